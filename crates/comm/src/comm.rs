//! Collectives, written once over any carrier. Sums are in `reduce.rs`, byte strings in `bytes.rs`.

use std::sync::Arc;
use std::time::Duration;

use lockstep_core::{Bytes, DType, Rank};
use lockstep_device::{Isa, Memory, Pool, View};

use crate::call::{Call, CallKind, FNV_START, fnv, shape_of};
use crate::carrier::{BOUNCE_BYTES, Carrier, MAX_OFFERS};
use crate::error::{Abort, CommError};
use crate::group::Group;
use crate::offers::Offers;

/// One part of an all-gather: this rank's piece and the whole that all members' pieces make up, cut by
/// [`Group::share`]. The piece may lie in the whole already.
#[derive(Clone, Copy, Debug)]
pub struct Gathered<'m> {
    pub own: View<'m>,
    pub whole: View<'m>,
}

/// Pulls what one member offers.
type Take<'a> = dyn FnMut(&mut dyn Carrier, usize, Rank) -> Result<(), CommError> + 'a;

/// A rank's side of every collective.
///
/// Calls are made in the same order by all members of a group. Views that peers read must lie in memory
/// the carrier knows. Nothing here allocates.
pub struct Comm {
    pub(crate) carrier: Box<dyn Carrier>,
    /// For byte strings: half goes out, half comes in.
    pub(crate) bounce: Arc<Memory>,
    pub(crate) isa: Isa,
    note: String,
}

impl Comm {
    pub fn new(carrier: Box<dyn Carrier>) -> Comm {
        let bounce = carrier.bounce().unwrap_or_else(|| {
            let memory = Memory::allocate(Bytes(BOUNCE_BYTES as u64), &Pool::new(1));
            Arc::new(memory.expect("the system has 128 KiB for a rank's small messages"))
        });
        assert!(bounce.bytes().0 >= BOUNCE_BYTES as u64, "a carrier's bounce memory is large enough");
        Comm { carrier, bounce, isa: Isa::detect(), note: String::new() }
    }

    pub(crate) fn with_note(self, note: String) -> Comm {
        Comm { note, ..self }
    }

    /// Who carries, and why not something faster, for a line in the log.
    pub fn note(&self) -> &str {
        &self.note
    }

    pub fn rank(&self) -> Rank {
        self.carrier.rank()
    }

    pub fn world(&self) -> u32 {
        self.carrier.world()
    }

    /// Ends every wait when it is raised, from any thread.
    pub fn abort(&self) -> Abort {
        self.carrier.abort()
    }

    /// How long one wait may last, from the next call on.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.carrier.set_deadline(deadline);
    }

    /// Returns when every member has called it.
    pub fn barrier(&mut self, group: &Group, tag: u64) -> Result<(), CommError> {
        let call = self.call(CallKind::Barrier, group, tag, [].into_iter());
        self.exchange(group, &call, &mut |_| Offers::none(), &mut |_, _, _| Ok(()))
    }

    /// Every member's pieces to every member.
    pub fn all_gather(&mut self, group: &Group, tag: u64, parts: &[Gathered<'_>]) -> Result<(), CommError> {
        for parts in parts.chunks(MAX_OFFERS) {
            let call = self.call(CallKind::AllGather, group, tag, parts.iter().map(|p| p.whole));
            let mut offer = |_| Offers::from_views(parts.iter().map(|p| p.own));
            self.exchange(group, &call, &mut offer, &mut |carrier, m, peer| {
                parts.iter().try_for_each(|part| carrier.pull(peer, share(group, part.whole, m)))
            })?;
            for part in parts {
                let home = share(group, part.whole, group.me());
                if home.as_ptr::<u8>() != part.own.as_ptr::<u8>() {
                    home.copy_from_host(&part.own);
                }
            }
        }
        Ok(())
    }

    /// The root's parts to every member, in place. `root` is a member.
    pub fn broadcast(
        &mut self,
        group: &Group,
        tag: u64,
        root: Rank,
        parts: &[View<'_>],
    ) -> Result<(), CommError> {
        let from = place(group, root);
        for parts in parts.chunks(MAX_OFFERS) {
            let call = self.call(CallKind::Broadcast, group, tag, parts.iter().copied());
            // Every pair of a broadcast has the root in it; two that see different roots do not agree.
            let call = Call { group: fnv(call.group, u64::from(root.0)), ..call };
            if group.me() == from {
                self.exchange(
                    group,
                    &call,
                    &mut |_| Offers::from_views(parts.iter().copied()),
                    &mut |_, _, _| Ok(()),
                )?;
            } else {
                self.fetch(root, &call, parts)?;
            }
        }
        Ok(())
    }

    /// Every member's piece to the root, which has a place for each in `into`, in the order of the members;
    /// its own may be there already. The others' `into` is empty. Pieces may differ in length.
    pub fn gather(
        &mut self,
        group: &Group,
        tag: u64,
        root: Rank,
        mine: View<'_>,
        into: &[View<'_>],
    ) -> Result<(), CommError> {
        let to = place(group, root);
        // Pairs agree on the piece that passes between them; members do not know each other's.
        let call_for = |comm: &Comm, piece: View<'_>| {
            let call = comm.call(CallKind::Gather, group, tag, [piece].into_iter());
            Call { group: fnv(call.group, u64::from(root.0)), ..call }
        };
        if group.me() != to {
            let call = call_for(self, mine);
            return self.lend(root, &call, &[mine]);
        }
        assert_eq!(into.len(), group.len(), "a root has one place for every member's piece");
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

    /// Parts to one rank, which receives them by [`Comm::recv`]. Returns when it has them.
    pub fn send(&mut self, to: Rank, tag: u64, parts: &[View<'_>]) -> Result<(), CommError> {
        let from = self.rank();
        for parts in parts.chunks(MAX_OFFERS) {
            self.lend(to, &message(from, to, tag, parts), parts)?;
        }
        Ok(())
    }

    /// Parts that another rank sends by [`Comm::send`].
    pub fn recv(&mut self, from: Rank, tag: u64, parts: &[View<'_>]) -> Result<(), CommError> {
        let to = self.rank();
        for parts in parts.chunks(MAX_OFFERS) {
            self.fetch(from, &message(from, to, tag, parts), parts)?;
        }
        Ok(())
    }

    // ---- calls with one peer ------------------------------------------------------------------------------

    fn lend(&mut self, peer: Rank, call: &Call, parts: &[View<'_>]) -> Result<(), CommError> {
        self.carrier.post(peer, call, parts)?;
        self.carrier.meet(peer, call)?;
        self.carrier.done(peer)?;
        self.carrier.finish(peer)
    }

    fn fetch(&mut self, peer: Rank, call: &Call, parts: &[View<'_>]) -> Result<(), CommError> {
        self.carrier.post(peer, call, &[])?;
        self.carrier.meet(peer, call)?;
        parts.iter().try_for_each(|part| self.carrier.pull(peer, *part))?;
        self.carrier.done(peer)?;
        self.carrier.finish(peer)
    }

    // ---- one call with every other member -----------------------------------------------------------------

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
        take: &mut Take<'_>,
    ) -> Result<(), CommError> {
        self.open(group, call, offer)?;
        for (m, peer) in others(group) {
            take(&mut *self.carrier, m, peer)?;
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

/// The other members, starting after this one, so that not everybody asks the first at once.
pub(crate) fn others(group: &Group) -> impl Iterator<Item = (usize, Rank)> + '_ {
    (1..group.len()).map(|i| (group.me() + i) % group.len()).map(|m| (m, group.members()[m]))
}

/// Member `m`'s share of a part.
pub(crate) fn share<'m>(group: &Group, part: View<'m>, m: usize) -> View<'m> {
    let range = group.share(part.len(), m);
    part.slice(range.start, range.elems())
}

fn place(group: &Group, root: Rank) -> usize {
    group.place(root).unwrap_or_else(|| panic!("{root} is not a member of this collective"))
}

/// The call of a message. Its "group" is the direction, so that two ranks that both send do not agree.
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
