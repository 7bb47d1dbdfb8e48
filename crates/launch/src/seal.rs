//! Frames of an authenticated connection: `length 4 | payload | tag 32`. The tag covers the frame's number and
//! direction, so that frames cannot be changed, dropped, replayed or reflected to their sender.

use std::fmt;

use lockstep_core::proof::{PROOF_BYTES, Secret};
use serde::{Serialize, de::DeserializeOwned};

pub(crate) const FROM_RANK: &str = "frame from rank";
pub(crate) const FROM_SERVER: &str = "frame from server";

/// Seals messages in order.
#[derive(Debug)]
pub(crate) struct Sealer {
    key: Secret,
    label: &'static str,
    count: u64,
}

impl Sealer {
    pub(crate) fn new(key: Secret, label: &'static str) -> Sealer {
        Sealer { key, label, count: 0 }
    }

    pub(crate) fn seal(&mut self, message: &impl Serialize) -> Vec<u8> {
        let payload = serde_json::to_vec(message).expect("messages can be serialized");
        let length = u32::try_from(payload.len()).expect("the sender bounds the size of messages");
        let tag = self.key.tag(self.label, &[&self.count.to_le_bytes(), &payload]);
        self.count += 1;
        [&length.to_le_bytes()[..], &payload, &tag].concat()
    }
}

/// Collects bytes and returns verified messages.
#[derive(Debug)]
pub(crate) struct Opener {
    key: Secret,
    label: &'static str,
    count: u64,
    max_bytes: usize,
    buffer: Vec<u8>,
}

/// What is wrong with a frame. After a fault the connection must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameFault {
    TooLong,
    WrongTag,
    NotAMessage,
}

impl fmt::Display for FrameFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FrameFault::TooLong => "a frame exceeds the size limit",
            FrameFault::WrongTag => "a frame failed authentication",
            FrameFault::NotAMessage => "a frame does not contain a valid message",
        })
    }
}

impl Opener {
    pub(crate) fn new(key: Secret, label: &'static str, max_bytes: usize) -> Opener {
        Opener { key, label, count: 0, max_bytes, buffer: Vec::new() }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next message, if it has arrived completely.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameFault> {
        let Some(length) = self.buffer.first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > self.max_bytes {
            return Err(FrameFault::TooLong);
        }
        let end = 4 + length + PROOF_BYTES;
        if self.buffer.len() < end {
            return Ok(None);
        }
        let (payload, tag) = self.buffer[4..end].split_at(length);
        if !self.key.verify(self.label, &[&self.count.to_le_bytes(), payload], tag) {
            return Err(FrameFault::WrongTag);
        }
        let message = serde_json::from_slice(payload).map_err(|_| FrameFault::NotAMessage)?;
        self.count += 1;
        self.buffer.drain(..end);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pair() -> (Sealer, Opener) {
        let key = Secret::from_bytes([3; 32]);
        (Sealer::new(key.clone(), FROM_RANK), Opener::new(key, FROM_RANK, 1000))
    }

    proptest! {
        /// Bytes may be split in any way.
        #[test]
        fn messages_arrive_complete_and_in_order(texts: Vec<String>, cuts in prop::collection::vec(1..40usize, 1..50)) {
            let (mut sealer, mut opener) = pair();
            let texts: Vec<String> = texts.into_iter().map(|t| t.chars().take(100).collect()).collect();
            let bytes: Vec<u8> = texts.iter().flat_map(|text| sealer.seal(text)).collect();
            let (mut got, mut rest) = (Vec::new(), &bytes[..]);
            for cut in cuts.iter().cycle() {
                let (chunk, tail) = rest.split_at((*cut).min(rest.len()));
                opener.push(chunk);
                while let Some(text) = opener.next::<String>().unwrap() {
                    got.push(text);
                }
                rest = tail;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(got, texts);
        }

        #[test]
        fn a_flipped_bit_is_detected(text in ".{0,100}", at: prop::sample::Index, bit in 0..8u32) {
            let (mut sealer, mut opener) = pair();
            let mut bytes = sealer.seal(&text);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            opener.push(&bytes);
            // A changed length may make the opener wait for more bytes.
            prop_assert!(matches!(opener.next::<String>(), Err(_) | Ok(None)));
        }
    }

    #[test]
    fn replayed_reordered_and_reflected_frames_are_detected() {
        let (mut sealer, _) = pair();
        let frames: Vec<Vec<u8>> = ["a", "b"].iter().map(|text| sealer.seal(text)).collect();
        let (_, mut opener) = pair();
        opener.push(&frames[0]);
        opener.push(&frames[0]);
        assert_eq!(opener.next::<String>(), Ok(Some("a".into())));
        assert_eq!(opener.next::<String>(), Err(FrameFault::WrongTag));
        let (_, mut opener) = pair();
        opener.push(&frames[1]);
        assert_eq!(opener.next::<String>(), Err(FrameFault::WrongTag));
        let mut other = Opener::new(Secret::from_bytes([3; 32]), FROM_SERVER, 1000);
        other.push(&frames[0]);
        assert_eq!(other.next::<String>(), Err(FrameFault::WrongTag));
        let (_, mut opener) = pair();
        opener.push(&[255; 4]);
        assert_eq!(opener.next::<String>(), Err(FrameFault::TooLong));
    }
}
