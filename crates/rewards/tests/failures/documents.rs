//! The programs in docs/rewards.md, run as they are printed there.

use std::path::Path;
use std::process::Command;

use lockstep_rewards::{Program, Sample};
use serde_json::{Value, json};

use crate::support::{PATIENT_S, has_python, script, start};

/// The block of this language.
fn block(language: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/rewards.md");
    let text = std::fs::read_to_string(path).unwrap();
    let start = format!("```{language}\n");
    let mut blocks = text.split(&start).skip(1);
    let block = blocks.next().unwrap().split("```").next().unwrap().to_owned();
    assert!(blocks.next().is_none(), "there is one {language} block");
    block
}

fn check(command: Vec<String>) {
    let mut function = start(Program { timeout_s: PATIENT_S, ..Program::new(command) });
    let Value::Object(columns) = json!({ "answer": 4 }) else { unreachable!() };
    let sample = |completion, truncated| Sample {
        prompt: "What is 2 + 2?",
        completion,
        completion_ids: &[31, 7, 2],
        columns: &columns,
        truncated,
    };
    let samples = [sample("It is 4.", false), sample("It is 5.", false), sample("It is 4", true)];
    assert_eq!(function.score(&samples).unwrap(), [Some(1.0), Some(0.0), None]);
}

#[test]
fn the_python_program_answers() {
    if has_python() {
        check(vec!["python3".into(), "-c".into(), block("python")]);
    }
}

#[test]
fn the_shell_program_answers() {
    if Command::new("jq").arg("--version").output().is_err() {
        return println!("skipped: there is no jq");
    }
    let folder = tempfile::tempdir().unwrap();
    check(vec!["/bin/sh".into(), script(folder.path(), &block("bash"), 0o644)]);
}
