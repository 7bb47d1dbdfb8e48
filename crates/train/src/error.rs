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
use lockstep_shape::ShapeError;

use crate::output_dir::Holder;

/// Why a run could not start or go on.
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
        "the tokenizer has {tokenizer} tokens, the model's vocabulary {vocab}: ids from {vocab} on have no embedding"
    )]
    VocabularyTooSmall { tokenizer: usize, vocab: usize },
    #[error("there is no tokenizer, and the model does not say how many tokens it knows")]
    NoVocabulary,
    #[error("model folder {} does not exist", path.display())]
    ModelMissing { path: PathBuf },
    #[error("max_length {max_length} is more than the model's {positions} positions")]
    TooLong { max_length: usize, positions: usize },
    #[error("{}: these tensors are in the folder, but the model has no place for them: {}", folder.display(), Names(names))]
    UnusedTensors { folder: PathBuf, names: Vec<String> },
    #[error("algorithm `{name}` is not implemented yet")]
    Algorithm { name: String },
    #[error("{} holds {then} of an optimizer, and {optimizer} keeps {now}", checkpoint.display())]
    OtherOptimizer { checkpoint: PathBuf, then: String, optimizer: &'static str, now: String },
    #[error("adapters cannot be trained yet")]
    Adapter,
    #[error(
        "prompt {index} has {tokens} tokens; a document has room for {capacity}, and needs one for a reply"
    )]
    Prompt { index: usize, tokens: usize, capacity: usize },
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error("{}: checkpoints of an earlier run are here (the last is {last})", dir.display())]
    OutputInUse { dir: PathBuf, last: String },
    #[error("{}: another run holds this output directory{}", dir.display(), Held(holder))]
    OutputLocked { dir: PathBuf, holder: Option<Holder> },
    #[error("cannot write {}: {cause}", path.display())]
    Output { path: PathBuf, cause: std::io::Error },
    #[error("nothing to resume from in {}", dir.display())]
    NothingToResume { dir: PathBuf },
    #[error("no checkpoint in {} can be used; the newest one: {why}", dir.display())]
    AllDamaged { dir: PathBuf, why: String },
    /// What one rank found, as all of them report it.
    #[error("{why}")]
    DamagedCheckpoint { why: String, hint: Option<String>, class: FaultClass },
    #[error("{}: the checkpoint was made with {what}: {then}, this run has {now}", path.display())]
    ResumeMismatch { path: PathBuf, what: &'static str, then: String, now: String },
    #[error("{} has no complete checkpoint", path.display())]
    NothingToExport { path: PathBuf },
    #[error("evaluation is asked for, and there is nothing to evaluate on")]
    NothingToEvaluate,
    #[error("there is no model folder to evaluate")]
    NoFolder,
    #[error(
        "step {step}: the loss is {loss}, the gradient norm {grad_norm}{}{} (rows {rows:?} of the data set)",
        InARow(*in_a_row), FirstBad(tensor)
    )]
    Diverged {
        step: u64,
        loss: f64,
        grad_norm: f64,
        /// Steps like this one, it included, with none between whose numbers were finite.
        in_a_row: u64,
        /// Those of them that were applied, because their gradients were finite.
        applied: u64,
        /// The first whose gradient was not finite.
        tensor: Option<String>,
        rows: Box<[u32]>,
        /// Whether any step was applied before.
        trained: bool,
        /// In fp16, the scale that would come next.
        scale: Option<f64>,
        /// The newest checkpoint of this run.
        checkpoint: Option<PathBuf>,
    },
    #[error("step {step}: fp16 overflows even at the lowest loss scale, {scale}{}", FirstBad(tensor))]
    ScaleAtFloor { step: u64, scale: f64, tensor: Option<String>, checkpoint: Option<PathBuf> },
}

impl TrainError {
    /// Names the checkpoint that a run which diverged has.
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
            VocabularyTooSmall { .. }
            | NoVocabulary
            | TooLong { .. }
            | Prompt { .. }
            | OutputInUse { .. }
            | ResumeMismatch { .. }
            | OtherOptimizer { .. }
            | NothingToEvaluate
            | NoFolder => FaultClass::BadConfig,
            UnusedTensors { .. } | AllDamaged { .. } => FaultClass::BadData,
            DamagedCheckpoint { class, .. } => *class,
            Algorithm { .. } | Adapter => FaultClass::Unavailable,
            OutputLocked { .. } | Output { .. } => FaultClass::CannotWrite,
            ModelMissing { .. } | NothingToResume { .. } | NothingToExport { .. } => FaultClass::InputMissing,
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
            Prompt { .. } => Some("Give a shorter prompt, or more room with --context.".into()),
            VocabularyTooSmall { tokenizer, .. } => {
                Some(format!("Use the model's own tokenizer, or a model with vocab_size of at least {tokenizer}."))
            }
            NoVocabulary => Some("Write `vocab_size: N`, one more than the largest id.".into()),
            ModelMissing { .. } => Some(
                "model_name_or_path is a folder on this machine. Nothing is downloaded: fetch the model first, for \
                 example with `hf download NAME --local-dir FOLDER`."
                    .into(),
            ),
            TooLong { positions, .. } => Some(format!("Set max_length to at most {positions}.")),
            UnusedTensors { .. } => Some("The model described is not the one these weights are of.".into()),
            Algorithm { .. } => Some("This build trains with `algorithm: sft` or `clm`.".into()),
            OtherOptimizer { .. } => Some(
                "Resume with the optimizer and the momentum of the run before, or train on from its model folder.".into(),
            ),
            Adapter => Some("Remove `adapter` to train all weights; `freeze` names those that are left alone.".into()),
            OutputInUse { .. } => Some(
                "Set resume_from_checkpoint: true to go on with it, overwrite_output_dir: true to delete its \
                 checkpoints, or choose another output_dir."
                    .into(),
            ),
            OutputLocked { .. } => Some("Wait for it to end, or choose another output_dir.".into()),
            NothingToResume { .. } => Some(
                "Remove resume_from_checkpoint to start from the beginning, or write resume_from_checkpoint: auto, \
                 which starts there where nothing is to be resumed."
                    .into(),
            ),
            AllDamaged { .. } => Some("Remove the damaged folders, or start over with overwrite_output_dir: true.".into()),
            DamagedCheckpoint { hint, .. } => hint.clone(),
            ResumeMismatch { what, .. } => {
                let decided_by = match *what {
                    "rows per step" => "per_device_train_batch_size times gradient_accumulation_steps",
                    "tokenizer hash" => "the tokenizer's files",
                    "data_seed" | "shuffle" | "dataloader_drop_last" | "mixed_precision" => what,
                    _ => "the data files, the tokenizer, max_length and packing",
                };
                Some(format!(
                    "A resumed run must be the one that was interrupted: restore {decided_by}, or start a new run \
                     in another output_dir."
                ))
            }
            NothingToExport { .. } => {
                Some("Give a checkpoint (a folder `step-N`), or the output folder of a run that made one.".into())
            }
            NoFolder => Some("Give a folder with config.json and safetensors.".into()),
            NothingToEvaluate => {
                Some("Name files in `eval_files`, or write `eval_strategy: no`.".into())
            }
            Diverged { applied, checkpoint, .. } if *applied > 0 => Some(format!(
                "{} applied: the loss was not finite, but the gradients were. Check how the objective computes its \
                 loss, or try a lower learning_rate.{}",
                if *applied == 1 { "One of these steps was".into() } else { format!("{applied} of these steps were") },
                kept(checkpoint)
            )),
            Diverged { trained: false, scale: Some(scale), .. } => Some(format!(
                "Every step overflowed while the loss scale was on its way down to {scale}: train longer, start \
                 lower with fp16: {{enabled: true, initial_scale_power: 8}}, or write mixed_precision: bf16."
            )),
            Diverged { trained: false, .. } => Some(
                "Nothing was applied. First steps like this come from the model: check its weights for NaN \
                 and infinity."
                    .into(),
            ),
            Diverged { checkpoint, .. } => Some(format!(
                "Nothing of these steps was applied. Try a lower learning_rate, a longer warmup, or \
                 max_grad_norm: 1.0.{}",
                kept(checkpoint)
            )),
            ScaleAtFloor { checkpoint, .. } => {
                Some(format!("Write mixed_precision: bf16, which needs no loss scale.{}", kept(checkpoint)))
            }
            Output { cause, .. } => match cause.kind() {
                std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                    Some("The disk or quota is full: free space, or choose another output_dir.".into())
                }
                std::io::ErrorKind::NotADirectory | std::io::ErrorKind::AlreadyExists => {
                    Some("output_dir must be a folder; a file of that name is in the way.".into())
                }
                _ => Some("Choose an output_dir that this user may write to.".into()),
            },
        }
    }
}

fn kept(checkpoint: &Option<PathBuf>) -> String {
    checkpoint.as_ref().map_or_else(String::new, |path| format!(" {} is intact.", path.display()))
}

struct InARow(u64);

impl fmt::Display for InARow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 > 1 { write!(f, ", and so for {} steps in a row", self.0) } else { Ok(()) }
    }
}

struct FirstBad<'a>(&'a Option<String>);

impl fmt::Display for FirstBad<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |name| write!(f, ", first in the gradient of {name}"))
    }
}

/// A few of many names.
struct Names<'a>(&'a [String]);

impl fmt::Display for Names<'_> {
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

struct Held<'a>(&'a Option<Holder>);

impl fmt::Display for Held<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(holder) => write!(f, " ({})", holder.described()),
            None => Ok(()),
        }
    }
}
