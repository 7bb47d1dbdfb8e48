//! The C library: its mathematical functions (`log`, `cos`) determine the last bits of some results.

/// Name and version, such as `glibc 2.36`, and whether its functions use fused multiply-add on this CPU.
pub fn c_library() -> String {
    format!("{}, {}", name(), if has_fma() { "with FMA" } else { "without FMA" })
}

#[cfg(target_env = "gnu")]
fn name() -> String {
    use std::ffi::{CStr, c_char};
    unsafe extern "C" {
        fn gnu_get_libc_version() -> *const c_char;
    }
    // SAFETY: takes no arguments and returns a C string that lives as long as the process.
    let version = unsafe { CStr::from_ptr(gnu_get_libc_version()) };
    format!("glibc {}", version.to_string_lossy())
}

#[cfg(not(target_env = "gnu"))]
fn name() -> String {
    let name = if cfg!(target_env = "musl") { "musl" } else { std::env::consts::OS };
    format!("{name}, version unknown")
}

#[cfg(target_arch = "x86_64")]
fn has_fma() -> bool {
    // The features that glibc requires for its FMA variants.
    std::arch::is_x86_feature_detected!("fma") && std::arch::is_x86_feature_detected!("avx2")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_fma() -> bool {
    true
}
