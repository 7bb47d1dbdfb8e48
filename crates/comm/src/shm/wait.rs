//! Waiting for another process, and waking it.
//!
//! A waiter sets a flag in its own block and then checks its condition one last time; a writer makes its change and
//! then checks that flag. A full fence between the two steps on both sides ensures that at least one side sees the
//! other, so no wake-up is lost, and no system call is made when nobody sleeps. If the doorbell rings between the
//! waiter's last check and its sleep, the futex value has changed and the kernel does not put it to sleep.

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use lockstep_core::Rank;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::futex;

use crate::error::CommError;
use crate::shm::{Link, ShmCarrier};

/// The longest sleep between checks of the abort signal, the deadline and whether the peer is alive.
const SLICE: Duration = Duration::from_millis(50);

/// Other work that must continue while a rank waits.
pub(crate) trait BackgroundWork {
    /// Works for well under a millisecond. Returns `false` if there is nothing to do.
    fn work(&mut self) -> Result<bool, CommError>;
}

/// For waits without background work.
pub(crate) struct NoBackgroundWork;

impl BackgroundWork for NoBackgroundWork {
    fn work(&mut self) -> Result<bool, CommError> {
        Ok(false)
    }
}

impl ShmCarrier {
    /// Waits until `ready` returns true. It reads what the peer has written with relaxed loads; everything that the
    /// peer wrote before that is visible when the wait returns.
    pub(super) fn wait(
        &self,
        peer: Rank,
        background: &mut dyn BackgroundWork,
        ready: &dyn Fn(&Link) -> bool,
    ) -> Result<(), CommError> {
        let link = self.link(peer);
        if ready(link) {
            fence(Ordering::Acquire);
            return Ok(());
        }
        let start = Instant::now();
        self.block.record_core();
        // Do not spin if the peer last ran on the same core: it can only run once this rank sleeps.
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
        let outcome = self.sleep_until(peer, background, ready, start);
        waiting.store(0, Ordering::Relaxed);
        fence(Ordering::Acquire);
        outcome
    }

    fn sleep_until(
        &self,
        peer: Rank,
        background: &mut dyn BackgroundWork,
        ready: &dyn Fn(&Link) -> bool,
        start: Instant,
    ) -> Result<(), CommError> {
        let link = self.link(peer);
        let theirs = link.peer.block.cell(self.rank.0);
        let waiting = &self.block.cell(peer.0).waiting;
        let call = || link.call.map_or_else(String::new, |call| call.to_string());
        let lost = |why: &str| CommError::Lost { rank: self.rank, peer, call: call(), why: why.into() };
        loop {
            let doorbell = theirs.doorbell.load(Ordering::Relaxed);
            waiting.store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if ready(link) {
                return Ok(());
            }
            self.abort.check()?;
            // Check `ready` again after `is_gone`: a peer that leaves has posted everything it ever will.
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
            if background.work()? {
                continue;
            }
            let slice = SLICE.min(self.deadline - waited).max(Duration::from_micros(100));
            let slice = Timespec::try_from(slice).expect("at most 50 ms");
            // Whether it was woken, timed out, was interrupted or did not sleep at all, the loop checks again.
            let _ = futex::wait(&theirs.doorbell, futex::Flags::empty(), doorbell, Some(&slice));
        }
    }

    /// Wakes the peer if it sleeps. Called after every change that it may be waiting for.
    pub(super) fn ring_doorbell(&self, peer: Rank) {
        let doorbell = &self.block.cell(peer.0).doorbell;
        doorbell.fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        let theirs = self.link(peer).peer.block.cell(self.rank.0);
        if theirs.waiting.load(Ordering::Relaxed) != 0 {
            let _ = futex::wake(doorbell, futex::Flags::empty(), 1);
        }
    }
}

/// Whether the process behind a pidfd has ended.
fn has_ended(process: &std::os::fd::OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut fds, Some(&now)), Ok(n) if n > 0)
}
