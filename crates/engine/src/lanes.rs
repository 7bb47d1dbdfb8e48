//! Lanes that run side by side: how far each is, who waits for whom, and what stops them all.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

use lockstep_plan::{Lane, Op, Schedule, Wait};

use crate::error::EngineError;

/// Looks before a waiting lane sleeps. Few: on a rank of one core the other lane needs that core.
const SPINS: u32 = 100;

/// The progress of one step on all lanes.
#[derive(Debug)]
pub(crate) struct Lanes {
    /// One more than the last operation that each lane has finished.
    done: [AtomicU32; Lane::COUNT],
    waiting: AtomicU32,
    stopped: AtomicBool,
    turn: Mutex<Turn>,
    changed: Condvar,
}

/// What changes seldom, under the lock that waits sleep on.
#[derive(Debug, Default)]
struct Turn {
    /// Steps begun.
    step: u64,
    /// Lane threads still inside the step.
    busy: u32,
    quit: bool,
    /// Why the step was stopped.
    cause: Option<EngineError>,
}

/// The step was stopped by another lane, which says why.
pub(crate) struct Stopped;

impl Lanes {
    pub(crate) fn new() -> Lanes {
        Lanes {
            done: Default::default(),
            waiting: AtomicU32::new(0),
            stopped: AtomicBool::new(false),
            turn: Mutex::new(Turn::default()),
            changed: Condvar::new(),
        }
    }

    /// Starts a step on `threads` lane threads. They are all at rest.
    pub(crate) fn begin(&self, threads: u32) {
        self.done.iter().for_each(|d| d.store(0, Ordering::Relaxed));
        let mut turn = self.lock();
        turn.step += 1;
        turn.busy = threads;
        drop(turn);
        self.changed.notify_all();
    }

    /// Waits for the lane threads to finish the step, or for one of them to fail.
    pub(crate) fn end(&self) -> Result<(), EngineError> {
        let mut turn = self.lock();
        while turn.busy > 0 && turn.cause.is_none() {
            turn = self.sleep(turn);
        }
        turn.cause.take().map_or(Ok(()), Err)
    }

    /// A lane thread waits for a step after `seen`. `None`: no step will come.
    pub(crate) fn next_step(&self, seen: u64) -> Option<u64> {
        let mut turn = self.lock();
        loop {
            if turn.quit {
                return None;
            }
            if turn.step > seen {
                return Some(turn.step);
            }
            turn = self.changed.wait(turn).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// A lane thread has run all its operations.
    pub(crate) fn leave(&self) {
        self.lock().busy -= 1;
        self.changed.notify_all();
    }

    /// Stops every lane. The first cause stays.
    pub(crate) fn stop(&self, cause: EngineError) {
        let mut turn = self.lock();
        turn.cause.get_or_insert(cause);
        self.stopped.store(true, Ordering::SeqCst);
        drop(turn);
        self.changed.notify_all();
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    pub(crate) fn quit(&self) {
        self.lock().quit = true;
        self.changed.notify_all();
    }

    /// Waits for everything that `op` waits for.
    pub(crate) fn before(&self, op: &Op, schedule: &Schedule) -> Result<(), Stopped> {
        for wait in &op.waits {
            // Steps do not overlap: all of the one before is over.
            if let Wait::This(id) = wait {
                self.wait(schedule.ops[id.0 as usize].lane, id.0)?;
            }
        }
        if self.is_stopped() { Err(Stopped) } else { Ok(()) }
    }

    fn wait(&self, lane: Lane, op: u32) -> Result<(), Stopped> {
        let done = &self.done[lane as usize];
        for _ in 0..SPINS {
            if done.load(Ordering::Acquire) > op {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let mut turn = self.lock();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // Looked at after `waiting` was raised: whoever finishes either sees the one who waits, or is seen.
        while done.load(Ordering::SeqCst) <= op && !self.is_stopped() {
            turn = self.sleep(turn);
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        if self.is_stopped() { Err(Stopped) } else { Ok(()) }
    }

    /// An operation is over.
    pub(crate) fn after(&self, lane: Lane, op: usize) {
        self.done[lane as usize].store(op as u32 + 1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // With the lock taken once, a waiter is either asleep by now or has not looked yet.
            drop(self.lock());
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Turn> {
        self.turn.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn sleep<'a>(&self, turn: MutexGuard<'a, Turn>) -> MutexGuard<'a, Turn> {
        self.changed.wait(turn).unwrap_or_else(|e| e.into_inner())
    }
}
