//! Waiting for another process, and waking it.
//!
//! Who waits raises a flag in its own block before it looks a last time; who changes something looks at that
//! flag after the change. With a full fence between the two on either side one of them sees the other, so no
//! wake-up is lost, and no system call is made when nobody sleeps. The bell's value, which the kernel
//! compares when it puts the waiter to sleep, covers the rest.

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use lockstep_core::Rank;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::futex;

use crate::error::CommError;
use crate::shm::{Link, ShmCarrier};

/// The longest sleep before abort, deadline and the peer's life are looked at.
const SLICE: Duration = Duration::from_millis(50);

/// Other work that must go on while a rank waits.
pub(crate) trait Meanwhile {
    /// Does some, for well under a millisecond. `false` if there is none to do.
    fn work(&mut self) -> Result<bool, CommError>;
}

/// Nothing else to do.
pub(crate) struct NoWork;

impl Meanwhile for NoWork {
    fn work(&mut self) -> Result<bool, CommError> {
        Ok(false)
    }
}

impl ShmCarrier {
    /// Waits until `ready`, which looks at what the peer has written with relaxed loads. What the peer wrote
    /// before that is then visible.
    pub(super) fn wait(
        &self,
        peer: Rank,
        meanwhile: &mut dyn Meanwhile,
        ready: &dyn Fn(&Link) -> bool,
    ) -> Result<(), CommError> {
        let link = self.link(peer);
        if ready(link) {
            fence(Ordering::Acquire);
            return Ok(());
        }
        let start = Instant::now();
        self.block.note_core();
        // A peer that has to share this core comes on when this rank sleeps, not while it spins.
        let shares_core = link.peer.block.core() == self.block.core();
        while !shares_core && start.elapsed() < self.spin {
            for _ in 0..32 {
                if ready(link) {
                    fence(Ordering::Acquire);
                    return Ok(());
                }
                std::hint::spin_loop();
            }
        }
        let waiting = &self.block.cell(peer.0).waiting;
        let outcome = self.sleep_until(peer, meanwhile, ready, start);
        waiting.store(0, Ordering::Relaxed);
        fence(Ordering::Acquire);
        outcome
    }

    fn sleep_until(
        &self,
        peer: Rank,
        meanwhile: &mut dyn Meanwhile,
        ready: &dyn Fn(&Link) -> bool,
        start: Instant,
    ) -> Result<(), CommError> {
        let link = self.link(peer);
        let theirs = link.peer.block.cell(self.rank.0);
        let waiting = &self.block.cell(peer.0).waiting;
        let call = || link.call.map_or_else(String::new, |call| call.to_string());
        let lost = |why: &str| CommError::Lost { rank: self.rank, peer, call: call(), why: why.into() };
        loop {
            let bell = theirs.bell.load(Ordering::Relaxed);
            waiting.store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if ready(link) {
                return Ok(());
            }
            self.abort.check()?;
            // Looked at in this order: who leaves has posted all it ever will.
            if link.peer.block.is_gone() || has_ended(&link.peer.process) {
                fence(Ordering::SeqCst);
                return match (ready(link), link.peer.block.is_gone()) {
                    (true, _) => Ok(()),
                    (false, true) => Err(lost("it has left the run")),
                    (false, false) => Err(lost("its process has ended")),
                };
            }
            let waited = start.elapsed();
            if waited >= self.deadline {
                return Err(CommError::TimedOut { rank: self.rank, peer, call: call(), waited });
            }
            if meanwhile.work()? {
                continue;
            }
            let slice = SLICE.min(self.deadline - waited).max(Duration::from_micros(100));
            let slice = Timespec::try_from(slice).expect("a short time");
            // Woken, timed out, interrupted or too late to sleep: the loop looks again in every case.
            let _ = futex::wait(&theirs.bell, futex::Flags::empty(), bell, Some(&slice));
        }
    }

    /// Wakes the peer if it sleeps, after a change that it may wait for.
    pub(super) fn ring(&self, peer: Rank) {
        let bell = &self.block.cell(peer.0).bell;
        bell.fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        let theirs = self.link(peer).peer.block.cell(self.rank.0);
        if theirs.waiting.load(Ordering::Relaxed) != 0 {
            let _ = futex::wake(bell, futex::Flags::empty(), 1);
        }
    }
}

/// Whether the process behind a process file has ended.
fn has_ended(process: &std::os::fd::OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut fds, Some(&now)), Ok(n) if n > 0)
}
