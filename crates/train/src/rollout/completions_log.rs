//! `completions.jsonl`: every completion of the run with its rewards and advantage, one JSON object per line. Rank 0
//! writes it.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::error::TrainError;

/// The file of completions.
pub(crate) struct CompletionsLog {
    path: PathBuf,
    file: File,
}

/// A completion, as the log shows it.
pub(crate) struct LoggedCompletion {
    pub(crate) prompt: String,
    pub(crate) completion: String,
    /// The reward of each function; `None`: it has no opinion.
    pub(crate) rewards: Vec<(String, Option<f64>)>,
    pub(crate) reward: Option<f64>,
    /// `None` if each token has its own.
    pub(crate) advantage: Option<f64>,
    pub(crate) truncated: bool,
}

impl CompletionsLog {
    /// Opens the file for appending. Completions of steps after `resume_step` are removed: they are generated again. A
    /// new run starts with an empty file.
    pub(crate) fn open(output_dir: &Path, resume_step: u64) -> Result<CompletionsLog, TrainError> {
        let path = output_dir.join("completions.jsonl");
        let kept = if resume_step > 0 { kept_lines(&path, resume_step) } else { Vec::new() };
        let write = || -> std::io::Result<File> {
            std::fs::write(&path, kept.concat())?;
            OpenOptions::new().append(true).open(&path)
        };
        match write() {
            Ok(file) => Ok(CompletionsLog { path, file }),
            Err(cause) => Err(TrainError::Output { path, cause }),
        }
    }

    /// Appends the completions of a rollout whose first step is `step`.
    pub(crate) fn append(&mut self, step: u64, completions: &[LoggedCompletion]) -> Result<(), TrainError> {
        let mut text = String::new();
        for one in completions {
            let rewards: serde_json::Map<String, Value> =
                one.rewards.iter().map(|(name, reward)| (name.clone(), json!(reward))).collect();
            let line = json!({
                "step": step,
                "prompt": one.prompt,
                "completion": one.completion,
                "rewards": rewards,
                "reward": one.reward,
                "advantage": one.advantage,
                "truncated": one.truncated,
            });
            text.push_str(&line.to_string());
            text.push('\n');
        }
        let written = self.file.write_all(text.as_bytes());
        written.map_err(|cause| TrainError::Output { path: self.path.clone(), cause })
    }
}

/// Completions that trackers show of a rollout.
const SAMPLES: usize = 4;

/// The first completions as Markdown. Texts are indented blocks, so that no line of them is taken for markup.
pub(crate) fn samples(completions: &[LoggedCompletion]) -> String {
    let block = |text: &str| text.lines().map(|line| format!("    {line}\n")).collect::<String>();
    let number = |value: Option<f64>| value.map_or_else(|| "-".into(), |value| format!("{value:.4}"));
    let one = |one: &LoggedCompletion| {
        let (prompt, completion) = (block(&one.prompt), block(&one.completion));
        let (reward, advantage) = (number(one.reward), number(one.advantage));
        format!("reward {reward}, advantage {advantage}\n\n{prompt}\n---\n\n{completion}")
    };
    completions.iter().take(SAMPLES).map(one).collect::<Vec<_>>().join("\n---\n\n")
}

/// The lines of a file whose step is at most `last`.
fn kept_lines(path: &Path, last: u64) -> Vec<String> {
    let Ok(file) = File::open(path) else { return Vec::new() };
    let step = |line: &str| serde_json::from_str::<Value>(line).ok()?["step"].as_u64();
    let lines = BufReader::new(file).lines().map_while(Result::ok);
    lines.filter(|line| step(line).is_some_and(|step| step <= last)).map(|line| line + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_blocks() {
        let completion = LoggedCompletion {
            prompt: "2 + 2\n# not a title".into(),
            completion: "<b>4</b>".into(),
            rewards: vec![],
            reward: Some(1.0),
            advantage: None,
            truncated: false,
        };
        let text = samples(&[completion]);
        assert_eq!(
            text,
            "reward 1.0000, advantage -\n\n    2 + 2\n    # not a title\n\n---\n\n    <b>4</b>\n"
        );
    }

    fn completion(text: &str) -> LoggedCompletion {
        LoggedCompletion {
            prompt: "1+1=".into(),
            completion: text.into(),
            rewards: vec![("exact_match".into(), Some(1.0)), ("other".into(), None)],
            reward: Some(1.0),
            advantage: Some(0.5),
            truncated: false,
        }
    }

    #[test]
    fn a_resumed_run_removes_later_completions() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = CompletionsLog::open(dir.path(), 0).unwrap();
        for step in [1, 2, 3] {
            log.append(step, &[completion("2\n\"x\"")]).unwrap();
        }
        drop(log);
        let mut log = CompletionsLog::open(dir.path(), 2).unwrap();
        log.append(3, &[completion("again")]).unwrap();
        let text = std::fs::read_to_string(dir.path().join("completions.jsonl")).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(lines[2]["completion"], "again");
        assert_eq!(
            (&lines[0]["completion"], &lines[0]["rewards"]["other"]),
            (&json!("2\n\"x\""), &Value::Null)
        );
    }
}
