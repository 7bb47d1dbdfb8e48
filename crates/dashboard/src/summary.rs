//! What a list of runs shows of a run: its state and its newest numbers. Only the end of the metrics is read for it.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, SystemTime};

use lockstep_observe::{MetricsEvent, MetricsLine, MetricsReader, RunFiles, RunInfo, RunSigns, RunState};
use serde_json::{Value, json};

use crate::text::beginning;

/// How much of the end of the metrics is read at first. An evaluation is rarer than a step.
const NEWEST_BYTES: u64 = 1 << 20;
/// Steps over which speeds are averaged.
const RECENT_STEPS: usize = 50;

/// The newest numbers of a run.
#[derive(Debug)]
pub(crate) struct Summary {
    reader: MetricsReader,
    pub(crate) step: Option<MetricsLine>,
    pub(crate) evaluation: Option<MetricsLine>,
    /// Seconds and tokens per second of recent steps.
    recent: VecDeque<(f64, f64)>,
    pub(crate) last_written: Option<SystemTime>,
    /// Whether a rank has just written its status.
    pub(crate) alive: bool,
    /// Why the run stopped early.
    pub(crate) stop: Option<String>,
}

impl Summary {
    pub(crate) fn new(files: &RunFiles) -> Summary {
        let reader = files.newest_metrics(NEWEST_BYTES);
        Summary {
            reader,
            step: None,
            evaluation: None,
            recent: VecDeque::new(),
            last_written: None,
            alive: false,
            stop: None,
        }
    }

    pub(crate) fn refresh(&mut self) -> io::Result<()> {
        let Summary { reader, step, evaluation, recent, .. } = self;
        reader.read_each(&mut |event| match event {
            MetricsEvent::Restarted => {
                (*step, *evaluation) = (None, None);
                recent.clear();
            }
            MetricsEvent::Line(line) if line.evaluation => *evaluation = Some(line),
            MetricsEvent::Line(line) => {
                if let (Some(seconds), Some(speed)) =
                    (line.get("step_seconds"), line.get("tokens_per_second"))
                {
                    recent.push_back((seconds, speed));
                }
                if recent.len() > RECENT_STEPS {
                    recent.pop_front();
                }
                *step = Some(line);
            }
        })
    }

    pub(crate) fn steps(&self) -> u64 {
        self.step.as_ref().map_or(0, |line| line.step)
    }

    /// Means of the seconds and the tokens per second of recent steps.
    fn recent(&self) -> Option<(f64, f64)> {
        let count = self.recent.len() as f64;
        let sums = self.recent.iter().fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        (count > 0.0).then(|| (sums.0 / count, sums.1 / count))
    }

    pub(crate) fn step_seconds(&self) -> Option<f64> {
        self.recent().map(|(seconds, _)| seconds)
    }

    pub(crate) fn silent_for(&self) -> Option<Duration> {
        self.last_written.map(|time| time.elapsed().unwrap_or_default())
    }

    pub(crate) fn state(&self, info: &RunInfo) -> RunState {
        let signs = RunSigns {
            steps: self.steps(),
            step_seconds: self.step_seconds(),
            silent: self.silent_for(),
            alive: self.alive,
            stop: self.stop.clone(),
        };
        signs.state(info)
    }

    pub(crate) fn json(&self, info: &RunInfo) -> Value {
        let of_step = |key: &str| self.step.as_ref().and_then(|line| line.get(key));
        let of_evaluation = |key: &str| self.evaluation.as_ref().and_then(|line| line.get(key));
        let state = self.state(info);
        let left = info.total_steps.saturating_sub(self.steps()) as f64;
        let remaining = self.step_seconds().filter(|_| state == RunState::Running && info.total_steps > 0);
        let shown = |text: &str| beginning(text, 200).0.into_owned();
        json!({
            "state": state.to_string(),
            "step": self.steps(),
            "total_steps": info.total_steps,
            "started": shown(&info.started),
            "version": shown(&info.version),
            "device": shown(&info.device),
            "ranks": info.ranks,
            "parameters": info.parameters,
            "epoch": of_step("epoch"),
            "loss": number(of_step("loss")),
            "eval_loss": number(of_evaluation("eval_loss")),
            "grad_norm": number(of_step("grad_norm")),
            "learning_rate": of_step("learning_rate"),
            "mfu": of_step("mfu"),
            "memory_bytes": of_step("memory_peak_bytes"),
            "planned_bytes": info.planned_memory_bytes.values().sum::<u64>(),
            "tokens_total": of_step("tokens_total"),
            "tokens_per_second": self.recent().map(|(_, speed)| speed),
            "step_seconds": self.step_seconds(),
            "remaining_seconds": remaining.map(|seconds| seconds * left),
            "silent_seconds": self.silent_for().map(|silent| silent.as_secs()),
        })
    }
}

/// A number; one that JSON does not have, as text.
fn number(value: Option<f64>) -> Value {
    match value {
        Some(value) if value.is_nan() => "nan".into(),
        Some(value) if value.is_infinite() => (if value > 0.0 { "inf" } else { "-inf" }).into(),
        value => json!(value),
    }
}
