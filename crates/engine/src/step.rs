//! The numbers of a step, which its operations leave for each other.

use std::sync::{Mutex, MutexGuard};

use crate::driver::UpdateSettings;
use crate::lanes::ScheduleRun;

/// What one operation leaves for later ones of the same step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepState {
    pub(crate) updates: UpdateSettings,
    pub(crate) grad_norm: f64,
    /// What gradients are multiplied by before the update: clips them and takes the scale away.
    pub(crate) clip: f32,
    pub(crate) skip: bool,
    /// What coefficients were multiplied by, and so all gradients.
    pub(crate) loss_scale: f64,
}

impl StepState {
    pub(crate) fn new(updates: UpdateSettings, loss_scale: f64) -> StepState {
        StepState { updates, grad_norm: 0.0, clip: 1.0, skip: false, loss_scale }
    }
}

/// Of the run that computes, and of the one before, which may still update.
pub(crate) struct StepStates([Mutex<StepState>; 2]);

impl StepStates {
    pub(crate) fn new() -> StepStates {
        StepStates([0, 1].map(|_| Mutex::new(StepState::new(UpdateSettings::NONE, 1.0))))
    }

    pub(crate) fn of(&self, run: ScheduleRun) -> MutexGuard<'_, StepState> {
        self.0[run.parity()].lock().unwrap_or_else(|e| e.into_inner())
    }
}
