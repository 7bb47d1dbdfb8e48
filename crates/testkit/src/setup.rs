//! Plans and engines for small models.

use lockstep_core::{Bytes, DType, Mesh};
use lockstep_device::Queue;
use lockstep_engine::Engine;
use lockstep_plan::{
    AccumulationOrder, Bounds, DeviceNeeds, ModelPlan, Placement, Placements, PlanInput, Role, RunPlan, Tier,
    build, strategy,
};
use lockstep_shape::{ModelShape, Recompute};

/// What tests vary.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub recompute: Recompute,
    pub storage: DType,
    pub micros: u32,
    pub order: AccumulationOrder,
    pub coefficients_ahead: bool,
    pub threads: usize,
    pub tokens: usize,
    pub max_doc: usize,
    pub head_chunk: usize,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            recompute: Recompute::None,
            storage: DType::F32,
            micros: 1,
            order: AccumulationOrder::Local,
            coefficients_ahead: true,
            threads: 2,
            tokens: 256,
            max_doc: 128,
            head_chunk: 256,
        }
    }
}

/// A plan for one rank.
pub fn plan(shape: &ModelShape, setup: &Setup) -> RunPlan {
    let bounds = Bounds { tokens: setup.tokens, docs: 64, max_doc: setup.max_doc };
    build(PlanInput {
        models: vec![ModelPlan::new(Role::Policy, shape, setup.recompute, None, false)],
        mesh: Mesh::SINGLE,
        strategy: strategy::ddp,
        placements: Placements {
            params: Placement::Whole,
            grads: Placement::Whole,
            optimizer: Placement::Whole,
            params_tier: Tier::Device,
            optimizer_tier: Tier::Device,
        },
        order: setup.order,
        micros: setup.micros,
        prefetch: 1,
        bucket: Bytes(25 << 20),
        recompute: setup.recompute,
        storage: setup.storage,
        bounds,
        head_chunk: setup.head_chunk,
        needs: DeviceNeeds {
            workspace: lockstep_model::workspace_bytes(shape, bounds.tokens, bounds.max_doc, setup.threads),
            foreign: Bytes::ZERO,
        },
        coefficients_ahead: setup.coefficients_ahead,
        clip: true,
        rollout: None,
    })
}

/// An engine with random parameters.
pub fn engine(shape: &ModelShape, setup: &Setup) -> Engine {
    let mut engine = Engine::new(plan(shape, setup), Queue::cpu(setup.threads)).expect("a plan for one rank");
    engine.initialise(7);
    engine
}
