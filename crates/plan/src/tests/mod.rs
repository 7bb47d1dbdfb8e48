//! Properties of plans, without a device: schedules are run by a simulator of lanes that takes nothing
//! from the builder but the list of operations and the offsets.

mod broken;
mod gradients;
mod lanes;
mod leaving;
mod overlap;
mod packing;
mod promises;
mod properties;
mod snapshots;

use lockstep_config::StrategyName;
use lockstep_core::{Bytes, DType, Mesh};
use lockstep_shape::{Channels, Freeze, ModelShape, Recompute};

use crate::{
    AccumulationOrder, Bounds, DeviceNeeds, Generation, ModelPlan, ModelSettings, OptimizerSpec, Phase,
    Placement, Placements, PlanInput, Recomputation, Role, RunPlan, State, Tier, What, build, strategy,
};

/// A run in the few words that tests vary.
#[derive(Clone, Debug)]
struct Setup {
    shape: ModelShape,
    strategy: StrategyName,
    mesh: Mesh,
    /// `None`: the strategy's default.
    order: Option<AccumulationOrder>,
    micros: u32,
    prefetch: u32,
    recompute: Recomputation,
    storage: DType,
    params_tier: Tier,
    optimizer_tier: Tier,
    stay: u32,
    bucket: u64,
    joined: usize,
    tokens: usize,
    coefficients_ahead: bool,
    /// Tensors that are not trained.
    frozen: Vec<String>,
    optimizer: OptimizerSpec,
    /// Policy, value, reference and reward models with a rollout.
    ppo: bool,
}

impl Setup {
    fn new(size: &str, strategy: StrategyName, replicate: u32, shard: u32) -> Setup {
        Setup {
            shape: ModelShape::named(size, 512).unwrap(),
            strategy,
            mesh: Mesh::on_one_node(replicate, shard),
            order: None,
            micros: 1,
            prefetch: 1,
            recompute: Recompute::None.into(),
            storage: DType::F32,
            params_tier: Tier::Device,
            optimizer_tier: Tier::Device,
            stay: 0,
            bucket: 25 << 20,
            joined: 0,
            tokens: 512,
            coefficients_ahead: true,
            frozen: vec![],
            optimizer: OptimizerSpec::ADAMW,
            ppo: false,
        }
    }

    fn with(mut self, change: impl FnOnce(&mut Setup)) -> Setup {
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
            stay: self.stay,
        };
        let model = |role: Role| {
            let settings = ModelSettings {
                placements,
                bounds: Bounds { tokens: self.tokens, docs: 8, max_doc: 128 },
                head_chunk: 256,
                recompute: self.recompute,
                channels: Channels::LOG_PROB,
                optimizer: self.optimizer,
                freeze: Freeze::Matching(self.frozen.clone()),
                decay_norms: false,
                scores: self.ppo,
                generation: (self.ppo && role == Role::Policy).then_some(Generation {
                    docs: 4,
                    tokens_per_doc: 192,
                    cache_elems: 4 * 192 * 64,
                }),
            };
            ModelPlan::new(role, &self.shape, settings)
        };
        let roles: &[Role] = match self.ppo {
            true => &[Role::Policy, Role::Value, Role::Reference, Role::Reward],
            false => &[Role::Policy],
        };
        let default_order = match grads {
            Placement::Whole => AccumulationOrder::Local,
            Placement::Shard => AccumulationOrder::Reduced,
        };
        let needs = DeviceNeeds { workspace: Bytes(1 << 16), foreign: Bytes(32 << 20), host_foreign: None };
        PlanInput {
            mesh: self.mesh,
            strategy,
            order: self.order.unwrap_or(default_order),
            micros: self.micros,
            prefetch: self.prefetch,
            bucket: Bytes(self.bucket),
            reduce_bucket: self.joined,
            publish_bucket: self.joined,
            coefficients_ahead: self.coefficients_ahead,
            ..PlanInput::alone(roles.iter().map(|role| model(*role)).collect(), self.storage, needs)
        }
    }

    fn plan(&self) -> RunPlan {
        build(self.input()).expect("a sound plan")
    }
}

fn train_phase(plan: &RunPlan) -> &Phase {
    plan.phases.iter().find(|p| p.name.starts_with("train")).expect("something is trained")
}

/// Bytes of residents of some states, on a tier.
fn resident_bytes(plan: &RunPlan, tier: Tier, states: &[State]) -> u64 {
    let wanted = |what: &What| matches!(what, What::State { state, .. } if states.contains(state));
    plan.buffers.iter().filter(|b| b.tier == tier && wanted(&b.what)).map(|b| b.bytes().0).sum()
}
