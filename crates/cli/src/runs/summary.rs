//! A run's files as the commands need them.

use std::time::Duration;

use lockstep_observe::{MetricsLine, RunFiles, RunInfo, run_state};

use super::RunError;
use crate::report::Failure;

pub(super) struct RunSummary {
    pub(super) path: String,
    pub(super) info: RunInfo,
    pub(super) lines: Vec<MetricsLine>,
    pub(super) last_written: Option<Duration>,
}

impl RunSummary {
    pub(super) fn read(files: &RunFiles) -> Result<RunSummary, Failure> {
        let read = files.metrics().read_new().map_err(|cause| -> Failure {
            Box::new(RunError::Unreadable { path: files.dir().to_owned(), cause })
        })?;
        let last_written = files.last_written().and_then(|time| time.elapsed().ok());
        let path = files.dir().display().to_string();
        Ok(RunSummary { path, info: files.info(), lines: read.lines, last_written })
    }

    /// The newest step.
    pub(super) fn last_step(&self) -> Option<&MetricsLine> {
        self.lines.iter().rev().find(|line| !line.evaluation)
    }

    pub(super) fn last_evaluation(&self) -> Option<&MetricsLine> {
        self.lines.iter().rev().find(|line| line.evaluation)
    }

    pub(super) fn steps(&self) -> u64 {
        self.last_step().map_or(0, |line| line.step)
    }

    /// `finished`, `running`, `stopped` or `-`.
    pub(super) fn state(&self) -> &'static str {
        run_state(self.steps(), self.info.total_steps, self.last_written, self.recent("step_seconds"))
    }

    /// The mean of a number over the newest tenth of the steps.
    pub(super) fn recent(&self, key: &str) -> Option<f64> {
        let of_steps = self.lines.iter().filter(|line| !line.evaluation);
        let values: Vec<f64> = of_steps.filter_map(|line| line.get(key)).filter(|v| v.is_finite()).collect();
        let newest = &values[values.len() - values.len().div_ceil(10)..];
        (!newest.is_empty()).then(|| newest.iter().sum::<f64>() / newest.len() as f64)
    }

    /// The keys of all numbers.
    pub(super) fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = Vec::new();
        for (key, _) in self.lines.iter().flat_map(|line| &line.numbers) {
            if !keys.contains(key) {
                keys.push(key.clone());
            }
        }
        keys
    }
}

/// Text of a file for a terminal: without control characters.
pub(super) fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|c| if c.is_control() { c.escape_default().collect::<Vec<_>>() } else { vec![c] })
        .collect()
}

/// The value of a setting on one line: a map with its parts separated by commas.
pub(super) fn one_line(text: &str) -> String {
    printable(&text.lines().map(str::trim).collect::<Vec<_>>().join(", "))
}

/// A number for a table.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        1e-2..1e7 if value.fract() == 0.0 => format!("{value:.0}"),
        1e-2..1e3 => format!("{value:.4}"),
        1e3..1e7 => format!("{value:.1}"),
        _ => format!("{value:.3e}"),
    }
}
