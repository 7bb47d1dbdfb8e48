//! The shared-memory carrier, for ranks that are processes on one host.
//!
//! Each rank's memory lies in unnamed files (memfd). Peers copy from them directly into their own memory, with
//! `pread` or, for long reads, through a small moving [`window`]. So bytes are copied once, and a rank's memory use
//! stays its own. Ranks announce their offers in memory-mapped control blocks ([`block`]), which also hold the bytes
//! of small offers. A wait spins briefly and then sleeps on the peer's doorbell.

mod block;
mod open;
mod region_range;
#[cfg(test)]
mod tests;
mod wait;
mod window;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lockstep_core::Rank;
use lockstep_device::{Memory, View};

use crate::call::Call;
use crate::carrier::{Carrier, MAX_OFFERS};
use crate::error::{Abort, CommError};
use block::{Block, INLINE, INLINE_BYTES, Slot};
use open::PeerMemory;
pub(crate) use open::{FileAddress, ShmAddress, ShmExport};
use region_range::RegionRange;
pub(crate) use wait::{BackgroundWork, NoBackgroundWork};
pub use window::SHM_WINDOW_BYTES;
use window::{MIN_WINDOW_READ_BYTES, MappedWindow};

/// One rank's carrier.
pub struct ShmCarrier {
    rank: Rank,
    block: Block,
    regions: Vec<Arc<Memory>>,
    /// Indexed by rank; `None` for this rank and for ranks on other hosts.
    links: Vec<Option<Link>>,
    deadline: Duration,
    spin: Duration,
    abort: Abort,
}

/// This rank's state for one peer.
struct Link {
    peer: PeerMemory,
    /// The number of the latest call; both sides count the same way.
    sequence: u64,
    /// The open call, for error messages.
    call: Option<Call>,
    /// Whether the peer reads this rank's memory in the open call.
    exported: bool,
    post: PeerPost,
    window: MappedWindow,
}

/// A validated copy of what the peer posted.
struct PeerPost {
    ranges: [RegionRange; MAX_OFFERS],
    num_ranges: usize,
    /// The bytes are in the control block, not in the peer's regions.
    inline: bool,
    /// The range, and the element in it, at which the next pull starts.
    next: (usize, u64),
}

impl ShmCarrier {
    /// `peers` is indexed by rank; this carrier does not connect to ranks without an address.
    pub(crate) fn open(
        rank: Rank,
        export: ShmExport,
        peers: &[Option<ShmAddress>],
        (deadline, spin): (Duration, Duration),
        abort: Abort,
    ) -> Result<ShmCarrier, CommError> {
        let world = peers.len() as u32;
        let link = |(peer, at): (u32, &Option<ShmAddress>)| match at {
            Some(at) if peer != rank.0 => PeerMemory::open(at, peer, world).map(|peer| Some(Link::new(peer))),
            _ => Ok(None),
        };
        let links = (0..).zip(peers).map(link).collect::<Result<_, _>>()?;
        Ok(ShmCarrier { rank, block: export.block, regions: export.regions, links, deadline, spin, abort })
    }

    fn link(&self, peer: Rank) -> &Link {
        self.links[peer.0 as usize].as_ref().unwrap_or_else(|| panic!("{peer} is not on this host"))
    }

    fn link_mut(&mut self, peer: Rank) -> &mut Link {
        self.links[peer.0 as usize].as_mut().unwrap_or_else(|| panic!("{peer} is not on this host"))
    }

    fn invalid_data(&self, peer: Rank, why: impl Into<String>) -> CommError {
        let call = self.link(peer).call.map_or_else(String::new, |call| call.to_string());
        CommError::InvalidData { rank: self.rank, peer, call, why: why.into() }
    }

    /// The position of `view` in this rank's regions.
    fn locate(&self, view: &View<'_>) -> Result<RegionRange, CommError> {
        let found = (0u8..).zip(&self.regions).find_map(|(i, memory)| Some((i, memory.shared_offset(view)?)));
        let Some((region, offset)) = found else {
            let why = format!("{} {} lie in memory that peers cannot read", view.len(), view.dtype());
            return Err(CommError::Setup { what: "a transfer through shared memory", why });
        };
        Ok(RegionRange { region, offset: offset as u64, len: view.len() as u64, dtype: view.dtype() })
    }

    /// Writes the ranges of the offers, or their bytes if they are small, to the slot of the next post. Returns
    /// whether peers will read this rank's regions.
    fn fill(&self, slot: &Slot, offers: &[View<'_>]) -> Result<bool, CommError> {
        let padded = |view: &View<'_>| view.bytes().next_multiple_of(8);
        let inline = offers.iter().map(padded).sum::<usize>() <= INLINE_BYTES;
        let mut at = 0;
        for (view, words) in offers.iter().zip(&slot.ranges) {
            let range = if inline {
                // SAFETY: the caller keeps the offered bytes alive and unchanged until `finish`.
                slot.write_bytes(at, unsafe { view.as_bytes() });
                RegionRange { region: 0, offset: at as u64, len: view.len() as u64, dtype: view.dtype() }
            } else if view.is_empty() {
                RegionRange { dtype: view.dtype(), ..RegionRange::NONE }
            } else {
                self.locate(view)?
            };
            at += padded(view);
            store(words, range.to_words());
        }
        let flag = if inline { INLINE } else { 0 };
        slot.offers.store(offers.len() as u64 | flag, Ordering::Relaxed);
        Ok(!inline)
    }

    pub(crate) fn meet_with(
        &mut self,
        peer: Rank,
        call: &Call,
        background: &mut dyn BackgroundWork,
    ) -> Result<(), CommError> {
        let sequence = self.link(peer).sequence;
        let me = self.rank.0;
        self.wait(peer, background, &|link| {
            link.peer.block.cell(me).posted.load(Ordering::Relaxed) >= sequence
        })?;
        let cell = self.link(peer).peer.block.cell(me);
        let posted = cell.posted.load(Ordering::Relaxed);
        if posted > sequence + 1 {
            return Err(self.invalid_data(
                peer,
                format!("it posted call {posted}, but this rank is in call {sequence}"),
            ));
        }
        let slot = cell.slot(sequence);
        let Some(theirs) = Call::from_words(load(&slot.call)) else {
            return Err(self.invalid_data(peer, "its announcement cannot be decoded"));
        };
        if theirs != *call {
            return Err(CommError::mismatch(self.rank, peer, call, &theirs));
        }
        let post = read_post(slot, &self.link(peer).peer.regions);
        let post =
            post.ok_or_else(|| self.invalid_data(peer, "it offers bytes outside its shared memory"))?;
        self.link_mut(peer).post = post;
        Ok(())
    }

    pub(crate) fn finish_with(
        &mut self,
        peer: Rank,
        background: &mut dyn BackgroundWork,
    ) -> Result<(), CommError> {
        let (sequence, exported) = (self.link(peer).sequence, self.link(peer).exported);
        let me = self.rank.0;
        if exported {
            self.wait(peer, background, &|link| {
                link.peer.block.cell(me).done.load(Ordering::Relaxed) >= sequence
            })?;
        }
        Ok(())
    }
}

impl Carrier for ShmCarrier {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> u32 {
        self.links.len() as u32
    }

    fn abort(&self) -> Abort {
        self.abort.clone()
    }

    fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    fn bounce(&self) -> Option<Arc<Memory>> {
        self.regions.last().cloned()
    }

    fn post(&mut self, peer: Rank, call: &Call, offers: &[View<'_>]) -> Result<(), CommError> {
        assert!(offers.len() <= MAX_OFFERS, "{} offers in one call", offers.len());
        let sequence = self.link(peer).sequence + 1;
        let cell = self.block.cell(peer.0);
        let slot = cell.slot(sequence);
        store(&slot.call, call.to_words());
        let exported = self.fill(slot, offers)?;
        cell.posted.store(sequence, Ordering::Release);
        self.block.record_core();
        self.ring_doorbell(peer);
        let link = self.link_mut(peer);
        (link.sequence, link.call, link.exported) = (sequence, Some(*call), exported);
        Ok(())
    }

    fn meet(&mut self, peer: Rank, call: &Call) -> Result<(), CommError> {
        self.meet_with(peer, call, &mut NoBackgroundWork)
    }

    fn pull(&mut self, peer: Rank, into: View<'_>) -> Result<(), CommError> {
        if into.is_empty() {
            return Ok(());
        }
        let post = &mut self.link_mut(peer).post;
        let (mut part, mut start) = post.next;
        while part < post.num_ranges && start == post.ranges[part].len {
            (part, start) = (part + 1, 0);
        }
        let range = if part < post.num_ranges { post.ranges[part] } else { RegionRange::NONE };
        if range.dtype != into.dtype() || start + into.len() as u64 > range.len {
            let why = format!(
                "expected {} {} from element {start} on, but it offers {} {}",
                into.len(),
                into.dtype(),
                range.len,
                range.dtype
            );
            return Err(self.invalid_data(peer, why));
        }
        post.next = (part, start + into.len() as u64);
        let inline = post.inline;
        let offset = range.offset + start * range.dtype.size() as u64;
        // SAFETY: the caller passes `into` to be written, and any bits are a valid value of every dtype.
        let into = unsafe { into.as_bytes_mut() };
        let me = self.rank.0;
        let link = self.link_mut(peer);
        if inline {
            let slot = link.peer.block.cell(me).slot(link.sequence);
            slot.read_bytes(offset as usize, into);
            return Ok(());
        }
        let (file, size) = &link.peer.regions[range.region as usize];
        let outcome = if range.len * range.dtype.size() as u64 >= MIN_WINDOW_READ_BYTES {
            link.window.read(file, (range.region, *size), offset, into)
        } else {
            read_all(file, into, offset)
        };
        outcome.map_err(|e| self.invalid_data(peer, format!("its memory cannot be read: {e}")))
    }

    fn done(&mut self, peer: Rank) -> Result<(), CommError> {
        let link = self.link_mut(peer);
        link.window.close();
        let (inline, sequence) = (link.post.inline, link.sequence);
        // If the bytes were inline, the peer does not wait for this rank to finish.
        if !inline {
            self.block.cell(peer.0).done.store(sequence, Ordering::Release);
            self.ring_doorbell(peer);
        }
        Ok(())
    }

    fn finish(&mut self, peer: Rank) -> Result<(), CommError> {
        self.finish_with(peer, &mut NoBackgroundWork)
    }
}

impl Drop for ShmCarrier {
    fn drop(&mut self) {
        self.block.leave();
        for peer in (0..).map(Rank).take(self.links.len()) {
            if self.links[peer.0 as usize].is_some() {
                self.ring_doorbell(peer);
            }
        }
    }
}

impl Link {
    fn new(peer: PeerMemory) -> Link {
        let post =
            PeerPost { ranges: [RegionRange::NONE; MAX_OFFERS], num_ranges: 0, inline: true, next: (0, 0) };
        Link { peer, sequence: 0, call: None, exported: false, post, window: MappedWindow::closed() }
    }
}

/// Copies a post and validates every range in it; `None` if one lies outside the peer's regions.
fn read_post(slot: &Slot, regions: &[(OwnedFd, u64)]) -> Option<PeerPost> {
    let offers = slot.offers.load(Ordering::Relaxed);
    let inline = offers & INLINE != 0;
    let num_ranges = usize::try_from(offers & !INLINE).ok().filter(|n| *n <= MAX_OFFERS)?;
    let size = |region: u8| match inline {
        true => Some(INLINE_BYTES as u64),
        false => regions.get(region as usize).map(|(_, len)| *len),
    };
    let mut post = PeerPost { ranges: [RegionRange::NONE; MAX_OFFERS], num_ranges, inline, next: (0, 0) };
    for (range, words) in post.ranges[..num_ranges].iter_mut().zip(&slot.ranges) {
        *range = RegionRange::from_words(load(words), size)?;
    }
    Some(post)
}

/// Reads until `into` is full.
fn read_all(file: &OwnedFd, mut into: &mut [u8], mut offset: u64) -> std::io::Result<()> {
    while !into.is_empty() {
        match rustix::io::pread(file, &mut *into, offset) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => (into, offset) = (&mut into[n..], offset + n as u64),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn store<const N: usize>(to: &[AtomicU64; N], words: [u64; N]) {
    to.iter().zip(words).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
}

fn load<const N: usize>(from: &[AtomicU64; N]) -> [u64; N] {
    std::array::from_fn(|i| from[i].load(Ordering::Relaxed))
}
