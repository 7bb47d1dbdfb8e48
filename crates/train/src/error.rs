use std::path::PathBuf;

use lockstep_ckpt::CkptError;
use lockstep_config::ConfigErrors;
use lockstep_core::{Fault, FaultClass};
use lockstep_data::DataError;
use lockstep_engine::EngineError;
use lockstep_observe::ObserveError;
use lockstep_plan::PlanError;
use lockstep_shape::ShapeError;

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
    #[error("max_length {max_length} is more than the model's {positions} positions")]
    TooLong { max_length: usize, positions: usize },
    #[error("{}: these tensors are in the folder, but the model has no place for them: {}", folder.display(), names.join(", "))]
    UnusedTensors { folder: PathBuf, names: Vec<String> },
    #[error("algorithm `{name}` is not implemented yet")]
    Algorithm { name: String },
    #[error("adapters are planned but cannot be trained yet")]
    Adapter,
    #[error("{}: checkpoints of an earlier run are here (the last is {last})", dir.display())]
    OutputInUse { dir: PathBuf, last: String },
    #[error("{}: another run holds this output directory", dir.display())]
    OutputLocked { dir: PathBuf },
    #[error("{}: {cause}", path.display())]
    Output { path: PathBuf, cause: std::io::Error },
    #[error("nothing to resume from in {}", dir.display())]
    NothingToResume { dir: PathBuf },
    #[error("no checkpoint in {} can be used; the newest one: {why}", dir.display())]
    AllDamaged { dir: PathBuf, why: String },
    #[error("{}: the checkpoint was made with {what} {then}, this run has {now}", path.display())]
    ResumeMismatch { path: PathBuf, what: &'static str, then: String, now: String },
    #[error("step {step}: the loss is {loss} (rows {rows:?} of the data set; gradient norm {grad_norm})")]
    Diverged { step: u64, loss: f64, grad_norm: f64, rows: Vec<u32> },
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
            VocabularyTooSmall { .. } | TooLong { .. } | OutputInUse { .. } | ResumeMismatch { .. } => {
                FaultClass::BadConfig
            }
            UnusedTensors { .. } | AllDamaged { .. } => FaultClass::BadData,
            Algorithm { .. } | Adapter => FaultClass::Unavailable,
            OutputLocked { .. } | Output { .. } => FaultClass::CannotWrite,
            NothingToResume { .. } => FaultClass::InputMissing,
            Diverged { .. } => FaultClass::Diverged,
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
            VocabularyTooSmall { tokenizer, .. } => {
                Some(format!("Use the model's own tokenizer, or a model with vocab_size of at least {tokenizer}."))
            }
            TooLong { positions, .. } => Some(format!("Set max_length to at most {positions}.")),
            UnusedTensors { .. } => Some("The folder holds another architecture than its config.json says.".into()),
            Algorithm { .. } => Some("`lockstep plan` can describe it; `train` runs algorithm: sft.".into()),
            Adapter => Some("`lockstep plan` can describe them; remove `adapter` to train all weights.".into()),
            OutputInUse { .. } => Some(
                "Set resume_from_checkpoint: true to go on with it, overwrite_output_dir: true to delete its \
                 checkpoints, or choose another output_dir."
                    .into(),
            ),
            OutputLocked { .. } => Some("Wait for it to end, or choose another output_dir.".into()),
            NothingToResume { .. } => Some("Remove resume_from_checkpoint to start from the beginning.".into()),
            AllDamaged { .. } => Some("Remove the damaged folders, or start over with overwrite_output_dir: true.".into()),
            ResumeMismatch { .. } => {
                Some("The run would not be the one that was interrupted. Restore the setting, or start a new run.".into())
            }
            Diverged { .. } => Some(
                "Nothing of this step was applied. Try a lower learning_rate, a longer warmup, or max_grad_norm: 1.0; \
                 the last checkpoint is intact."
                    .into(),
            ),
            Output { .. } => None,
        }
    }
}
