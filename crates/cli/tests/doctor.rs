//! `doctor` prints a line for every part on any machine, leaves no files behind and prints no secrets.

use std::process::Command;
use std::time::{Duration, Instant};

use insta::assert_snapshot;

use crate::support::{Folder, RUN};

/// A command whose environment names no CUDA toolkit and no Python environment.
fn doctor(folder: &Folder, args: &[&str]) -> Command {
    let mut command = folder.command(&[&["doctor"], args].concat());
    for name in
        ["CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]
    {
        command.env_remove(name);
    }
    command
        .env("PATH", "")
        .env("HOME", folder.path("home"))
        .env_remove("XDG_CACHE_HOME")
        .env_remove("HF_HOME");
    command
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert_eq!((output.status.code(), &output.stderr[..]), (Some(0), &b""[..]), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_line_for_every_part() {
    let folder = Folder::new(RUN);
    let before = folder.tree();
    let start = Instant::now();
    let text = output(&mut doctor(&folder, &[]));
    // A GPU driver may take longer to start.
    if !std::path::Path::new("/dev/nvidiactl").exists() {
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    }
    assert_eq!(folder.tree(), before);
    // The findings and the number of GPUs differ between machines.
    let parts: Vec<&str> = text
        .lines()
        .filter(|line| !line.starts_with("      "))
        .filter_map(|line| line.get(6..)?.split("  ").next())
        .filter(|part| {
            !part.starts_with("GPU 0")
                && !part.starts_with("GPU 1")
                && *part != "kernel cache"
                && *part != "/dev/shm"
        })
        .collect();
    let lines = &parts[1..parts.len() - 1];
    assert_snapshot!(lines.join("\n"), @r"
    CPU
    memory
    open files
    cgroup limits
    disk
    nvme offload
    port
    network
    NVIDIA driver
    NVRTC
    cuBLASLt
    NCCL
    cuDNN
    GPU processes
    HF Hub
    HF cache
    HF token
    ");
    assert!(text.lines().last().unwrap().starts_with("This machine can train"), "{text}");
}

#[test]
fn json_and_no_secrets() {
    let folder = Folder::new(RUN);
    let text = output(doctor(&folder, &["--json"]).env("HF_TOKEN", "hf_secret"));
    assert!(!text.contains("hf_secret"));
    let all: serde_json::Value = serde_json::from_str(&text).unwrap();
    let findings = all["findings"].as_array().unwrap();
    let of = |part: &str| findings.iter().find(|finding| finding["part"] == part).unwrap();
    assert_eq!(of("HF token")["found"], "found (not shown)");
    assert!(["ok", "warn"].contains(&of("CPU")["status"].as_str().unwrap()));
    assert!(["cpu", "cuda"].contains(&all["device"].as_str().unwrap()));
    for finding in findings {
        // A warning has a remedy.
        let warned = finding["status"] == "warn";
        assert_eq!(finding["remedy"].is_string(), warned, "{finding}");
    }
}

#[test]
fn a_folder_that_is_gone_is_no_reason_to_fail() {
    let folder = Folder::new(RUN);
    std::fs::create_dir(folder.path("gone")).unwrap();
    let program = env!("CARGO_BIN_EXE_lockstep");
    let script = format!("cd gone && rmdir ../gone && exec {program} doctor");
    let output = Command::new("/bin/sh").args(["-c", &script]).current_dir(folder.path("")).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("the current folder does not exist"), "{text}");
}

#[test]
fn a_report_names_nobody() {
    let folder = Folder::new(RUN);
    let home = folder.path("home/alice.person");
    std::fs::create_dir_all(&home).unwrap();
    let text = output(
        doctor(&folder, &["--report"])
            .env("HOME", &home)
            .env("USER", "alice.person")
            .env("HF_TOKEN", "hf_secret")
            .env("HF_ENDPOINT", "https://hub.example.net"),
    );
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    for word in ["alice", "hf_secret", "example.net", "127.0.0.1"] {
        assert!(!text.contains(word), "{word}: {text}");
    }
    assert!(host.trim().len() < 3 || !text.contains(host.trim()), "{host}: {text}");
    for word in [
        "lockstep ",
        "memory",
        "HF cache       ~/.cache/huggingface/hub",
        "HF_TOKEN",
        "(values not shown)",
        "system: ",
    ] {
        let compact = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(compact.contains(&word.split_whitespace().collect::<Vec<_>>().join(" ")), "{word}: {text}");
    }
    // Everything in it is in one block of printable text.
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()) && !text.contains("\n\n"), "{text}");
}
