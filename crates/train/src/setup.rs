//! Prepares a run: loads and checks everything that it needs before its first step.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lockstep_ckpt::{AdapterFolder, ModelFolder};
use lockstep_config::{self as config, ModelSource, RunConfig};
use lockstep_core::{Bytes, DType, Rank};
use lockstep_data::{Dataset, Format, Tokenizer, TokenizerSource, first_format, preparing_bytes};
use lockstep_device::{Amx, Device, HostMemory, Machine};
use lockstep_model::KernelBackend;
use lockstep_plan::cost::Figures;
use lockstep_plan::{
    BatchBounds, DeviceMemory, Hardware, PlanInput, RunPlan, bounds, budget, build, resolve,
};
use lockstep_rewards::RewardContext;
use lockstep_shape::{ModelShape, WeightFormat};

use crate::chat::chat_encoder;
use crate::data_spec::{eval_spec, prepare_eval, prepare_train, train_spec};
use crate::error::TrainError;
use crate::journal::TrackerAccess;
use crate::models::{ObjectiveNeeds, RunModels, run_needs};
use crate::objective::Objective;
use crate::output_dir::OutputDir;
use crate::resume::ResumeCandidates;
use crate::save;
use crate::stop::StopRequest;

/// Resident memory of a process besides its arena, tokenizer and data: code, stacks, the allocator, and buffers
/// between files and the arena. Measured on Linux x86-64 as the kernel's peak minus the arena, for 3 million
/// parameters on 1 to 16 threads: 11.5 MiB from scratch, 14.2 MiB with weights or a checkpoint loaded. A development build
/// has up to 19.6 MiB with optimizer states offloaded, 0.6 MiB of them for the Hub client's code and TLS.
/// `crates/cli/tests/memory.rs` checks it.
const FOREIGN: Bytes = Bytes(22 << 20);

/// The most memory that a tokenizer's tables need per byte of its files: measured 8.0 for a byte-level BPE of 32
/// thousand tokens, 5.7 for one of 150 thousand.
const TOKENIZER_FACTOR: u64 = 8;

/// The HTTP client and the thread of a tracker on a server. Measured on Linux x86-64: 1.1 MiB.
const TRACKER: Bytes = Bytes(3 << 20);

/// The index of a document: its bounds, its row, and the state of packing. The tokens stay in their file.
const BYTES_PER_DOC: u64 = 32;

/// A position of a batch: token, target, weight and position, and the spare capacity of the vectors.
const BYTES_PER_POSITION: u64 = 32;

/// Everything that [`train`](crate::train) needs.
pub struct PreparedRun {
    pub rank: Rank,
    pub tokenizer: Arc<Tokenizer>,
    pub dataset: Arc<Dataset>,
    /// The evaluation data, if the configuration has any.
    pub eval: Option<Arc<Dataset>>,
    pub(crate) models: RunModels,
    pub plan: RunPlan,
    pub machine: Machine,
    /// Returns the peak memory of this process, if the system reports it.
    pub peak_memory: fn() -> Option<Bytes>,
    /// Asks the run to stop after its current step.
    pub stop: StopRequest,
    /// Identifies this launch and its restarts: a restart resumes only from checkpoints of its own launch.
    pub launch_id: Option<String>,
    /// The environment of the process, which reward programs get a part of.
    pub environment: RewardContext,
    /// How trackers are reached.
    pub trackers: TrackerAccess,
    /// The command that started the run, for people to read. It must contain no secrets.
    pub command: String,
    pub(crate) output: OutputDir,
    /// Checkpoints that the run may resume from.
    pub(crate) candidates: ResumeCandidates,
    /// Notes to report before the first step.
    pub(crate) notes: Vec<String>,
    /// The texts of the model folder's `config.json` and `generation_config.json`.
    pub(crate) folder_texts: [Option<String>; 2],
}

/// Locks the output folder (on rank 0), loads the tokenizer, the model's configuration and the data, and builds the
/// plan. Quick checks come first, because preparing a dataset may take minutes.
pub fn prepare(config: &RunConfig, rank: Rank, device: Device) -> Result<PreparedRun, TrainError> {
    prepare_run(config, rank, device, None)
}

/// Like [`prepare`], for a custom objective, which replaces that of `sft`.
pub fn prepare_for(
    config: &RunConfig,
    rank: Rank,
    device: Device,
    objective: &dyn Objective,
) -> Result<PreparedRun, TrainError> {
    prepare_run(config, rank, device, Some(objective))
}

fn prepare_run(
    config: &RunConfig,
    rank: Rank,
    device: Device,
    objective: Option<&dyn Objective>,
) -> Result<PreparedRun, TrainError> {
    config.check_trainable()?;
    let output = match rank {
        Rank(0) => OutputDir::take(&config.output)?,
        _ => OutputDir::follow(&config.output),
    };
    let mut notes = config.notes.clone();
    // Only rank 0 looks for checkpoints. It sends the list to the others once they are connected.
    let candidates = match rank {
        Rank(0) => {
            let resume = &config.output.resume_from_checkpoint;
            ResumeCandidates::find(resume, &output.checkpoints(), &mut |text| notes.push(text.to_string()))?
        }
        _ => ResumeCandidates::default(),
    };
    let mut tokenizer = load_tokenizer(config)?;
    let models = RunModels::of(config, &tokenizer)?;
    models.check_weights()?;
    let folder_texts = folder_texts(config)?;
    let max_length = config.data.max_length as usize;
    for model in &models.0 {
        if max_length - 1 > model.shape.max_positions {
            return Err(TrainError::TooLong { max_length, positions: model.shape.max_positions });
        }
    }
    let machine = Machine { device, num_threads: num_threads(config) };
    let kernels = machine.into();
    let needs = objective.map_or_else(|| ObjectiveNeeds::of_algorithm(config, &models), ObjectiveNeeds::of);
    // Check the memory before preparing the data, which may take minutes.
    let least = with_rows_of_at_most(config, 2);
    let plan = plan_with((&least, rank), &models, foreign(&least, &tokenizer, None), kernels, &needs)?;
    if let Device::Cuda(gpu) = device {
        plan.check_budget(gpu.total)?;
    }
    if config.eval.evaluates() && eval_spec(config)?.is_none() {
        return Err(TrainError::NothingToEvaluate);
    }
    let chat = chat_encoder(config, &mut tokenizer)?;
    save::check_writable(&tokenizer)?;
    let dataset = Arc::new(prepare_train(config, &tokenizer, chat.as_ref())?);
    let eval = prepare_eval(config, &tokenizer, chat.as_ref())?.map(Arc::new);
    notes.extend(evaluation_notes(config, eval.is_some()));
    notes.extend(dataset.notes().iter().chain(eval.iter().flat_map(|data| data.notes())).cloned());
    let longest = dataset.max_doc_len().max(eval.as_ref().map_or(0, |eval| eval.max_doc_len()));
    let fitted = with_rows_of_at_most(config, longest);
    let plan =
        plan_with((&fitted, rank), &models, foreign(&fitted, &tokenizer, Some(&dataset)), kernels, &needs)?;
    if let Device::Cuda(gpu) = device {
        plan.check_budget(gpu.total)?;
    }
    Ok(PreparedRun {
        rank,
        tokenizer: Arc::new(tokenizer),
        dataset,
        eval,
        models,
        plan,
        machine,
        peak_memory: || None,
        stop: StopRequest::default(),
        launch_id: None,
        environment: RewardContext::default(),
        trackers: TrackerAccess::default(),
        command: String::new(),
        output,
        candidates,
        notes,
        folder_texts,
    })
}

/// The configuration for the plan of data whose longest row or prompt has `longest` tokens: `max_length` is as short as
/// it can be, so that no memory is reserved for tokens that are not there. Packed rows stay as long as they are.
fn with_rows_of_at_most(config: &RunConfig, longest: usize) -> RunConfig {
    let mut config = config.clone();
    if config.data.packing == config::Packing::None {
        let completion = config.algorithm.sampling().map_or(0, |sampling| sampling.max_completion_length);
        let needed = longest.max(2) as u32 + completion;
        config.data.max_length = config.data.max_length.min(needed);
    }
    config
}

/// Notes about evaluation settings that are adjusted or have no effect.
fn evaluation_notes(config: &RunConfig, has_data: bool) -> Vec<String> {
    let mut notes = Vec::new();
    let trained = config.batch.per_device_train_batch_size;
    match config.eval.per_device_batch_size {
        Some(rows) if rows > trained => notes.push(format!(
            "`per_device_eval_batch_size: {rows}` is reduced to {trained}, the training batch size; the results are \
             the same"
        )),
        _ => {}
    }
    if has_data && !config.eval.evaluates() {
        notes.push("the evaluation data has no effect: `eval_strategy` is no".into());
    }
    notes
}

/// The folder of a model or an adapter at `path`: the folder itself, or `model` inside the output folder of a run.
pub fn model_folder(path: &Path) -> PathBuf {
    let inner = path.join("model");
    let is_one = |path: &Path| path.join("config.json").exists() || AdapterFolder::is_one(path);
    if !is_one(path) && is_one(&inner) { inner } else { path.into() }
}

fn folder_texts(config: &RunConfig) -> Result<[Option<String>; 2], TrainError> {
    Ok(match &config.model.source {
        ModelSource::Folder(path) => {
            [Some(ModelFolder::read_config(path)?), ModelFolder::read_generation_config(path)?]
        }
        _ => [None, None],
    })
}

impl PreparedRun {
    /// Named values that must be equal on all ranks of a run.
    pub fn must_agree(&self, config: &RunConfig) -> Vec<(String, String)> {
        // Compare the schedules, not the memory: hosts with more threads need more memory for the same step.
        let phases = self.plan.phases.iter();
        let plan: String = phases.map(|phase| lockstep_plan::schedule_text(&self.plan, phase)).collect();
        let brief = |text: &str| blake3::hash(text.as_bytes()).to_hex()[..16].to_string();
        // Everything that affects results and is not in the plan.
        let numbers = format!(
            "{:?} {:?} {:?} {:?} {:?} {:?} {:?}",
            config.optim,
            config.batch,
            config.precision,
            config.eval,
            config.algorithm,
            self.models.policy().shape.dropout,
            self.models.policy().shape.lora
        );
        [
            ("version", env!("CARGO_PKG_VERSION").to_string()),
            ("strategy", config.plan.strategy.to_string()),
            ("plan", brief(&plan)),
            ("dataset", brief(&self.dataset.fingerprint())),
            ("evaluation data", self.eval.as_ref().map_or("none".into(), |d| brief(&d.fingerprint()))),
            ("tokenizer", brief(self.tokenizer.fingerprint())),
            ("batch and optimizer", brief(&numbers)),
            ("bf16 matmul", self.bf16_matmul().to_string()),
        ]
        .map(|(name, value)| (name.to_string(), value))
        .into()
    }

    /// How this CPU computes bf16 matmuls, if the run has any: AMX sums in a different order. All other results are the
    /// same on every CPU.
    fn bf16_matmul(&self) -> &'static str {
        match (self.machine.device, self.plan.input.storage) {
            (Device::Cpu, DType::BF16) if Amx::detect().is_some() => "AMX tiles",
            (Device::Cpu, DType::BF16) => "vector instructions",
            _ => "none on the CPU",
        }
    }
}

/// The number of CPU threads of a rank: `threads`, or all available ones.
pub fn num_threads(config: &RunConfig) -> usize {
    let available = || std::thread::available_parallelism().map_or(1, |n| n.get());
    config.plan.threads.map_or_else(available, |n| n as usize)
}

/// Loads the configured tokenizer, or that of the model folder.
pub fn load_tokenizer(config: &RunConfig) -> Result<Tokenizer, TrainError> {
    if let ModelSource::Folder(path) = &config.model.source
        && !path.exists()
    {
        // Report the missing folder, not its missing tokenizer.
        return Err(TrainError::ModelMissing { path: path.clone() });
    }
    let source = match (&config.data.tokenizer, &config.model.source) {
        (config::TokenizerChoice::None, _) => return without_tokenizer(config),
        (config::TokenizerChoice::Byte, _) => return Ok(Tokenizer::load(&TokenizerSource::Byte)?),
        (config::TokenizerChoice::File(path), _) => {
            return Ok(Tokenizer::load(&TokenizerSource::File(path.clone()))?);
        }
        (config::TokenizerChoice::Auto, ModelSource::Folder(path)) => TokenizerSource::File(path.clone()),
        (config::TokenizerChoice::Auto, _) => TokenizerSource::Byte,
    };
    // No tokenizer is configured. Rows of token ids can do without one if the model folder's tokenizer is missing or
    // too large for the model; the byte tokenizer would be wrong for them.
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

/// The placeholder for a tokenizer if rows are token ids.
fn without_tokenizer(config: &RunConfig) -> Result<Tokenizer, TrainError> {
    Ok(Tokenizer::none(model_vocab(config)?.ok_or(TrainError::NoVocabulary)?))
}

/// The vocabulary size that the model's configuration defines.
fn model_vocab(config: &RunConfig) -> Result<Option<usize>, TrainError> {
    let in_keys = |keys: &serde_json::Value| keys.get("vocab_size").and_then(serde_json::Value::as_u64);
    Ok(match &config.model.source {
        ModelSource::Folder(path) => Some(folder_shape(path)?.vocab),
        ModelSource::Explicit(keys) => in_keys(keys).map(|vocab| vocab as usize),
        ModelSource::Named(_) => None,
    }
    .or(config.model.vocab_size.map(|vocab| vocab as usize)))
}

pub(crate) fn folder_shape(path: &Path) -> Result<ModelShape, TrainError> {
    let text = ModelFolder::read_config(path)?;
    Ok(ModelShape::from_hf_text(&text, &path.join("config.json").display().to_string())?)
}

/// Whether the first row of the data has token ids. Data that cannot be read is reported later.
fn rows_are_ids(config: &RunConfig) -> bool {
    let spec = match config.data.dataset.is_none() && config.data.train_files.is_empty() {
        true => eval_spec(config).ok().flatten(),
        false => train_spec(config).ok(),
    };
    spec.and_then(|spec| first_format(&spec).ok()).flatten().is_some_and(Format::is_tokens)
}

/// The model's shape, from a folder's `config.json`, a named size, or the keys of the `model` map.
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
    if config.model.load_in_4bit {
        shape.frozen_projections = WeightFormat::Nf4;
    }
    shape.eos_id = shape.eos_id.or(tokenizer.eos_id());
    let dropout = &mut shape.dropout;
    dropout.attention = config.model.attention_dropout.unwrap_or(dropout.attention);
    dropout.residual = config.model.resid_dropout.unwrap_or(dropout.residual);
    Ok(shape)
}

/// Builds the first rank's plan of a configuration.
pub fn plan_for(
    config: &RunConfig,
    models: &RunModels,
    tokenizer: &Tokenizer,
    dataset: Option<&Dataset>,
    kernels: KernelBackend,
) -> Result<RunPlan, TrainError> {
    let needs = ObjectiveNeeds::of_algorithm(config, models);
    plan_with((config, Rank(0)), models, foreign(config, tokenizer, dataset), kernels, &needs)
}

/// Builds a rank's plan. `process`: the memory of the process besides the plan's arenas.
pub(crate) fn plan_with(
    (config, rank): (&RunConfig, Rank),
    models: &RunModels,
    process: Bytes,
    kernels: KernelBackend,
    objective: &ObjectiveNeeds,
) -> Result<RunPlan, TrainError> {
    let plan = build(plan_input(config, models, process, kernels, objective)?, rank)?;
    if let Some(budget) = budget(config) {
        plan.check_budget(budget)?;
    }
    Ok(plan)
}

/// What a plan is built from, whether it fits or not. Needs no data.
pub fn plan_input_for(
    config: &RunConfig,
    models: &RunModels,
    tokenizer: &Tokenizer,
    kernels: KernelBackend,
) -> Result<PlanInput, TrainError> {
    let needs = ObjectiveNeeds::of_algorithm(config, models);
    plan_input(config, models, foreign(config, tokenizer, None), kernels, &needs)
}

fn plan_input(
    config: &RunConfig,
    models: &RunModels,
    process: Bytes,
    kernels: KernelBackend,
    objective: &ObjectiveNeeds,
) -> Result<PlanInput, TrainError> {
    let workspace = |shape: &ModelShape, bounds: &BatchBounds| {
        lockstep_model::workspace_bytes(shape, bounds.tokens, bounds.max_doc, kernels)
    };
    let hardware = Hardware {
        device: device_memory(kernels),
        workspace: &workspace,
        process_bytes: process,
        figures: match kernels {
            KernelBackend::Cpu { .. } => Figures::CPU,
            KernelBackend::Cuda { memory, name } => Figures::gpu(name, memory),
        },
    };
    let mut config = config.clone();
    config.resolve_auto_sizes(models.0[0].shape.dim as u64);
    Ok(resolve(&config, &run_needs(&config, models, objective, kernels), &hardware)?)
}

/// The memory of the device that kernels run on, for the planner.
pub fn device_memory(kernels: KernelBackend) -> DeviceMemory {
    match kernels {
        KernelBackend::Cpu { .. } => DeviceMemory::Host(HostMemory::read().map(|memory| memory.capacity())),
        KernelBackend::Cuda { memory, .. } => DeviceMemory::Gpu(memory),
    }
}

/// The estimated memory of the process besides the arena.
fn foreign(config: &RunConfig, tokenizer: &Tokenizer, dataset: Option<&Dataset>) -> Bytes {
    let positions = bounds(config).tokens;
    let tokenizer_bytes: usize = tokenizer.files().iter().map(|(_, content)| content.len()).sum();
    let data_bytes = dataset.map_or(0, |d| d.num_docs() as u64 * BYTES_PER_DOC);
    let data = &config.data;
    // The batches of the steps that workers have filled or are filling, and of the current step.
    let steps_in_flight =
        u64::from(data.dataloader_num_workers) * u64::from(data.dataloader_prefetch_factor) + 1;
    let micros = u64::from(config.batch.gradient_accumulation_steps);
    let batch_bytes = steps_in_flight * micros * positions as u64 * BYTES_PER_POSITION;
    // The window through which this rank maps the memory of each other rank of the host.
    let peers = u64::from(config.plan.nproc_per_node.saturating_sub(1)) * lockstep_comm::SHM_WINDOW_BYTES;
    let on_server =
        |tracker: &&config::Tracker| matches!(tracker, config::Tracker::Mlflow | config::Tracker::Trackio);
    let trackers = config.output.trackers.iter().filter(on_server).count() as u64 * TRACKER.0;
    let held = trackers + tokenizer_bytes as u64 * TOKENIZER_FACTOR + data_bytes + batch_bytes + peers;
    FOREIGN + preparing_bytes(tokenizer) + Bytes(held)
}
