//! Which axes of the mesh a state is sharded over and a gradient is reduced over. Every collective and the norm ask here;
//! nothing else reads the mesh's axes.

use lockstep_core::Axis;

use crate::buffer::ParamState;
use crate::input::{AccumulationOrder, Placement, PlanInput};
use crate::schedule::ModelId;

/// A set of axes, nearest ranks first.
pub type Axes = &'static [Axis];

impl PlanInput {
    /// The axes that a state is sharded over: ranks along them hold different parts of it. Empty: every rank holds all.
    pub fn sharded_over(&self, model: ModelId, state: ParamState) -> Axes {
        let placement = self.model(model).placements.of(state);
        if placement == Placement::Shard && self.mesh.shard > 1 { &[Axis::Shard] } else { &[] }
    }

    /// The axes that a micro-batch's gradients are summed over. Each rank has a micro-batch of its own, so: all.
    pub fn summed_over(&self) -> Axes {
        match (self.mesh.shard > 1, self.mesh.replicate > 1) {
            (false, false) => &[],
            (true, true) => &[Axis::Shard, Axis::Replicate],
            (true, false) => &[Axis::Shard],
            (false, true) => &[Axis::Replicate],
        }
    }

    /// The sums that bring a unit's gradient to its accumulator, one after the other. Alone, a sum over one rank adds
    /// micro-batches up, where backward does not add to the accumulator itself and the host does not either.
    pub fn reductions(&self, model: ModelId, unit: u32) -> Axes {
        let axes = self.summed_over();
        let alone = axes.is_empty() && self.order == AccumulationOrder::Reduced;
        if alone && !self.grads_offloaded(model, unit) { &[Axis::World] } else { axes }
    }

    /// The axes that an updated parameter has to be sent along: the optimizer is sharded over them, the parameters are not.
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
