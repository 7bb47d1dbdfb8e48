use lockstep_core::{Fault, FaultClass};
use lockstep_device::MemoryError;

/// Why an engine could not be made or a step not be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("the plan has operations on the {lane} lane (first: {op}), which this build cannot run yet")]
    Lane { lane: String, op: String },
    #[error("a micro-batch has {found} {what}, the plan has room for {planned}")]
    TooLarge { what: &'static str, found: usize, planned: usize },
}

impl Fault for EngineError {
    fn class(&self) -> FaultClass {
        match self {
            EngineError::Memory(_) | EngineError::Lane { .. } => FaultClass::Unavailable,
            EngineError::TooLarge { .. } => FaultClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            EngineError::Memory(_) => Some(
                "`lockstep plan` shows where the bytes go; recompute: full or a smaller batch takes less."
                    .into(),
            ),
            EngineError::Lane { .. } => Some(
                "Training runs on one rank without offload for now: set nproc_per_node: 1, nodes: 1 and \
                 offload_*: none. `lockstep plan` shows this configuration all the same."
                    .into(),
            ),
            EngineError::TooLarge { .. } => None,
        }
    }
}
