//! Why a collective fails, and the signal that ends all waits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockstep_core::{Fault, FaultClass, Rank};
use lockstep_device::cuda::GpuError;

use crate::call::{Call, tell_apart};

/// Why a collective could not be finished.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    #[error("{rank} and {peer} are not in the same call: {rank} in {mine}, {peer} in {theirs}")]
    Mismatch { rank: Rank, peer: Rank, mine: String, theirs: String },
    #[error("{peer} is gone ({why}) while {rank} waits for it in {call}")]
    Lost { rank: Rank, peer: Rank, call: String, why: String },
    #[error("{rank} has waited {:.1} s for {peer} in {call}", waited.as_secs_f64())]
    TimedOut { rank: Rank, peer: Rank, call: String, waited: Duration },
    #[error("what {peer} told {rank} in {call} cannot be right: {why}")]
    Garbled { rank: Rank, peer: Rank, call: String, why: String },
    #[error("the run was stopped: {why}")]
    Aborted { why: String },
    #[error("{what} could not be set up: {why}")]
    Setup { what: &'static str, why: String },
    #[error("{rank} and {peer} could not prove to each other that they belong to the same run: {why}")]
    NotAuthorised { rank: Rank, peer: Rank, why: String },
    #[error("NCCL failed on {rank} in {call}: {text}")]
    Nccl {
        rank: Rank,
        call: String,
        text: String,
        /// It is what a rank sees when another one ends.
        by_peer: bool,
    },
    #[error("{rank} has waited {:.1} s in {call}, which is not done on its GPU", waited.as_secs_f64())]
    Stalled { rank: Rank, call: String, waited: Duration },
    #[error("the GPU of {rank} failed in {call}: {cause}")]
    Gpu { rank: Rank, call: String, cause: GpuError },
}

impl CommError {
    pub(crate) fn mismatch(rank: Rank, peer: Rank, mine: &Call, theirs: &Call) -> CommError {
        let (mine, theirs) = tell_apart(mine, theirs);
        CommError::Mismatch { rank, peer, mine, theirs }
    }
}

impl Fault for CommError {
    fn class(&self) -> FaultClass {
        match self {
            CommError::Mismatch { .. } | CommError::TimedOut { .. } | CommError::Stalled { .. } => {
                FaultClass::Desync
            }
            CommError::Lost { .. }
            | CommError::Aborted { .. }
            | CommError::Garbled { .. }
            | CommError::Nccl { by_peer: true, .. } => FaultClass::PeerFailed,
            CommError::Setup { .. } | CommError::Nccl { .. } => FaultClass::Unavailable,
            CommError::Gpu { cause, .. } => cause.class(),
            CommError::NotAuthorised { .. } => FaultClass::NotAuthorised,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            CommError::Mismatch { .. } => Some(
                "Ranks must run the same binary on the same configuration; if they do, this is a bug in lockstep."
                    .into(),
            ),
            CommError::TimedOut { peer, .. } | CommError::Lost { peer, .. } => {
                Some(format!("Look at what {peer} does; its last lines are in the log."))
            }
            CommError::Garbled { .. } => Some(
                "Ranks must run the same binary, and nothing else may write to their memory or connections."
                    .into(),
            ),
            CommError::Nccl { by_peer: true, .. } | CommError::Stalled { .. } => Some(
                "Look at what the other ranks do; their last lines are in the log. NCCL_DEBUG=INFO lets NCCL tell \
                 what it waits for."
                    .into(),
            ),
            CommError::Nccl { .. } | CommError::Setup { what: "NCCL", .. } => Some(
                "NCCL_DEBUG=INFO lets NCCL tell what it tried. `lockstep doctor` shows which libraries were found \
                 where; NCCL_SOCKET_IFNAME names the network interface that ranks reach each other by."
                    .into(),
            ),
            CommError::Gpu { cause, .. } => cause.hint(),
            CommError::NotAuthorised { .. } => Some(
                "All ranks need the same token and run id, the same version of lockstep, and addresses that \
                 lead to each other."
                    .into(),
            ),
            _ => None,
        }
    }
}

/// Ends every wait of a rank's carriers: raised when the run is known to be lost.
#[derive(Clone, Debug, Default)]
pub struct Abort(Arc<(AtomicBool, OnceLock<String>)>);

impl Abort {
    /// The first reason given stays.
    pub fn raise(&self, why: impl Into<String>) {
        self.0.1.get_or_init(|| why.into());
        self.0.0.store(true, Ordering::Release);
    }

    pub fn check(&self) -> Result<(), CommError> {
        if self.0.0.load(Ordering::Acquire) {
            let why = self.0.1.get().cloned().unwrap_or_default();
            return Err(CommError::Aborted { why });
        }
        Ok(())
    }
}
