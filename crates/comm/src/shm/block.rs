//! A rank's control block, in which it announces calls to the other ranks on its host.
//!
//! A block is a small memfd that only its owner writes; peers map it read-only. It has one cell for each rank. Peers
//! copy and validate everything they read from it, and all accesses are atomic, so a faulty rank can cause errors in
//! its peers but never undefined behaviour.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};

use crate::carrier::MAX_OFFERS;

/// Offers of up to this many bytes in total are stored in the cell itself.
pub(crate) const INLINE_BYTES: usize = 4096;

const MAGIC: u64 = u64::from_le_bytes(*b"lstpshm1");

/// What one rank announces to another. It has two slots, so that a call stays readable while the next one is posted.
/// Two are enough: the call after the next is posted only once the peer has started the next, and so no longer reads
/// this one.
#[repr(C, align(64))]
pub(crate) struct Cell {
    /// A futex that the peer sleeps on. The owner increments it after every change that the peer may be waiting for.
    pub(crate) doorbell: AtomicU32,
    /// Non-zero while the owner sleeps on the peer's doorbell, or is about to.
    pub(crate) waiting: AtomicU32,
    /// The number of the latest call posted.
    pub(crate) posted: AtomicU64,
    /// The owner has finished reading the peer's posts up to this number.
    pub(crate) done: AtomicU64,
    slots: [Slot; 2],
}

/// One post.
#[repr(C, align(64))]
pub(crate) struct Slot {
    pub(crate) call: [AtomicU64; 4],
    /// The number of offers, and the flag [`INLINE`].
    pub(crate) offers: AtomicU64,
    /// Encoded `RegionRange`s.
    pub(crate) ranges: [[AtomicU64; 2]; MAX_OFFERS],
    pub(crate) bytes: [AtomicU64; INLINE_BYTES / 8],
}

/// The flag in [`Slot::offers`] that says that the bytes are in [`Slot::bytes`].
pub(crate) const INLINE: u64 = 1 << 32;

#[repr(C, align(64))]
struct Header {
    magic: AtomicU64,
    rank: AtomicU32,
    world: AtomicU32,
    /// Non-zero once the owner has left the run.
    gone: AtomicU32,
    /// The core that the owner last ran on, plus one.
    core: AtomicU32,
}

impl Cell {
    pub(crate) fn slot(&self, sequence: u64) -> &Slot {
        &self.slots[(sequence % 2) as usize]
    }
}

/// A mapped block: this rank's own, or a peer's, which is read-only.
pub(crate) struct Block {
    map: MmapRaw,
    world: u32,
    file: OwnedFd,
}

impl Block {
    fn bytes(world: u32) -> usize {
        size_of::<Header>() + world as usize * size_of::<Cell>()
    }

    /// Creates the block of `rank`, zeroed except for its header.
    pub(crate) fn create(rank: u32, world: u32) -> std::io::Result<Block> {
        let file = memfd_create("lockstep-control", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let len = Block::bytes(world);
        ftruncate(&file, len as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let map = MmapOptions::new().len(len).map_raw(&file)?;
        let block = Block { map, world, file };
        block.header().rank.store(rank, Ordering::Relaxed);
        block.header().world.store(world, Ordering::Relaxed);
        block.header().magic.store(MAGIC, Ordering::Release);
        Ok(block)
    }

    /// Maps the block of `rank` in `file`.
    pub(crate) fn open(file: OwnedFd, rank: u32, world: u32) -> std::io::Result<Block> {
        let wrong = |what: &str| std::io::Error::other(format!("not a control block of rank {rank}: {what}"));
        let len = Block::bytes(world);
        // If the file could shrink under the mapping, an access would kill this process with SIGBUS.
        if fstat(&file)?.st_size as u64 != len as u64 {
            return Err(wrong("unexpected size"));
        }
        if !fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
            return Err(wrong("not sealed against shrinking"));
        }
        let map = MmapOptions::new().len(len).map_raw_read_only(&file)?;
        let block = Block { map, world, file };
        let header = block.header();
        if header.magic.load(Ordering::Relaxed) != MAGIC
            || header.rank.load(Ordering::Relaxed) != rank
            || header.world.load(Ordering::Relaxed) != world
        {
            return Err(wrong("unexpected header"));
        }
        Ok(block)
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The owner's cell for `peer`.
    pub(crate) fn cell(&self, peer: u32) -> &Cell {
        assert!(peer < self.world, "rank {peer} is outside a world of {}", self.world);
        let start = size_of::<Header>() + peer as usize * size_of::<Cell>();
        // SAFETY: the cell is within the mapping, which lives as long as this block and never shrinks. It is aligned:
        // the base is page-aligned and sizes are multiples of 64. All fields are atomics, valid for any bits. A
        // peer's block is mapped read-only, and is only accessed with relaxed loads.
        unsafe { &*self.map.as_ptr().add(start).cast::<Cell>() }
    }

    /// Marks the owner as having left the run.
    pub(crate) fn leave(&self) {
        self.header().gone.store(1, Ordering::Release);
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.header().gone.load(Ordering::Relaxed) != 0
    }

    /// Records the core that the owner runs on.
    pub(crate) fn record_core(&self) {
        let core = rustix::thread::sched_getcpu() as u32 + 1;
        self.header().core.store(core, Ordering::Relaxed);
    }

    /// The core that the owner last ran on, plus one; 0 if none was recorded.
    pub(crate) fn core(&self) -> u32 {
        self.header().core.load(Ordering::Relaxed)
    }

    fn header(&self) -> &Header {
        // SAFETY: as in `cell`; the header is at the start.
        unsafe { &*self.map.as_ptr().cast::<Header>() }
    }
}

impl Slot {
    /// Copies `from` into the slot's inline bytes at offset `at`, a multiple of eight.
    pub(crate) fn write_bytes(&self, at: usize, from: &[u8]) {
        let words = &self.bytes[at / 8..];
        let mut chunks = from.chunks_exact(8);
        for (word, bytes) in words.iter().zip(&mut chunks) {
            word.store(u64::from_ne_bytes(bytes.try_into().expect("eight")), Ordering::Relaxed);
        }
        let rest = chunks.remainder();
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            words[from.len() / 8].store(u64::from_ne_bytes(last), Ordering::Relaxed);
        }
    }

    /// Copies from the slot's inline bytes at offset `at`.
    pub(crate) fn read_bytes(&self, mut at: usize, mut into: &mut [u8]) {
        while !into.is_empty() {
            let word = self.bytes[at / 8].load(Ordering::Relaxed).to_ne_bytes();
            let from = &word[at % 8..];
            let len = from.len().min(into.len());
            let (head, tail) = into.split_at_mut(len);
            head.copy_from_slice(&from[..len]);
            (at, into) = (at + len, tail);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inline_bytes_can_be_read_at_any_offset() {
        let block = Block::create(0, 2).unwrap();
        let slot = block.cell(1).slot(1);
        let data: Vec<u8> = (0..100).collect();
        slot.write_bytes(0, &data[..13]);
        slot.write_bytes(16, &data[..100]);
        for (at, len) in [(0, 13), (3, 8), (16, 100), (17, 99), (23, 1), (115, 1)] {
            let mut out = vec![0; len];
            slot.read_bytes(at, &mut out);
            let start = if at < 16 { at } else { at - 16 };
            assert_eq!(out, data[start..start + len], "{at} +{len}");
        }
    }

    #[test]
    fn a_block_of_another_rank_or_world_is_rejected() {
        let block = Block::create(3, 4).unwrap();
        let file = || block.file().try_clone_to_owned().unwrap();
        assert!(Block::open(file(), 3, 4).is_ok());
        assert!(Block::open(file(), 2, 4).is_err());
        assert!(Block::open(file(), 3, 5).is_err());
    }
}
