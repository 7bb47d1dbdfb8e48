//! A rank's control block: what it has told each other rank of its host.
//!
//! A block is a small file in memory that its owner alone writes; peers map it read-only. It has a cell for
//! every rank. Whatever a peer finds there it copies and checks before use: a rank gone wrong gives others
//! errors and nothing worse, so all access is atomic and nothing is trusted.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};

use crate::carrier::MAX_OFFERS;

/// Bytes of offers that travel in the cell itself.
pub(crate) const INLINE_BYTES: usize = 4096;

const MAGIC: u64 = u64::from_le_bytes(*b"lstpshm1");

/// What one rank tells another. Two slots: a call's stays readable while the next is posted, and the one
/// after that is posted only when the peer has begun the next, so it has left this one.
#[repr(C, align(64))]
pub(crate) struct Cell {
    /// Changes after every change that the peer may wait for; the peer sleeps on it.
    pub(crate) bell: AtomicU32,
    /// The owner sleeps, or is about to, on the peer's bell.
    pub(crate) waiting: AtomicU32,
    /// The number of the newest call posted.
    pub(crate) posted: AtomicU64,
    /// The peer's posts up to this one are no longer needed.
    pub(crate) done: AtomicU64,
    slots: [Slot; 2],
}

/// One post.
#[repr(C, align(64))]
pub(crate) struct Slot {
    pub(crate) call: [AtomicU64; 4],
    /// Offers, and above [`INLINE`] whether their bytes are here.
    pub(crate) offers: AtomicU64,
    /// Where and how many: see `Place`.
    pub(crate) places: [[AtomicU64; 2]; MAX_OFFERS],
    pub(crate) bytes: [AtomicU64; INLINE_BYTES / 8],
}

/// The flag in [`Slot::offers`].
pub(crate) const INLINE: u64 = 1 << 32;

#[repr(C, align(64))]
struct Head {
    magic: AtomicU64,
    rank: AtomicU32,
    world: AtomicU32,
    /// The owner has left the run.
    gone: AtomicU32,
    /// The core that the owner was last seen on, plus one.
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
        size_of::<Head>() + world as usize * size_of::<Cell>()
    }

    /// A new block of `rank`, all zero but for its head.
    pub(crate) fn create(rank: u32, world: u32) -> std::io::Result<Block> {
        let file = memfd_create("lockstep-control", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let len = Block::bytes(world);
        ftruncate(&file, len as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let map = MmapOptions::new().len(len).map_raw(&file)?;
        let block = Block { map, world, file };
        block.head().rank.store(rank, Ordering::Relaxed);
        block.head().world.store(world, Ordering::Relaxed);
        block.head().magic.store(MAGIC, Ordering::Release);
        Ok(block)
    }

    /// Maps the block of `rank` that lies in `file`.
    pub(crate) fn open(file: OwnedFd, rank: u32, world: u32) -> std::io::Result<Block> {
        let wrong = |what: &str| std::io::Error::other(format!("not a control block of rank {rank}: {what}"));
        let len = Block::bytes(world);
        // A file that could shrink under the mapping would kill this process.
        if fstat(&file)?.st_size as u64 != len as u64 {
            return Err(wrong("its size"));
        }
        if !fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
            return Err(wrong("it may shrink"));
        }
        let map = MmapOptions::new().len(len).map_raw_read_only(&file)?;
        let block = Block { map, world, file };
        let head = block.head();
        if head.magic.load(Ordering::Relaxed) != MAGIC
            || head.rank.load(Ordering::Relaxed) != rank
            || head.world.load(Ordering::Relaxed) != world
        {
            return Err(wrong("its head"));
        }
        Ok(block)
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// What the owner tells `peer`.
    pub(crate) fn cell(&self, peer: u32) -> &Cell {
        assert!(peer < self.world, "rank {peer} of a world of {}", self.world);
        let start = size_of::<Head>() + peer as usize * size_of::<Cell>();
        // SAFETY: in bounds of the mapping, which lives as long as this block and never shrinks;
        // page-aligned base and multiples of 64 keep it aligned; all fields are atomics, valid for any bits.
        // A peer's block is mapped read-only and only loaded from, relaxed.
        unsafe { &*self.map.as_ptr().add(start).cast::<Cell>() }
    }

    /// Says that the owner leaves.
    pub(crate) fn leave(&self) {
        self.head().gone.store(1, Ordering::Release);
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.head().gone.load(Ordering::Relaxed) != 0
    }

    /// Notes the core that the owner runs on.
    pub(crate) fn note_core(&self) {
        let core = rustix::thread::sched_getcpu() as u32 + 1;
        self.head().core.store(core, Ordering::Relaxed);
    }

    /// The core that the owner was last seen on; 0 if it never was.
    pub(crate) fn core(&self) -> u32 {
        self.head().core.load(Ordering::Relaxed)
    }

    fn head(&self) -> &Head {
        // SAFETY: as in `cell`; the head is at the start.
        unsafe { &*self.map.as_ptr().cast::<Head>() }
    }
}

impl Slot {
    /// Copies `from` to byte `at` (a multiple of eight) of the slot's bytes.
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

    /// Copies from byte `at` of the slot's bytes.
    pub(crate) fn read_bytes(&self, mut at: usize, mut into: &mut [u8]) {
        while !into.is_empty() {
            let word = self.bytes[at / 8].load(Ordering::Relaxed).to_ne_bytes();
            let from = &word[at % 8..];
            let len = from.len().min(into.len());
            let (now, later) = into.split_at_mut(len);
            now.copy_from_slice(&from[..len]);
            (at, into) = (at + len, later);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_through_a_slot() {
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
    fn only_the_right_block_opens() {
        let block = Block::create(3, 4).unwrap();
        let file = || block.file().try_clone_to_owned().unwrap();
        assert!(Block::open(file(), 3, 4).is_ok());
        assert!(Block::open(file(), 2, 4).is_err());
        assert!(Block::open(file(), 3, 5).is_err());
    }
}
