//! What becomes of a step whose numbers are not finite.
//!
//! The gradient decides: if its norm is not finite, all ranks skip the step, and in fp16 the loss scale answers to it.
//! If only the loss is not finite, the step has been applied: ranks know the loss of the whole world after the update
//! has begun, and waiting for it would hold up every step. Either way the step is reported as what it was, with the
//! tensor where it began, and [`TOO_MANY`] of them in a row end the run. Overflows while the loss scale moves do not
//! count: they are how the scale is found.

use lockstep_engine::{Engine, StepReport};
use lockstep_plan::ModelId;

use crate::error::TrainError;
use crate::position::{BadInARow, Position};
use crate::run::Run;
use crate::scaler::{LossScaler, Overflow};

/// Such steps in a row until a run stops.
const TOO_MANY: u64 = 3;

impl Run<'_> {
    /// A step that updated the weights, from finite gradients.
    pub(crate) fn applied(&mut self, position: &mut Position, loss: f64) {
        position.updates += 1;
        position.skipped_in_a_row = 0;
        self.change_scale(position, |scaler| scaler.applied());
        if loss.is_finite() {
            position.bad_in_a_row = BadInARow::default();
        }
    }

    /// The scaler goes on from where the position says it is, which may come from a checkpoint.
    fn change_scale<R>(
        &mut self,
        position: &mut Position,
        f: impl FnOnce(&mut LossScaler) -> R,
    ) -> Option<R> {
        let scaler = self.scaler.as_mut()?;
        scaler.state = position.scale?;
        let outcome = f(scaler);
        position.scale = Some(scaler.state);
        Some(outcome)
    }

    /// A step whose loss is not finite, though its gradients were, and were applied: what to report of it, or that the
    /// run ends here.
    pub(crate) fn bad_loss(
        &mut self,
        position: &mut Position,
        report: &StepReport,
        loss: f64,
        rows: &[u32],
    ) -> Result<String, TrainError> {
        position.bad_in_a_row.steps += 1;
        position.bad_in_a_row.applied += 1;
        let bad = self.remember(loss, report, None, rows);
        if position.bad_in_a_row.steps >= TOO_MANY {
            return Err(bad.ends(position));
        }
        Ok(format!(
            "step {} was applied: its loss is {loss}, but its gradients were finite (norm {}); {TOO_MANY} steps in a \
             row that are not finite end the run",
            position.step, report.grad_norm
        ))
    }

    /// A step that was skipped, because its gradients are not finite: what to report of it, or that the run ends here.
    pub(crate) fn skipped(
        &mut self,
        engine: &Engine,
        position: &mut Position,
        report: &StepReport,
        loss: f64,
        rows: &[u32],
    ) -> Result<String, TrainError> {
        let tensor = engine.model(ModelId::FIRST).first_non_finite_gradient()?;
        position.skipped += 1;
        position.skipped_in_a_row += 1;
        let bad = self.remember(loss, report, tensor.clone(), rows);
        let step = position.step;
        let scale = position.scale.map(|scale| scale.scale);
        let first =
            tensor.as_ref().map_or(String::new(), |name| format!(", first in the gradient of {name}"));
        let overflow = self.change_scale(position, |scaler| scaler.overflowed());
        match (overflow, scale) {
            (Some(Overflow::AtFloor), Some(scale)) => {
                return Err(TrainError::ScaleAtFloor { step, scale, tensor, checkpoint: None });
            }
            (Some(Overflow::Halved), Some(scale)) => {
                let now = position.scale.map_or(scale, |state| state.scale);
                return Ok(format!(
                    "step {step} was skipped: fp16 overflowed at scale {scale}{first}; the scale is {now} now \
                     (mixed_precision: bf16 needs none)"
                ));
            }
            (Some(Overflow::Kept), Some(scale)) if self.finds_scale() => {
                return Ok(format!(
                    "step {step} was skipped: fp16 overflowed at scale {scale}{first}; the scale stays, this time \
                     (mixed_precision: bf16 needs none)"
                ));
            }
            _ => {}
        }
        position.bad_in_a_row.steps += 1;
        if position.bad_in_a_row.steps >= TOO_MANY {
            return Err(bad.ends(position));
        }
        Ok(format!(
            "step {step} was skipped: objective {loss}, gradient norm {}{first}; {TOO_MANY} such steps in a row \
             end the run",
            report.grad_norm
        ))
    }

    fn remember(&mut self, loss: f64, report: &StepReport, tensor: Option<String>, rows: &[u32]) -> Bad {
        let rows = rows.iter().copied().take(16).collect();
        let bad = Bad { loss, grad_norm: report.grad_norm, tensor, rows };
        self.last_bad = Some(bad.clone());
        bad
    }

    /// Whether the loss scale moves, so that an overflow is nothing wrong.
    fn finds_scale(&self) -> bool {
        self.scaler.is_some_and(|scaler| !scaler.is_fixed())
    }

    /// Whether a checkpoint is worth making now. While steps go wrong, the earlier ones are the better ones, and
    /// new ones would push them out; a scale on its way down is nothing wrong, once a step was applied.
    pub(crate) fn is_sound(&self, position: &Position) -> bool {
        let applied = position.skipped_in_a_row == 0 || self.finds_scale() && position.updates > 0;
        applied && position.bad_in_a_row.steps == 0
    }

    /// A run in which no step was applied has not trained anything.
    pub(crate) fn check_trained(&mut self, position: &Position) -> Result<(), TrainError> {
        match self.last_bad.take().filter(|_| position.updates == 0) {
            Some(bad) => Err(bad.ends(position)),
            None => Ok(()),
        }
    }
}

/// What the last bad step was told as.
#[derive(Clone, Debug)]
pub(crate) struct Bad {
    loss: f64,
    grad_norm: f64,
    tensor: Option<String>,
    /// The first of its rows.
    rows: Box<[u32]>,
}

impl Bad {
    /// The run ends with it.
    fn ends(self, position: &Position) -> TrainError {
        let Bad { loss, grad_norm, tensor, rows } = self;
        TrainError::Diverged {
            step: position.step,
            loss,
            grad_norm,
            in_a_row: position.bad_in_a_row.steps.max(position.skipped_in_a_row),
            applied: position.bad_in_a_row.applied,
            tensor,
            rows,
            trained: position.updates > 0,
            scale: position.scale.map(|scale| scale.scale),
            checkpoint: None,
        }
    }
}
