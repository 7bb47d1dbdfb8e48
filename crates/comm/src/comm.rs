//! Collectives, implemented once on top of any carrier. Reductions are in `reduce.rs`, byte strings in `bytes.rs`.

use std::sync::Arc;
use std::time::Duration;

use lockstep_core::{Bytes, DType, Rank};
use lockstep_device::{Isa, Memory, Pool, View};

use crate::call::{Call, CallKind, FNV_START, fnv, shape_of};
use crate::carrier::{BOUNCE_BYTES, Carrier, MAX_OFFERS};
use crate::error::{Abort, CommError};
use crate::group::Group;
use crate::offers::Offers;
use crate::traffic::{CountingCarrier, Traffic};

/// One part of an all-gather: this rank's shard, and the whole that all members' shards make up ([`Group::share`]).
/// The shard may already lie inside the whole.
#[derive(Clone, Copy, Debug)]
pub struct GatherPart<'m> {
    pub own: View<'m>,
    pub whole: View<'m>,
}

/// Pulls what one member offers.
type PullFn<'a> = dyn FnMut(&mut dyn Carrier, usize, Rank) -> Result<(), CommError> + 'a;

/// The collectives of one rank.
///
/// All members of a group must make the same calls in the same order. Views that peers read must lie in memory
/// registered with the carrier. Collectives do not allocate.
pub struct Comm {
    pub(crate) carrier: Box<dyn Carrier>,
    /// Staging for byte strings: one half for outgoing bytes, one half for incoming bytes.
    pub(crate) bounce: Arc<Memory>,
    pub(crate) isa: Isa,
    note: String,
    traffic: Traffic,
}

impl Comm {
    pub fn new(carrier: Box<dyn Carrier>) -> Comm {
        let bounce = carrier.bounce().unwrap_or_else(|| {
            let memory = Memory::allocate(Bytes(BOUNCE_BYTES as u64), &Pool::new(1));
            Arc::new(memory.expect("128 KiB of host memory for small messages can be allocated"))
        });
        assert!(bounce.bytes().0 >= BOUNCE_BYTES as u64, "the carrier's bounce buffer is too small");
        let traffic = Traffic::default();
        let carrier = Box::new(CountingCarrier { inner: carrier, traffic: traffic.clone() });
        Comm { carrier, bounce, isa: Isa::detect(), note: String::new(), traffic }
    }

    pub(crate) fn with_note(self, note: String) -> Comm {
        Comm { note, ..self }
    }

    /// For the log: which carrier is in use, and why a faster one is not.
    pub fn note(&self) -> &str {
        &self.note
    }

    /// The bytes that this rank's collectives have moved.
    pub fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    pub fn rank(&self) -> Rank {
        self.carrier.rank()
    }

    pub fn world(&self) -> u32 {
        self.carrier.world()
    }

    /// The signal that ends every wait; any thread may raise it.
    pub fn abort(&self) -> Abort {
        self.carrier.abort()
    }

    /// Sets the limit for a single wait, starting with the next call.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.carrier.set_deadline(deadline);
    }

    /// Waits until every member has called it.
    pub fn barrier(&mut self, group: &Group, tag: u64) -> Result<(), CommError> {
        let call = self.call(CallKind::Barrier, group, tag, [].into_iter());
        self.exchange(group, &call, &mut |_| Offers::none(), &mut |_, _, _| Ok(()))
    }

    /// Gathers every member's shards on every member.
    pub fn all_gather(&mut self, group: &Group, tag: u64, parts: &[GatherPart<'_>]) -> Result<(), CommError> {
        for parts in parts.chunks(MAX_OFFERS) {
            let call = self.call(CallKind::AllGather, group, tag, parts.iter().map(|p| p.whole));
            let mut offer = |_| Offers::from_views(parts.iter().map(|p| p.own));
            self.exchange(group, &call, &mut offer, &mut |carrier, m, peer| {
                parts.iter().try_for_each(|part| carrier.pull(peer, share(group, part.whole, m)))
            })?;
            for part in parts {
                let own_range = share(group, part.whole, group.me());
                if own_range.as_ptr::<u8>() != part.own.as_ptr::<u8>() {
                    own_range.copy_from_host(&part.own);
                }
            }
        }
        Ok(())
    }

    /// Copies the root's parts to every member, in place. `root` must be a member.
    pub fn broadcast(
        &mut self,
        group: &Group,
        tag: u64,
        root: Rank,
        parts: &[View<'_>],
    ) -> Result<(), CommError> {
        let from = member_idx(group, root);
        for parts in parts.chunks(MAX_OFFERS) {
            let call = self.call(CallKind::Broadcast, group, tag, parts.iter().copied());
            // Every pair in a broadcast includes the root, so ranks that assume different roots fail to match.
            let call = Call { group: fnv(call.group, u64::from(root.0)), ..call };
            if group.me() == from {
                self.exchange(
                    group,
                    &call,
                    &mut |_| Offers::from_views(parts.iter().copied()),
                    &mut |_, _, _| Ok(()),
                )?;
            } else {
                self.recv_parts(root, &call, parts)?;
            }
        }
        Ok(())
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
        let to = member_idx(group, root);
        // Each pair agrees on its own transfer only: members do not know each other's lengths.
        let call_for = |comm: &Comm, piece: View<'_>| {
            let call = comm.call(CallKind::Gather, group, tag, [piece].into_iter());
            Call { group: fnv(call.group, u64::from(root.0)), ..call }
        };
        if group.me() != to {
            let call = call_for(self, mine);
            return self.send_parts(root, &call, &[mine]);
        }
        assert_eq!(into.len(), group.len(), "the root needs one destination for each member");
        for (m, peer) in others(group) {
            self.carrier.post(peer, &call_for(self, into[m]), &[])?;
        }
        for (m, peer) in others(group) {
            self.carrier.meet(peer, &call_for(self, into[m]))?;
            self.carrier.pull(peer, into[m])?;
            self.carrier.done(peer)?;
        }
        for (_, peer) in others(group) {
            self.carrier.finish(peer)?;
        }
        if into[to].as_ptr::<u8>() != mine.as_ptr::<u8>() {
            into[to].copy_from_host(&mine);
        }
        Ok(())
    }

    /// Sends parts to one rank, which receives them with [`Comm::recv`]. Returns once it has received them.
    pub fn send(&mut self, to: Rank, tag: u64, parts: &[View<'_>]) -> Result<(), CommError> {
        let from = self.rank();
        for parts in parts.chunks(MAX_OFFERS) {
            self.send_parts(to, &message(from, to, tag, parts), parts)?;
        }
        Ok(())
    }

    /// Receives parts that another rank sends with [`Comm::send`].
    pub fn recv(&mut self, from: Rank, tag: u64, parts: &[View<'_>]) -> Result<(), CommError> {
        let to = self.rank();
        for parts in parts.chunks(MAX_OFFERS) {
            self.recv_parts(from, &message(from, to, tag, parts), parts)?;
        }
        Ok(())
    }

    // ---- calls with a single peer -------------------------------------------------------------------------

    fn send_parts(&mut self, peer: Rank, call: &Call, parts: &[View<'_>]) -> Result<(), CommError> {
        self.carrier.post(peer, call, parts)?;
        self.carrier.meet(peer, call)?;
        self.carrier.done(peer)?;
        self.carrier.finish(peer)
    }

    fn recv_parts(&mut self, peer: Rank, call: &Call, parts: &[View<'_>]) -> Result<(), CommError> {
        self.carrier.post(peer, call, &[])?;
        self.carrier.meet(peer, call)?;
        parts.iter().try_for_each(|part| self.carrier.pull(peer, *part))?;
        self.carrier.done(peer)?;
        self.carrier.finish(peer)
    }

    // ---- calls with every other member --------------------------------------------------------------------

    pub(crate) fn call<'v>(
        &self,
        kind: CallKind,
        group: &Group,
        tag: u64,
        parts: impl Iterator<Item = View<'v>> + Clone,
    ) -> Call {
        let dtype = parts.clone().next().map_or(DType::U32, |part| part.dtype());
        let elems = parts.clone().map(|part| part.len() as u64).sum();
        Call { kind, dtype, elems, tag, group: group.hash(), shape: shape_of(parts) }
    }

    pub(crate) fn exchange<'m>(
        &mut self,
        group: &Group,
        call: &Call,
        offer: &mut dyn FnMut(usize) -> Offers<'m>,
        pull: &mut PullFn<'_>,
    ) -> Result<(), CommError> {
        self.open(group, call, offer)?;
        for (m, peer) in others(group) {
            pull(&mut *self.carrier, m, peer)?;
        }
        self.close(group)
    }

    pub(crate) fn open<'m>(
        &mut self,
        group: &Group,
        call: &Call,
        offer: &mut dyn FnMut(usize) -> Offers<'m>,
    ) -> Result<(), CommError> {
        for (m, peer) in others(group) {
            self.carrier.post(peer, call, offer(m).views())?;
        }
        others(group).try_for_each(|(_, peer)| self.carrier.meet(peer, call))
    }

    pub(crate) fn close(&mut self, group: &Group) -> Result<(), CommError> {
        others(group).try_for_each(|(_, peer)| self.carrier.done(peer))?;
        others(group).try_for_each(|(_, peer)| self.carrier.finish(peer))
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

fn member_idx(group: &Group, root: Rank) -> usize {
    group.member_idx(root).unwrap_or_else(|| panic!("{root} is not a member of this collective"))
}

/// The call of a point-to-point message. Its `group` hash encodes the direction, so that two ranks that both send to
/// each other fail to match.
fn message(from: Rank, to: Rank, tag: u64, parts: &[View<'_>]) -> Call {
    Call {
        kind: CallKind::Message,
        dtype: parts[0].dtype(),
        elems: parts.iter().map(|part| part.len() as u64).sum(),
        tag,
        group: fnv(fnv(FNV_START, u64::from(from.0)), u64::from(to.0)),
        shape: shape_of(parts.iter().copied()),
    }
}
