//! Handles steps whose loss or gradients are not finite.
//!
//! The gradient decides whether a step is applied: if its norm is not finite, all ranks skip the step, and in fp16 the
//! loss scaler reacts to the overflow. If only the loss is not finite, the step has been applied: the ranks know the
//! loss of the whole world only after the update has begun, and waiting for it would delay every step. Either way the
//! step is reported, with the first tensor whose gradient is not finite, and [`MAX_IN_A_ROW`] such steps in a row end
//! the run. Overflows under dynamic loss scaling do not count: they are part of finding the scale.
//!
//! Warnings avoid the word "loss": in the log only the lines of steps have it, for scripts that collect losses.

use lockstep_engine::{Engine, StepReport};
use lockstep_plan::ModelId;

use crate::error::TrainError;
use crate::position::{BadStepStreak, Position};
use crate::scaler::{LossScaler, Overflow};
use crate::train_state::TrainState;

/// The number of consecutive bad steps that ends a run.
const MAX_IN_A_ROW: u64 = 3;

impl TrainState<'_> {
    /// Records a step that was applied, because its gradients were finite.
    pub(crate) fn applied(&mut self, position: &mut Position, loss: f64) {
        position.updates += 1;
        position.skipped_in_a_row = 0;
        self.change_scale(position, |scaler| scaler.applied());
        if loss.is_finite() {
            position.bad_in_a_row = BadStepStreak::default();
        }
    }

    /// Changes the loss scale, starting from the position's, which may come from a checkpoint.
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

    /// Records a step that was applied although its loss is not finite. Returns the warning to report, or the error
    /// that ends the run.
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
        if position.bad_in_a_row.steps >= MAX_IN_A_ROW {
            return Err(bad.into_error(position));
        }
        Ok(format!(
            "step {} was applied: its loss is {loss}, but its gradients were finite (norm {}); {MAX_IN_A_ROW} steps in a \
             row that are not finite end the run",
            position.step, report.grad_norm
        ))
    }

    /// Records a step that was skipped because its gradients are not finite. Returns the warning to report, or the
    /// error that ends the run.
    pub(crate) fn skipped(
        &mut self,
        engine: &Engine,
        model: ModelId,
        position: &mut Position,
        report: &StepReport,
        loss: f64,
        rows: &[u32],
    ) -> Result<String, TrainError> {
        let tensor = engine.model(model).first_non_finite_gradient()?;
        position.skipped += 1;
        position.skipped_in_a_row += 1;
        let bad = self.remember(loss, report, tensor.clone(), rows);
        let step = position.step;
        let scale = position.scale.map(|scale| scale.scale);
        let first = tensor
            .as_ref()
            .map_or(String::new(), |name| format!("; the first non-finite gradient is that of {name}"));
        let overflow = self.change_scale(position, |scaler| scaler.overflowed());
        match (overflow, scale) {
            (Some(Overflow::AtFloor), Some(scale)) => {
                return Err(TrainError::ScaleAtFloor { step, scale, tensor, checkpoint: None });
            }
            (Some(Overflow::Halved), Some(scale)) => {
                let now = position.scale.map_or(scale, |state| state.scale);
                return Ok(format!(
                    "step {step} was skipped: fp16 overflow at scale {scale}{first}; the scale is now {now} \
                     (mixed_precision: bf16 needs none)"
                ));
            }
            (Some(Overflow::Kept), Some(scale)) if self.has_dynamic_scale() => {
                return Ok(format!(
                    "step {step} was skipped: fp16 overflow at scale {scale}{first}; the scale stays the same this time \
                     (mixed_precision: bf16 needs none)"
                ));
            }
            _ => {}
        }
        position.bad_in_a_row.steps += 1;
        if position.bad_in_a_row.steps >= MAX_IN_A_ROW {
            return Err(bad.into_error(position));
        }
        Ok(format!(
            "step {step} was skipped: objective {loss}, gradient norm {}{first}; {MAX_IN_A_ROW} such steps in a row end the \
             run",
            report.grad_norm
        ))
    }

    fn remember(&mut self, loss: f64, report: &StepReport, tensor: Option<String>, rows: &[u32]) -> BadStep {
        let rows = rows.iter().copied().take(16).collect();
        let bad = BadStep { loss, grad_norm: report.grad_norm, tensor, rows };
        self.last_bad = Some(bad.clone());
        bad
    }

    /// Whether loss scaling is dynamic, so that an overflow is expected.
    fn has_dynamic_scale(&self) -> bool {
        self.scaler.is_some_and(|scaler| !scaler.is_static())
    }

    /// Whether a checkpoint should be saved now. While steps go wrong it should not: earlier checkpoints are better,
    /// and `save_total_limit` would delete them. A decreasing loss scale is fine once a step has been applied.
    pub(crate) fn is_sound(&self, position: &Position) -> bool {
        let applied = position.skipped_in_a_row == 0 || self.has_dynamic_scale() && position.updates > 0;
        applied && position.bad_in_a_row.steps == 0
    }

    /// Fails if no step of the run was applied, because then nothing was trained.
    pub(crate) fn check_trained(&mut self, position: &Position) -> Result<(), TrainError> {
        match self.last_bad.take().filter(|_| position.updates == 0) {
            Some(bad) => Err(bad.into_error(position)),
            None => Ok(()),
        }
    }
}

/// What is known about the last bad step.
#[derive(Clone, Debug)]
pub(crate) struct BadStep {
    loss: f64,
    grad_norm: f64,
    /// The first tensor with a non-finite gradient.
    tensor: Option<String>,
    /// The first of its rows.
    rows: Box<[u32]>,
}

impl BadStep {
    /// The error of a run that ends with this step.
    fn into_error(self, position: &Position) -> TrainError {
        let BadStep { loss, grad_norm, tensor, rows } = self;
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
