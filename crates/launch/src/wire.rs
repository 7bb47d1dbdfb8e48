//! The protocol between a rank and the rendezvous, version 1.
//!
//! Until a rank has proved that it has the token, messages have fixed sizes and nothing is parsed:
//!
//! ```text
//! rank   -> server   hello   64 bytes   magic 8 | version 2 | 0 2 | rank 4 | attempt 4 | 0 12 | nonce 32
//! server -> rank     reply   64 bytes   magic 8 | version 2 | status 2 | attempt 4 | 0 16 | nonce 32
//! rank   -> server   proof   32 bytes   tag over everything above
//! server -> rank     reply   64 bytes   the same, with the server's tag instead of the nonce
//! ```
//!
//! Both sides prove that they have the token. Both nonces are fresh, so a recorded proof cannot be replayed. After
//! that both sides send frames, sealed with a key derived from both nonces and with the frame's number (`seal`).
//! Numbers are little-endian.

use lockstep_core::proof::Secret;
use serde::{Deserialize, Serialize};

use crate::abort::{Abort, Member};

pub(crate) const MAGIC: [u8; 8] = *b"LOCKSTEP";
pub(crate) const VERSION: u16 = 1;
pub(crate) const HELLO_BYTES: usize = 64;
pub(crate) const REPLY_BYTES: usize = 64;
pub(crate) const PROOF_BYTES: usize = 32;

/// The largest value that a rank may contribute to an exchange.
pub(crate) const MAX_VALUE_BYTES: usize = 64 << 10;
/// The largest frame that a rank sends: a value in hexadecimal, and the message around it.
pub(crate) const MAX_FRAME_TO_SERVER: usize = 2 * MAX_VALUE_BYTES + 4096;

/// The largest frame that the server sends: the values of all ranks.
pub(crate) fn max_frame_to_rank(world_size: u32) -> usize {
    MAX_FRAME_TO_SERVER.saturating_mul(world_size.max(1) as usize).min(256 << 20)
}

/// The first message of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) version: u16,
    pub(crate) rank: u32,
    pub(crate) attempt: u32,
    pub(crate) nonce: [u8; 32],
}

impl Hello {
    pub(crate) fn to_bytes(self) -> [u8; HELLO_BYTES] {
        let mut out = [0; HELLO_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&self.version.to_le_bytes());
        out[12..16].copy_from_slice(&self.rank.to_le_bytes());
        out[16..20].copy_from_slice(&self.attempt.to_le_bytes());
        out[32..].copy_from_slice(&self.nonce);
        out
    }

    /// `None` if the magic bytes or the zeros are missing.
    pub(crate) fn from_bytes(bytes: &[u8; HELLO_BYTES]) -> Option<Hello> {
        let zeros = bytes[10..12].iter().chain(&bytes[20..32]).all(|&b| b == 0);
        (bytes[..8] == MAGIC && zeros).then(|| Hello {
            version: u16::from_le_bytes([bytes[8], bytes[9]]),
            rank: u32_at(bytes, 12),
            attempt: u32_at(bytes, 16),
            nonce: half(bytes),
        })
    }
}

/// Whether `start` matches the magic bytes, as far as it goes.
pub(crate) fn has_magic(start: &[u8]) -> bool {
    start.iter().zip(&MAGIC).all(|(a, b)| a == b)
}

/// The server's answer to a hello or a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyStatus {
    Continue,
    OtherVersion,
    WrongProof,
    /// The run is at another attempt: its ranks have been restarted more or fewer times than this rank.
    OtherAttempt,
    /// The run is over.
    Over,
}

/// The server's reply to a hello or a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) version: u16,
    pub(crate) status: ReplyStatus,
    pub(crate) attempt: u32,
    /// The nonce in the first reply, the tag in the second.
    pub(crate) value: [u8; 32],
}

const STATUSES: [ReplyStatus; 5] = [
    ReplyStatus::Continue,
    ReplyStatus::OtherVersion,
    ReplyStatus::WrongProof,
    ReplyStatus::OtherAttempt,
    ReplyStatus::Over,
];

impl Reply {
    pub(crate) fn to_bytes(self) -> [u8; REPLY_BYTES] {
        let status = STATUSES.iter().position(|v| *v == self.status).unwrap_or_default() as u16;
        let mut out = [0; REPLY_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&self.version.to_le_bytes());
        out[10..12].copy_from_slice(&status.to_le_bytes());
        out[12..16].copy_from_slice(&self.attempt.to_le_bytes());
        out[32..].copy_from_slice(&self.value);
        out
    }

    pub(crate) fn from_bytes(bytes: &[u8; REPLY_BYTES]) -> Option<Reply> {
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        let status = *STATUSES.get(usize::from(u16::from_le_bytes([bytes[10], bytes[11]])))?;
        (bytes[..8] == MAGIC).then(|| Reply {
            version,
            status,
            attempt: u32_at(bytes, 12),
            value: half(bytes),
        })
    }
}

/// Everything that both sides have sent before the proofs. The proofs cover it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transcript {
    pub(crate) hello: Hello,
    pub(crate) server_nonce: [u8; 32],
}

impl Transcript {
    pub(crate) fn rank_proof(&self, secret: &Secret) -> [u8; PROOF_BYTES] {
        secret.tag("rendezvous rank", &[&self.hello.to_bytes(), &self.server_nonce])
    }

    pub(crate) fn rank_proved(&self, secret: &Secret, tag: &[u8]) -> bool {
        secret.verify("rendezvous rank", &[&self.hello.to_bytes(), &self.server_nonce], tag)
    }

    pub(crate) fn server_proof(&self, secret: &Secret) -> [u8; PROOF_BYTES] {
        secret.tag("rendezvous server", &[&self.hello.to_bytes(), &self.server_nonce])
    }

    pub(crate) fn server_proved(&self, secret: &Secret, tag: &[u8]) -> bool {
        secret.verify("rendezvous server", &[&self.hello.to_bytes(), &self.server_nonce], tag)
    }

    /// The key of this connection.
    pub(crate) fn key(&self, secret: &Secret) -> Secret {
        secret.derive("rendezvous frames", &[&self.hello.to_bytes(), &self.server_nonce])
    }
}

/// A message from a rank to the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ToServer {
    Join {
        member: Member,
        world_size: u32,
        local_world_size: u32,
        /// The version of the program.
        version: String,
    },
    /// A heartbeat.
    Beat,
    /// This rank's value for an exchange.
    Put {
        name: String,
        hex: String,
        timeout_ms: u64,
    },
    Failed {
        text: String,
        code: u8,
    },
    Leave,
}

/// A message from the server to a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ToRank {
    /// All ranks have joined. `run` is a random number that identifies the run, in hexadecimal.
    Start {
        members: Vec<Member>,
        run: String,
    },
    /// A heartbeat.
    Beat,
    /// The values of all ranks for an exchange.
    All {
        name: String,
        hex: Vec<String>,
    },
    Abort(Abort),
    /// Confirms a `Leave` or `Failed`.
    Bye,
}

pub(crate) fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes.iter().flat_map(|b| [b >> 4, b & 15]).map(|d| DIGITS[usize::from(d)] as char).collect()
}

pub(crate) fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |b: u8| (b as char).to_digit(16).map(|d| d as u8);
    let pairs = text.as_bytes().chunks_exact(2);
    if !pairs.remainder().is_empty() {
        return None;
    }
    pairs.map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?)).collect()
}

fn u32_at(bytes: &[u8; 64], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn half(bytes: &[u8; 64]) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(&bytes[32..]);
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn hellos_and_replies_read_back(version: u16, rank: u32, attempt: u32, nonce: [u8; 32], v in 0..5usize) {
            let hello = Hello { version, rank, attempt, nonce };
            prop_assert_eq!(Hello::from_bytes(&hello.to_bytes()), Some(hello));
            let reply = Reply { version, status: STATUSES[v], attempt, value: nonce };
            prop_assert_eq!(Reply::from_bytes(&reply.to_bytes()), Some(reply));
        }

        #[test]
        fn values_read_back(bytes: Vec<u8>) {
            prop_assert_eq!(from_hex(&to_hex(&bytes)), Some(bytes));
        }

        #[test]
        fn decoding_arbitrary_bytes_does_not_panic(bytes in prop::array::uniform32(any::<[u8; 2]>()), text: String) {
            let flat: [u8; 64] = bytes.concat().try_into().unwrap();
            let _ = (Hello::from_bytes(&flat), Reply::from_bytes(&flat), from_hex(&text));
        }
    }
}
