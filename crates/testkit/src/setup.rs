//! Plans and engines for small models.

use lockstep_config::StrategyName;
use lockstep_core::{Bytes, DType, Mesh};
use lockstep_device::Queue;
use lockstep_engine::{Engine, Resources};
use lockstep_model::KernelBackend;
use lockstep_plan::{
    AccumulationOrder, Bounds, DeviceNeeds, Generation, ModelId, ModelPlan, ModelSettings, OptimizerSpec,
    Placements, PlanInput, Recomputation, Role, RunPlan, Tier, build, strategy,
};
use lockstep_shape::{Channels, Freeze, ModelShape, Recompute};

/// What tests vary.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub recompute: Recompute,
    /// What the last blocks compute again instead, and how many of them.
    pub late: Option<(Recompute, u32)>,
    pub storage: DType,
    pub micros: u32,
    pub order: AccumulationOrder,
    pub coefficients_ahead: bool,
    pub threads: usize,
    pub tokens: usize,
    pub max_doc: usize,
    pub head_chunk: usize,
    pub strategy: StrategyName,
    pub mesh: Mesh,
    pub prefetch: u32,
    pub bucket: Bytes,
    pub params_tier: Tier,
    pub optimizer_tier: Tier,
    /// Units whose optimizer states stay on the device.
    pub stay: u32,
    /// What the head is asked for.
    pub channels: Channels,
    pub optimizer: OptimizerSpec,
    /// Tensors that are not trained.
    pub frozen: &'static [&'static str],
    pub decay_norms: bool,
    pub evaluates: bool,
    /// Documents that grow at once, and the tokens each has room for.
    pub generates: Option<(usize, usize)>,
    /// As if the device had memory of its own: batches cross over through a port, in whole blocks of tokens.
    pub separate: bool,
    /// Bytes that no operation may count on are NaN.
    pub poison: bool,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            recompute: Recompute::None,
            late: None,
            storage: DType::F32,
            micros: 1,
            order: AccumulationOrder::Local,
            coefficients_ahead: true,
            threads: 2,
            tokens: 256,
            max_doc: 128,
            head_chunk: 256,
            strategy: StrategyName::Ddp,
            mesh: Mesh::SINGLE,
            prefetch: 1,
            bucket: Bytes(25 << 20),
            params_tier: Tier::Device,
            optimizer_tier: Tier::Device,
            stay: 0,
            channels: Channels::LOG_PROB,
            optimizer: OptimizerSpec::ADAMW,
            frozen: &[],
            decay_norms: false,
            evaluates: false,
            generates: None,
            separate: false,
            poison: true,
        }
    }
}

/// The plan of every rank.
pub fn plan(shape: &ModelShape, setup: &Setup) -> RunPlan {
    build(input(shape, setup)).expect("a sound plan")
}

/// What the plan is made from: one model, which is trained.
pub fn input(shape: &ModelShape, setup: &Setup) -> PlanInput {
    let kernels = KernelBackend::Cpu { num_threads: setup.threads };
    let model = model(Role::Policy, shape, setup);
    let Bounds { tokens, max_doc, .. } = model.bounds;
    let needs = DeviceNeeds {
        workspace: lockstep_model::workspace_bytes(shape, tokens, max_doc, kernels),
        foreign: Bytes::ZERO,
        host_foreign: setup.separate.then_some(Bytes::ZERO),
    };
    PlanInput {
        mesh: setup.mesh,
        strategy: strategy::by_name(setup.strategy).0,
        order: setup.order,
        micros: setup.micros,
        prefetch: setup.prefetch,
        bucket: setup.bucket,
        // Some units of a small model are joined, some are not.
        reduce_bucket: if setup.prefetch.is_multiple_of(2) { 40_000 } else { 0 },
        publish_bucket: if setup.prefetch.is_multiple_of(2) { 40_000 } else { 0 },
        coefficients_ahead: setup.coefficients_ahead,
        ..PlanInput::alone(vec![model], setup.storage, needs)
    }
}

/// One model of a plan.
pub fn model(role: Role, shape: &ModelShape, setup: &Setup) -> ModelPlan {
    let (_, [params, grads, optimizer]) = strategy::by_name(setup.strategy);
    let kernels = KernelBackend::Cpu { num_threads: setup.threads };
    let settings = ModelSettings {
        placements: Placements {
            params,
            grads,
            optimizer,
            params_tier: setup.params_tier,
            optimizer_tier: setup.optimizer_tier,
            stay: setup.stay,
        },
        bounds: Bounds { tokens: setup.tokens, docs: 64, max_doc: setup.max_doc },
        head_chunk: setup.head_chunk,
        recompute: match setup.late {
            None => setup.recompute.into(),
            Some((late, late_blocks)) => Recomputation { early: setup.recompute, late, late_blocks },
        },
        channels: setup.channels,
        optimizer: setup.optimizer,
        freeze: Freeze::Matching(setup.frozen.iter().map(ToString::to_string).collect()),
        decay_norms: setup.decay_norms,
        scores: setup.evaluates || !role.trains(),
        generation: setup.generates.map(|(docs, tokens_per_doc)| Generation {
            docs,
            tokens_per_doc,
            cache_elems: lockstep_model::kv_cache_elems(shape, docs, tokens_per_doc, setup.storage, kernels),
        }),
    };
    ModelPlan::new(role, shape, settings)
}

/// An engine on one rank, with random parameters.
pub fn engine(shape: &ModelShape, setup: &Setup) -> Engine {
    let plan = plan(shape, setup);
    let resources = Resources::alone(&plan, Queue::cpu(setup.threads)).expect("the memory of a small model");
    let mut engine = Engine::new(plan, resources).expect("a plan for one rank");
    engine.model_mut(ModelId::FIRST).initialise(7).expect("nothing is on a disk");
    if setup.poison {
        engine.poison_buffers();
    }
    engine
}
