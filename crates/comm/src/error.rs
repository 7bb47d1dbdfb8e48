use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockstep_core::{Fault, FaultClass, Rank};

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
    #[error("the run was stopped: {why}")]
    Aborted { why: String },
    #[error("{what} could not be set up: {why}")]
    Setup { what: &'static str, why: String },
}

impl Fault for CommError {
    fn class(&self) -> FaultClass {
        match self {
            CommError::Mismatch { .. } | CommError::TimedOut { .. } => FaultClass::Desync,
            CommError::Lost { .. } | CommError::Aborted { .. } => FaultClass::PeerFailed,
            CommError::Setup { .. } => FaultClass::Unavailable,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            CommError::Mismatch { .. } => Some(
                "Ranks must run the same binary on the same configuration; if they do, this is a bug in lockstep."
                    .into(),
            ),
            CommError::TimedOut { peer, .. } => {
                Some(format!("Look at what {peer} does; its last lines are in the log."))
            }
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
