//! The position of a run: its counters and the loss scale, and how checkpoints store them.

use std::collections::BTreeMap;

use lockstep_ckpt::Checkpoint;

use crate::error::TrainError;
use crate::evaluate::BestEval;
use crate::scaler::ScaleState;

/// The position of a run: everything that a checkpoint stores besides tensors and the data cursor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Position {
    pub(crate) step: u64,
    pub(crate) updates: u64,
    pub(crate) tokens_total: u64,
    /// Steps that were not applied: in total, and since the last one that was.
    pub(crate) skipped: u64,
    pub(crate) skipped_in_a_row: u64,
    /// Not stored in checkpoints, because none is saved while it is not zero.
    pub(crate) bad_in_a_row: BadStepStreak,
    /// The best evaluation so far.
    pub(crate) best: Option<BestEval>,
    /// The loss scaler's state, in fp16.
    pub(crate) scale: Option<ScaleState>,
    /// The run was stopped before the evaluation that was due after this step.
    pub(crate) owes_evaluation: bool,
}

/// The number of consecutive steps up to now whose loss or gradient is not finite. Overflows under dynamic loss scaling
/// do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BadStepStreak {
    pub(crate) steps: u64,
    /// Those that were applied, because their gradients were finite.
    pub(crate) applied: u64,
}

impl Position {
    /// The position before the first step.
    pub(crate) fn start(scale: Option<ScaleState>) -> Position {
        Position {
            step: 0,
            updates: 0,
            tokens_total: 0,
            skipped: 0,
            skipped_in_a_row: 0,
            bad_in_a_row: BadStepStreak::default(),
            best: None,
            scale,
            owes_evaluation: false,
        }
    }

    pub(crate) fn counters(&self) -> BTreeMap<String, u64> {
        let mut counters = vec![
            ("updates", self.updates),
            ("tokens_total", self.tokens_total),
            ("skipped", self.skipped),
            ("skipped_in_a_row", self.skipped_in_a_row),
        ];
        counters.extend(self.best.map(|best| ("best_step", best.step)));
        counters.extend(self.owes_evaluation.then_some(("owes_evaluation", 1)));
        if let Some(scale) = &self.scale {
            counters.extend([("scale_patience", scale.patience), ("scale_stable", scale.stable)]);
        }
        counters.into_iter().map(|(name, count)| (name.to_string(), count)).collect()
    }

    pub(crate) fn reals(&self) -> BTreeMap<String, f64> {
        let best = self.best.map(|best| ("best_metric".to_string(), best.metric));
        let scale = self.scale.map(|scale| ("loss_scale".to_string(), scale.scale));
        best.into_iter().chain(scale).collect()
    }

    /// The position stored in a checkpoint. `scale` is the initial state of the loss scaler, if this run has one.
    pub(crate) fn of(checkpoint: &Checkpoint, scale: Option<ScaleState>) -> Result<Position, TrainError> {
        let reals = &checkpoint.meta().reals;
        let best = match reals.get("best_metric") {
            Some(metric) => Some(BestEval { metric: *metric, step: checkpoint.counter("best_step")? }),
            None => None,
        };
        let scale = match (scale, reals.get("loss_scale")) {
            (None, _) => None,
            (Some(_), Some(scale)) => Some(ScaleState {
                scale: *scale,
                patience: checkpoint.counter("scale_patience")?,
                stable: checkpoint.counter("scale_stable")?,
            }),
            (Some(_), None) => {
                return Err(TrainError::ResumeMismatch {
                    path: checkpoint.path().to_path_buf(),
                    what: "mixed_precision",
                    then: "without a loss scale".into(),
                    now: "fp16".into(),
                });
            }
        };
        Ok(Position {
            step: checkpoint.step().0,
            updates: checkpoint.counter("updates")?,
            tokens_total: checkpoint.counter("tokens_total")?,
            skipped: checkpoint.counter("skipped")?,
            skipped_in_a_row: checkpoint.counter("skipped_in_a_row")?,
            bad_in_a_row: BadStepStreak::default(),
            best,
            scale,
            owes_evaluation: checkpoint.meta().counters.contains_key("owes_evaluation"),
        })
    }
}
