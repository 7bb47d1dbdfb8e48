//! Where a rank's device memory goes, by what users know: parameters, gradients, optimizer, activations, buffers.

use lockstep_core::Bytes;

use crate::buffer::{BufferKind, MemoryTier, ParamState};
use crate::run_plan::PlanData;

/// The device memory of a rank at its peak. The kinds add up to the total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryByKind {
    /// The working copy, and what is gathered at the peak.
    pub parameters: Bytes,
    /// Also those that wait for their reduction at the peak.
    pub gradients: Bytes,
    /// Master copies and the optimizer's states.
    pub optimizer: Bytes,
    /// What is live of them at the peak.
    pub activations: Bytes,
    /// Scratch, inputs and outputs, tables, staging, and gaps between buffers.
    pub buffers: Bytes,
    /// What the plan does not manage: the process, the driver, libraries.
    pub foreign: Bytes,
}

impl MemoryByKind {
    pub fn of(plan: &PlanData) -> MemoryByKind {
        let mut kinds = MemoryByKind { foreign: plan.input.needs.overhead_bytes, ..MemoryByKind::default() };
        for buffer in plan.buffers.iter().filter(|buffer| buffer.tier == MemoryTier::Device) {
            let BufferKind::ParamState { state, .. } = buffer.kind else { continue };
            match state {
                ParamState::Working | ParamState::Codes | ParamState::ScaleCodes | ParamState::ScaleTable => {
                    kinds.parameters += buffer.bytes()
                }
                ParamState::Grad => kinds.gradients += buffer.bytes(),
                ParamState::Master | ParamState::Optimizer(_) => kinds.optimizer += buffer.bytes(),
            }
        }
        let largest = plan.phases.iter().max_by_key(|phase| phase.memory.bytes);
        for id in largest.iter().flat_map(|phase| &phase.memory.peak) {
            let buffer = &plan.buffers[id.0 as usize];
            match buffer.kind {
                BufferKind::UnshardedParams { .. }
                | BufferKind::GatheredState { .. }
                | BufferKind::ParamStaging { .. } => kinds.parameters += buffer.bytes(),
                BufferKind::UnshardedGrad { .. } => kinds.gradients += buffer.bytes(),
                BufferKind::Residual { .. }
                | BufferKind::ResidualGrad { .. }
                | BufferKind::SavedActivations { .. }
                | BufferKind::RecomputedActivations { .. } => kinds.activations += buffer.bytes(),
                _ => {}
            }
        }
        kinds.buffers = plan.device_bytes() - kinds.total();
        kinds
    }

    pub fn total(&self) -> Bytes {
        self.rows().map(|(_, bytes)| bytes).into_iter().sum()
    }

    /// The kinds by name, in the order of the table.
    pub fn rows(&self) -> [(&'static str, Bytes); 6] {
        [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("activations", self.activations),
            ("buffers", self.buffers),
            ("foreign", self.foreign),
        ]
    }
}
