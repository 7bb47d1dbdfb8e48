//! Tests of plans without a device. Schedules run in a lane simulator that uses only the list of operations and the
//! offsets.

mod generation;
mod gradients;
mod lane_simulator;
mod offload;
mod overlap;
mod packing;
mod properties;
mod quantised;
mod snapshots;
mod strategy_memory;
mod violations;

use lockstep_config::StrategyName;
use lockstep_core::{Bytes, DType, Mesh, Rank};
use lockstep_shape::{Channels, Freeze, ModelShape, Recompute};

use crate::{
    AccumulationOrder, BatchBounds, BufferKind, DeviceNeeds, GenerationBounds, KvPage, MemoryTier, ModelPlan,
    ModelRole, ModelSettings, OptimizerSpec, ParamState, Phase, Placement, Placements, PlanInput,
    RecomputePolicy, RunPlan, build, strategy,
};

/// The settings that tests vary.
#[derive(Clone, Debug)]
struct TestSetup {
    shape: ModelShape,
    strategy: StrategyName,
    mesh: Mesh,
    /// `None`: the strategy's default.
    order: Option<AccumulationOrder>,
    num_micro_batches: u32,
    prefetch: u32,
    recompute: RecomputePolicy,
    storage: DType,
    params_tier: MemoryTier,
    optimizer_tier: MemoryTier,
    optimizer_units_on_device: u32,
    bucket_bytes: u64,
    /// Both the reduce and the all-gather bucket.
    bucket_elems: usize,
    tokens: usize,
    coefficients_ahead: bool,
    /// Patterns of frozen tensors.
    frozen: Vec<String>,
    optimizer: OptimizerSpec,
    /// Policy, value, reference and reward models with a rollout.
    ppo: bool,
}

impl TestSetup {
    fn new(size: &str, strategy: StrategyName, replicate: u32, shard: u32) -> TestSetup {
        TestSetup {
            shape: ModelShape::named(size, 512).unwrap(),
            strategy,
            mesh: Mesh::on_one_node(replicate, shard),
            order: None,
            num_micro_batches: 1,
            prefetch: 1,
            recompute: Recompute::None.into(),
            storage: DType::F32,
            params_tier: MemoryTier::Device,
            optimizer_tier: MemoryTier::Device,
            optimizer_units_on_device: 0,
            bucket_bytes: 25 << 20,
            bucket_elems: 0,
            tokens: 512,
            coefficients_ahead: true,
            frozen: vec![],
            optimizer: OptimizerSpec::ADAMW,
            ppo: false,
        }
    }

    fn with(mut self, change: impl FnOnce(&mut TestSetup)) -> TestSetup {
        change(&mut self);
        self
    }

    fn input(&self) -> PlanInput {
        let (strategy, [params, grads, optimizer]) = strategy::by_name(self.strategy);
        let placements = Placements {
            params,
            grads,
            optimizer,
            params_tier: self.params_tier,
            optimizer_tier: self.optimizer_tier,
            optimizer_units_on_device: self.optimizer_units_on_device,
        };
        let model = |role: ModelRole| {
            let settings = ModelSettings {
                placements,
                bounds: BatchBounds { tokens: self.tokens, docs: 8, max_doc: 128, shares_rows: false },
                head_chunk_tokens: 256,
                recompute: self.recompute,
                channels: Channels::LOG_PROB,
                temperature: 1.0,
                optimizer: self.optimizer,
                freeze: Freeze::Matching(self.frozen.clone()),
                decay_norms: false,
                scores: self.ppo,
                generation: (self.ppo && role == ModelRole::Policy)
                    .then(|| GenerationBounds::of_docs(4, 192, KvPage { tokens: 64, elems: 64 * 64 })),
            };
            ModelPlan::new(role, &self.shape, settings)
        };
        let roles: &[ModelRole] = match self.ppo {
            true => &[ModelRole::Policy, ModelRole::Value, ModelRole::Reference, ModelRole::Reward],
            false => &[ModelRole::Policy],
        };
        let default_order = match grads {
            Placement::Replicate => AccumulationOrder::Local,
            Placement::Shard => AccumulationOrder::Reduced,
        };
        let needs = DeviceNeeds {
            workspace_bytes: Bytes(1 << 16),
            overhead_bytes: Bytes(32 << 20),
            host_overhead_bytes: None,
        };
        PlanInput {
            mesh: self.mesh,
            strategy,
            order: self.order.unwrap_or(default_order),
            num_micro_batches: self.num_micro_batches,
            prefetch: self.prefetch,
            ddp_bucket_bytes: Bytes(self.bucket_bytes),
            reduce_bucket_elems: self.bucket_elems,
            allgather_bucket_elems: self.bucket_elems,
            coefficients_ahead: self.coefficients_ahead,
            ..PlanInput::single_rank(roles.iter().map(|role| model(*role)).collect(), self.storage, needs)
        }
    }

    fn plan(&self) -> RunPlan {
        build(self.input(), Rank(0)).expect("a valid plan")
    }
}

fn train_phase(plan: &RunPlan) -> &Phase {
    plan.phases.iter().find(|p| p.name.starts_with("train")).expect("something is trained")
}

/// Bytes of the residents of some states in a tier.
fn resident_bytes(plan: &RunPlan, tier: MemoryTier, states: &[ParamState]) -> u64 {
    let wanted =
        |kind: &BufferKind| matches!(kind, BufferKind::ParamState { state, .. } if states.contains(state));
    plan.buffers.iter().filter(|b| b.tier == tier && wanted(&b.kind)).map(|b| b.bytes().0).sum()
}
