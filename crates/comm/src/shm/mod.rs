//! Ranks that are processes of one host.
//!
//! Every rank's memory lies in files without names. Peers read from them straight into their own memory, by
//! `pread` or, where there is much to read, through a small moving [`window`]; so a rank's memory stays its
//! own, and bytes are copied once. Who offers what to whom is told in control blocks ([`block`]), which are
//! mapped; small offers are in them. A wait spins for a moment and then sleeps on the peer's bell.

mod block;
mod open;
mod place;
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
use open::Peer;
pub(crate) use open::{FileAddress, Prepared, ShmAddress};
use place::Place;
pub(crate) use wait::{Meanwhile, NoWork};
pub use window::WINDOW;
use window::{WORTH_A_WINDOW, Window};

/// One rank's side.
pub struct ShmCarrier {
    rank: Rank,
    block: Block,
    regions: Vec<Arc<Memory>>,
    /// By rank; `None` for this rank and those on other hosts.
    links: Vec<Option<Link>>,
    deadline: Duration,
    spin: Duration,
    abort: Abort,
}

/// What this rank knows of a pair it is in.
struct Link {
    peer: Peer,
    /// The number of the newest call; both sides count alike.
    sequence: u64,
    /// The open call, for messages.
    call: Option<Call>,
    /// Whether the peer reads this rank's memory in the open call.
    lent: bool,
    met: Met,
    window: Window,
}

/// The peer's post, copied and checked.
struct Met {
    places: [Place; MAX_OFFERS],
    num_places: usize,
    inline: bool,
    /// The place and the element in it that the next pull starts at.
    next: (usize, u64),
}

impl ShmCarrier {
    /// `peers` by rank; those without an address are not reached by this carrier.
    pub(crate) fn open(
        rank: Rank,
        prepared: Prepared,
        peers: &[Option<ShmAddress>],
        (deadline, spin): (Duration, Duration),
        abort: Abort,
    ) -> Result<ShmCarrier, CommError> {
        let world = peers.len() as u32;
        let link = |(peer, at): (u32, &Option<ShmAddress>)| match at {
            Some(at) if peer != rank.0 => Peer::open(at, peer, world).map(|peer| Some(Link::new(peer))),
            _ => Ok(None),
        };
        let links = (0..).zip(peers).map(link).collect::<Result<_, _>>()?;
        Ok(ShmCarrier {
            rank,
            block: prepared.block,
            regions: prepared.regions,
            links,
            deadline,
            spin,
            abort,
        })
    }

    fn link(&self, peer: Rank) -> &Link {
        self.links[peer.0 as usize].as_ref().unwrap_or_else(|| panic!("{peer} is not on this host"))
    }

    fn link_mut(&mut self, peer: Rank) -> &mut Link {
        self.links[peer.0 as usize].as_mut().unwrap_or_else(|| panic!("{peer} is not on this host"))
    }

    fn garbled(&self, peer: Rank, why: impl Into<String>) -> CommError {
        let call = self.link(peer).call.map_or_else(String::new, |call| call.to_string());
        CommError::Garbled { rank: self.rank, peer, call, why: why.into() }
    }

    /// Where `view` lies in this rank's regions.
    fn place(&self, view: &View<'_>) -> Result<Place, CommError> {
        let found = (0u8..).zip(&self.regions).find_map(|(i, memory)| Some((i, memory.shared_offset(view)?)));
        let Some((region, offset)) = found else {
            let why =
                format!("{} {} are offered from memory that peers cannot read", view.len(), view.dtype());
            return Err(CommError::Setup { what: "an offer", why });
        };
        Ok(Place { region, offset: offset as u64, len: view.len() as u64, dtype: view.dtype() })
    }

    /// Writes the offers' places, or their bytes, to the slot of the next post.
    fn fill(&self, slot: &Slot, offers: &[View<'_>]) -> Result<bool, CommError> {
        let padded = |view: &View<'_>| view.bytes().next_multiple_of(8);
        let inline = offers.iter().map(padded).sum::<usize>() <= INLINE_BYTES;
        let mut at = 0;
        for (view, words) in offers.iter().zip(&slot.places) {
            let place = if inline {
                // SAFETY: the caller offers the view to be read until `finish`.
                slot.write_bytes(at, unsafe { view.as_bytes() });
                Place { region: 0, offset: at as u64, len: view.len() as u64, dtype: view.dtype() }
            } else if view.is_empty() {
                Place { dtype: view.dtype(), ..Place::NONE }
            } else {
                self.place(view)?
            };
            at += padded(view);
            store(words, place.to_words());
        }
        let flag = if inline { INLINE } else { 0 };
        slot.offers.store(offers.len() as u64 | flag, Ordering::Relaxed);
        Ok(!inline)
    }

    pub(crate) fn meet_with(
        &mut self,
        peer: Rank,
        call: &Call,
        meanwhile: &mut dyn Meanwhile,
    ) -> Result<(), CommError> {
        let sequence = self.link(peer).sequence;
        let me = self.rank.0;
        self.wait(peer, meanwhile, &|link| {
            link.peer.block.cell(me).posted.load(Ordering::Relaxed) >= sequence
        })?;
        let cell = self.link(peer).peer.block.cell(me);
        let posted = cell.posted.load(Ordering::Relaxed);
        if posted > sequence + 1 {
            return Err(self.garbled(peer, format!("it posted call {posted} of the pair in call {sequence}")));
        }
        let slot = cell.slot(sequence);
        let Some(theirs) = Call::from_words(load(&slot.call)) else {
            return Err(self.garbled(peer, "its call cannot be read"));
        };
        if theirs != *call {
            return Err(CommError::mismatch(self.rank, peer, call, &theirs));
        }
        let met = read_post(slot, &self.link(peer).peer.regions);
        let met = met.ok_or_else(|| self.garbled(peer, "it offers what is not in its memory"))?;
        self.link_mut(peer).met = met;
        Ok(())
    }

    pub(crate) fn finish_with(&mut self, peer: Rank, meanwhile: &mut dyn Meanwhile) -> Result<(), CommError> {
        let (sequence, lent) = (self.link(peer).sequence, self.link(peer).lent);
        let me = self.rank.0;
        if lent {
            self.wait(peer, meanwhile, &|link| {
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
        let lent = self.fill(slot, offers)?;
        cell.posted.store(sequence, Ordering::Release);
        self.block.note_core();
        self.ring(peer);
        let link = self.link_mut(peer);
        (link.sequence, link.call, link.lent) = (sequence, Some(*call), lent);
        Ok(())
    }

    fn meet(&mut self, peer: Rank, call: &Call) -> Result<(), CommError> {
        self.meet_with(peer, call, &mut NoWork)
    }

    fn pull(&mut self, peer: Rank, into: View<'_>) -> Result<(), CommError> {
        if into.is_empty() {
            return Ok(());
        }
        let met = &mut self.link_mut(peer).met;
        let (mut part, mut start) = met.next;
        while part < met.num_places && start == met.places[part].len {
            (part, start) = (part + 1, 0);
        }
        let place = if part < met.num_places { met.places[part] } else { Place::NONE };
        if place.dtype != into.dtype() || start + into.len() as u64 > place.len {
            let why = format!(
                "elements [{start}, +{}] of {} are wanted of an offer of {} {}",
                into.len(),
                into.dtype(),
                place.len,
                place.dtype
            );
            return Err(self.garbled(peer, why));
        }
        met.next = (part, start + into.len() as u64);
        let inline = met.inline;
        let offset = place.offset + start * place.dtype.size() as u64;
        // SAFETY: the caller gives `into` to be written, and any bits are a valid value of every dtype.
        let into = unsafe { into.as_bytes_mut() };
        let me = self.rank.0;
        let link = self.link_mut(peer);
        if inline {
            let slot = link.peer.block.cell(me).slot(link.sequence);
            slot.read_bytes(offset as usize, into);
            return Ok(());
        }
        let (file, size) = &link.peer.regions[place.region as usize];
        let outcome = if place.len * place.dtype.size() as u64 >= WORTH_A_WINDOW {
            link.window.read(file, (place.region, *size), offset, into)
        } else {
            read_all(file, into, offset)
        };
        outcome.map_err(|e| self.garbled(peer, format!("its memory cannot be read: {e}")))
    }

    fn done(&mut self, peer: Rank) -> Result<(), CommError> {
        let link = self.link_mut(peer);
        link.window.close();
        let (inline, sequence) = (link.met.inline, link.sequence);
        // Nobody waits for the end of a call whose bytes were in the cell.
        if !inline {
            self.block.cell(peer.0).done.store(sequence, Ordering::Release);
            self.ring(peer);
        }
        Ok(())
    }

    fn finish(&mut self, peer: Rank) -> Result<(), CommError> {
        self.finish_with(peer, &mut NoWork)
    }
}

impl Drop for ShmCarrier {
    fn drop(&mut self) {
        self.block.leave();
        for peer in (0..).map(Rank).take(self.links.len()) {
            if self.links[peer.0 as usize].is_some() {
                self.ring(peer);
            }
        }
    }
}

impl Link {
    fn new(peer: Peer) -> Link {
        let met = Met { places: [Place::NONE; MAX_OFFERS], num_places: 0, inline: true, next: (0, 0) };
        Link { peer, sequence: 0, call: None, lent: false, met, window: Window::closed() }
    }
}

/// Copies a post and checks every place in it; `None` if one is not there.
fn read_post(slot: &Slot, regions: &[(OwnedFd, u64)]) -> Option<Met> {
    let offers = slot.offers.load(Ordering::Relaxed);
    let inline = offers & INLINE != 0;
    let num_places = usize::try_from(offers & !INLINE).ok().filter(|n| *n <= MAX_OFFERS)?;
    let size = |region: u8| match inline {
        true => Some(INLINE_BYTES as u64),
        false => regions.get(region as usize).map(|(_, len)| *len),
    };
    let mut met = Met { places: [Place::NONE; MAX_OFFERS], num_places, inline, next: (0, 0) };
    for (place, words) in met.places[..num_places].iter_mut().zip(&slot.places) {
        *place = Place::from_words(load(words), size)?;
    }
    Some(met)
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
