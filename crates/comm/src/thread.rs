//! The carrier between ranks that are threads of one process.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use lockstep_core::{DType, Rank};
use lockstep_device::View;

use crate::call::Call;
use crate::carrier::{Carrier, MAX_OFFERS};
use crate::error::{Abort, CommError};

/// Creates the carriers for `world` ranks that run as threads of this process.
pub fn thread_world(world: u32, deadline: Duration) -> Vec<ThreadCarrier> {
    let n = world as usize;
    let cells = (0..n * n).map(|_| Cell::default()).collect();
    let shared = Arc::new(Shared { cells, world: n });
    (0..world)
        .map(|rank| ThreadCarrier {
            shared: shared.clone(),
            rank: Rank(rank),
            deadline,
            abort: Abort::default(),
            calls: vec![None; n],
            pull_position: vec![(0, 0); n],
        })
        .collect()
}

/// One rank's carrier.
pub struct ThreadCarrier {
    shared: Arc<Shared>,
    rank: Rank,
    deadline: Duration,
    abort: Abort,
    /// The open call with each peer, for error messages.
    calls: Vec<Option<Call>>,
    /// For each peer: the part, and the element in it, at which the next pull starts.
    pull_position: Vec<(usize, usize)>,
}

struct Shared {
    /// Indexed by `from * world + to`.
    cells: Vec<Cell>,
    world: usize,
}

/// The mailbox from one rank to another.
#[derive(Default)]
struct Cell {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    posted: Option<Announcement>,
    /// The receiver has pulled everything it needs.
    done: bool,
    /// The sender has dropped its carrier.
    gone: bool,
}

#[derive(Clone, Copy)]
struct Announcement {
    call: Call,
    offers: [Offer; MAX_OFFERS],
    num_offers: usize,
}

impl Announcement {
    /// The next element to pull: its part, its index in that part, and the offer.
    fn next(&self, mut part: usize, mut start: usize) -> Option<(usize, usize, Offer)> {
        while part < self.num_offers {
            if start < self.offers[part].len {
                return Some((part, start, self.offers[part]));
            }
            (part, start) = (part + 1, 0);
        }
        None
    }
}

/// The address of a view that its owner keeps alive until `finish`, or until its carrier is dropped.
#[derive(Clone, Copy)]
struct Offer {
    base: usize,
    len: usize,
    dtype: DType,
}

impl ThreadCarrier {
    /// Replaces the signal that ends this carrier's waits.
    pub fn with_abort(mut self, abort: Abort) -> ThreadCarrier {
        self.abort = abort;
        self
    }

    fn cell(&self, from: Rank, to: Rank) -> &Cell {
        &self.shared.cells[from.0 as usize * self.shared.world + to.0 as usize]
    }

    fn wait(
        &self,
        peer: Rank,
        (from, to): (Rank, Rank),
        ready: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'_, State>, CommError> {
        let call = || self.calls[peer.0 as usize].map_or_else(String::new, |c| c.to_string());
        let cell = self.cell(from, to);
        let start = Instant::now();
        let mut state = lock(cell);
        loop {
            if ready(&state) {
                return Ok(state);
            }
            self.abort.check()?;
            let (rank, waited) = (self.rank, start.elapsed());
            // A rank that leaves marks only the cells it writes, so check the other direction too.
            if state.gone || (from == rank && self.is_gone(peer)) {
                return Err(self.lost(peer));
            }
            if waited >= self.deadline {
                return Err(CommError::TimedOut { rank, peer, call: call(), waited });
            }
            let slice = (self.deadline - waited).min(Duration::from_millis(20));
            state = cell.changed.wait_timeout(state, slice).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    fn invalid_data(&self, peer: Rank, why: String) -> CommError {
        let call = self.calls[peer.0 as usize].map_or_else(String::new, |c| c.to_string());
        CommError::InvalidData { rank: self.rank, peer, call, why }
    }

    fn lost(&self, peer: Rank) -> CommError {
        let call = self.calls[peer.0 as usize].map_or_else(String::new, |c| c.to_string());
        CommError::Lost { rank: self.rank, peer, call, why: "its thread has ended".into() }
    }

    fn is_gone(&self, peer: Rank) -> bool {
        lock(self.cell(peer, self.rank)).gone
    }
}

impl Carrier for ThreadCarrier {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> u32 {
        self.shared.world as u32
    }

    fn abort(&self) -> Abort {
        self.abort.clone()
    }

    fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    fn post(&mut self, peer: Rank, call: &Call, offers: &[View<'_>]) -> Result<(), CommError> {
        self.calls[peer.0 as usize] = Some(*call);
        self.pull_position[peer.0 as usize] = (0, 0);
        let none = Offer { base: 0, len: 0, dtype: DType::U32 };
        let mut posted = Announcement { call: *call, offers: [none; MAX_OFFERS], num_offers: offers.len() };
        for (offer, view) in posted.offers.iter_mut().zip(offers) {
            *offer = Offer { base: view.as_ptr::<u8>() as usize, len: view.len(), dtype: view.dtype() };
        }
        let cell = self.cell(self.rank, peer);
        *lock(cell) = State { posted: Some(posted), done: false, gone: false };
        cell.changed.notify_all();
        Ok(())
    }

    fn meet(&mut self, peer: Rank, call: &Call) -> Result<(), CommError> {
        let state = self.wait(peer, (peer, self.rank), |s| s.posted.is_some() && !s.done)?;
        let theirs = state.posted.expect("just waited for").call;
        if theirs != *call {
            return Err(CommError::mismatch(self.rank, peer, call, &theirs));
        }
        Ok(())
    }

    fn pull(&mut self, peer: Rank, into: View<'_>) -> Result<(), CommError> {
        if into.is_empty() {
            return Ok(());
        }
        let (part, start) = self.pull_position[peer.0 as usize];
        // Hold the lock while copying: a peer that drops its carrier blocks on it, and frees its memory only after.
        let state = lock(self.cell(peer, self.rank));
        if state.gone {
            return Err(self.lost(peer));
        }
        let Some((part, start, offer)) = state.posted.as_ref().and_then(|posted| posted.next(part, start))
        else {
            return Err(self.invalid_data(peer, "it offers less data than this rank expects".into()));
        };
        if offer.dtype != into.dtype() || start + into.len() > offer.len {
            let why = format!(
                "expected {} {} from element {start} on, but it offers {} {}",
                into.len(),
                into.dtype(),
                offer.len,
                offer.dtype
            );
            return Err(self.invalid_data(peer, why));
        }
        let from = (offer.base + start * offer.dtype.size()) as *const u8;
        let bytes = into.len() * into.dtype().size();
        // SAFETY: the offer is a live view of the peer, and the range is in bounds (just checked). The peer has not
        // dropped its carrier and cannot while the lock is held. It does not change the bytes until this rank is
        // done. Only this rank accesses `into`.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_ptr::<u8>(), bytes) };
        drop(state);
        self.pull_position[peer.0 as usize] = (part, start + into.len());
        Ok(())
    }

    fn done(&mut self, peer: Rank) -> Result<(), CommError> {
        let cell = self.cell(peer, self.rank);
        lock(cell).done = true;
        cell.changed.notify_all();
        Ok(())
    }

    fn finish(&mut self, peer: Rank) -> Result<(), CommError> {
        drop(self.wait(peer, (self.rank, peer), |s| s.done)?);
        Ok(())
    }
}

impl Drop for ThreadCarrier {
    fn drop(&mut self) {
        for peer in 0..self.shared.world as u32 {
            let cell = self.cell(self.rank, Rank(peer));
            lock(cell).gone = true;
            cell.changed.notify_all();
        }
    }
}

fn lock(cell: &Cell) -> MutexGuard<'_, State> {
    cell.state.lock().unwrap_or_else(|e| e.into_inner())
}
