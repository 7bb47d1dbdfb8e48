//! A fork-join thread pool for one rank.
//!
//! An operation is divided into items that write disjoint outputs. Threads take items from a shared counter, so a core
//! that is interrupted takes fewer of them. No result depends on which thread ran which item. A call allocates nothing.
//! Between calls workers spin briefly, because the next operation of a step usually follows within microseconds, and
//! then sleep. A panic in an item is propagated to the caller, and the pool stays usable.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{JoinHandle, Thread};

/// The closure of one call: `f(item, worker)`.
type Job = *const (dyn Fn(usize, usize) + Sync);

/// A worker spins this many times, about 50 microseconds, before it sleeps.
const SPINS: u32 = 1000;

/// A fixed set of threads, including the caller's.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    sleepers: Vec<Thread>,
}

struct Shared {
    /// Written by the caller before `epoch` changes, read by workers after they see the change.
    job: UnsafeCell<Option<Job>>,
    items: AtomicUsize,
    next: AtomicUsize,
    /// Workers still inside the current call.
    busy: AtomicUsize,
    epoch: AtomicU32,
    asleep: AtomicUsize,
    stop: AtomicBool,
    /// The first panic of a worker in the current call.
    panicked: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written only while no worker is busy, and read only after the epoch that published it; everything
// else is atomic.
unsafe impl Sync for Shared {}
// SAFETY: the raw job pointer is used only during the call that provided it (see `Pool::run`).
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `num_threads` threads, one of which is the calling thread.
    pub fn new(num_threads: usize) -> Pool {
        assert!(num_threads >= 1, "a pool needs at least one thread, the caller's");
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            items: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            epoch: AtomicU32::new(0),
            asleep: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panicked: Mutex::new(None),
        });
        let workers: Vec<_> = (1..num_threads)
            .map(|worker| {
                let shared = shared.clone();
                std::thread::Builder::new()
                    .name(format!("compute-{worker}"))
                    .spawn(move || shared.work(worker))
                    .expect("failed to start a thread of the pool")
            })
            .collect();
        let sleepers = workers.iter().map(|w| w.thread().clone()).collect();
        Pool { shared, workers, sleepers }
    }

    pub fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `f(item, worker)` once for every item in `0..items` and returns when all are done. `worker` is below
    /// [`Pool::num_threads`] and is never the same for two items that run at the same time, so it can index scratch
    /// memory. Calls must not be nested.
    pub fn run(&self, items: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        let shared = &*self.shared;
        if items <= 1 || self.workers.is_empty() {
            (0..items).for_each(|item| f(item, 0));
            return;
        }
        let was_idle = shared.busy.swap(self.workers.len(), Ordering::Acquire);
        assert_eq!(was_idle, 0, "a pool runs one call at a time");
        // SAFETY: the lifetime is erased, but no worker touches the job after `busy` returns to zero, and this call
        // waits for that before it returns, even if `f` panics (see `WaitForWorkers`).
        let job = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize, usize) + Sync + '_), Job>(std::ptr::from_ref(f))
        };
        // SAFETY: no worker is inside a call, so nobody reads `job` now.
        unsafe { *shared.job.get() = Some(job) };
        shared.items.store(items, Ordering::Relaxed);
        shared.next.store(0, Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        if shared.asleep.load(Ordering::SeqCst) > 0 {
            self.sleepers.iter().for_each(Thread::unpark);
        }
        let mut waiting = WaitForWorkers { shared, panicked: true };
        shared.take_items(f, 0);
        waiting.panicked = false;
        drop(waiting);
        let panicked = shared.panicked().take();
        if let Some(payload) = panicked {
            resume_unwind(payload);
        }
    }
}

/// Waits in its drop until every worker has left the call, whether the call returns or panics.
struct WaitForWorkers<'a> {
    shared: &'a Shared,
    /// The caller's own item panicked.
    panicked: bool,
}

impl Drop for WaitForWorkers<'_> {
    fn drop(&mut self) {
        if self.panicked {
            self.shared.skip_items();
        }
        let mut spins = 0u32;
        while self.shared.busy.load(Ordering::Acquire) != 0 {
            spins += 1;
            // There may be more threads than cores: let the others run.
            if spins.is_multiple_of(4096) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        if self.panicked {
            // Report the caller's own panic rather than a worker's.
            self.shared.panicked().take();
        }
    }
}

impl Shared {
    /// Skips the remaining items after a panic.
    fn skip_items(&self) {
        self.next.store(usize::MAX / 2, Ordering::Relaxed);
    }

    fn panicked(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.panicked.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn take_items(&self, f: &(dyn Fn(usize, usize) + Sync), worker: usize) {
        let items = self.items.load(Ordering::Relaxed);
        loop {
            let item = self.next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                return;
            }
            f(item, worker);
        }
    }

    fn work(&self, worker: usize) {
        let mut seen = 0;
        loop {
            seen = self.next_epoch(seen);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            // SAFETY: the epoch was published after the job was written, and the caller keeps the job alive until
            // `busy` returns to zero, which waits for this worker.
            let job = unsafe { &*(*self.job.get()).expect("an epoch is published with a job") };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| self.take_items(job, worker))) {
                self.skip_items();
                self.panicked().get_or_insert(payload);
            }
            self.busy.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for an epoch other than `seen`: spins first, then sleeps.
    fn next_epoch(&self, seen: u32) -> u32 {
        for _ in 0..SPINS {
            let epoch = self.epoch.load(Ordering::Acquire);
            if epoch != seen {
                return epoch;
            }
            std::hint::spin_loop();
        }
        self.asleep.fetch_add(1, Ordering::SeqCst);
        let epoch = loop {
            // Check the epoch after raising `asleep`: either the caller sees the sleeper, or this sees the new epoch.
            let epoch = self.epoch.load(Ordering::SeqCst);
            if epoch != seen {
                break epoch;
            }
            std::thread::park();
        };
        self.asleep.fetch_sub(1, Ordering::SeqCst);
        epoch
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        self.sleepers.iter().for_each(Thread::unpark);
        for worker in self.workers.drain(..) {
            // A worker's panic has already been reported.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads)", self.num_threads())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_runs_once_on_any_number_of_threads() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads);
            for items in [0usize, 1, 2, 5, 1000] {
                let counts: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                pool.run(items, &|item, worker| {
                    assert!(worker < threads);
                    counts[item].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn sleeping_workers_wake() {
        let pool = Pool::new(3);
        for _ in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(3));
            let sum = AtomicUsize::new(0);
            pool.run(64, &|item, _| {
                sum.fetch_add(item, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 64 * 63 / 2);
        }
    }

    #[test]
    fn the_pool_stays_usable_after_an_item_panics() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            for round in 0..50 {
                let bad = (round * 7) % 100;
                let payload = catch_unwind(AssertUnwindSafe(|| {
                    pool.run(100, &|item, _| assert!(item != bad, "item {bad}"));
                }))
                .expect_err("an item panics");
                assert_eq!(payload.downcast_ref::<String>(), Some(&format!("item {bad}")));
                let sum = AtomicUsize::new(0);
                pool.run(64, &|item, _| {
                    sum.fetch_add(item, Ordering::Relaxed);
                });
                assert_eq!(sum.into_inner(), 64 * 63 / 2, "the pool must work after a panic");
            }
        }
    }

    #[test]
    fn all_items_may_panic() {
        let pool = Pool::new(4);
        for _ in 0..20 {
            let all = catch_unwind(AssertUnwindSafe(|| pool.run(100, &|_, _| panic!("on purpose"))));
            assert!(all.is_err());
            pool.run(8, &|_, _| {});
        }
    }
}
