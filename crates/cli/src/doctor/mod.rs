//! `lockstep doctor`: what of this machine training can use, what is missing, and the remedy.
//!
//! Everything is looked at and nothing is taken: no GPU is opened, no more than a few MiB are written, and a part
//! that cannot be looked at is told of like one that is missing.

mod cuda;
mod disk;
mod hub;
mod system;

use std::process::ExitCode;

use lockstep_core::FaultClass;
use serde_json::{Value, json};

use crate::args::Doctor;
use crate::report::{self, Failure};

/// How a part is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Ok,
    /// Not there, and not missed.
    None,
    /// Something will not work, or not well.
    Warn,
    /// No training at all.
    Fail,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Verdict::Ok => "ok",
            Verdict::None => "none",
            Verdict::Warn => "warn",
            Verdict::Fail => "fail",
        }
    }
}

/// One part of the machine.
#[derive(Debug)]
struct Finding {
    part: String,
    verdict: Verdict,
    found: String,
    remedy: Option<String>,
}

impl Finding {
    fn ok(part: impl Into<String>, found: impl Into<String>) -> Finding {
        Finding { part: part.into(), verdict: Verdict::Ok, found: found.into(), remedy: None }
    }

    fn none(part: impl Into<String>, found: impl Into<String>) -> Finding {
        Finding { verdict: Verdict::None, ..Finding::ok(part, found) }
    }

    fn warn(part: impl Into<String>, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { verdict: Verdict::Warn, remedy: Some(remedy.into()), ..Finding::ok(part, found) }
    }

    fn fail(part: impl Into<String>, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { verdict: Verdict::Fail, ..Finding::warn(part, found, remedy) }
    }

    fn json(&self) -> Value {
        json!({
            "part": self.part,
            "verdict": self.verdict.word(),
            "found": self.found,
            "remedy": self.remedy,
        })
    }
}

pub(crate) fn run(args: &Doctor) -> Result<ExitCode, Failure> {
    let gpus = cuda::look();
    let mut findings = system::look(gpus.num_usable);
    findings.extend(disk::look());
    findings.extend(gpus.findings);
    findings.extend(hub::look());
    let works = findings.iter().all(|finding| finding.verdict != Verdict::Fail);
    let device = match (works, gpus.works) {
        (false, _) => None,
        (true, true) => Some("cuda"),
        (true, false) => Some("cpu"),
    };
    let text = if args.json {
        let all: Vec<Value> = findings.iter().map(Finding::json).collect();
        let version = env!("CARGO_PKG_VERSION");
        format!("{}\n", json!({ "version": version, "device": device, "findings": all }))
    } else {
        table(&findings, device)
    };
    report::print(&text)?;
    Ok(if works { ExitCode::SUCCESS } else { ExitCode::from(FaultClass::Unavailable.exit_code()) })
}

/// A line for each part, with its remedy below it, and what comes of them all.
fn table(findings: &[Finding], device: Option<&str>) -> String {
    let width = findings.iter().map(|finding| finding.part.len()).max().unwrap_or_default();
    let mut text = format!("lockstep {}\n", env!("CARGO_PKG_VERSION"));
    for Finding { part, verdict, found, remedy } in findings {
        text.push_str(&format!("{:<4}  {part:<width$}  {found}\n", verdict.word()));
        if let Some(remedy) = remedy {
            text.push_str(&format!("{:<4}  {:<width$}  {remedy}\n", "", ""));
        }
    }
    text.push_str(match device {
        Some("cuda") => "training works here, on GPUs and on the CPU\n",
        Some(_) => "training works here, on the CPU\n",
        None => "training does not work here\n",
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
            Finding::warn("open files", "256", "Allow more."),
            Finding::fail("memory", "1.00 MiB", "Buy some."),
        ];
        let text = table(&findings, None);
        let (head, rest) = text.split_once('\n').unwrap();
        assert!(head.starts_with("lockstep "));
        insta::assert_snapshot!(rest, @r"
        ok    CPU         AVX2, 4 cores
        none  NCCL        not found
        warn  open files  256
                          Allow more.
        fail  memory      1.00 MiB
                          Buy some.
        training does not work here
        ");
        assert_eq!(findings[2].json()["remedy"], "Allow more.");
        assert_eq!(findings[1].json()["verdict"], "none");
    }
}
