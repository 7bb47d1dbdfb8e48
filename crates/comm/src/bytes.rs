//! All-gather of byte strings on the host, such as norms, losses and hashes.

use lockstep_core::DType;

use crate::call::{Call, CallKind};
use crate::carrier::{BOUNCE_BYTES, Carrier};
use crate::carrier_comm::CarrierComm;
use crate::error::CommError;
use crate::group::Group;
use crate::offers::Offers;

/// Size of the header before each piece, which holds the length of the member's whole string.
const HEADER_BYTES: usize = 8;

/// Payload bytes of one round: a multiple of 64, so that records whose size is a power of two up to 64 are not split.
pub const BYTES_PER_ROUND: usize = (BOUNCE_BYTES / 2 - HEADER_BYTES) / 64 * 64;

impl CarrierComm {
    pub(crate) fn all_gather_bytes(
        &mut self,
        group: &Group,
        tag: u64,
        mine: &[u8],
        each: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), CommError> {
        for round in 0.. {
            let sent = (round * BYTES_PER_ROUND).min(mine.len());
            let piece = &mine[sent..(sent + BYTES_PER_ROUND).min(mine.len())];
            let longest = self.bytes_round(group, tag, round, (piece, mine.len()), each)?;
            if longest <= (round as u64 + 1) * BYTES_PER_ROUND as u64 {
                break;
            }
        }
        Ok(())
    }

    /// Exchanges one piece of every member's string. Returns the length of the longest string.
    fn bytes_round(
        &mut self,
        group: &Group,
        tag: u64,
        round: usize,
        (piece, whole): (&[u8], usize),
        each: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<u64, CommError> {
        let bounce = self.bounce.clone();
        let half = |i: usize| bounce.view(i * BOUNCE_BYTES / 2, BOUNCE_BYTES / 2 / 4, DType::U32);
        let out = half(0).first((HEADER_BYTES + piece.len()).div_ceil(4));
        // SAFETY: between calls, only this rank accesses the outgoing half.
        let bytes = unsafe { out.as_bytes_mut() };
        bytes[..HEADER_BYTES].copy_from_slice(&(whole as u64).to_le_bytes());
        bytes[HEADER_BYTES..][..piece.len()].copy_from_slice(piece);
        bytes[HEADER_BYTES + piece.len()..].fill(0);
        let call = Call { elems: round as u64, ..Call::new(CallKind::Bytes, group, tag, [].into_iter()) };
        self.open(group, &call, &mut |_| Offers::from_views([out].into_iter()))?;
        let mut longest = whole as u64;
        for (m, peer) in group.members().iter().enumerate() {
            if m == group.me() {
                if round == 0 || !piece.is_empty() {
                    each(m, piece);
                }
                continue;
            }
            let carrier: &mut dyn Carrier = &mut *self.carrier;
            let header = half(1).first(HEADER_BYTES / 4);
            carrier.pull(*peer, header)?;
            // SAFETY: only this rank accesses the incoming half.
            let theirs = u64::from_le_bytes(unsafe { header.as_bytes() }.try_into().expect("eight bytes"));
            longest = longest.max(theirs);
            let left = theirs.saturating_sub(round as u64 * BYTES_PER_ROUND as u64);
            let len = left.min(BYTES_PER_ROUND as u64) as usize;
            let body = half(1).slice(HEADER_BYTES / 4, len.div_ceil(4));
            carrier.pull(*peer, body)?;
            if round == 0 || len > 0 {
                // SAFETY: as above.
                each(m, &unsafe { body.as_bytes() }[..len]);
            }
        }
        self.close(group)?;
        Ok(longest)
    }
}
