//! A fork-join thread pool for one rank.
//!
//! Operations are cut into items that write disjoint outputs; threads take items from a shared counter,
//! so a core that is disturbed does fewer. No result depends on who took which item. A call allocates
//! nothing. Between calls workers spin briefly, because the next operation of a step follows within
//! microseconds, and then sleep.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};

/// Items of one call: `f(item, worker)`.
type Job = *const (dyn Fn(usize, usize) + Sync);

/// About 50 microseconds of pauses before a worker sleeps.
const SPINS: u32 = 1000;

/// A fixed set of threads, the caller included.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    sleepers: Vec<Thread>,
}

struct Shared {
    /// Written by the caller before `epoch` moves, read by workers after they see it move.
    job: UnsafeCell<Option<Job>>,
    items: AtomicUsize,
    next: AtomicUsize,
    /// Workers still inside the current call.
    busy: AtomicUsize,
    epoch: AtomicU32,
    asleep: AtomicUsize,
    stop: AtomicBool,
    failed: AtomicBool,
}

// SAFETY: `job` is written only while no worker is busy and read only after the epoch that published
// it; everything else is atomic.
unsafe impl Sync for Shared {}
// SAFETY: the raw job pointer is used only during the call that lent it (see `Pool::run`).
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `num_threads`, of which the calling thread is one.
    pub fn new(num_threads: usize) -> Pool {
        assert!(num_threads >= 1, "a pool has at least its caller");
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            items: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            epoch: AtomicU32::new(0),
            asleep: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            failed: AtomicBool::new(false),
        });
        let workers: Vec<_> = (1..num_threads)
            .map(|worker| {
                let shared = shared.clone();
                std::thread::Builder::new()
                    .name(format!("compute-{worker}"))
                    .spawn(move || shared.work(worker))
                    .expect("the system can start a thread")
            })
            .collect();
        let sleepers = workers.iter().map(|w| w.thread().clone()).collect();
        Pool { shared, workers, sleepers }
    }

    pub fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `f(item, worker)` once for every item in `0..items`, and returns when all are done. `worker`
    /// is below [`Pool::num_threads`] and is never the same for two items at once, so it can index
    /// scratch memory. Calls do not nest.
    pub fn run(&self, items: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        let shared = &*self.shared;
        if items <= 1 || self.workers.is_empty() {
            (0..items).for_each(|item| f(item, 0));
            return;
        }
        let was_idle = shared.busy.swap(self.workers.len(), Ordering::Acquire);
        assert_eq!(was_idle, 0, "a pool runs one call at a time");
        // SAFETY: the lifetime is erased, but no worker touches the job after `busy` returns to zero,
        // which this call waits for before it returns, also when `f` panics (see `WaitForWorkers`).
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
        let waiting = WaitForWorkers(shared);
        shared.take_items(f, 0);
        drop(waiting);
        assert!(!shared.failed.load(Ordering::Relaxed), "a worker thread panicked; its message is above");
    }
}

/// Waits until every worker has left the call, on the way out of it by return or by panic.
struct WaitForWorkers<'a>(&'a Shared);

impl Drop for WaitForWorkers<'_> {
    fn drop(&mut self) {
        // After a panic the rest of the items is not wanted.
        if std::thread::panicking() {
            self.0.next.store(usize::MAX / 2, Ordering::Relaxed);
        }
        let mut spins = 0u32;
        while self.0.busy.load(Ordering::Acquire) != 0 {
            spins += 1;
            // More threads than cores: let the others run.
            if spins.is_multiple_of(4096) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

impl Shared {
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
            struct Leave<'a>(&'a Shared);
            impl Drop for Leave<'_> {
                fn drop(&mut self) {
                    if std::thread::panicking() {
                        self.0.failed.store(true, Ordering::Relaxed);
                    }
                    self.0.busy.fetch_sub(1, Ordering::Release);
                }
            }
            let leave = Leave(self);
            // SAFETY: the epoch was published after the job was written, and the caller keeps the job
            // alive until `leave` is dropped.
            let job = unsafe { &*(*self.job.get()).expect("an epoch has a job") };
            self.take_items(job, worker);
            drop(leave);
        }
    }

    /// Waits for an epoch other than `seen`: spins a while, then sleeps.
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
            // Checked after `asleep` is raised, so a caller either sees the sleeper or is seen here.
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
            // A worker that panicked has already been reported.
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
    fn a_panic_in_an_item_reaches_the_caller() {
        let pool = Pool::new(2);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(100, &|item, _| assert!(item != 50, "on purpose"));
        }));
        assert!(caught.is_err());
    }
}
