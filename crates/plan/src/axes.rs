//! Which mesh axes a state is sharded over and a gradient is reduced over. Every collective and the gradient norm ask
//! here; nothing else reads the mesh's axes.

use lockstep_core::{Axis, DType};
use lockstep_shape::UnitKind;

use crate::buffer::ParamState;
use crate::input::{AccumulationOrder, Placement, PlanInput};
use crate::schedule::ModelId;

/// A set of axes, the one with the closest ranks first.
pub type Axes = &'static [Axis];

impl PlanInput {
    /// The axes a state is sharded over: ranks along them hold different parts of it. Empty: every rank holds all.
    pub fn sharded_over(&self, model: ModelId, state: ParamState) -> Axes {
        let placement = self.model(model).placements.of(state);
        if placement == Placement::Shard && self.mesh.shard > 1 { &[Axis::Shard] } else { &[] }
    }

    /// The axes a micro-batch's gradients are summed over: all of them, because every rank has its own micro-batch.
    pub fn summed_over(&self) -> Axes {
        match (self.mesh.shard > 1, self.mesh.replicate > 1) {
            (false, false) => &[],
            (true, true) => &[Axis::Shard, Axis::Replicate],
            (true, false) => &[Axis::Shard],
            (false, true) => &[Axis::Replicate],
        }
    }

    /// The axes of the reductions that bring a unit's gradient to its accumulator, in order. On a single rank one
    /// reduction adds micro-batches up or rounds the gradient, unless backward or the host already does.
    pub fn reductions(&self, model: ModelId, unit: u32) -> Axes {
        let axes = self.summed_over();
        if self.backward_rounds(model, unit) {
            return &[];
        }
        let needs_one = self.order == AccumulationOrder::Reduced || self.rounds_grads();
        if axes.is_empty() && needs_one && !self.grads_offloaded(model, unit) { &[Axis::World] } else { axes }
    }

    /// Whether backward itself writes a unit's rounded gradient: there are no other ranks, it stays on the device, and every
    /// tensor's gradient is computed by one kernel. The head's is a sum over chunks, the embedding's a sum over tokens.
    pub fn backward_rounds(&self, model: ModelId, unit: u32) -> bool {
        self.rounds_grads()
            && self.summed_over().is_empty()
            && !self.grads_offloaded(model, unit)
            && matches!(self.unit(model, unit).kind, UnitKind::Block(_))
    }

    /// Whether gradients are rounded after they are reduced. Backward and reductions compute in f32.
    pub fn rounds_grads(&self) -> bool {
        self.grad_dtype != DType::F32
    }

    /// The axes that updated parameters are all-gathered over: the optimizer is sharded over them, the parameters are
    /// not.
    pub fn updates_gathered_over(&self, model: ModelId) -> Axes {
        match self.sharded_over(model, ParamState::Working) {
            [] => self.sharded_over(model, ParamState::Master),
            _ => &[],
        }
    }

    /// Whether ranks hold different parts of a state.
    pub fn is_sharded(&self, model: ModelId, state: ParamState) -> bool {
        !self.sharded_over(model, state).is_empty()
    }
}
