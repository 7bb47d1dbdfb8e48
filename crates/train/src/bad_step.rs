//! What becomes of a step whose numbers are not finite: it is skipped by all ranks and told, with the tensor
//! where it began; in fp16 the loss scale answers to it; too many of them end the run.

use lockstep_engine::{Engine, StepReport};

use crate::error::TrainError;
use crate::position::Position;
use crate::run::Run;
use crate::scaler::{LossScaler, Overflow};

/// Such steps in a row until a run stops.
const TOO_MANY: u64 = 3;

impl Run<'_> {
    pub(crate) fn applied(&mut self, position: &mut Position) {
        position.updates += 1;
        position.skipped_in_a_row = 0;
        self.change_scale(position, |scaler| scaler.applied());
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

    /// A step whose numbers are not finite: what to say of it, or that the run ends here.
    pub(crate) fn not_finite(
        &mut self,
        engine: &Engine,
        position: &mut Position,
        report: &StepReport,
        loss: f64,
        rows: &[u32],
    ) -> Result<String, TrainError> {
        let tensor = engine.first_bad_gradient()?;
        position.skipped += 1;
        position.skipped_in_a_row += 1;
        if !report.skipped {
            // Gradients were finite, and were applied.
            position.updates += 1;
        }
        let rows = rows.iter().copied().take(16).collect();
        let bad = Bad { loss, grad_norm: report.grad_norm, tensor: tensor.clone(), rows };
        self.last_bad = Some(bad.clone());
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
            (Some(Overflow::Kept), Some(scale)) if self.scaler.is_some_and(|scaler| !scaler.is_fixed()) => {
                return Ok(format!(
                    "step {step} was skipped: fp16 overflowed at scale {scale}{first}; the scale stays, this time \
                     (mixed_precision: bf16 needs none)"
                ));
            }
            _ => {}
        }
        if position.skipped_in_a_row >= TOO_MANY {
            return Err(bad.ends(position));
        }
        let what = if report.skipped { "was skipped" } else { "went wrong" };
        Ok(format!(
            "step {step} {what}: objective {loss}, gradient norm {}{first}; {TOO_MANY} such steps in a row \
             end the run",
            report.grad_norm
        ))
    }

    /// Whether a checkpoint is worth making now. While steps go wrong, the earlier ones are the better ones, and
    /// new ones would push them out; a scale on its way down is nothing wrong, once a step was applied.
    pub(crate) fn is_sound(&self, position: &Position) -> bool {
        let finds_scale = self.scaler.is_some_and(|scaler| !scaler.is_fixed());
        position.skipped_in_a_row == 0 || finds_scale && position.updates > 0
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
    rows: Vec<u32>,
}

impl Bad {
    /// The run ends with it.
    fn ends(self, position: &Position) -> TrainError {
        let Bad { loss, grad_norm, tensor, rows } = self;
        TrainError::Diverged {
            step: position.step,
            loss,
            grad_norm,
            in_a_row: position.skipped_in_a_row,
            tensor,
            rows,
            trained: position.updates > 0,
            scale: position.scale.map(|scale| scale.scale),
            checkpoint: None,
        }
    }
}
