//! The interface of a carrier: the point-to-point transport below the collectives.

use std::sync::Arc;
use std::time::Duration;

use lockstep_core::Rank;
use lockstep_device::{Memory, View};

use crate::call::Call;
use crate::error::{Abort, CommError};

/// The largest number of parts that one call can offer to a peer. Collectives with more parts are split into several
/// calls.
pub const MAX_OFFERS: usize = 32;

/// Size of the buffer that [`Carrier::bounce`] returns: one half for outgoing bytes, one half for incoming bytes.
pub const BOUNCE_BYTES: usize = 128 << 10;

/// Moves bytes between pairs of ranks.
///
/// A call with a peer is `post`, `meet`, any number of `pull`s, `done`, `finish`. A rank may have one open call with
/// each of several peers at once. Each pair numbers its calls, and both sides count the same way. Every wait is
/// limited by the carrier's deadline and ends early if the run is aborted. After an error the carrier must not be
/// used again. Nothing here allocates, except to report an error.
pub trait Carrier: Send {
    /// This rank.
    fn rank(&self) -> Rank;

    /// The number of ranks.
    fn world(&self) -> u32;

    /// Sets the limit for a single wait, starting with the next call.
    fn set_deadline(&mut self, deadline: Duration);

    /// The signal that ends every wait of this carrier.
    fn abort(&self) -> Abort;

    /// A buffer of [`BOUNCE_BYTES`] that peers can read. `None` if this carrier can send from any memory.
    fn bounce(&self) -> Option<Arc<Memory>> {
        None
    }

    /// Announces a call to a peer, together with the parts that the peer may pull. Does not wait. The offered bytes
    /// must not change until `finish` returns.
    fn post(&mut self, peer: Rank, call: &Call, offers: &[View<'_>]) -> Result<(), CommError>;

    /// Waits for the peer's announcement and compares it with `call`. If they differ, no data has moved.
    fn meet(&mut self, peer: Rank, call: &Call) -> Result<(), CommError>;

    /// Copies the next elements that the peer offers, in order. A single pull must not cross a part boundary.
    fn pull(&mut self, peer: Rank, into: View<'_>) -> Result<(), CommError>;

    /// Signals to the peer that this rank has pulled everything it needs. Does not wait.
    fn done(&mut self, peer: Rank) -> Result<(), CommError>;

    /// Waits until the peer no longer needs the offered bytes, which may change afterwards.
    fn finish(&mut self, peer: Rank) -> Result<(), CommError>;
}
