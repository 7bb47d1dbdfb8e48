//! Errors of collectives, and the signal that aborts all waits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockstep_core::{Fault, FaultClass, Rank};
use lockstep_device::cuda::GpuError;

use crate::call::{Call, describe_mismatch};

/// Why a collective failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// Two ranks are in different collectives.
    #[error("collective mismatch: {rank} called {mine}, but {peer} called {theirs}")]
    Mismatch { rank: Rank, peer: Rank, mine: String, theirs: String },
    /// The peer ended or closed its connection.
    #[error("{rank} lost {peer} in {call}: {why}")]
    Lost { rank: Rank, peer: Rank, call: String, why: String },
    /// The peer is alive, but did not take part in the call before the deadline.
    #[error("{rank} timed out in {call} after waiting {:.1} s for {peer}", waited.as_secs_f64())]
    TimedOut { rank: Rank, peer: Rank, call: String, waited: Duration },
    /// The peer sent something that no correct rank sends.
    #[error("{rank} received invalid data from {peer} in {call}: {why}")]
    InvalidData { rank: Rank, peer: Rank, call: String, why: String },
    /// [`Abort`] was raised.
    #[error("the run was aborted: {why}")]
    Aborted { why: String },
    /// A connection or a resource could not be set up.
    #[error("could not set up {what}: {why}")]
    Setup { what: &'static str, why: String },
    /// A handshake failed: the two ranks hold different secrets.
    #[error("{rank} and {peer} could not authenticate each other as members of the same run: {why}")]
    NotAuthorised { rank: Rank, peer: Rank, why: String },
    /// NCCL reported an error.
    #[error("NCCL failed on {rank} in {call}: {text}")]
    Nccl {
        rank: Rank,
        call: String,
        text: String,
        /// The status is one that NCCL reports when another rank ends.
        by_peer: bool,
    },
    /// A collective on the GPU did not complete before the deadline.
    #[error("{rank} timed out: {call} did not complete on its GPU within {:.1} s", waited.as_secs_f64())]
    Stalled { rank: Rank, call: String, waited: Duration },
    /// MPI reported an error.
    #[error("MPI failed on {rank} in {call}: {text}")]
    Mpi {
        rank: Rank,
        call: String,
        text: String,
        /// Ranks disagree on the size of a message.
        is_mismatch: bool,
    },
    /// A collective by MPI did not complete before the deadline.
    #[error("{rank} timed out: {call} did not complete by MPI within {:.1} s", waited.as_secs_f64())]
    MpiTimedOut { rank: Rank, call: String, waited: Duration },
    /// The GPU itself failed.
    #[error("the GPU of {rank} failed in {call}: {cause}")]
    Gpu { rank: Rank, call: String, cause: GpuError },
}

impl CommError {
    pub(crate) fn mismatch(rank: Rank, peer: Rank, mine: &Call, theirs: &Call) -> CommError {
        let (mine, theirs) = describe_mismatch(mine, theirs);
        CommError::Mismatch { rank, peer, mine, theirs }
    }
}

impl Fault for CommError {
    fn class(&self) -> FaultClass {
        match self {
            CommError::Mismatch { .. }
            | CommError::TimedOut { .. }
            | CommError::Stalled { .. }
            | CommError::MpiTimedOut { .. }
            | CommError::Mpi { is_mismatch: true, .. } => FaultClass::Desync,
            CommError::Lost { .. }
            | CommError::Aborted { .. }
            | CommError::InvalidData { .. }
            | CommError::Mpi { .. }
            | CommError::Nccl { by_peer: true, .. } => FaultClass::PeerFailed,
            CommError::Setup { .. } | CommError::Nccl { .. } => FaultClass::Unavailable,
            CommError::Gpu { cause, .. } => cause.class(),
            CommError::NotAuthorised { .. } => FaultClass::NotAuthorised,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            CommError::Mismatch { .. } => Some(
                "All ranks must run the same binary with the same configuration. If they do, this is a bug in \
                 lockstep: please report it with both lines."
                    .into(),
            ),
            CommError::TimedOut { peer, .. } => Some(format!(
                "Find out what {peer} is doing: look at its last lines in the log. It may be stuck, or slower than \
                 the deadline allows."
            )),
            CommError::Lost { peer, .. } => {
                Some(format!("Look for the error of {peer}: its last lines in the log say why it ended."))
            }
            CommError::InvalidData { .. } => Some(
                "All ranks must run the same binary, and nothing else may write to their memory or connections."
                    .into(),
            ),
            CommError::Nccl { by_peer: true, .. } | CommError::Stalled { .. } => Some(
                "Look for errors of the other ranks in the log. Set NCCL_DEBUG=INFO to see what NCCL is waiting for."
                    .into(),
            ),
            CommError::Nccl { .. } | CommError::Setup { what: "NCCL", .. } => Some(
                "Set NCCL_DEBUG=INFO to see what NCCL tried, and run `lockstep doctor` to see which libraries were \
                 found where. NCCL_SOCKET_IFNAME selects the network interface between ranks."
                    .into(),
            ),
            CommError::Mpi { .. } | CommError::MpiTimedOut { .. } => Some(
                "Look for errors of the other ranks in the log: one of them may have ended, or be slower than the \
                 deadline allows."
                    .into(),
            ),
            CommError::Setup { what: "MPI", .. } => Some(
                "Install an MPI with the standard ABI of MPI 5 (MPICH 5, Open MPI 6, or the Python package `mpich`), \
                 and set LOCKSTEP_MPI_DIR to the folder of libmpi_abi.so.1. `carrier: tcp` needs no MPI."
                    .into(),
            ),
            CommError::Gpu { cause, .. } => cause.hint(),
            CommError::NotAuthorised { .. } => Some(
                "Check that all ranks use the same token, the same run id and the same version of lockstep, and \
                 that their addresses belong to this run."
                    .into(),
            ),
            _ => None,
        }
    }
}

/// A flag that ends every wait of a rank's carriers. It is raised once the run is known to have failed.
#[derive(Clone, Debug, Default)]
pub struct Abort(Arc<(AtomicBool, OnceLock<String>)>);

impl Abort {
    /// Raises the flag. The first reason wins; later ones are ignored.
    pub fn raise(&self, why: impl Into<String>) {
        self.0.1.get_or_init(|| why.into());
        self.0.0.store(true, Ordering::Release);
    }

    /// [`CommError::Aborted`] if the flag has been raised.
    pub fn check(&self) -> Result<(), CommError> {
        if self.0.0.load(Ordering::Acquire) {
            let why = self.0.1.get().cloned().unwrap_or_default();
            return Err(CommError::Aborted { why });
        }
        Ok(())
    }
}
