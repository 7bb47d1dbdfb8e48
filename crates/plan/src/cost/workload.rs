//! A run to plan, and variants of it: another strategy, micro-batch size, recomputation, precision or offload.

use lockstep_config::{self as config, RunConfig, StrategyName};
use lockstep_core::{Bytes, DType, Mesh};
use lockstep_shape::{ModelShape, Recompute};

use crate::budget::{Candidate, OpenChoices};
use crate::buffer::MemoryTier;
use crate::cost::cluster::Cluster;
use crate::cost::prediction::{Prediction, predict};
use crate::cost::rates::Rates;
use crate::input::{AccumulationOrder, BatchBounds, Placement, PlanInput, RecomputePolicy};
use crate::run_plan::{PlanData, lay_out};
use crate::strategy;

/// The largest workspace that an operation of a model needs, for micro-batches of this size. See
/// [`crate::Hardware::workspace`].
pub type WorkspaceBytes<'a> = &'a dyn Fn(&ModelShape, &BatchBounds) -> Bytes;

/// The machine that a plan is for: one rank's rates and memory, and the links between ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    pub rates: Rates,
    pub cluster: Cluster,
    /// The device memory that a rank may use.
    pub budget: Bytes,
    /// The host memory that a rank may use, if it is known.
    pub host_budget: Option<Bytes>,
}

/// A run, and which of its choices are left to the plan.
#[derive(Clone)]
pub struct Workload<'a> {
    /// The plan's input under `strategy`. With `auto` any strategy will do.
    pub input: PlanInput,
    pub strategy: StrategyName,
    /// Rows of a micro-batch: `per_device_train_batch_size`.
    pub rows: u32,
    /// `None`: the strategy's default.
    pub order: Option<AccumulationOrder>,
    /// The rows of a micro-batch are chosen: `rows` is the largest number, and accumulation makes up for fewer.
    pub auto_rows: bool,
    /// The plan decides how much is recomputed.
    pub auto_recompute: bool,
    /// The plan decides how many units' states are on the device, where the optimizer is offloaded.
    pub auto_offload: bool,
    pub workspace: WorkspaceBytes<'a>,
}

impl<'a> Workload<'a> {
    /// The run of a configuration, from the plan's input that [`crate::resolve`] makes of it.
    pub fn of(config: &RunConfig, input: PlanInput, workspace: WorkspaceBytes<'a>) -> Workload<'a> {
        let p = &config.plan;
        Workload {
            input,
            strategy: p.strategy,
            rows: config.batch.per_device_train_batch_size,
            order: match p.accumulation_order {
                config::AccumulationOrder::Local => Some(AccumulationOrder::Local),
                config::AccumulationOrder::Reduced => Some(AccumulationOrder::Reduced),
                config::AccumulationOrder::Auto => None,
            },
            auto_rows: config.batch.chooses_rows,
            auto_recompute: p.recompute == config::Recompute::Auto,
            auto_offload: p.memory_budget_gib.is_some() && p.offload_ratio.is_none(),
            workspace,
        }
    }
}

impl Workload<'_> {
    /// Parameters of the first model.
    pub fn params(&self) -> u64 {
        self.input.models[0].params()
    }

    /// The same run under another strategy, on the ranks of a cluster. `None`: the strategy does not apply there.
    pub fn with_strategy(&self, name: StrategyName, cluster: &Cluster) -> Option<Self> {
        let mesh = mesh(name, cluster)?;
        let (strategy, [params, grads, optimizer]) = strategy::by_name(name);
        let mut changed = self.clone();
        let input = &mut changed.input;
        for model in &mut input.models {
            let placements = &mut model.placements;
            if params == Placement::Replicate && placements.params_tier != MemoryTier::Device {
                return None;
            }
            (placements.params, placements.grads, placements.optimizer) = (params, grads, optimizer);
        }
        let default_order = match grads {
            Placement::Replicate => AccumulationOrder::Local,
            Placement::Shard => AccumulationOrder::Reduced,
        };
        (input.mesh, input.strategy) = (mesh, strategy);
        input.order = self.order.unwrap_or(default_order);
        changed.strategy = name;
        Some(changed)
    }

    /// The same batch in micro-batches of `rows` rows, a divisor of the present number.
    pub fn with_rows(&self, rows: u32) -> Self {
        assert!(rows > 0 && self.rows.is_multiple_of(rows), "{rows} rows do not divide {}", self.rows);
        let parts = (self.rows / rows) as usize;
        let mut changed = self.clone();
        let input = &mut changed.input;
        for model in &mut input.models {
            let bounds = model.bounds;
            let tokens = bounds.tokens.div_ceil(parts).max(bounds.max_doc).next_multiple_of(256);
            model.bounds = BatchBounds { tokens, docs: bounds.docs.div_ceil(parts), ..bounds };
            model.head_chunk_tokens = model.head_chunk_tokens.min(tokens);
        }
        let workspaces = input.models.iter().map(|model| (self.workspace)(&model.shape, &model.bounds));
        input.needs.workspace_bytes = workspaces.max().unwrap_or_default();
        input.num_micro_batches *= parts as u32;
        changed.rows = rows;
        changed
    }

    pub fn with_recompute(&self, recompute: RecomputePolicy) -> Self {
        let mut changed = self.clone();
        let models = std::mem::take(&mut changed.input.models).into_iter();
        changed.input.models = models.map(|model| model.with_recompute(recompute)).collect();
        changed.auto_recompute = false;
        changed
    }

    /// The optimizer's states in another memory, those of as few units as the budget allows.
    pub fn with_optimizer_in(&self, tier: MemoryTier) -> Self {
        let mut changed = self.clone();
        changed.auto_offload = true;
        changed.input.models.iter_mut().for_each(|model| model.placements.optimizer_tier = tier);
        changed
    }

    pub fn with_params_in(&self, tier: MemoryTier) -> Self {
        let mut changed = self.clone();
        changed.input.models.iter_mut().for_each(|model| model.placements.params_tier = tier);
        changed
    }

    pub fn with_storage(&self, storage: DType) -> Self {
        let mut changed = self.clone();
        changed.input.storage = storage;
        changed
    }

    fn open_choices(&self) -> OpenChoices {
        OpenChoices { recompute: self.auto_recompute, offload: self.auto_offload }
    }

    /// Lays the run out in memory, after the choices that are left to the plan.
    pub fn lay_out(&self, machine: &Machine) -> PlanData {
        lay_out(self.input.clone().with_fastest_choices(self.open_choices(), machine))
    }

    /// Whether the configuration leaves anything but the strategy open.
    pub(crate) fn has_open_choices(&self) -> bool {
        self.auto_rows || self.auto_recompute || self.auto_offload
    }

    /// All candidates that fit: numbers of rows, each with its open choices. If none fits, the one with the fewest rows
    /// and the least memory.
    ///
    /// Fewer rows save memory and nothing else. So fewer are tried only where memory is what costs time: until nothing is
    /// recomputed and every state is where the configuration would have it at most.
    pub(crate) fn candidates(&self, machine: &Machine) -> Vec<(u32, Candidate)> {
        let mut all = Vec::new();
        let mut rows = Some(self.rows);
        while let Some(count) = rows {
            let input = if count == self.rows { self.input.clone() } else { self.with_rows(count).input };
            let candidates = input.candidates(self.open_choices(), machine);
            let costs_time =
                candidates.iter().all(|candidate| !candidate.fits || saves_memory(&candidate.plan));
            let fit = candidates.iter().any(|candidate| candidate.fits);
            if fit || all.iter().all(|(_, earlier): &(u32, Candidate)| !earlier.fits) {
                all.retain(|(_, earlier)| earlier.fits);
                all.extend(candidates.into_iter().map(|candidate| (count, candidate)));
            }
            rows = (self.auto_rows && costs_time).then(|| fewer_rows(self.rows, count)).flatten();
        }
        all
    }
}

/// Whether a plan spends time to save memory.
fn saves_memory(plan: &PlanData) -> bool {
    plan.input.models.iter().filter(|model| model.trains()).any(|model| {
        let RecomputePolicy { early, late, late_blocks } = model.recompute;
        let recomputes =
            late != Recompute::None || (early != late && (late_blocks as usize) < model.shape.layers);
        recomputes || model.placements.optimizer_tier != MemoryTier::Device
    })
}

/// The largest divisor of `most` that is at most half of `rows`.
fn fewer_rows(most: u32, rows: u32) -> Option<u32> {
    (1..=rows / 2).rev().find(|fewer| most.is_multiple_of(*fewer))
}

impl Machine {
    pub fn fits(&self, plan: &PlanData) -> bool {
        let on_host = match plan.input.has_separate_memory() {
            true => plan.process_bytes() <= self.host_budget.unwrap_or(Bytes(u64::MAX)),
            // The device is the host: both arenas are in one memory.
            false => plan.process_bytes() <= self.budget,
        };
        plan.device_bytes() <= self.budget && on_host
    }

    pub fn predict(&self, plan: &PlanData) -> Prediction {
        predict(plan, &self.rates, &self.cluster, None)
    }
}

/// The ranks of a cluster as a strategy arranges them. `None`: it needs several nodes of several ranks.
fn mesh(name: StrategyName, cluster: &Cluster) -> Option<Mesh> {
    let (world, per_node) = (cluster.world_size(), cluster.ranks_per_node);
    match name {
        StrategyName::Ddp | StrategyName::NoShard | StrategyName::Auto => {
            Some(Mesh { replicate: world, shard: 1, per_node })
        }
        StrategyName::HybridShard if cluster.nodes < 2 || per_node < 2 => None,
        StrategyName::HybridShard => Some(Mesh { replicate: cluster.nodes, shard: per_node, per_node }),
        StrategyName::Zero1
        | StrategyName::Zero2
        | StrategyName::Zero3
        | StrategyName::ShardGradOp
        | StrategyName::FullShard => Some(Mesh { replicate: 1, shard: world, per_node }),
    }
}
