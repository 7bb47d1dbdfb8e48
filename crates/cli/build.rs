//! Lets the linker fold functions whose code is identical, in release builds: generic code is often the same for several
//! types. Only lld, gold and mold can, and which linker runs depends on the toolchain, so a small program is linked
//! first. Rust promises no unique addresses of functions.

use std::path::Path;
use std::process::{Command, Stdio};
use std::{env, fs};

const FOLD: &str = "-Wl,--icf=all";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |name: &str, value: &str| env::var(name).is_ok_and(|found| found == value);
    if is("PROFILE", "release") && is("CARGO_CFG_TARGET_OS", "linux") && links_with(FOLD) {
        println!("cargo::rustc-link-arg-bins={FOLD}");
    }
}

/// Whether a program links with this argument, by the compiler, linker and flags of this build.
fn links_with(argument: &str) -> bool {
    let (Ok(rustc), Ok(target), Ok(folder)) = (env::var("RUSTC"), env::var("TARGET"), env::var("OUT_DIR"))
    else {
        return false;
    };
    let (source, program) = (Path::new(&folder).join("empty.rs"), Path::new(&folder).join("empty"));
    if fs::write(&source, "fn main() {}").is_err() {
        return false;
    }
    let mut command = Command::new(rustc);
    command
        .args(["--target", &target, "-C", &format!("link-arg={argument}")])
        .arg(&source)
        .arg("-o")
        .arg(&program);
    if let Ok(linker) = env::var("RUSTC_LINKER") {
        command.args(["-C", &format!("linker={linker}")]);
    }
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    command.args(flags.split('\u{1f}').filter(|flag| !flag.is_empty()));
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}
