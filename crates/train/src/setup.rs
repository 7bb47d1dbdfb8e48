//! From a configuration to everything a run needs, before its first step.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lockstep_ckpt::ModelFolder;
use lockstep_config::{self as config, Algorithm, ModelSource, Offload, RunConfig, StrategyName};
use lockstep_core::{Bytes, DType, Mesh, Rank};
use lockstep_data::{Dataset, Format, Tokenizer, TokenizerSource, first_format, preparing_bytes};
use lockstep_device::{Amx, Device, Machine};
use lockstep_model::Kernels;
use lockstep_plan::{
    AccumulationOrder, Bounds, DeviceNeeds, Generation, ModelPlan, Placement, Placements, PlanError,
    PlanInput, Role, RunPlan, Tier, build, strategy,
};
use lockstep_shape::{Adapter, ModelShape, Recompute, units};

use crate::chat::chat_rows;
use crate::data_spec::{eval_spec, prepare_eval, prepare_train, train_spec};
use crate::error::TrainError;
use crate::objective::Objective;
use crate::output_dir::OutputDir;
use crate::resume::Candidates;
use crate::save;
use crate::sft::Sft;
use crate::stop::StopRequest;

/// Resident bytes of a process beside its arena, tokenizer and data: code, stacks, the allocator, buffers
/// between files and the arena. Measured on Linux x86-64 as the peak that the kernel reports less the
/// arena, for 3 million parameters on 1 to 16 threads: 11.5 MiB from scratch, 14.2 MiB with weights or a
/// checkpoint loaded; 15.2 MiB in a development build. `crates/cli/tests/memory.rs` holds it to that.
const FOREIGN: Bytes = Bytes(18 << 20);

/// What a tokenizer's tables take at most, for each byte of its files: measured 8.0 for a byte-level BPE
/// of 32 thousand tokens, 5.7 for one of 150 thousand.
const TOKENIZER_FACTOR: u64 = 8;

/// Bounds, its row, and what packing remembers of a document. Tokens stay in their file.
const BYTES_PER_DOC: u64 = 32;

/// A position of a batch: token, target, weight and place, and the room that vectors grow by.
const BYTES_PER_POSITION: u64 = 32;

/// The logits of a head chunk take about this much, and at least one block of 256 tokens.
const HEAD_CHUNK_BYTES: usize = 16 << 20;

/// The same on a GPU, whose products want more rows.
const GPU_HEAD_CHUNK_BYTES: usize = 512 << 20;

/// What a context, the libraries' code and our kernels take of a GPU's memory: measured on an H200 with CUDA 13.
const GPU_FOREIGN: Bytes = Bytes(536 << 20);

/// What NCCL takes besides.
const NCCL_FOREIGN: Bytes = Bytes(400 << 20);

/// What CUDA's libraries take of the host's memory.
const GPU_HOST_FOREIGN: Bytes = Bytes(1 << 30);

/// What `train` starts from.
pub struct Prepared {
    pub rank: Rank,
    pub tokenizer: Tokenizer,
    pub dataset: Arc<Dataset>,
    /// What to evaluate on, where the configuration names something.
    pub eval: Option<Dataset>,
    pub shape: ModelShape,
    /// The folder weights are loaded from.
    pub folder: Option<ModelFolder>,
    pub plan: RunPlan,
    pub machine: Machine,
    /// Asks the system for the most memory this process has held, where it can say.
    pub peak_memory: fn() -> Option<Bytes>,
    /// Asks the run to stop after the step it is in.
    pub stop: StopRequest,
    /// Identifies this launch and its restarts: a restart resumes only from checkpoints of its own launch.
    pub launch_id: Option<String>,
    pub(crate) output: OutputDir,
    /// Checkpoints that the run may resume from.
    pub(crate) candidates: Candidates,
    /// What is worth telling before the first step.
    pub(crate) notes: Vec<String>,
    /// The texts of `config.json` and `generation_config.json` that the model folder has.
    pub(crate) folder_texts: [Option<String>; 2],
}

/// Takes the output directory, reads tokenizer, model description and data, and makes the plan. What is
/// quick to check comes first: a data set may take minutes to read. Rank 0 alone takes the directory.
pub fn prepare(config: &RunConfig, rank: Rank, device: Device) -> Result<Prepared, TrainError> {
    prepare_for(config, rank, device, &Sft::default())
}

/// As [`prepare`], for an objective of one's own.
pub fn prepare_for(
    config: &RunConfig,
    rank: Rank,
    device: Device,
    objective: &dyn Objective,
) -> Result<Prepared, TrainError> {
    config.check_trainable()?;
    check_built(config)?;
    let output = match rank {
        Rank(0) => OutputDir::take(&config.output)?,
        _ => OutputDir::follow(&config.output),
    };
    let mut notes = config.notes.clone();
    // Only rank 0 looks for checkpoints; it sends them to the others once they are connected.
    let candidates = match rank {
        Rank(0) => {
            let resume = &config.output.resume_from_checkpoint;
            Candidates::find(resume, &output.checkpoints(), &mut |text| notes.push(text.to_string()))?
        }
        _ => Candidates::default(),
    };
    let mut tokenizer = load_tokenizer(config)?;
    let shape = model_shape(config, &tokenizer)?;
    let folder = match (&config.model.source, config.model.init) {
        (ModelSource::Folder(path), config::Init::Pretrained) => Some(ModelFolder::open(path)?),
        _ => None,
    };
    if let Some(folder) = &folder {
        save::check_weights(folder, &shape)?;
    }
    let folder_texts = folder_texts(config)?;
    let max_length = config.data.max_length as usize;
    if max_length - 1 > shape.max_positions {
        return Err(TrainError::TooLong { max_length, positions: shape.max_positions });
    }
    let machine = Machine { device, num_threads: num_threads(config) };
    let (kernels, ahead) = (machine.into(), objective.coefficients_ahead());
    // Whether the memory suffices is known without the data, but for what little a document takes.
    let plan = plan_with(config, &shape, foreign(config, &tokenizer, None), kernels, ahead)?;
    if let Device::Cuda(gpu) = device {
        plan.check_budget(gpu.total)?;
    }
    if config.eval.evaluates() && eval_spec(config)?.is_none() {
        return Err(TrainError::NothingToEvaluate);
    }
    let chat = chat_rows(config, &mut tokenizer)?;
    save::check_writable(&tokenizer)?;
    let dataset = Arc::new(prepare_train(config, &tokenizer, chat.as_ref())?);
    let eval = prepare_eval(config, &tokenizer, chat.as_ref())?;
    notes.extend(evaluation_notes(config, eval.is_some()));
    notes.extend(dataset.notes().iter().chain(eval.iter().flat_map(Dataset::notes)).cloned());
    let plan = plan_with(config, &shape, foreign(config, &tokenizer, Some(&dataset)), kernels, ahead)?;
    Ok(Prepared {
        rank,
        tokenizer,
        dataset,
        eval,
        shape,
        folder,
        plan,
        machine,
        peak_memory: || None,
        stop: StopRequest::default(),
        launch_id: None,
        output,
        candidates,
        notes,
        folder_texts,
    })
}

/// Whether this build can run what the configuration asks for, and not only plan it.
pub(crate) fn check_built(config: &RunConfig) -> Result<(), TrainError> {
    if !matches!(config.plan.algorithm, Algorithm::Sft | Algorithm::Clm) {
        return Err(TrainError::Algorithm { name: format!("{:?}", config.plan.algorithm).to_lowercase() });
    }
    if config.plan.adapter.is_some() {
        return Err(TrainError::Adapter);
    }
    Ok(())
}

/// What is not done as it was asked for, though with the same results.
fn evaluation_notes(config: &RunConfig, has_data: bool) -> Vec<String> {
    let mut notes = Vec::new();
    let trained = config.batch.per_device_train_batch_size;
    match config.eval.per_device_batch_size {
        Some(rows) if rows > trained => notes.push(format!(
            "`per_device_eval_batch_size: {rows}` is taken as {trained}, which the plan has room for: results \
             do not depend on it"
        )),
        _ => {}
    }
    if has_data && !config.eval.evaluates() {
        notes.push("what there is to evaluate on has no effect here: `eval_strategy` is no".into());
    }
    notes
}

/// The model folder that a path stands for: itself, or that of the run whose output folder it is.
pub fn model_folder(path: &Path) -> PathBuf {
    let inner = path.join("model");
    let is_run = !path.join("config.json").exists() && inner.join("config.json").exists();
    if is_run { inner } else { path.into() }
}

fn folder_texts(config: &RunConfig) -> Result<[Option<String>; 2], TrainError> {
    Ok(match &config.model.source {
        ModelSource::Folder(path) => {
            [Some(ModelFolder::read_config(path)?), ModelFolder::read_generation_config(path)?]
        }
        _ => [None, None],
    })
}

impl Prepared {
    /// What every rank of a run must have alike, by name.
    pub fn must_agree(&self, config: &RunConfig) -> Vec<(String, String)> {
        // Not the memory: hosts with more threads need more of it, and run the same step.
        let phases = self.plan.phases.iter();
        let plan: String = phases.map(|phase| lockstep_plan::schedule_text(&self.plan, phase)).collect();
        let brief = |text: &str| blake3::hash(text.as_bytes()).to_hex()[..16].to_string();
        // Everything that decides numbers and is not in the plan.
        let numbers = format!(
            "{:?} {:?} {:?} {:?} {:?}",
            config.optim, config.batch, config.precision, config.eval, self.shape.dropout
        );
        [
            ("version", env!("CARGO_PKG_VERSION").to_string()),
            ("strategy", strategy_name(config.plan.strategy)),
            ("plan", brief(&plan)),
            ("data set", brief(&self.dataset.fingerprint())),
            ("evaluation data", self.eval.as_ref().map_or("none".into(), |d| brief(&d.fingerprint()))),
            ("tokenizer", brief(self.tokenizer.fingerprint())),
            ("batch and optimizer", brief(&numbers)),
            ("products of bf16", self.products_of_bf16().to_string()),
        ]
        .map(|(name, value)| (name.to_string(), value))
        .into()
    }

    /// In which of two orders this machine sums them, if the run has any on the CPU. All other results are the same on
    /// every CPU.
    fn products_of_bf16(&self) -> &'static str {
        match (self.machine.device, self.plan.input.storage) {
            (Device::Cpu, DType::BF16) if Amx::detect().is_some() => "on AMX tiles",
            (Device::Cpu, DType::BF16) => "on vectors",
            _ => "not on the CPU",
        }
    }
}

/// A strategy as it is written in a configuration.
pub fn strategy_name(name: StrategyName) -> String {
    match name {
        StrategyName::ShardGradOp => "shard_grad_op".into(),
        StrategyName::FullShard => "full_shard".into(),
        StrategyName::HybridShard => "hybrid_shard".into(),
        StrategyName::NoShard => "no_shard".into(),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// What `auto` comes to: ddp below a billion parameters, zero2 up to seven, zero3 beyond.
pub fn chosen_strategy(config: &RunConfig, shape: &ModelShape) -> StrategyName {
    const BILLION: u64 = 1_000_000_000;
    match config.plan.strategy {
        StrategyName::Auto => {
            match units(shape, false, None, false).iter().map(|u| u.params()).sum::<u64>() {
                n if n < BILLION => StrategyName::Ddp,
                n if n <= 7 * BILLION => StrategyName::Zero2,
                _ => StrategyName::Zero3,
            }
        }
        named => named,
    }
}

pub fn num_threads(config: &RunConfig) -> usize {
    let available = || std::thread::available_parallelism().map_or(1, |n| n.get());
    config.plan.threads.map_or_else(available, |n| n as usize)
}

/// The tokenizer that a configuration names, by itself or through its model folder.
pub fn load_tokenizer(config: &RunConfig) -> Result<Tokenizer, TrainError> {
    if let ModelSource::Folder(path) = &config.model.source
        && !path.exists()
    {
        // Told as what it is, not as the tokenizer that is not in it.
        return Err(TrainError::ModelMissing { path: path.clone() });
    }
    let source = match (&config.data.tokenizer, &config.model.source) {
        (config::Tokenizer::None, _) => return without_tokenizer(config),
        (config::Tokenizer::Byte, _) => return Ok(Tokenizer::load(&TokenizerSource::Byte)?),
        (config::Tokenizer::File(path), _) => {
            return Ok(Tokenizer::load(&TokenizerSource::File(path.clone()))?);
        }
        (config::Tokenizer::Auto, ModelSource::Folder(path)) => TokenizerSource::File(path.clone()),
        (config::Tokenizer::Auto, _) => TokenizerSource::Byte,
    };
    // Nobody named a tokenizer. Rows of token ids need none that is missing or does not fit, and bytes are not what
    // they are made of.
    let needs_none = match (&source, model_vocab(config)?) {
        (_, None) => false,
        (TokenizerSource::Byte, Some(_)) => true,
        (TokenizerSource::File(folder), Some(vocab)) => match Tokenizer::load(&source) {
            Ok(tokenizer) if tokenizer.vocab_size() <= vocab => return Ok(tokenizer),
            Ok(_) => true,
            Err(_) => !folder.join("tokenizer.json").exists(),
        },
    };
    if needs_none && rows_are_ids(config) { without_tokenizer(config) } else { Ok(Tokenizer::load(&source)?) }
}

/// What stands for a tokenizer where rows are token ids.
fn without_tokenizer(config: &RunConfig) -> Result<Tokenizer, TrainError> {
    Ok(Tokenizer::none(model_vocab(config)?.ok_or(TrainError::NoVocabulary)?))
}

/// The size of the vocabulary that the model's description says by itself.
fn model_vocab(config: &RunConfig) -> Result<Option<usize>, TrainError> {
    let in_keys = |keys: &serde_json::Value| keys.get("vocab_size").and_then(serde_json::Value::as_u64);
    Ok(match &config.model.source {
        ModelSource::Folder(path) => Some(folder_shape(path)?.vocab),
        ModelSource::Explicit(keys) => in_keys(keys).map(|vocab| vocab as usize),
        ModelSource::Named(_) => None,
    }
    .or(config.model.vocab_size.map(|vocab| vocab as usize)))
}

fn folder_shape(path: &Path) -> Result<ModelShape, TrainError> {
    let text = ModelFolder::read_config(path)?;
    Ok(ModelShape::from_hf_text(&text, &path.join("config.json").display().to_string())?)
}

/// Whether the first row of the data is token ids. Data that cannot be read has its own error later.
fn rows_are_ids(config: &RunConfig) -> bool {
    let spec = match config.data.dataset.is_none() && config.data.train_files.is_empty() {
        true => eval_spec(config).ok().flatten(),
        false => train_spec(config).ok(),
    };
    spec.and_then(|spec| first_format(&spec).ok()).flatten() == Some(Format::Tokens)
}

/// The model's shape: from a folder's `config.json`, a named size, or the keys given.
pub fn model_shape(config: &RunConfig, tokenizer: &Tokenizer) -> Result<ModelShape, TrainError> {
    let vocab = config.model.vocab_size.map_or(tokenizer.vocab_size(), |vocab| vocab as usize);
    let mut shape = match &config.model.source {
        ModelSource::Folder(path) => folder_shape(path)?,
        ModelSource::Named(name) => ModelShape::named(name, vocab)?,
        ModelSource::Explicit(keys) => {
            let mut keys = keys.clone();
            if let Some(map) = keys.as_object_mut() {
                map.entry("vocab_size").or_insert_with(|| vocab.into());
            }
            ModelShape::from_hf(&keys, "model")?
        }
    };
    if tokenizer.vocab_size() > shape.vocab {
        return Err(TrainError::VocabularyTooSmall { tokenizer: tokenizer.vocab_size(), vocab: shape.vocab });
    }
    shape.eos_id = shape.eos_id.or(tokenizer.eos_id());
    let dropout = &mut shape.dropout;
    dropout.attention = config.model.attention_dropout.unwrap_or(dropout.attention);
    dropout.residual = config.model.resid_dropout.unwrap_or(dropout.residual);
    Ok(shape)
}

/// The plan of a configuration: also for algorithms that this build cannot run.
pub fn plan_for(
    config: &RunConfig,
    shape: &ModelShape,
    tokenizer: &Tokenizer,
    dataset: Option<&Dataset>,
    kernels: Kernels,
) -> Result<RunPlan, TrainError> {
    let ahead = matches!(config.plan.algorithm, Algorithm::Sft | Algorithm::Clm);
    plan_with(config, shape, foreign(config, tokenizer, dataset), kernels, ahead)
}

/// `process`: what the process holds beside the plan's memory. `coefficients_ahead`: the objective knows them before
/// the head has run.
pub(crate) fn plan_with(
    config: &RunConfig,
    shape: &ModelShape,
    process: Bytes,
    kernels: Kernels,
    coefficients_ahead: bool,
) -> Result<RunPlan, TrainError> {
    let p = &config.plan;
    let name = chosen_strategy(config, shape);
    let (strategy, [params, grads, optimizer]) = strategy::by_name(name);
    let storage = storage(config.precision, kernels);
    let tier = |offload: Offload| match offload {
        Offload::None => Tier::Device,
        Offload::Cpu => Tier::Host,
        Offload::Nvme => Tier::Nvme,
    };
    if p.offload_param != Offload::None && params == Placement::Whole {
        let strategy = strategy_name(name);
        return Err(PlanError::ParamOffload { strategy }.into());
    }
    let adapter =
        p.adapter.as_ref().map(|a| Adapter { rank: a.r as usize, targets: a.target_modules.clone() });
    let recompute = match p.recompute {
        config::Recompute::None => Recompute::None,
        config::Recompute::Selective => Recompute::Selective,
        // Less, as soon as it is known what there is room for.
        config::Recompute::Full | config::Recompute::Auto => Recompute::Full,
    };
    let model =
        |role| ModelPlan::new(role, shape, recompute, adapter.as_ref(), config.optim.decay_norms_and_biases);
    let (models, generation) = match p.algorithm {
        Algorithm::Sft | Algorithm::Clm => (vec![model(Role::Policy)], None),
        Algorithm::Ppo => {
            let rows = config.batch.per_device_train_batch_size * config.batch.gradient_accumulation_steps;
            let (docs, tokens_per_doc) = (rows as usize, config.data.max_length as usize);
            let cache_elems = lockstep_model::cache_elems(shape, docs, tokens_per_doc, storage, kernels);
            let generation = Generation { docs, tokens_per_doc, cache_elems };
            let roles = [Role::Policy, Role::Value, Role::Reference, Role::Reward];
            (roles.map(model).into(), Some(generation))
        }
        other => return Err(TrainError::Algorithm { name: format!("{other:?}").to_lowercase() }),
    };
    let bounds = bounds(config);
    let head_chunk =
        p.head_chunk_tokens.map_or(head_chunk(shape.vocab, kernels), |n| n as usize).min(bounds.tokens);
    let mut input = PlanInput {
        models,
        mesh: mesh(config, name)?,
        strategy,
        placements: Placements {
            params,
            grads,
            optimizer,
            params_tier: tier(p.offload_param),
            optimizer_tier: tier(p.offload_optimizer),
            stay: 0,
        },
        order: match p.accumulation_order {
            config::AccumulationOrder::Local => AccumulationOrder::Local,
            config::AccumulationOrder::Reduced => AccumulationOrder::Reduced,
            config::AccumulationOrder::Auto if grads == Placement::Whole => AccumulationOrder::Local,
            config::AccumulationOrder::Auto => AccumulationOrder::Reduced,
        },
        micros: config.batch.gradient_accumulation_steps,
        prefetch: p.prefetch,
        bucket: Bytes(u64::from(p.ddp_bucket_cap_mb) << 20),
        reduce_bucket: p.reduce_bucket_size as usize,
        publish_bucket: p.allgather_bucket_size as usize,
        storage,
        bounds,
        head_chunk,
        needs: needs(config, shape, bounds, kernels, process),
        coefficients_ahead,
        clip: config.optim.max_grad_norm.is_some(),
        evaluates: config.eval.evaluates(),
        generation,
    };
    if let Some(ratio) = p.offload_ratio {
        input = input.leaving_at_least(ratio);
    }
    let budget = p.memory_budget_gib.map(|gib| Bytes((gib * (1u64 << 30) as f64) as u64));
    if p.recompute == config::Recompute::Auto {
        let room = budget.or_else(|| room_on_gpu(config, kernels)).ok_or(PlanError::NoBudget)?;
        input = input.recomputing_least(room);
    }
    let Some(budget) = budget else { return Ok(build(input)?) };
    if p.offload_ratio.is_none() {
        input = input.staying_most(budget);
    }
    let plan = build(input)?;
    plan.check_budget(budget)?;
    Ok(plan)
}

/// What a rank may take of its GPU, where nobody says: all but a little, for the driver's own needs are not the same
/// everywhere. Not what is free, which differs between the ranks of a run, whose plans must not.
fn room_on_gpu(config: &RunConfig, kernels: Kernels) -> Option<Bytes> {
    let Kernels::Cuda { memory: Some(memory) } = kernels else { return None };
    let ranks = if config.device.share_gpus { u64::from(config.plan.nproc_per_node) } else { 1 };
    Some(Bytes(memory.0 / 100 * 97 / ranks))
}

/// What activations and working parameters are stored in.
pub(crate) fn storage(precision: config::Precision, kernels: Kernels) -> DType {
    match precision {
        // Every GPU that works here has bf16.
        config::Precision::Auto if matches!(kernels, Kernels::Cuda { .. }) => DType::BF16,
        config::Precision::Auto => DType::F32,
        config::Precision::F32 => DType::F32,
        config::Precision::Bf16 => DType::BF16,
        config::Precision::F16(_) => DType::F16,
    }
}

/// Tokens whose logits are there at once, where nobody says how many.
pub fn head_chunk(vocab: usize, kernels: Kernels) -> usize {
    let bytes = match kernels {
        Kernels::Cpu { .. } => HEAD_CHUNK_BYTES,
        Kernels::Cuda { .. } => GPU_HEAD_CHUNK_BYTES,
    };
    (bytes / 4 / vocab / 256 * 256).max(256)
}

fn needs(
    config: &RunConfig,
    shape: &ModelShape,
    bounds: Bounds,
    kernels: Kernels,
    process: Bytes,
) -> DeviceNeeds {
    let workspace = lockstep_model::workspace_bytes(shape, bounds.tokens, bounds.max_doc, kernels);
    let alone = config.plan.world_size() == 1;
    match kernels {
        Kernels::Cpu { .. } => DeviceNeeds { workspace, foreign: process, host_foreign: None },
        Kernels::Cuda { .. } => DeviceNeeds {
            workspace,
            foreign: if alone { GPU_FOREIGN } else { GPU_FOREIGN + NCCL_FOREIGN },
            host_foreign: Some(process + GPU_HOST_FOREIGN),
        },
    }
}

/// The largest micro-batch.
fn bounds(config: &RunConfig) -> Bounds {
    let rows = config.batch.per_device_train_batch_size as usize;
    let packed = config.data.packing != config::Packing::None;
    Bounds::of_rows(rows, config.data.max_length as usize, packed)
}

/// What the process holds beside the arena.
fn foreign(config: &RunConfig, tokenizer: &Tokenizer, dataset: Option<&Dataset>) -> Bytes {
    let positions = bounds(config).tokens;
    let tokenizer_bytes: usize = tokenizer.files().iter().map(|(_, content)| content.len()).sum();
    let data_bytes = dataset.map_or(0, |d| d.num_docs() as u64 * BYTES_PER_DOC);
    let data = &config.data;
    // Those that workers have filled or are filling, and the step's own.
    let windows = u64::from(data.dataloader_num_workers) * u64::from(data.dataloader_prefetch_factor) + 1;
    let micros = u64::from(config.batch.gradient_accumulation_steps);
    let batch_bytes = windows * micros * positions as u64 * BYTES_PER_POSITION;
    // What is mapped of the other ranks of this host while they are read.
    let peers = u64::from(config.plan.nproc_per_node.saturating_sub(1)) * lockstep_comm::WINDOW;
    let held = tokenizer_bytes as u64 * TOKENIZER_FACTOR + data_bytes + batch_bytes + peers;
    FOREIGN + preparing_bytes(tokenizer) + Bytes(held)
}

/// ddp replicates over the world, sharding strategies shard over it, HYBRID_SHARD shards inside a node
/// and replicates across nodes.
fn mesh(config: &RunConfig, strategy: StrategyName) -> Result<Mesh, TrainError> {
    let p = &config.plan;
    let (world, per_node) = (p.world_size(), p.nproc_per_node);
    Ok(match strategy {
        StrategyName::Ddp | StrategyName::NoShard | StrategyName::Auto => {
            Mesh { replicate: world, shard: 1, per_node }
        }
        StrategyName::HybridShard if world == 1 => Mesh::SINGLE,
        StrategyName::HybridShard if p.nodes < 2 || per_node < 2 => {
            return Err(PlanError::HybridMesh { nodes: p.nodes, per_node }.into());
        }
        StrategyName::HybridShard => Mesh { replicate: p.nodes, shard: per_node, per_node },
        _ => Mesh { replicate: 1, shard: world, per_node },
    })
}
