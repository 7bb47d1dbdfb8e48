//! Collectives over any carrier. Reductions are in `reduce.rs`, byte strings in `bytes.rs`.

use std::sync::Arc;

use lockstep_core::{Bytes, Rank};
use lockstep_device::{Isa, Memory, Pool, View};

use crate::call::{Call, CallKind, FNV_START, fnv, shape_of};
use crate::carrier::{BOUNCE_BYTES, Carrier, MAX_OFFERS};
use crate::comm::{GatherPart, member_idx, others, share};
use crate::error::CommError;
use crate::group::Group;
use crate::offers::Offers;
use crate::traffic::{CountingCarrier, Traffic};

/// Pulls what one member offers.
type PullFn<'a> = dyn FnMut(&mut dyn Carrier, usize, Rank) -> Result<(), CommError> + 'a;

/// The collectives of one rank over a carrier.
pub(crate) struct CarrierComm {
    pub(crate) carrier: Box<dyn Carrier>,
    /// Staging for byte strings: one half for outgoing bytes, one half for incoming bytes.
    pub(crate) bounce: Arc<Memory>,
    pub(crate) isa: Isa,
}

impl CarrierComm {
    pub(crate) fn new(carrier: Box<dyn Carrier>, traffic: Traffic) -> CarrierComm {
        let bounce = carrier.bounce().unwrap_or_else(|| {
            let memory = Memory::allocate(Bytes(BOUNCE_BYTES as u64), &Pool::new(1));
            Arc::new(memory.expect("128 KiB of host memory for small messages can be allocated"))
        });
        assert!(bounce.bytes().0 >= BOUNCE_BYTES as u64, "the carrier's bounce buffer is too small");
        let carrier = Box::new(CountingCarrier { inner: carrier, traffic });
        CarrierComm { carrier, bounce, isa: Isa::detect() }
    }

    pub(crate) fn barrier(&mut self, group: &Group, tag: u64) -> Result<(), CommError> {
        let call = Call::new(CallKind::Barrier, group, tag, [].into_iter());
        self.exchange(group, &call, &mut |_| Offers::none(), &mut |_, _, _| Ok(()))
    }

    pub(crate) fn all_gather(
        &mut self,
        group: &Group,
        tag: u64,
        parts: &[GatherPart<'_>],
    ) -> Result<(), CommError> {
        for parts in parts.chunks(MAX_OFFERS) {
            let call = Call::new(CallKind::AllGather, group, tag, parts.iter().map(|p| p.whole));
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

    pub(crate) fn broadcast(
        &mut self,
        group: &Group,
        tag: u64,
        root: Rank,
        parts: &[View<'_>],
    ) -> Result<(), CommError> {
        let from = member_idx(group, root);
        for parts in parts.chunks(MAX_OFFERS) {
            let call = Call::new(CallKind::Broadcast, group, tag, parts.iter().copied());
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

    pub(crate) fn gather(
        &mut self,
        group: &Group,
        tag: u64,
        root: Rank,
        mine: View<'_>,
        into: &[View<'_>],
    ) -> Result<(), CommError> {
        let to = member_idx(group, root);
        // Each pair agrees on its own transfer only: members do not know each other's lengths.
        let call_for = |piece: View<'_>| {
            let call = Call::new(CallKind::Gather, group, tag, [piece].into_iter());
            Call { group: fnv(call.group, u64::from(root.0)), ..call }
        };
        if group.me() != to {
            let call = call_for(mine);
            return self.send_parts(root, &call, &[mine]);
        }
        assert_eq!(into.len(), group.len(), "the root needs one destination for each member");
        for (m, peer) in others(group) {
            self.carrier.post(peer, &call_for(into[m]), &[])?;
        }
        for (m, peer) in others(group) {
            self.carrier.meet(peer, &call_for(into[m]))?;
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

    pub(crate) fn send(&mut self, to: Rank, tag: u64, parts: &[View<'_>]) -> Result<(), CommError> {
        let from = self.carrier.rank();
        for parts in parts.chunks(MAX_OFFERS) {
            self.send_parts(to, &message(from, to, tag, parts), parts)?;
        }
        Ok(())
    }

    pub(crate) fn recv(&mut self, from: Rank, tag: u64, parts: &[View<'_>]) -> Result<(), CommError> {
        let to = self.carrier.rank();
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
