//! Samples and small programs for the tests.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use lockstep_rewards::{Program, RewardContext, RewardFunction, RewardSpec, Sample, ScoreReport, open};
use serde_json::{Map, Value, json};

/// Deadline for programs that must answer: the machine may be busy.
pub(crate) const PATIENT_S: f64 = 30.0;
/// Deadline for programs that never answer.
pub(crate) const SHORT_S: f64 = 1.0;

/// The beginning of a Python program: `answer(sample, reward)` writes one answer.
const PRELUDE: &str = "import json, os, signal, sys, time
samples = (json.loads(line) for line in sys.stdin)
def answer(sample, reward):
    print(json.dumps({'id': sample['id'], 'reward': reward}), flush=True)
";

pub(crate) fn columns(index: usize) -> Map<String, Value> {
    let Value::Object(columns) = json!({ "answer": index, "id": "a column named id" }) else {
        unreachable!()
    };
    columns
}

/// `num_samples` samples, whose completions are `c0`, `c1`, …
pub(crate) fn score(function: &mut dyn RewardFunction, num_samples: usize) -> ScoreReport {
    let completions: Vec<String> = (0..num_samples).map(|i| format!("c{i}")).collect();
    score_texts(function, &completions)
}

pub(crate) fn score_texts(function: &mut dyn RewardFunction, completions: &[String]) -> ScoreReport {
    let rows: Vec<Map<String, Value>> = (0..completions.len()).map(columns).collect();
    let samples: Vec<Sample<'_>> = completions
        .iter()
        .zip(&rows)
        .map(|(completion, columns)| Sample {
            prompt: "p",
            completion,
            completion_ids: &[1, 2],
            columns,
            truncated: false,
        })
        .collect();
    function.score_each(&samples)
}

/// Whether python3 is there. Prints why a test is skipped.
pub(crate) fn has_python() -> bool {
    let found = std::process::Command::new("python3").arg("--version").output().is_ok();
    if !found {
        println!("skipped: there is no python3");
    }
    found
}

/// A Python program with this body after the prelude.
pub(crate) fn python(body: &str) -> Program {
    Program::new(vec!["python3".into(), "-c".into(), format!("{PRELUDE}{body}")])
}

/// A shell program.
pub(crate) fn shell(body: &str) -> Program {
    Program::new(vec!["/bin/sh".into(), "-c".into(), body.into()])
}

pub(crate) fn environment() -> Vec<(OsString, OsString)> {
    std::env::vars_os().collect()
}

pub(crate) fn start(program: Program) -> Box<dyn RewardFunction> {
    let context = RewardContext { environment: environment() };
    open("checked", &RewardSpec::Program(program), &context).unwrap()
}

/// The only failure's text and samples.
pub(crate) fn failure(report: &ScoreReport) -> (String, Vec<usize>) {
    assert_eq!(report.failures.len(), 1, "{report:?}");
    (report.failures[0].error.to_string(), report.failures[0].samples.clone())
}

/// Writes a script into a folder, with these permissions.
pub(crate) fn script(folder: &Path, text: &str, mode: u32) -> String {
    let path = folder.join("reward.sh");
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Waits until a process is gone, or is a zombie whose parent has not reaped it.
pub(crate) fn is_gone(pid: &str) -> bool {
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        if stat.is_empty() || stat.rsplit(')').next().is_some_and(|rest| rest.trim().starts_with('Z')) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}
