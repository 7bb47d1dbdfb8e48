//! What a carrier must be able to do.

use std::sync::Arc;
use std::time::Duration;

use lockstep_core::Rank;
use lockstep_device::{Memory, View};

use crate::call::Call;
use crate::error::{Abort, CommError};

/// Parts that one call can offer to one peer; collectives with more are cut into several calls.
pub const MAX_OFFERS: usize = 32;

/// Bytes of the memory that [`Carrier::bounce`] gives: half for what goes out, half for what comes in.
pub const BOUNCE_BYTES: usize = 128 << 10;

/// Moves bytes between ranks, pair by pair.
///
/// A call with a peer is `post`, `meet`, any number of `pull`s, `done`, `finish`. Calls with several peers
/// may be open at once, one with each. Calls of a pair are numbered; both sides count alike. Every wait has
/// the carrier's deadline, and ends early if the run is aborted. After an error the carrier is of no further
/// use. Nothing here allocates unless it fails.
pub trait Carrier: Send {
    fn rank(&self) -> Rank;

    fn world(&self) -> u32;

    /// How long one wait may last, from the next call on.
    fn set_deadline(&mut self, deadline: Duration);

    /// Ends every wait of this carrier when it is raised.
    fn abort(&self) -> Abort;

    /// Memory of [`BOUNCE_BYTES`] that peers can read, where not every memory will do.
    fn bounce(&self) -> Option<Arc<Memory>> {
        None
    }

    /// Announces a call to a peer, and where the parts are that it may pull. Does not wait. The offered
    /// bytes must stay as they are until `finish`.
    fn post(&mut self, peer: Rank, call: &Call, offers: &[View<'_>]) -> Result<(), CommError>;

    /// Waits for the peer's announcement and compares it with `call`. No data has moved if they differ.
    fn meet(&mut self, peer: Rank, call: &Call) -> Result<(), CommError>;

    /// The next elements of what the peer offers, in order. One pull does not cross from a part to the next.
    fn pull(&mut self, peer: Rank, into: View<'_>) -> Result<(), CommError>;

    /// Tells the peer that this rank has pulled all it wants. Does not wait.
    fn done(&mut self, peer: Rank) -> Result<(), CommError>;

    /// Waits until the peer no longer needs what it was offered, which may then change.
    fn finish(&mut self, peer: Rank) -> Result<(), CommError>;
}
