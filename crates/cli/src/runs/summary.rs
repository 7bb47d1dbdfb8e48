//! A run's files as the commands need them.

use lockstep_observe::{MetricsLine, RunFiles, RunInfo, RunSigns, RunState};
pub(super) use lockstep_observe::{number, one_line, printable};

use super::RunError;
use crate::report::Failure;

pub(super) struct RunSummary {
    pub(super) path: String,
    pub(super) info: RunInfo,
    pub(super) lines: Vec<MetricsLine>,
    signs: RunSigns,
}

impl RunSummary {
    pub(super) fn read(files: &RunFiles) -> Result<RunSummary, Failure> {
        let read = files.metrics().read_new().map_err(|cause| -> Failure {
            Box::new(RunError::Unreadable { path: files.dir().to_owned(), cause })
        })?;
        let path = files.dir().display().to_string();
        let signs = RunSigns {
            silent: files.silent(),
            alive: files.is_alive(),
            stop: files.stop_reason(),
            ..RunSigns::default()
        };
        let mut run = RunSummary { path, info: files.info(), lines: read.lines, signs };
        (run.signs.steps, run.signs.step_seconds) = (run.steps(), run.recent("step_seconds"));
        Ok(run)
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

    pub(super) fn state(&self) -> RunState {
        self.signs.state(&self.info)
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
