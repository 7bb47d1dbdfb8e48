//! Mutual authentication: two ranks prove to each other that they belong to the same run.
//!
//! Both hold the session's key. Each side sends a fresh nonce and proves that it holds the key with a MAC over both
//! nonces and all other fields, so nothing recorded on another connection can be replayed. All messages have fixed
//! lengths, and no byte beyond the current message is read before that message has been verified:
//!
//! ```text
//! connecting side                     accepting side
//! hello, tag over it         ->
//!                            <-       hello, tag over both
//! proof over both            ->
//!                            <-       proof over both
//! ```
//!
//! The key is derived from the session's secret and the run id. This file does no I/O; `establish.rs` does.

use lockstep_core::Rank;
use lockstep_core::proof::{PROOF_BYTES, Secret};

/// Incremented when frames or handshakes change. Ranks with different versions refuse each other.
pub(crate) const VERSION: u16 = 1;

const MAGIC: [u8; 8] = *b"lockstep";
const FIELDS_BYTES: usize = 64;
const HELLO_BYTES: usize = FIELDS_BYTES + PROOF_BYTES;

/// Who connects to whom in a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) connects: Rank,
    pub(crate) accepts: Rank,
    pub(crate) world: u32,
}

/// One side of a handshake.
#[derive(Debug)]
pub(crate) struct Handshake {
    key: Secret,
    me: Rank,
    world: u32,
    nonce: [u8; 32],
    stage: Stage,
    peer: Option<Rank>,
    /// The fields of the first and of the second hello.
    first: [u8; FIELDS_BYTES],
    second: [u8; FIELDS_BYTES],
    input: Vec<u8>,
    output: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The accepting side expects the first hello.
    First,
    /// The connecting side expects the second hello.
    Second,
    /// The accepting side expects the proof of the connecting side.
    ConnectProof,
    /// The connecting side expects the proof of the accepting side.
    AcceptProof,
    Done,
}

/// The key of a run's connections.
pub(crate) fn link_key(session: &Secret, run_id: &str) -> Secret {
    session.derive("tcp links", &[&VERSION.to_le_bytes(), run_id.as_bytes()])
}

impl Handshake {
    /// The side of the rank that connects.
    pub(crate) fn connect(key: &Secret, pair: Pair, nonce: [u8; 32]) -> Handshake {
        let mut this = Handshake::new(key, pair.connects, pair.world, nonce, Stage::Second);
        this.peer = Some(pair.accepts);
        this.first = fields(pair.connects, pair.accepts, pair.world, &nonce);
        let tag = key.tag("first hello", &[&this.first]);
        this.output.extend_from_slice(&this.first);
        this.output.extend_from_slice(&tag);
        this
    }

    /// The side of the rank that accepts a connection from any rank.
    pub(crate) fn accept(key: &Secret, me: Rank, world: u32, nonce: [u8; 32]) -> Handshake {
        Handshake::new(key, me, world, nonce, Stage::First)
    }

    fn new(key: &Secret, me: Rank, world: u32, nonce: [u8; 32], stage: Stage) -> Handshake {
        Handshake {
            key: key.clone(),
            me,
            world,
            nonce,
            stage,
            peer: None,
            first: [0; FIELDS_BYTES],
            second: [0; FIELDS_BYTES],
            input: Vec::with_capacity(HELLO_BYTES),
            output: Vec::with_capacity(HELLO_BYTES + PROOF_BYTES),
        }
    }

    /// The other side; authenticated once [`Handshake::is_done`].
    pub(crate) fn peer(&self) -> Option<Rank> {
        self.peer
    }

    /// Whether the other side is authenticated. There may still be output to send.
    pub(crate) fn is_done(&self) -> bool {
        self.stage == Stage::Done
    }

    /// Bytes to send.
    pub(crate) fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// The number of bytes to read now. The caller must not read more.
    pub(crate) fn wants(&self) -> usize {
        let message = match self.stage {
            Stage::First | Stage::Second => HELLO_BYTES,
            Stage::ConnectProof | Stage::AcceptProof => PROOF_BYTES,
            Stage::Done => 0,
        };
        message - self.input.len()
    }

    /// Processes up to [`Handshake::wants`] bytes. An error is the reason to refuse the other side.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Result<(), &'static str> {
        assert!(bytes.len() <= self.wants(), "more bytes than the current message has");
        self.input.extend_from_slice(bytes);
        // Refuse anything without our magic bytes before the rest of it arrives.
        let magic = self.input.len().min(MAGIC.len());
        if matches!(self.stage, Stage::First | Stage::Second) && self.input[..magic] != MAGIC[..magic] {
            return Err("it does not speak lockstep's protocol");
        }
        if self.wants() > 0 {
            return Ok(());
        }
        let message = std::mem::take(&mut self.input);
        match self.stage {
            Stage::First => self.first_hello(&message)?,
            Stage::Second => self.second_hello(&message)?,
            Stage::ConnectProof => {
                self.check("connect proof", &message)?;
                self.output.extend_from_slice(&self.key.tag("accept proof", &[&self.first, &self.second]));
                self.stage = Stage::Done;
            }
            Stage::AcceptProof => {
                self.check("accept proof", &message)?;
                self.stage = Stage::Done;
            }
            Stage::Done => unreachable!("wants nothing"),
        }
        Ok(())
    }

    fn first_hello(&mut self, message: &[u8]) -> Result<(), &'static str> {
        let (hello, tag) = message.split_at(FIELDS_BYTES);
        self.first.copy_from_slice(hello);
        check_version(hello)?;
        if !self.key.verify("first hello", &[hello], tag) {
            return Err("its token, run id or version differs");
        }
        let (from, to, world) = ranks(hello);
        if to != self.me || world != self.world || from.0 >= world || from == self.me {
            return Err("it expects another rank or world size here");
        }
        self.peer = Some(from);
        self.second = fields(self.me, from, self.world, &self.nonce);
        let tag = self.key.tag("second hello", &[&self.first, &self.second]);
        self.output.extend_from_slice(&self.second);
        self.output.extend_from_slice(&tag);
        self.stage = Stage::ConnectProof;
        Ok(())
    }

    fn second_hello(&mut self, message: &[u8]) -> Result<(), &'static str> {
        let (hello, tag) = message.split_at(FIELDS_BYTES);
        self.second.copy_from_slice(hello);
        check_version(hello)?;
        if !self.key.verify("second hello", &[&self.first, hello], tag) {
            return Err("its token, run id or version differs");
        }
        let (from, to, world) = ranks(hello);
        if Some(from) != self.peer || to != self.me || world != self.world {
            return Err("another rank answered");
        }
        self.output.extend_from_slice(&self.key.tag("connect proof", &[&self.first, &self.second]));
        self.stage = Stage::AcceptProof;
        Ok(())
    }

    fn check(&self, label: &str, tag: &[u8]) -> Result<(), &'static str> {
        match self.key.verify(label, &[&self.first, &self.second], tag) {
            true => Ok(()),
            false => Err("its proof is not for this connection"),
        }
    }
}

fn fields(from: Rank, to: Rank, world: u32, nonce: &[u8; 32]) -> [u8; FIELDS_BYTES] {
    let mut out = [0; FIELDS_BYTES];
    out[..8].copy_from_slice(&MAGIC);
    out[8..10].copy_from_slice(&VERSION.to_le_bytes());
    out[12..16].copy_from_slice(&from.0.to_le_bytes());
    out[16..20].copy_from_slice(&to.0.to_le_bytes());
    out[20..24].copy_from_slice(&world.to_le_bytes());
    out[24..56].copy_from_slice(nonce);
    out
}

fn check_version(hello: &[u8]) -> Result<(), &'static str> {
    match hello[8..10] == VERSION.to_le_bytes() {
        true => Ok(()),
        false => Err("its version of the protocol differs"),
    }
}

/// The fields `(from, to, world)` of a hello.
fn ranks(hello: &[u8]) -> (Rank, Rank, u32) {
    let word = |at: usize| u32::from_le_bytes(hello[at..at + 4].try_into().expect("four bytes"));
    (Rank(word(12)), Rank(word(16)), word(20))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIR: Pair = Pair { connects: Rank(2), accepts: Rank(1), world: 4 };

    fn key(run: &str) -> Secret {
        link_key(&Secret::from_text("token"), run)
    }

    /// Passes bytes between both sides, up to `chunk` at a time, until neither has any left.
    fn exchange(a: &mut Handshake, b: &mut Handshake, chunk: usize) -> Result<(), &'static str> {
        loop {
            let mut moved = false;
            for turn in 0..2 {
                let (from, to) = if turn == 0 { (&mut *a, &mut *b) } else { (&mut *b, &mut *a) };
                let n = from.output.len().min(to.wants()).min(chunk);
                if n > 0 {
                    let bytes: Vec<u8> = from.output.drain(..n).collect();
                    to.feed(&bytes)?;
                    moved = true;
                }
            }
            if !moved {
                return Ok(());
            }
        }
    }

    #[test]
    fn two_ranks_of_a_run_authenticate_whatever_the_chunk_size() {
        for chunk in [1, 7, 96, 1000] {
            let mut a = Handshake::connect(&key("run"), PAIR, [1; 32]);
            let mut b = Handshake::accept(&key("run"), Rank(1), 4, [2; 32]);
            exchange(&mut a, &mut b, chunk).unwrap();
            assert!(a.is_done() && b.is_done());
            assert_eq!((a.peer(), b.peer()), (Some(Rank(1)), Some(Rank(2))));
        }
    }

    #[test]
    fn ranks_of_another_run_or_world_are_refused() {
        let accept = || Handshake::accept(&key("run"), Rank(1), 4, [2; 32]);
        let refused = |mut a: Handshake| {
            let mut b = accept();
            let outcome = exchange(&mut a, &mut b, 1000);
            assert!(outcome.is_err() && !a.is_done() && !b.is_done(), "{outcome:?}");
            outcome.unwrap_err()
        };
        let other_run = Handshake::connect(&key("other"), PAIR, [1; 32]);
        assert_eq!(refused(other_run), "its token, run id or version differs");
        let wrong_world = Handshake::connect(&key("run"), Pair { world: 5, ..PAIR }, [1; 32]);
        assert_eq!(refused(wrong_world), "it expects another rank or world size here");
        let wrong_rank = Handshake::connect(&key("run"), Pair { accepts: Rank(0), ..PAIR }, [1; 32]);
        assert_eq!(refused(wrong_rank), "it expects another rank or world size here");
        let mut version = Handshake::connect(&key("run"), PAIR, [1; 32]);
        version.output[8] = 9;
        assert_eq!(refused(version), "its version of the protocol differs");
        let mut b = accept();
        assert_eq!(b.feed(b"GET / HTTP"), Err("it does not speak lockstep's protocol"));
    }

    #[test]
    fn every_flipped_bit_is_refused() {
        for message in 0..4 {
            let len = [96, 96, 32, 32][message];
            for bit in (0..len * 8).step_by(5) {
                let mut a = Handshake::connect(&key("run"), PAIR, [1; 32]);
                let mut b = Handshake::accept(&key("run"), Rank(1), 4, [2; 32]);
                for turn in 0..=message {
                    let (from, to) = if turn % 2 == 0 { (&mut a, &mut b) } else { (&mut b, &mut a) };
                    let mut bytes = std::mem::take(&mut from.output);
                    if turn == message {
                        bytes[bit / 8] ^= 1 << (bit % 8);
                        assert!(to.feed(&bytes).is_err(), "message {message}, bit {bit}");
                        assert!(!to.is_done());
                    } else {
                        to.feed(&bytes).unwrap();
                    }
                }
            }
        }
    }

    #[test]
    fn a_replayed_handshake_is_refused() {
        let mut a = Handshake::connect(&key("run"), PAIR, [1; 32]);
        let mut b = Handshake::accept(&key("run"), Rank(1), 4, [2; 32]);
        let hello = a.output.clone();
        b.feed(&hello).unwrap();
        a.feed(&std::mem::take(&mut b.output)).unwrap();
        let proof = a.output[HELLO_BYTES..].to_vec();
        b.feed(&proof).unwrap();
        assert!(b.is_done());
        // The same bytes once more, to an accepting side with another nonce.
        let mut second = Handshake::accept(&key("run"), Rank(1), 4, [3; 32]);
        second.feed(&hello).unwrap();
        assert_eq!(second.feed(&proof), Err("its proof is not for this connection"));
    }
}
