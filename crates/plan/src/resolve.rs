//! Turns a configuration into a [`PlanInput`]. There is no other way to do it, and the result is the same on every
//! rank.

use lockstep_config::{
    self as config, AlgorithmName, Offload, OptimConfig, OptimizerName, RunConfig, StrategyName,
};
use lockstep_core::{Bytes, DType, Mesh};
use lockstep_shape::{Channels, Freeze, ModelShape, Recompute, UnitShape, pattern_matches, units};

use crate::budget::OpenChoices;
use crate::buffer::MemoryTier;
use crate::cost::Figures;
use crate::generation::WantedGeneration;
use crate::input::{
    AccumulationOrder, BatchBounds, DeviceNeeds, ModelPlan, ModelRole, ModelSettings, Placement, Placements,
    PlanInput,
};
use crate::optimizer::OptimizerSpec;
use crate::run_plan::PlanError;
use crate::schedule::ModelId;
use crate::strategy;

/// The size of a head chunk's logits; a chunk has at least 256 tokens.
const HEAD_CHUNK_BYTES: usize = 16 << 20;

/// The same on a GPU, whose matmuls need more rows to be efficient.
const GPU_HEAD_CHUNK_BYTES: usize = 512 << 20;

/// GPU memory used by the CUDA context, the libraries' code and our kernels: measured on an H200 with CUDA 13.
const GPU_OVERHEAD: Bytes = Bytes(536 << 20);

/// GPU memory used by NCCL.
const NCCL_OVERHEAD: Bytes = Bytes(400 << 20);

/// Host memory used by CUDA's libraries.
const GPU_HOST_OVERHEAD: Bytes = Bytes(1 << 30);

/// What a plan depends on besides the configuration and the model.
pub struct Hardware<'a> {
    pub device: DeviceMemory,
    /// The largest workspace that an operation of a model needs, for micro-batches of this size.
    pub workspace: &'a dyn Fn(&ModelShape, &BatchBounds) -> Bytes,
    /// Host memory that the process uses besides the plan's.
    pub process_bytes: Bytes,
    /// What the device can do, for choices that the configuration leaves open. The same on every rank.
    pub figures: Figures,
}

/// The memory of the device that ranks compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceMemory {
    /// The device is the CPU, with the host's memory, if its size is known.
    Host(Option<Bytes>),
    /// A GPU and its memory size, if there is a GPU on this machine.
    Gpu(Option<Bytes>),
}

impl DeviceMemory {
    fn is_gpu(self) -> bool {
        matches!(self, DeviceMemory::Gpu(_))
    }
}

/// What a run needs from its plan: its models, and how it trains them.
#[derive(Clone, Debug)]
pub struct RunNeeds<'a> {
    /// The first one is the policy, which `freeze` applies to.
    pub models: Vec<ModelNeeds<'a>>,
    /// Whether the coefficients of all objectives are known before the head runs: from the batch, or from scores.
    pub coefficients_ahead: bool,
    /// Micro-batches per optimizer step.
    pub num_micro_batches: u32,
}

/// What a run needs of one model.
#[derive(Clone, Debug)]
pub struct ModelNeeds<'a> {
    pub role: ModelRole,
    pub shape: &'a ModelShape,
    /// The size of its largest micro-batch.
    pub bounds: BatchBounds,
    /// The outputs that its head computes.
    pub channels: Channels,
    /// Whether it is scored: before a step, for a rollout, or for evaluation.
    pub scores: bool,
    /// The sequences it would generate at once, if it generates and there is memory for them.
    pub generation: Option<WantedGeneration>,
    /// The head's distribution is softmax(logits / temperature).
    pub temperature: f32,
    /// The model whose weights it uses, without that model's adapters. It comes before this one.
    pub shares_weights_of: Option<ModelId>,
}

/// The plan input of a configuration.
pub fn resolve(
    config: &RunConfig,
    needs: &RunNeeds<'_>,
    hardware: &Hardware,
) -> Result<PlanInput, PlanError> {
    let p = &config.plan;
    let policy = needs.models[0].shape;
    let name = chosen_strategy(config, policy);
    let (strategy, [params, grads, _]) = strategy::by_name(name);
    if p.offload_param != Offload::None && params == Placement::Replicate {
        return Err(PlanError::ParamOffload { strategy: name.to_string() });
    }
    let storage = storage(config.precision, hardware.device);
    let policy_freeze = freeze(config, policy)?;
    let mut models: Vec<ModelPlan> = Vec::new();
    for model in &needs.models {
        let freeze = if model.role == ModelRole::Policy { policy_freeze.clone() } else { Freeze::Nothing };
        let settings = settings(config, model, name, hardware, freeze);
        models.push(match model.shares_weights_of {
            Some(id) => models[id.0 as usize].without_adapters(id, model.role, &settings),
            None => ModelPlan::new(model.role, model.shape, settings),
        });
    }
    if !models[0].trains() {
        return Err(PlanError::NothingTrains);
    }
    let has_quantised = |model: &ModelPlan| model.units.iter().any(UnitShape::has_quantised);
    if p.offload_param != Offload::None && models.iter().any(has_quantised) {
        return Err(PlanError::QuantisedOffload);
    }
    let mut input = PlanInput {
        mesh: mesh(config, name)?,
        strategy,
        order: match p.accumulation_order {
            config::AccumulationOrder::Local => AccumulationOrder::Local,
            config::AccumulationOrder::Reduced => AccumulationOrder::Reduced,
            config::AccumulationOrder::Auto if grads == Placement::Replicate => AccumulationOrder::Local,
            config::AccumulationOrder::Auto => AccumulationOrder::Reduced,
        },
        num_micro_batches: needs.num_micro_batches,
        prefetch: p.prefetch,
        ddp_bucket_bytes: Bytes(u64::from(p.ddp_bucket_cap_mb) << 20),
        reduce_bucket_elems: p.reduce_bucket_size as usize,
        allgather_bucket_elems: p.allgather_bucket_size as usize,
        coefficients_ahead: needs.coefficients_ahead,
        ..PlanInput::single_rank(models, storage, device_needs(config, &needs.models, hardware))
    };
    if let Some(ratio) = p.offload_ratio {
        input = input.offloading_at_least(ratio);
    }
    let budget = budget(config);
    let open = OpenChoices {
        recompute: p.recompute == config::Recompute::Auto,
        offload: budget.is_some() && p.offload_ratio.is_none(),
    };
    let available = budget.or_else(|| default_budget(config, hardware.device));
    if open.recompute && available.is_none() {
        return Err(PlanError::NoBudget);
    }
    if let Some(available) = available {
        let (nodes, ranks_per_node) = (p.nodes, p.nproc_per_node);
        let machine = hardware.figures.machine(nodes, ranks_per_node, storage, available);
        input = input.with_fastest_choices(open, &machine);
    }
    for (i, model) in needs.models.iter().enumerate() {
        if let Some(wanted) = model.generation {
            // A GPU has no other use for its memory. A host's memory is shared.
            let available = match hardware.device {
                DeviceMemory::Gpu(_) => available,
                DeviceMemory::Host(_) => budget,
            };
            let bounds = input.generation_bounds(ModelId(i as u8), wanted, available)?;
            input.models[i].generation = Some(bounds);
        }
    }
    Ok(input)
}

/// The device memory that the plan may use, if the configuration sets it.
pub fn budget(config: &RunConfig) -> Option<Bytes> {
    config.plan.memory_budget_gib.map(|gib| Bytes((gib * (1u64 << 30) as f64) as u64))
}

fn settings(
    config: &RunConfig,
    model: &ModelNeeds<'_>,
    name: StrategyName,
    hardware: &Hardware,
    freeze: Freeze,
) -> ModelSettings {
    let p = &config.plan;
    let (_, [params, grads, optimizer]) = strategy::by_name(name);
    let tier = |offload: Offload| match offload {
        Offload::None => MemoryTier::Device,
        Offload::Cpu => MemoryTier::Host,
        Offload::Nvme => MemoryTier::Nvme,
    };
    let (params_tier, optimizer_tier) = (tier(p.offload_param), tier(p.offload_optimizer));
    let default_chunk = default_head_chunk_tokens(model.shape.vocab, hardware.device);
    let chunk = p.head_chunk_tokens.map_or(default_chunk, |n| n as usize).min(model.bounds.tokens);
    ModelSettings {
        placements: Placements {
            params,
            grads,
            optimizer,
            params_tier,
            optimizer_tier,
            optimizer_units_on_device: 0,
        },
        bounds: model.bounds,
        head_chunk_tokens: chunk,
        recompute: match p.recompute {
            config::Recompute::None => Recompute::None,
            config::Recompute::Selective => Recompute::Selective,
            // `auto` starts from `full`; `with_fastest_choices` reduces it.
            config::Recompute::Full | config::Recompute::Auto => Recompute::Full,
        }
        .into(),
        channels: model.channels,
        temperature: model.temperature,
        optimizer: optimizer_spec(&config.optim),
        freeze,
        decay_norms: config.optim.decay_norms_and_biases,
        scores: model.scores,
        // `resolve` decides it, when the size of the other phases is known.
        generation: None,
    }
}

/// The states of the configured optimizer.
pub fn optimizer_spec(optim: &OptimConfig) -> OptimizerSpec {
    match optim.optimizer {
        OptimizerName::AdamW => OptimizerSpec::ADAMW,
        OptimizerName::Sgd if optim.momentum == 0.0 => OptimizerSpec::SGD,
        OptimizerName::Sgd => OptimizerSpec::SGD_MOMENTUM,
        OptimizerName::Lion => OptimizerSpec::LION,
    }
}

/// The name of a tensor's module: suggestions show that, not the tensor.
fn module(tensor: &str) -> &str {
    tensor.trim_end_matches(".weight")
}

/// The tensors that `freeze` names. A pattern that matches no tensor is an error.
fn freeze(config: &RunConfig, shape: &ModelShape) -> Result<Freeze, PlanError> {
    let patterns = &config.optim.freeze;
    let all = units(shape, &Freeze::Nothing, false);
    let names = || all.iter().flat_map(|unit| &unit.segments).map(|segment| segment.name.as_str());
    match patterns.iter().find(|pattern| !names().any(|name| pattern_matches(pattern, name))) {
        Some(pattern) => Err(PlanError::UnmatchedFreezePattern {
            pattern: pattern.clone(),
            closest: lockstep_core::closest(pattern, names().map(module)).map(str::to_string),
        }),
        None if patterns.is_empty() => Ok(Freeze::Nothing),
        None => Ok(Freeze::Matching(patterns.clone())),
    }
}

/// Resolves the strategy `auto`: ddp below one billion parameters, zero2 up to seven billion, zero3 above.
pub fn chosen_strategy(config: &RunConfig, shape: &ModelShape) -> StrategyName {
    const BILLION: u64 = 1_000_000_000;
    match config.plan.strategy {
        StrategyName::Auto => {
            match units(shape, &Freeze::Nothing, false).iter().map(|u| u.params()).sum::<u64>() {
                n if n < BILLION => StrategyName::Ddp,
                n if n <= 7 * BILLION => StrategyName::Zero2,
                _ => StrategyName::Zero3,
            }
        }
        named => named,
    }
}

/// A rank's memory budget if none is configured: 97 % of a GPU's memory, because drivers need different amounts, or an
/// equal part of 80 % of the host's. Free memory does not count: it differs between ranks, and their plans must not.
pub fn default_budget(config: &RunConfig, device: DeviceMemory) -> Option<Bytes> {
    let ranks = u64::from(config.plan.nproc_per_node);
    let (memory, percent, sharers) = match device {
        DeviceMemory::Gpu(memory) => (memory, 97, if config.device.share_gpus { ranks } else { 1 }),
        DeviceMemory::Host(memory) => (memory, 80, ranks),
    };
    memory.map(|memory| Bytes(memory.0 / 100 * percent / sharers))
}

/// The type that activations and working parameters are stored in.
pub fn storage(precision: config::Precision, device: DeviceMemory) -> DType {
    match precision {
        // Every supported GPU has bf16.
        config::Precision::Auto if device.is_gpu() => DType::BF16,
        config::Precision::Auto => DType::F32,
        config::Precision::F32 => DType::F32,
        config::Precision::Bf16 => DType::BF16,
        config::Precision::F16(_) => DType::F16,
    }
}

/// How many tokens' logits the head computes at a time, if the configuration does not set it.
pub fn default_head_chunk_tokens(vocab: usize, device: DeviceMemory) -> usize {
    let bytes = if device.is_gpu() { GPU_HEAD_CHUNK_BYTES } else { HEAD_CHUNK_BYTES };
    (bytes / 4 / vocab / 256 * 256).max(256)
}

fn device_needs(config: &RunConfig, models: &[ModelNeeds<'_>], hardware: &Hardware) -> DeviceNeeds {
    let workspaces = models.iter().map(|model| (hardware.workspace)(model.shape, &model.bounds));
    let workspace_bytes = workspaces.max().unwrap_or_default();
    let single_rank = config.plan.world_size() == 1;
    match hardware.device {
        DeviceMemory::Host(_) => {
            DeviceNeeds { workspace_bytes, overhead_bytes: hardware.process_bytes, host_overhead_bytes: None }
        }
        DeviceMemory::Gpu(_) => DeviceNeeds {
            workspace_bytes,
            overhead_bytes: if single_rank { GPU_OVERHEAD } else { GPU_OVERHEAD + NCCL_OVERHEAD },
            host_overhead_bytes: Some(hardware.process_bytes + GPU_HOST_OVERHEAD),
        },
    }
}

/// The size of the policy's largest micro-batch. Rows of preference data are pairs of documents. Models with a scalar
/// head see the last token of a document as well.
pub fn bounds(config: &RunConfig) -> BatchBounds {
    let rows = config.batch.per_device_train_batch_size as usize;
    let packed = config.data.packing != config::Packing::None;
    let max_length = config.data.max_length as usize;
    match config.algorithm.algorithm() {
        AlgorithmName::Reward => {
            let docs = if packed { rows * max_length } else { 2 * rows };
            BatchBounds { docs, ..BatchBounds::of_sequences(2 * rows, max_length) }.sharing_rows()
        }
        AlgorithmName::Dpo => BatchBounds::of_rows(2 * rows, max_length, packed).sharing_rows(),
        AlgorithmName::Grpo | AlgorithmName::Rloo => {
            BatchBounds::of_rows(rows, max_length, false).sharing_rows()
        }
        AlgorithmName::Ppo => BatchBounds::of_rows(rows, max_length, false),
        AlgorithmName::Sft | AlgorithmName::Clm => BatchBounds::of_rows(rows, max_length, packed),
    }
}

/// The size of the largest micro-batch of a reward or value model that scores the sequences of a rollout.
pub fn sequence_bounds(config: &RunConfig) -> BatchBounds {
    let rows = config.batch.per_device_train_batch_size as usize;
    let bounds = BatchBounds::of_sequences(rows, config.data.max_length as usize);
    match config.algorithm.algorithm() {
        AlgorithmName::Grpo | AlgorithmName::Rloo => bounds.sharing_rows(),
        _ => bounds,
    }
}

/// ddp replicates over the world, sharding strategies shard over it, HYBRID_SHARD shards inside a node
/// and replicates across nodes.
fn mesh(config: &RunConfig, strategy: StrategyName) -> Result<Mesh, PlanError> {
    let p = &config.plan;
    let (world, per_node) = (p.world_size(), p.nproc_per_node);
    Ok(match strategy {
        StrategyName::Ddp | StrategyName::NoShard | StrategyName::Auto => {
            Mesh { replicate: world, shard: 1, per_node }
        }
        StrategyName::HybridShard if world == 1 => Mesh::SINGLE,
        StrategyName::HybridShard if p.nodes < 2 || per_node < 2 => {
            return Err(PlanError::HybridMesh { nodes: p.nodes, per_node });
        }
        StrategyName::HybridShard => Mesh { replicate: p.nodes, shard: per_node, per_node },
        _ => Mesh { replicate: 1, shard: world, per_node },
    })
}
