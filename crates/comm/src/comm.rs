//! The collectives of a rank, over a carrier or by MPI.

use std::time::Duration;

use lockstep_core::Rank;
use lockstep_device::View;

use crate::carrier::Carrier;
use crate::carrier_comm::CarrierComm;
use crate::error::{Abort, CommError};
use crate::group::Group;
use crate::mpi::MpiComm;
use crate::traffic::Traffic;

/// One part of an all-gather: this rank's shard, and the whole that all members' shards make up ([`Group::share`]).
/// The shard may already lie inside the whole.
#[derive(Clone, Copy, Debug)]
pub struct GatherPart<'m> {
    pub own: View<'m>,
    pub whole: View<'m>,
}

/// The collectives of one rank.
///
/// All members of a group must make the same calls in the same order. Views must lie in the memory that the
/// communicator was connected with. Over carriers, collectives do not allocate, and sums have the order of
/// [`lockstep_core::fold`]; by MPI, they have the library's.
pub struct Comm {
    via: Via,
    note: String,
    traffic: Traffic,
}

enum Via {
    Carrier(CarrierComm),
    Mpi(Box<MpiComm>),
}

impl Comm {
    pub fn new(carrier: Box<dyn Carrier>) -> Comm {
        let traffic = Traffic::default();
        let via = Via::Carrier(CarrierComm::new(carrier, traffic.clone()));
        Comm { via, note: String::new(), traffic }
    }

    pub(crate) fn over_mpi(mpi: MpiComm) -> Comm {
        let traffic = mpi.traffic().clone();
        Comm { via: Via::Mpi(Box::new(mpi)), note: String::new(), traffic }
    }

    pub(crate) fn with_note(self, note: String) -> Comm {
        Comm { note, ..self }
    }

    /// For the log: what carries the bytes, and why something faster does not.
    pub fn note(&self) -> &str {
        &self.note
    }

    /// Adds a reason to the note.
    pub fn with_reason(self, reason: &str) -> Comm {
        let note = format!("{} ({reason})", self.note);
        self.with_note(note)
    }

    /// The library whose order sums have. `None`: they have the order of [`lockstep_core::fold`].
    pub fn library(&self) -> Option<&str> {
        match &self.via {
            Via::Carrier(_) => None,
            Via::Mpi(mpi) => Some(mpi.library()),
        }
    }

    /// The bytes that this rank's collectives have moved.
    pub fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    pub fn rank(&self) -> Rank {
        match &self.via {
            Via::Carrier(comm) => comm.carrier.rank(),
            Via::Mpi(mpi) => mpi.rank(),
        }
    }

    pub fn world(&self) -> u32 {
        match &self.via {
            Via::Carrier(comm) => comm.carrier.world(),
            Via::Mpi(mpi) => mpi.world(),
        }
    }

    /// The signal that ends every wait; any thread may raise it.
    pub fn abort(&self) -> Abort {
        match &self.via {
            Via::Carrier(comm) => comm.carrier.abort(),
            Via::Mpi(mpi) => mpi.abort(),
        }
    }

    /// Sets the limit for a single wait, starting with the next call.
    pub fn set_deadline(&mut self, deadline: Duration) {
        match &mut self.via {
            Via::Carrier(comm) => comm.carrier.set_deadline(deadline),
            Via::Mpi(mpi) => mpi.set_deadline(deadline),
        }
    }

    /// Sets up what collectives of this group need. All ranks must call it with groups along the same axes, in the same
    /// order, one communicator after the other. Without it, the first collective of a group does so, which is safe as
    /// long as no other communicator is in use.
    pub fn prepare(&mut self, group: &Group) -> Result<(), CommError> {
        match &mut self.via {
            Via::Carrier(_) => Ok(()),
            Via::Mpi(mpi) => mpi.prepare(group),
        }
    }

    /// Waits until every member has called it.
    pub fn barrier(&mut self, group: &Group, tag: u64) -> Result<(), CommError> {
        match &mut self.via {
            Via::Carrier(comm) => comm.barrier(group, tag),
            Via::Mpi(mpi) => mpi.barrier(group, tag),
        }
    }

    /// Gathers every member's shards on every member.
    pub fn all_gather(&mut self, group: &Group, tag: u64, parts: &[GatherPart<'_>]) -> Result<(), CommError> {
        match &mut self.via {
            Via::Carrier(comm) => comm.all_gather(group, tag, parts),
            Via::Mpi(mpi) => mpi.all_gather(group, tag, parts),
        }
    }

    /// Copies the root's parts to every member, in place. `root` must be a member.
    pub fn broadcast(
        &mut self,
        group: &Group,
        tag: u64,
        root: Rank,
        parts: &[View<'_>],
    ) -> Result<(), CommError> {
        match &mut self.via {
            Via::Carrier(comm) => comm.broadcast(group, tag, root, parts),
            Via::Mpi(mpi) => mpi.broadcast(group, tag, root, parts),
        }
    }

    /// Gathers every member's view on the root. On the root, `into` has one view for each member, in member order;
    /// its own may already be filled. On the other members `into` is empty. Lengths may differ between members.
    pub fn gather(
        &mut self,
        group: &Group,
        tag: u64,
        root: Rank,
        mine: View<'_>,
        into: &[View<'_>],
    ) -> Result<(), CommError> {
        match &mut self.via {
            Via::Carrier(comm) => comm.gather(group, tag, root, mine, into),
            Via::Mpi(mpi) => mpi.gather(group, tag, root, mine, into),
        }
    }

    /// Sends parts to one rank, which receives them with [`Comm::recv`]. Returns once it has received them.
    pub fn send(&mut self, to: Rank, tag: u64, parts: &[View<'_>]) -> Result<(), CommError> {
        match &mut self.via {
            Via::Carrier(comm) => comm.send(to, tag, parts),
            Via::Mpi(mpi) => mpi.send(to, tag, parts),
        }
    }

    /// Receives parts that another rank sends with [`Comm::send`].
    pub fn recv(&mut self, from: Rank, tag: u64, parts: &[View<'_>]) -> Result<(), CommError> {
        match &mut self.via {
            Via::Carrier(comm) => comm.recv(from, tag, parts),
            Via::Mpi(mpi) => mpi.recv(from, tag, parts),
        }
    }

    /// Sums f32 parts over the members. Each member ends with the sum in its own share (by [`Group::share`]) of each
    /// part; the other shares keep what they held. `scratch` has [`lockstep_core::fold::fold_scratch_elems`] elements.
    pub fn reduce_scatter(
        &mut self,
        group: &Group,
        tag: u64,
        parts: &[View<'_>],
        scratch: View<'_>,
    ) -> Result<(), CommError> {
        match &mut self.via {
            Via::Carrier(comm) => comm.reduce_scatter(group, tag, parts, scratch),
            Via::Mpi(mpi) => mpi.reduce_scatter(group, tag, parts),
        }
    }

    /// Sums f32 parts over the members: every member ends with the whole sum in place. `scratch` as in
    /// [`Comm::reduce_scatter`].
    pub fn all_reduce(
        &mut self,
        group: &Group,
        tag: u64,
        parts: &[View<'_>],
        scratch: View<'_>,
    ) -> Result<(), CommError> {
        match &mut self.via {
            Via::Carrier(comm) => comm.all_reduce(group, tag, parts, scratch),
            Via::Mpi(mpi) => mpi.all_reduce(group, tag, parts),
        }
    }

    /// Gathers every member's byte string on every member. Lengths may differ. `each(member, bytes)` is called in
    /// member order, for this rank too. Strings of up to [`crate::BYTES_PER_ROUND`] arrive in one piece, longer ones in
    /// one or several consecutive pieces.
    pub fn all_gather_bytes(
        &mut self,
        group: &Group,
        tag: u64,
        mine: &[u8],
        each: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), CommError> {
        match &mut self.via {
            Via::Carrier(comm) => comm.all_gather_bytes(group, tag, mine, each),
            Via::Mpi(mpi) => mpi.all_gather_bytes(group, tag, mine, each),
        }
    }
}

impl std::fmt::Debug for Comm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Comm({} of {})", self.rank(), self.world())
    }
}

/// The other members, starting after this one, so that members do not all contact the first one at the same time.
pub(crate) fn others(group: &Group) -> impl Iterator<Item = (usize, Rank)> + '_ {
    (1..group.len()).map(|i| (group.me() + i) % group.len()).map(|m| (m, group.members()[m]))
}

/// Member `m`'s share of a part.
pub(crate) fn share<'m>(group: &Group, part: View<'m>, m: usize) -> View<'m> {
    let range = group.share(part.len(), m);
    part.slice(range.start, range.elems())
}

pub(crate) fn member_idx(group: &Group, root: Rank) -> usize {
    group.member_idx(root).unwrap_or_else(|| panic!("{root} is not a member of this collective"))
}
