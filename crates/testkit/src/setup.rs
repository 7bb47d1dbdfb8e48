//! Plans and engines for small models.

use lockstep_config::StrategyName;
use lockstep_core::{Bytes, DType, Mesh, Rank};
use lockstep_device::Queue;
use lockstep_engine::{Engine, Resources};
use lockstep_model::KernelBackend;
use lockstep_plan::{
    AccumulationOrder, BatchBounds, DeviceNeeds, GenerationBounds, KvPage, MasterFormat, MemoryTier, ModelId,
    ModelPlan, ModelRole, ModelSettings, OptimizerSpec, ParamState, Placements, PlanInput, RecomputePolicy,
    RunPlan, build, strategy,
};
use lockstep_shape::{Channels, Freeze, ModelShape, Recompute};

/// The settings that tests vary.
#[derive(Clone, Copy, Debug)]
pub struct TestSetup {
    pub recompute: Recompute,
    /// Another recompute mode for the last blocks, and their number.
    pub late: Option<(Recompute, u32)>,
    pub storage: DType,
    pub num_micro_batches: u32,
    pub order: AccumulationOrder,
    pub coefficients_ahead: bool,
    pub threads: usize,
    pub tokens: usize,
    pub max_doc: usize,
    pub head_chunk_tokens: usize,
    pub strategy: StrategyName,
    pub mesh: Mesh,
    pub prefetch: u32,
    pub ddp_bucket_bytes: Bytes,
    pub params_tier: MemoryTier,
    pub optimizer_tier: MemoryTier,
    /// The number of units whose optimizer states are on the device.
    pub optimizer_units_on_device: u32,
    /// The outputs that the head computes.
    pub channels: Channels,
    /// Divides the logits before the softmax.
    pub temperature: f32,
    pub optimizer: OptimizerSpec,
    pub masters: MasterFormat,
    pub grad_dtype: DType,
    /// Patterns of frozen tensors.
    pub frozen: &'static [&'static str],
    pub decay_norms: bool,
    pub evaluates: bool,
    /// For generation: the number of sequences at once, and the largest number of tokens of each.
    pub generates: Option<(usize, usize)>,
    /// Plans as if the device had its own memory: batches pass through staging memory, padded to whole blocks of tokens.
    pub separate_memory: bool,
    /// Lets documents that begin alike share rows.
    pub shares_rows: bool,
    /// Fills memory that no operation may read with NaN.
    pub poison: bool,
}

impl Default for TestSetup {
    fn default() -> TestSetup {
        TestSetup {
            recompute: Recompute::None,
            late: None,
            storage: DType::F32,
            num_micro_batches: 1,
            order: AccumulationOrder::Local,
            coefficients_ahead: true,
            threads: 2,
            tokens: 256,
            max_doc: 128,
            head_chunk_tokens: 256,
            strategy: StrategyName::Ddp,
            mesh: Mesh::SINGLE,
            prefetch: 1,
            ddp_bucket_bytes: Bytes(25 << 20),
            params_tier: MemoryTier::Device,
            optimizer_tier: MemoryTier::Device,
            optimizer_units_on_device: 0,
            channels: Channels::LOG_PROB,
            temperature: 1.0,
            optimizer: OptimizerSpec::ADAMW,
            masters: MasterFormat::F32,
            grad_dtype: DType::F32,
            frozen: &[],
            decay_norms: false,
            evaluates: false,
            generates: None,
            separate_memory: false,
            shares_rows: false,
            poison: true,
        }
    }
}

/// The plan of the first rank.
pub fn plan(shape: &ModelShape, setup: &TestSetup) -> RunPlan {
    build(input(shape, setup), Rank(0)).expect("a sound plan")
}

/// The plan input for one model, which is trained.
pub fn input(shape: &ModelShape, setup: &TestSetup) -> PlanInput {
    let kernels = KernelBackend::Cpu { num_threads: setup.threads };
    let model = model(ModelRole::Policy, shape, setup);
    let BatchBounds { tokens, max_doc, .. } = model.bounds;
    let needs = DeviceNeeds {
        workspace_bytes: lockstep_model::workspace_bytes(shape, tokens, max_doc, kernels),
        overhead_bytes: Bytes::ZERO,
        host_overhead_bytes: setup.separate_memory.then_some(Bytes::ZERO),
    };
    PlanInput {
        mesh: setup.mesh,
        strategy: strategy::by_name(setup.strategy).0,
        order: setup.order,
        num_micro_batches: setup.num_micro_batches,
        prefetch: setup.prefetch,
        ddp_bucket_bytes: setup.ddp_bucket_bytes,
        // Some units of a small model share a bucket, some do not.
        reduce_bucket_elems: if setup.prefetch.is_multiple_of(2) { 40_000 } else { 0 },
        allgather_bucket_elems: if setup.prefetch.is_multiple_of(2) { 40_000 } else { 0 },
        coefficients_ahead: setup.coefficients_ahead,
        masters: setup.masters,
        grad_dtype: setup.grad_dtype,
        ..PlanInput::single_rank(vec![model], setup.storage, needs)
    }
}

/// One model of a plan.
pub fn model(role: ModelRole, shape: &ModelShape, setup: &TestSetup) -> ModelPlan {
    let scores = setup.evaluates || !role.trains();
    ModelPlan::new(role, shape, ModelSettings { scores, ..settings(shape, setup) })
}

/// The settings of a model of a plan.
pub fn settings(shape: &ModelShape, setup: &TestSetup) -> ModelSettings {
    let (_, [params, grads, optimizer]) = strategy::by_name(setup.strategy);
    let kernels = KernelBackend::Cpu { num_threads: setup.threads };
    ModelSettings {
        placements: Placements {
            params,
            grads,
            optimizer,
            params_tier: setup.params_tier,
            optimizer_tier: setup.optimizer_tier,
            optimizer_units_on_device: setup.optimizer_units_on_device,
        },
        bounds: BatchBounds {
            tokens: setup.tokens,
            docs: 64,
            max_doc: setup.max_doc,
            shares_rows: setup.shares_rows,
        },
        head_chunk_tokens: setup.head_chunk_tokens,
        recompute: match setup.late {
            None => setup.recompute.into(),
            Some((late, late_blocks)) => RecomputePolicy { early: setup.recompute, late, late_blocks },
        },
        channels: setup.channels,
        temperature: setup.temperature,
        optimizer: setup.optimizer,
        freeze: Freeze::Matching(setup.frozen.iter().map(ToString::to_string).collect()),
        decay_norms: setup.decay_norms,
        scores: setup.evaluates,
        generation: setup.generates.map(|(docs, tokens_per_doc)| {
            let elems = lockstep_model::kv_page_elems(shape, setup.storage, kernels);
            let page = KvPage { tokens: lockstep_model::KV_PAGE_TOKENS, elems };
            GenerationBounds::of_docs(docs, tokens_per_doc, page)
        }),
    }
}

/// An engine on one rank, with random parameters.
pub fn engine(shape: &ModelShape, setup: &TestSetup) -> Engine {
    let plan = plan(shape, setup);
    let resources =
        Resources::single_rank(&plan, Queue::cpu(setup.threads)).expect("the memory of a small model");
    let mut engine = Engine::new(plan, resources).expect("a plan for one rank");
    engine.model_mut(ModelId::FIRST).initialise(7).expect("nothing is on a disk");
    if setup.poison {
        engine.poison_buffers();
    }
    engine
}

/// A state of all tensors of the first model, one after the other, on a rank that holds all of it.
pub fn read_state(engine: &Engine, state: ParamState) -> Vec<f32> {
    let model = engine.model(ModelId::FIRST);
    let mut all = Vec::new();
    for (u, unit) in model.units().iter().enumerate() {
        for segment in &unit.segments {
            let mut values = vec![0f32; segment.elems()];
            let read = model.read(u, segment, state, 0..segment.elems(), &mut values);
            assert!(read.expect("nothing is on a disk"), "{} has no {state:?}", segment.name);
            all.extend(values);
        }
    }
    all
}
