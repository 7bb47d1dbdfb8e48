//! Collectives, written once over any carrier.

use lockstep_core::fold::FOLD_CHUNK;
use lockstep_core::{DType, Rank, shard_range};
use lockstep_device::View;

use crate::call::{Call, CallKind};
use crate::carrier::{Carrier, MAX_OFFERS};
use crate::error::CommError;
use crate::fold::fold_into;
use crate::group::Group;

/// One part of an all-gather: this rank's piece and the whole that all members' pieces make up, cut by
/// [`shard_range`]. The piece may lie in the whole already.
#[derive(Clone, Copy, Debug)]
pub struct Gathered<'m> {
    pub own: View<'m>,
    pub whole: View<'m>,
}

/// A rank's side of every collective.
///
/// Calls are made in the same order by all members of a group. Views that peers read must lie in memory
/// the carrier knows. Nothing here allocates.
pub struct Comm {
    carrier: Box<dyn Carrier>,
}

impl Comm {
    pub fn new(carrier: Box<dyn Carrier>) -> Comm {
        Comm { carrier }
    }

    pub fn rank(&self) -> Rank {
        self.carrier.rank()
    }

    pub fn world(&self) -> u32 {
        self.carrier.world()
    }

    /// Returns when every member has called it.
    pub fn barrier(&mut self, group: &Group, tag: u64) -> Result<(), CommError> {
        let call = self.call(CallKind::Barrier, group, DType::U32, 0, tag);
        self.exchange(group, &call, &mut |_| Offers::none(), &mut |_, _, _| Ok(()))
    }

    /// Every member's pieces to every member.
    pub fn all_gather(
        &mut self,
        group: &Group,
        tag: u64,
        parts: &[Gathered<'_>],
    ) -> Result<(), CommError> {
        for parts in parts.chunks(MAX_OFFERS) {
            let dtype = parts[0].whole.dtype();
            let elems = parts.iter().map(|p| p.whole.len() as u64).sum();
            let call = self.call(CallKind::AllGather, group, dtype, elems, tag);
            let members = group.len() as u32;
            let mut offer = |_| Offers::from_views(parts.iter().map(|p| p.own));
            self.exchange(group, &call, &mut offer, &mut |carrier, m, peer| {
                for part in parts {
                    let range = shard_range(part.whole.len(), members, m as u32);
                    carrier.pull(peer, part.whole.slice(range.start, range.elems()))?;
                }
                Ok(())
            })?;
            for part in parts {
                let range = shard_range(part.whole.len(), members, group.me() as u32);
                let home = part.whole.slice(range.start, range.elems());
                if home.as_ptr::<u8>() != part.own.as_ptr::<u8>() {
                    home.copy_from(&part.own);
                }
            }
        }
        Ok(())
    }

    /// Sums f32 parts over the members, in the order of [`lockstep_core::fold`]. Each member ends with the
    /// sum in its own share (by [`shard_range`]) of each part; the other shares keep what they held.
    /// `scratch` has [`lockstep_core::fold::fold_scratch_elems`] elements.
    pub fn reduce_scatter(
        &mut self,
        group: &Group,
        tag: u64,
        parts: &[View<'_>],
        scratch: View<'_>,
    ) -> Result<(), CommError> {
        let members = group.len() as u32;
        for parts in parts.chunks(MAX_OFFERS) {
            let elems = parts.iter().map(|p| p.len() as u64).sum();
            let call = self.call(CallKind::ReduceScatter, group, DType::F32, elems, tag);
            self.open(group, &call, &mut |m| {
                Offers::from_views(parts.iter().map(|part| {
                    let range = shard_range(part.len(), members, m as u32);
                    part.slice(range.start, range.elems())
                }))
            })?;
            for part in parts {
                let range = shard_range(part.len(), members, group.me() as u32);
                let own = part.slice(range.start, range.elems());
                for start in (0..own.len()).step_by(FOLD_CHUNK) {
                    let chunk = own.slice(start, FOLD_CHUNK.min(own.len() - start));
                    fold_into(&mut *self.carrier, group, chunk, scratch)?;
                }
            }
            self.close(group)?;
        }
        Ok(())
    }

    /// Sums f32 parts over the members: every member ends with the whole sum in place.
    pub fn all_reduce(
        &mut self,
        group: &Group,
        tag: u64,
        parts: &[View<'_>],
        scratch: View<'_>,
    ) -> Result<(), CommError> {
        let members = group.len() as u32;
        self.reduce_scatter(group, tag, parts, scratch)?;
        for parts in parts.chunks(MAX_OFFERS) {
            let mut gathered = [Gathered { own: View::empty(), whole: View::empty() }; MAX_OFFERS];
            for (g, part) in gathered.iter_mut().zip(parts) {
                let range = shard_range(part.len(), members, group.me() as u32);
                *g = Gathered { own: part.slice(range.start, range.elems()), whole: *part };
            }
            self.all_gather(group, tag, &gathered[..parts.len()])?;
        }
        Ok(())
    }

    // ---- one call with every other member ---------------------------------------------------------------

    fn call(&self, kind: CallKind, group: &Group, dtype: DType, elems: u64, tag: u64) -> Call {
        Call { kind, dtype, elems, tag, group: group.hash() }
    }

    fn exchange<'m>(
        &mut self,
        group: &Group,
        call: &Call,
        offer: &mut dyn FnMut(usize) -> Offers<'m>,
        take: &mut dyn FnMut(&mut dyn Carrier, usize, Rank) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        self.open(group, call, offer)?;
        for (m, peer) in others(group) {
            take(&mut *self.carrier, m, peer)?;
        }
        self.close(group)
    }

    fn open<'m>(
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

    fn close(&mut self, group: &Group) -> Result<(), CommError> {
        others(group).try_for_each(|(_, peer)| self.carrier.done(peer))?;
        others(group).try_for_each(|(_, peer)| self.carrier.finish(peer))
    }
}

/// The other members, starting after this one, so that not everybody asks the first at once.
fn others(group: &Group) -> impl Iterator<Item = (usize, Rank)> + '_ {
    (1..group.len()).map(|i| (group.me() + i) % group.len()).map(|m| (m, group.members()[m]))
}

/// What one peer is offered.
struct Offers<'m> {
    views: [View<'m>; MAX_OFFERS],
    len: usize,
}

impl<'m> Offers<'m> {
    fn from_views(views: impl Iterator<Item = View<'m>>) -> Offers<'m> {
        let mut offers = Offers::none();
        for view in views {
            offers.views[offers.len] = view;
            offers.len += 1;
        }
        offers
    }

    fn none() -> Offers<'m> {
        Offers { views: [View::empty(); MAX_OFFERS], len: 0 }
    }

    fn views(&self) -> &[View<'m>] {
        &self.views[..self.len]
    }
}
