use lockstep_comm::CommError;
use lockstep_core::panics::Panic;
use lockstep_core::{Bytes, Fault, FaultClass};
use lockstep_device::cuda::GpuError;
use lockstep_device::{MemoryError, OffloadFileError};

/// Why an engine could not be created, or a phase could not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    OffloadFile(#[from] OffloadFileError),
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error("{cause} (in {op})")]
    Comm { op: String, cause: CommError },
    #[error("the plan offloads {bytes} to NVMe, but `nvme_path` is not set")]
    NoNvmeDir { bytes: Bytes },
    #[error("the {lane} lane {panic}")]
    LanePanicked { lane: String, panic: Panic },
    #[error("an earlier step failed, and the engine cannot continue after a failure")]
    Stopped,
    #[error("a micro-batch has {found} {what}, but the plan allows {planned}")]
    TooLarge { what: &'static str, found: usize, planned: usize },
    #[error("{what} {id}, at index {at} of a micro-batch, is outside the model's vocabulary of {vocab}")]
    UnknownToken { what: &'static str, id: u32, at: usize, vocab: usize },
    #[error(
        "position {position}, at index {at} of a micro-batch, is outside the {planned} positions of the rotary table"
    )]
    UnplannedPosition { position: u32, at: usize, planned: usize },
    #[error("a micro-batch of {tokens} tokens has {found} {what}")]
    LengthMismatch { what: &'static str, found: usize, tokens: usize },
    #[error(
        "cu_seqlens of a micro-batch must rise from 0 to its {tokens} tokens; the value at index {at} does not"
    )]
    BadSequenceBounds { at: usize, tokens: usize },
    #[error(
        "document {doc} of a micro-batch does not share its first {common} tokens with the one before it"
    )]
    NotShared { doc: usize, common: usize },
    #[error(
        "a decode batch of {docs} sequences has {found} entries in its page tables, which need {table_len} each"
    )]
    PageTableLength { found: usize, docs: usize, table_len: usize },
    #[error(
        "page {page} of the KV cache is written to for one sequence of a decode batch and used by another"
    )]
    SharedPage { page: u32 },
    #[error("the positions of sequence {doc} of a decode batch are not consecutive")]
    PositionGap { doc: usize },
    #[error("sequence {doc} of a decode batch has no new token")]
    NoNewToken { doc: usize },
}

impl Fault for EngineError {
    fn class(&self) -> FaultClass {
        match self {
            EngineError::Memory(_) => FaultClass::Unavailable,
            EngineError::Gpu(cause) => cause.class(),
            EngineError::OffloadFile(_) => FaultClass::CannotWrite,
            EngineError::Comm { cause, .. } => cause.class(),
            EngineError::NoNvmeDir { .. } => FaultClass::BadConfig,
            EngineError::UnknownToken { .. } => FaultClass::BadData,
            EngineError::LanePanicked { .. }
            | EngineError::Stopped
            | EngineError::TooLarge { .. }
            | EngineError::UnplannedPosition { .. }
            | EngineError::LengthMismatch { .. }
            | EngineError::BadSequenceBounds { .. }
            | EngineError::NotShared { .. }
            | EngineError::PageTableLength { .. }
            | EngineError::SharedPage { .. }
            | EngineError::PositionGap { .. }
            | EngineError::NoNewToken { .. } => FaultClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            EngineError::Gpu(cause) | EngineError::Memory(MemoryError::Gpu(cause)) => cause.hint(),
            EngineError::Memory(_) => Some(
                "`lockstep plan` prints how the memory is used. Set recompute: full, or use smaller batches.".into(),
            ),
            EngineError::OffloadFile(_) => Some(
                "Set nvme_path to a folder on a local disk with enough free space; `lockstep plan` prints how much."
                    .into(),
            ),
            EngineError::NoNvmeDir { .. } => Some("Set nvme_path to a folder on a local disk.".into()),
            EngineError::Comm { cause, .. } => cause.hint(),
            EngineError::LanePanicked { .. } => Some(
                "This is a bug in lockstep or in a custom objective. Checkpoints are intact: resume with \
                 resume_from_checkpoint: true."
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
            | EngineError::BadSequenceBounds { .. }
            | EngineError::NotShared { .. }
            | EngineError::PageTableLength { .. }
            | EngineError::SharedPage { .. }
            | EngineError::PositionGap { .. }
            | EngineError::NoNewToken { .. } => None,
        }
    }
}
