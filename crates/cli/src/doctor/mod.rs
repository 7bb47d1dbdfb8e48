//! `lockstep doctor`: checks this machine for training, and prints what is missing and how to fix it.
//!
//! The checks use few resources: no GPU is opened, and at most a few MiB are written. A part that cannot be checked is
//! reported like a missing one.

mod cgroup;
mod cuda;
mod disk;
mod gpu_processes;
mod hub;
mod network;
mod paste;
mod system;

use std::process::ExitCode;

use lockstep_core::FaultClass;
use serde_json::{Value, json};

use crate::args::Doctor;
use crate::report::{self, Failure};

/// The state of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Ok,
    /// Missing, and not needed.
    None,
    /// Something does not work, or is slow.
    Warn,
    /// Training does not work.
    Fail,
}

impl Status {
    fn word(self) -> &'static str {
        match self {
            Status::Ok => "ok",
            Status::None => "none",
            Status::Warn => "warn",
            Status::Fail => "fail",
        }
    }
}

/// One part of the machine.
#[derive(Debug)]
struct Finding {
    part: String,
    status: Status,
    found: String,
    remedy: Option<String>,
}

impl Finding {
    fn ok(part: impl Into<String>, found: impl Into<String>) -> Finding {
        Finding { part: part.into(), status: Status::Ok, found: found.into(), remedy: None }
    }

    fn none(part: impl Into<String>, found: impl Into<String>) -> Finding {
        Finding { status: Status::None, ..Finding::ok(part, found) }
    }

    fn warn(part: impl Into<String>, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { status: Status::Warn, remedy: Some(remedy.into()), ..Finding::ok(part, found) }
    }

    fn fail(part: impl Into<String>, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { status: Status::Fail, ..Finding::warn(part, found, remedy) }
    }

    fn json(&self) -> Value {
        json!({
            "part": self.part,
            "status": self.status.word(),
            "found": self.found,
            "remedy": self.remedy,
        })
    }
}

pub(crate) fn run(args: &Doctor) -> Result<ExitCode, Failure> {
    let gpus = cuda::check();
    let mut findings = system::check(gpus.num_usable);
    findings.push(cgroup::check());
    findings.extend(disk::check());
    findings.extend(network::check());
    findings.extend(gpus.findings);
    findings.push(gpu_processes::check(gpus.num_usable));
    findings.extend(hub::check());
    let works = findings.iter().all(|finding| finding.status != Status::Fail);
    let device = match (works, gpus.works) {
        (false, _) => None,
        (true, true) => Some("cuda"),
        (true, false) => Some("cpu"),
    };
    let text = if args.json {
        let all: Vec<Value> = findings.iter().map(Finding::json).collect();
        let version = env!("CARGO_PKG_VERSION");
        format!("{}\n", json!({ "version": version, "device": device, "findings": all }))
    } else if args.report {
        paste::report(&findings, &|findings| table(findings, device))
    } else {
        table(&findings, device)
    };
    report::print(&text)?;
    Ok(if works { ExitCode::SUCCESS } else { ExitCode::from(FaultClass::Unavailable.exit_code()) })
}

/// One line per part with its remedy below it, and the conclusion.
fn table(findings: &[Finding], device: Option<&str>) -> String {
    let width = findings.iter().map(|finding| finding.part.len()).max().unwrap_or_default();
    let mut text = format!("lockstep {}\n", env!("CARGO_PKG_VERSION"));
    for Finding { part, status, found, remedy } in findings {
        text.push_str(&format!("{:<4}  {part:<width$}  {found}\n", status.word()));
        if let Some(remedy) = remedy {
            text.push_str(&format!("{:<4}  {:<width$}  {remedy}\n", "", ""));
        }
    }
    text.push_str(match device {
        Some("cuda") => "This machine can train on GPUs and on the CPU.\n",
        Some(_) => "This machine can train on the CPU.\n",
        None => "This machine cannot train.\n",
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_each_part() {
        let findings = [
            Finding::ok("CPU", "AVX2, 4 cores"),
            Finding::none("NCCL", "not found"),
            Finding::warn("open files", "256", "Raise the limit."),
            Finding::fail("memory", "1.00 MiB", "End other programs."),
        ];
        let text = table(&findings, None);
        let (head, rest) = text.split_once('\n').unwrap();
        assert!(head.starts_with("lockstep "));
        insta::assert_snapshot!(rest, @r"
        ok    CPU         AVX2, 4 cores
        none  NCCL        not found
        warn  open files  256
                          Raise the limit.
        fail  memory      1.00 MiB
                          End other programs.
        This machine cannot train.
        ");
        assert_eq!(findings[2].json()["remedy"], "Raise the limit.");
        assert_eq!(findings[1].json()["status"], "none");
    }
}
