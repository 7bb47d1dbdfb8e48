//! Reductions over the members of a group, summed in the order of [`lockstep_core::fold`].

use lockstep_core::fold::FOLD_CHUNK;
use lockstep_device::View;

use crate::call::{Call, CallKind};
use crate::carrier::MAX_OFFERS;
use crate::carrier_comm::CarrierComm;
use crate::comm::{GatherPart, share};
use crate::error::CommError;
use crate::fold::{Target, fold};
use crate::group::Group;
use crate::offers::Offers;

/// Up to this many elements, every member computes the whole sum: one exchange instead of two, at the price of more
/// traffic and more additions. This pays off because a carrier sends the header and this little data together.
const DIRECT_ELEMS: usize = 1 << 10;

impl CarrierComm {
    pub(crate) fn reduce_scatter(
        &mut self,
        group: &Group,
        tag: u64,
        parts: &[View<'_>],
        scratch: View<'_>,
    ) -> Result<(), CommError> {
        if group.len() == 1 {
            return Ok(());
        }
        for parts in parts.chunks(MAX_OFFERS) {
            let call = Call::new(CallKind::ReduceScatter, group, tag, parts.iter().copied());
            self.open(group, &call, &mut |m| {
                Offers::from_views(parts.iter().map(|part| share(group, *part, m)))
            })?;
            for part in parts {
                let own = share(group, *part, group.me());
                for start in (0..own.len()).step_by(FOLD_CHUNK) {
                    let chunk = own.slice(start, FOLD_CHUNK.min(own.len() - start));
                    fold(&mut *self.carrier, self.isa, group, chunk, scratch, Target::InPlace)?;
                }
            }
            self.close(group)?;
        }
        Ok(())
    }

    pub(crate) fn all_reduce(
        &mut self,
        group: &Group,
        tag: u64,
        parts: &[View<'_>],
        scratch: View<'_>,
    ) -> Result<(), CommError> {
        if group.len() == 1 {
            return Ok(());
        }
        for parts in parts.chunks(MAX_OFFERS) {
            let elems: usize = parts.iter().map(|part| part.len()).sum();
            if elems <= DIRECT_ELEMS {
                self.all_reduce_direct(group, tag, parts, scratch)?;
                continue;
            }
            self.reduce_scatter(group, tag, parts, scratch)?;
            let mut gathered = [GatherPart { own: View::empty(), whole: View::empty() }; MAX_OFFERS];
            for (g, part) in gathered.iter_mut().zip(parts) {
                *g = GatherPart { own: share(group, *part, group.me()), whole: *part };
            }
            self.all_gather(group, tag, &gathered[..parts.len()])?;
        }
        Ok(())
    }

    /// Every member computes the whole sum. Peers may still be reading this rank's parts, so sums are kept in the
    /// scratch buffer until the call is closed.
    fn all_reduce_direct(
        &mut self,
        group: &Group,
        tag: u64,
        parts: &[View<'_>],
        scratch: View<'_>,
    ) -> Result<(), CommError> {
        let call = Call::new(CallKind::AllReduce, group, tag, parts.iter().copied());
        self.open(group, &call, &mut |_| Offers::from_views(parts.iter().copied()))?;
        let mut at = 0;
        for part in parts {
            fold(&mut *self.carrier, self.isa, group, *part, scratch, Target::Scratch { at })?;
            at += part.len();
        }
        self.close(group)?;
        let mut at = 0;
        for part in parts {
            part.copy_from_host(&scratch.slice(at, part.len()));
            at += part.len();
        }
        Ok(())
    }
}
