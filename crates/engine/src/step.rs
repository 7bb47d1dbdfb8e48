//! The state of a step that its operations share.

use std::sync::{Mutex, MutexGuard};

use crate::driver::UpdateSettings;
use crate::lanes::ScheduleRun;

/// What an operation computes for later operations of the same step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepState {
    pub(crate) updates: UpdateSettings,
    pub(crate) grad_norm: f64,
    /// The factor that gradients are multiplied by in the update. It clips them and removes the loss scale.
    pub(crate) clip: f32,
    pub(crate) skip: bool,
    /// The factor that coefficients, and so all gradients, were multiplied by.
    pub(crate) loss_scale: f64,
}

impl StepState {
    pub(crate) fn new(updates: UpdateSettings, loss_scale: f64) -> StepState {
        StepState { updates, grad_norm: 0.0, clip: 1.0, skip: false, loss_scale }
    }
}

/// The states of the current run and of the previous one, which may still be updating.
pub(crate) struct StepStates([Mutex<StepState>; 2]);

impl StepStates {
    pub(crate) fn new() -> StepStates {
        StepStates([0, 1].map(|_| Mutex::new(StepState::new(UpdateSettings::NONE, 1.0))))
    }

    pub(crate) fn of(&self, run: ScheduleRun) -> MutexGuard<'_, StepState> {
        self.0[run.parity()].lock().unwrap_or_else(|e| e.into_inner())
    }
}
