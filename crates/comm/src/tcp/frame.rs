//! The header that precedes the data of every call on a connection.

use crate::call::Call;

/// Size of an encoded header.
pub(crate) const HEADER_BYTES: usize = 56;

const MAGIC: u32 = u32::from_le_bytes(*b"lsf1");

/// A call, its number within the pair, and the number of data bytes that follow if both sides are in the same call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameHeader {
    pub(crate) sequence: u64,
    pub(crate) call: Call,
    pub(crate) bytes: u64,
}

impl FrameHeader {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let [a, b, c, d] = self.call.to_words();
        let mut out = [0; HEADER_BYTES];
        let words = [u64::from(MAGIC), self.sequence, a, b, c, d, self.bytes];
        for (out, word) in out.chunks_exact_mut(8).zip(words) {
            out.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// `None` if the bytes are not a header.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<FrameHeader> {
        let word = |i: usize| u64::from_le_bytes(bytes[i * 8..][..8].try_into().expect("eight bytes"));
        if word(0) != u64::from(MAGIC) {
            return None;
        }
        let call = Call::from_words([word(2), word(3), word(4), word(5)])?;
        Some(FrameHeader { sequence: word(1), call, bytes: word(6) })
    }
}
