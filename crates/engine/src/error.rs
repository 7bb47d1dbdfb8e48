use lockstep_comm::CommError;
use lockstep_core::panics::Panic;
use lockstep_core::{Bytes, Fault, FaultClass};
use lockstep_device::cuda::GpuError;
use lockstep_device::{MemoryError, OffloadFileError};

/// Why an engine could not be made or a step not be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Spill(#[from] OffloadFileError),
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error("{cause} (in {op})")]
    Comm { op: String, cause: CommError },
    #[error("the plan spills {bytes} to a disk, and no folder was given for it")]
    NoNvmeDir { bytes: Bytes },
    #[error("the {lane} lane {panic}")]
    LanePanicked { lane: String, panic: Panic },
    #[error("a step failed before; the engine does not go on after that")]
    Stopped,
    #[error("a micro-batch has {found} {what}, the plan has room for {planned}")]
    TooLarge { what: &'static str, found: usize, planned: usize },
    #[error("{what} {id}, at index {at} of a micro-batch, is outside the model's vocabulary of {vocab}")]
    UnknownToken { what: &'static str, id: u32, at: usize, vocab: usize },
    #[error(
        "position {position}, at index {at} of a micro-batch: the plan has rotary angles for {planned} positions"
    )]
    UnplannedPosition { position: u32, at: usize, planned: usize },
    #[error("a micro-batch of {tokens} tokens has {found} {what}")]
    LengthMismatch { what: &'static str, found: usize, tokens: usize },
    #[error(
        "the bounds of a micro-batch's documents go from 0 to its {tokens} tokens in order, and bound {at} does not"
    )]
    BadSequenceBounds { at: usize, tokens: usize },
}

impl Fault for EngineError {
    fn class(&self) -> FaultClass {
        match self {
            EngineError::Memory(_) => FaultClass::Unavailable,
            EngineError::Gpu(cause) => cause.class(),
            EngineError::Spill(_) => FaultClass::CannotWrite,
            EngineError::Comm { cause, .. } => cause.class(),
            EngineError::NoNvmeDir { .. } => FaultClass::BadConfig,
            EngineError::UnknownToken { .. } => FaultClass::BadData,
            EngineError::LanePanicked { .. }
            | EngineError::Stopped
            | EngineError::TooLarge { .. }
            | EngineError::UnplannedPosition { .. }
            | EngineError::LengthMismatch { .. }
            | EngineError::BadSequenceBounds { .. } => FaultClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            EngineError::Gpu(cause) | EngineError::Memory(MemoryError::Gpu(cause)) => cause.hint(),
            EngineError::Memory(_) => Some(
                "`lockstep plan` shows where the bytes go; recompute: full or a smaller batch takes less."
                    .into(),
            ),
            EngineError::Spill(_) => Some(
                "Set nvme_path to a folder on a local disk with room for it; `lockstep plan` says how much."
                    .into(),
            ),
            EngineError::NoNvmeDir { .. } => Some("Set nvme_path to a folder on a local disk.".into()),
            EngineError::Comm { cause, .. } => cause.hint(),
            EngineError::LanePanicked { .. } => Some(
                "This is a bug, in lockstep or in a custom objective. Checkpoints are intact: resume \
                 with resume_from_checkpoint: true."
                    .into(),
            ),
            EngineError::UnknownToken { .. } => Some(
                "Prepare the data with the model's own tokenizer, or use a model with a larger vocab_size."
                    .into(),
            ),
            EngineError::Stopped
            | EngineError::TooLarge { .. }
            | EngineError::UnplannedPosition { .. }
            | EngineError::LengthMismatch { .. }
            | EngineError::BadSequenceBounds { .. } => None,
        }
    }
}
