//! Why a run cannot start or continue: errors of this crate, and those of the crates it uses.

use std::fmt;
use std::path::PathBuf;

use lockstep_ckpt::CkptError;
use lockstep_comm::CommError;
use lockstep_config::ConfigErrors;
use lockstep_core::{Fault, FaultClass};
use lockstep_data::DataError;
use lockstep_engine::EngineError;
use lockstep_observe::ObserveError;
use lockstep_plan::PlanError;
use lockstep_rewards::RewardError;
use lockstep_shape::ShapeError;

use crate::output_dir::LockHolder;

/// Why a run cannot start or continue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Checkpoint(#[from] CkptError),
    #[error(transparent)]
    Observe(#[from] ObserveError),

    #[error(
        "the tokenizer has {tokenizer} tokens, but the model's vocab_size is {vocab}: ids from {vocab} on have no embedding"
    )]
    VocabularyTooSmall { tokenizer: usize, vocab: usize },
    #[error("there is no tokenizer, and the model does not define vocab_size")]
    NoVocabulary,
    #[error("model folder {} does not exist", path.display())]
    ModelMissing { path: PathBuf },
    #[error("max_length {max_length} exceeds the model's {positions} positions")]
    TooLong { max_length: usize, positions: usize },
    #[error("{}: the model has no tensors of these names: {}", folder.display(), NameList(names))]
    UnusedTensors { folder: PathBuf, names: Vec<String> },
    #[error("{}: the checkpoint's optimizer state is {then}, but {optimizer} needs {now}", checkpoint.display())]
    OtherOptimizer { checkpoint: PathBuf, then: String, optimizer: &'static str, now: String },
    #[error("`{pattern}` names no module of the model that can have an adapter or be saved with one")]
    LoraTarget { pattern: String, closest: Option<String> },
    #[error(
        "`sync_ref_model` moves the weights of a reference model, but a run with adapters has none: its reference is the model without them"
    )]
    SyncWithAdapter,
    #[error("weights in 4 bits cannot be trained themselves")]
    TrainsQuantised,
    #[error("`{key}` does not work with weights in 4 bits: a model would need them in another format")]
    QuantisedReference { key: &'static str },
    #[error("the model that the adapter belongs to {}", BaseNote(name))]
    BaseModel { name: Option<String> },
    #[error("{}: the adapter does not fit this model: {}", base.display(), NameList(names))]
    OtherBase { base: PathBuf, names: Vec<String> },
    #[error(
        "prompt {index} has {tokens} tokens; the context has {capacity}, and the reply needs at least one of them"
    )]
    Prompt { index: usize, tokens: usize, capacity: usize },
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error("{}: the output folder has checkpoints of an earlier run (the newest is {last})", dir.display())]
    OutputInUse { dir: PathBuf, last: String },
    #[error("{}: another run is using this output folder{}", dir.display(), HolderNote(holder))]
    OutputLocked { dir: PathBuf, holder: Option<LockHolder> },
    #[error("cannot write {}: {cause}", path.display())]
    Output { path: PathBuf, cause: std::io::Error },
    #[error("no checkpoint to resume from in {}", dir.display())]
    NothingToResume { dir: PathBuf },
    #[error("all checkpoints in {} are damaged; the newest one: {why}", dir.display())]
    AllDamaged { dir: PathBuf, why: String },
    /// Damage that one rank found, as all ranks report it.
    #[error("{why}")]
    DamagedCheckpoint { why: String, hint: Option<String>, class: FaultClass },
    #[error("{}: the checkpoint has {what} {then}, but this run has {now}", path.display())]
    ResumeMismatch { path: PathBuf, what: &'static str, then: String, now: String },
    #[error("no complete checkpoint in {}", path.display())]
    NothingToExport { path: PathBuf },
    #[error("{}: there is no adapter to merge", path.display())]
    NothingToMerge { path: PathBuf },
    #[error("cannot read {}: {cause}", path.display())]
    Input { path: PathBuf, cause: std::io::Error },
    #[error("{algorithm} trains a language model, but the model folder has a reward model")]
    NeedsLanguageModel { algorithm: &'static str },
    #[error("{}: this is a language model, not a reward model", path.display())]
    NotARewardModel { path: PathBuf },
    #[error(
        "{}: the reference model must be a language model with the policy's vocabulary ({policy_vocab} tokens); it has \
         {vocab}",
        path.display()
    )]
    OtherReference { path: PathBuf, vocab: usize, policy_vocab: usize },
    #[error("`bench step` measures a step of sft, not of {name}")]
    BenchAlgorithm { name: &'static str },
    #[error("{origin}: the generated sequences are damaged")]
    DamagedRollout { origin: String },
    #[error(transparent)]
    Rewards(#[from] RewardError),
    #[error("the environment variable {variable}, which holds the token of a reward endpoint, is not set")]
    NoRewardToken { variable: String },
    #[error("evaluation is enabled, but there is no evaluation data")]
    NothingToEvaluate,
    #[error("evaluation needs a model folder")]
    NoFolder,
    #[error(
        "step {step}: loss is {loss}, gradient norm is {grad_norm}{}{} (dataset rows {rows:?})",
        InARow(*in_a_row), FirstBad(tensor)
    )]
    Diverged {
        step: u64,
        loss: f64,
        grad_norm: f64,
        /// The number of consecutive steps with a non-finite loss or gradient norm, including this one.
        in_a_row: u64,
        /// How many of them were applied, because their gradients were finite.
        applied: u64,
        /// The first tensor with a non-finite gradient.
        tensor: Option<String>,
        rows: Box<[u32]>,
        /// Whether any step of the run was applied.
        trained: bool,
        /// In fp16, the next loss scale.
        scale: Option<f64>,
        /// The newest checkpoint of this run.
        checkpoint: Option<PathBuf>,
    },
    #[error(
        "step {step}: fp16 gradients overflow even at the minimum loss scale {scale}{}",
        FirstBad(tensor)
    )]
    ScaleAtFloor { step: u64, scale: f64, tensor: Option<String>, checkpoint: Option<PathBuf> },
}

impl TrainError {
    /// Adds the newest checkpoint to the error of a run that diverged.
    pub(crate) fn with_checkpoint(mut self, newest: Option<PathBuf>) -> TrainError {
        if let TrainError::Diverged { checkpoint, .. } | TrainError::ScaleAtFloor { checkpoint, .. } =
            &mut self
        {
            *checkpoint = newest;
        }
        self
    }
}

impl Fault for TrainError {
    fn class(&self) -> FaultClass {
        use TrainError::*;
        match self {
            Config(e) => e.class(),
            Data(e) => e.class(),
            Shape(e) => e.class(),
            Plan(e) => e.class(),
            Engine(e) => e.class(),
            Checkpoint(e) => e.class(),
            Observe(e) => e.class(),
            Comm(e) => e.class(),
            Rewards(e) => e.class(),
            VocabularyTooSmall { .. }
            | NoVocabulary
            | TooLong { .. }
            | Prompt { .. }
            | OutputInUse { .. }
            | ResumeMismatch { .. }
            | OtherOptimizer { .. }
            | LoraTarget { .. }
            | SyncWithAdapter
            | TrainsQuantised
            | QuantisedReference { .. }
            | OtherBase { .. }
            | NothingToEvaluate
            | NeedsLanguageModel { .. }
            | NotARewardModel { .. }
            | OtherReference { .. }
            | NoRewardToken { .. }
            | BenchAlgorithm { .. }
            | NoFolder => FaultClass::BadConfig,
            UnusedTensors { .. } | AllDamaged { .. } | DamagedRollout { .. } => FaultClass::BadData,
            DamagedCheckpoint { class, .. } => *class,
            OutputLocked { .. } | Output { .. } => FaultClass::CannotWrite,
            BaseModel { .. }
            | ModelMissing { .. }
            | NothingToResume { .. }
            | NothingToExport { .. }
            | NothingToMerge { .. }
            | Input { .. } => FaultClass::InputMissing,
            Diverged { .. } | ScaleAtFloor { .. } => FaultClass::Diverged,
        }
    }

    fn hint(&self) -> Option<String> {
        use TrainError::*;
        match self {
            Config(e) => e.hint(),
            Data(e) => e.hint(),
            Shape(e) => e.hint(),
            Plan(e) => e.hint(),
            Engine(e) => e.hint(),
            Checkpoint(e) => e.hint(),
            Observe(e) => e.hint(),
            Comm(e) => e.hint(),
            Rewards(e) => e.hint(),
            Diverged { .. } | ScaleAtFloor { .. } => Some(self.divergence_hint()),
            OtherOptimizer { .. }
            | OutputInUse { .. }
            | OutputLocked { .. }
            | Output { .. }
            | NothingToResume { .. }
            | AllDamaged { .. }
            | DamagedCheckpoint { .. }
            | DamagedRollout { .. }
            | Input { .. }
            | ResumeMismatch { .. }
            | NothingToExport { .. }
            | NothingToMerge { .. } => self.output_hint(),
            VocabularyTooSmall { .. }
            | NoVocabulary
            | ModelMissing { .. }
            | TooLong { .. }
            | UnusedTensors { .. }
            | NeedsLanguageModel { .. }
            | NotARewardModel { .. }
            | OtherReference { .. }
            | NoRewardToken { .. }
            | BenchAlgorithm { .. }
            | LoraTarget { .. }
            | SyncWithAdapter
            | TrainsQuantised
            | QuantisedReference { .. }
            | BaseModel { .. }
            | OtherBase { .. }
            | Prompt { .. }
            | NoFolder
            | NothingToEvaluate => self.model_hint(),
        }
    }
}

impl TrainError {
    /// Hints about the model, its weights, and what to do with it.
    fn model_hint(&self) -> Option<String> {
        use TrainError::*;
        let text = match self {
            VocabularyTooSmall { tokenizer, .. } => {
                return Some(format!(
                    "Use the model's own tokenizer, or a model with a vocab_size of at least {tokenizer}."
                ));
            }
            TooLong { positions, .. } => return Some(format!("Set max_length to at most {positions}.")),
            NoVocabulary => "Set `vocab_size: N`, one more than the largest token id.",
            ModelMissing { .. } => {
                "Give a folder with a model, or the name of a model on the Hugging Face Hub, such as org/name."
            }
            UnusedTensors { .. } => {
                "These weights belong to a different model than the one in the configuration."
            }
            NeedsLanguageModel { .. } => {
                "Give the folder of a language model (…ForCausalLM), or set `algorithm: reward` to train the reward model."
            }
            NotARewardModel { .. } => {
                "Train one with `lockstep reward`, or give another …ForSequenceClassification model with one label."
            }
            OtherReference { .. } => {
                "Remove `ref_model_name_or_path` to compare with the initial policy, or give a model of the same family."
            }
            NoRewardToken { .. } => "Set it, or remove `token_env` if the endpoint needs no token.",
            BenchAlgorithm { .. } => "Remove `algorithm`. The step times of a run are in its metrics.jsonl.",
            LoraTarget { closest: Some(name), .. } => {
                return Some(format!(
                    "Did you mean `{name}`? `all-linear` targets all projections of all blocks."
                ));
            }
            LoraTarget { .. } => {
                "Use names such as q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj, patterns with `*`, or \
                 all-linear."
            }
            BaseModel { .. } => {
                "Give its folder with --model (export) or as MODEL with --adapter (generate, chat, eval)."
            }
            OtherBase { .. } => "Give the model that the adapter was trained on.",
            TrainsQuantised => {
                "Train adapters on them with `use_peft: true`, or train weights that are not quantised."
            }
            QuantisedReference { .. } => "Remove it, or do not load models in 4 bits.",
            SyncWithAdapter => "Remove `sync_ref_model`, or train all weights.",
            Prompt { .. } => "Shorten the prompt, or increase the context with --context.",
            NoFolder => "Give a folder with config.json and safetensors files.",
            NothingToEvaluate => "Set `eval_files`, or turn evaluation off with `eval_strategy: no`.",
            _ => return None,
        };
        Some(text.into())
    }

    /// Hints about the output folder and its checkpoints.
    fn output_hint(&self) -> Option<String> {
        use TrainError::*;
        let text = match self {
            OtherOptimizer { .. } => {
                "Resume with the optimizer and momentum of the original run, or start a new run from its model folder."
            }
            OutputInUse { .. } => {
                "Set resume_from_checkpoint: true to continue that run, overwrite_output_dir: true to delete its \
                 checkpoints, or choose another output_dir."
            }
            OutputLocked { .. } => "Wait for that run to end, or choose another output_dir.",
            NothingToResume { .. } => {
                "Remove resume_from_checkpoint to start from the beginning, or set resume_from_checkpoint: auto, which \
                 starts from the beginning if there is no checkpoint."
            }
            AllDamaged { .. } => "Remove the damaged folders, or start over with overwrite_output_dir: true.",
            DamagedCheckpoint { hint, .. } => return hint.clone(),
            DamagedRollout { .. } => {
                "Resume from an earlier checkpoint: set resume_from_checkpoint to its folder."
            }
            ResumeMismatch { what, .. } => {
                let determined_by = match *what {
                    "rows per step" => "per_device_train_batch_size times gradient_accumulation_steps",
                    "tokenizer hash" => "the tokenizer files",
                    "data_seed" | "shuffle" | "dataloader_drop_last" | "mixed_precision" => what,
                    _ => "the data files, the tokenizer, max_length and packing",
                };
                return Some(format!(
                    "To resume, restore {determined_by}. Otherwise start a new run in another output_dir."
                ));
            }
            NothingToMerge { .. } => "Remove --merge, or give a run that trained an adapter.",
            NothingToExport { .. } => {
                "Give a checkpoint (a `step-N` folder), or the output folder of a run that has saved one."
            }
            Output { cause, .. } => match cause.kind() {
                std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                    "The disk or quota is full: free some space, or choose another output_dir."
                }
                std::io::ErrorKind::NotADirectory | std::io::ErrorKind::AlreadyExists => {
                    "output_dir must be a folder, but a file of that name exists."
                }
                _ => "Choose an output_dir that you have permission to write to.",
            },
            _ => return None,
        };
        Some(text.into())
    }

    /// Hints about a loss or gradients that are not finite.
    fn divergence_hint(&self) -> String {
        use TrainError::*;
        match self {
            Diverged { applied, checkpoint, .. } if *applied > 0 => format!(
                "{} applied: the loss was not finite, but the gradients were. Check how the objective computes its loss, \
                 or lower learning_rate.{}",
                if *applied == 1 { "One of these steps was".into() } else { format!("{applied} of these steps were") },
                intact(checkpoint)
            ),
            Diverged { trained: false, scale: Some(scale), .. } => format!(
                "Every step overflowed while the loss scale decreased to {scale}. Train longer, start lower with fp16: \
                 {{enabled: true, initial_scale_power: 8}}, or use mixed_precision: bf16."
            ),
            Diverged { trained: false, .. } => {
                "No step was applied. If the first steps fail, check the model's weights for NaN and infinity.".into()
            }
            Diverged { checkpoint, .. } => format!(
                "None of these steps was applied. Lower learning_rate, use a longer warmup, or set max_grad_norm: 1.0.{}",
                intact(checkpoint)
            ),
            ScaleAtFloor { checkpoint, .. } => {
                format!("Use mixed_precision: bf16, which needs no loss scaling.{}", intact(checkpoint))
            }
            _ => String::new(),
        }
    }
}

fn intact(checkpoint: &Option<PathBuf>) -> String {
    checkpoint.as_ref().map_or_else(String::new, |path| format!(" Checkpoint {} is intact.", path.display()))
}

struct InARow(u64);

impl fmt::Display for InARow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 > 1 { write!(f, "; {} steps in a row were not finite", self.0) } else { Ok(()) }
    }
}

struct FirstBad<'a>(&'a Option<String>);

impl fmt::Display for FirstBad<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |name| write!(f, "; the first non-finite gradient is that of {name}"))
    }
}

/// What is known of an adapter's model that is not there.
struct BaseNote<'a>(&'a Option<String>);

impl std::fmt::Display for BaseNote<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(name) => write!(f, "is `{name}`, which is not a folder here"),
            None => f.write_str("is not known: adapter_config.json does not name it"),
        }
    }
}

/// The first few of many names.
struct NameList<'a>(&'a [String]);

impl fmt::Display for NameList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 6;
        let shown = &self.0[..self.0.len().min(SHOWN)];
        f.write_str(&shown.join(", "))?;
        match self.0.len() - shown.len() {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

struct HolderNote<'a>(&'a Option<LockHolder>);

impl fmt::Display for HolderNote<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(holder) => write!(f, " ({})", holder.described()),
            None => Ok(()),
        }
    }
}
