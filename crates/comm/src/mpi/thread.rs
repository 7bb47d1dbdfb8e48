//! The thread that makes every call of MPI, so that a library needs no locks (`MPI_THREAD_FUNNELED`).
//!
//! Callers hand it nonblocking operations through a queue and wait for their completion. The thread starts what
//! arrives and tests what has been started: MPI makes progress only while it is called. A caller that waits too long,
//! or whose run is aborted, gives up for the whole process: the thread then makes no further call.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::library::Mpi;
use super::sys::{self, Count, Displacement, Handle, MpiTable, Status};
use crate::error::{Abort, CommError};

/// How often a waiting caller looks for an abort.
const LOOK: Duration = Duration::from_millis(2);
/// The limit for `MPI_Finalize`. After that the process ends without it.
const FINALIZE_LIMIT: Duration = Duration::from_secs(10);

/// A nonblocking operation. Its buffers and arrays must stay as they are until it is complete. Sums are of f32, other
/// operations move bytes.
#[derive(Clone, Copy)]
pub(super) enum Operation {
    Barrier,
    Broadcast {
        data: *mut c_void,
        bytes: Count,
        root: c_int,
    },
    /// This rank's part is in its place.
    AllGather {
        to: *mut c_void,
        counts: *const Count,
        starts: *const Displacement,
    },
    ReduceScatter {
        from: *const c_void,
        to: *mut c_void,
        counts: *const Count,
    },
    AllReduce {
        data: *mut c_void,
        elems: Count,
    },
    Send {
        data: *const c_void,
        bytes: Count,
        to: c_int,
        tag: c_int,
    },
    Receive {
        data: *mut c_void,
        bytes: Count,
        from: c_int,
        tag: c_int,
    },
}

/// The limits of a caller's waits.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    pub(super) deadline: Duration,
    pub(super) abort: Abort,
}

/// Why a wait ended without its result.
pub(super) enum WaitError {
    /// MPI reported this status.
    Failed(Status),
    TimedOut(Duration),
    Aborted(CommError),
    /// Another caller has given up before.
    GivenUp,
}

/// Counts the operations of one caller that are not complete.
#[derive(Default)]
pub(super) struct Completion {
    state: Mutex<CompletionState>,
    changed: Condvar,
}

#[derive(Default)]
struct CompletionState {
    open: usize,
    failed: Option<Status>,
}

impl Completion {
    fn lock(&self) -> MutexGuard<'_, CompletionState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn complete(&self, status: Status) {
        let mut state = self.lock();
        state.open -= 1;
        if status != sys::SUCCESS {
            state.failed.get_or_insert(status);
        }
        self.changed.notify_all();
    }
}

enum Job {
    Start {
        comm: Handle,
        operation: Operation,
        done: Arc<Completion>,
    },
    /// Calls that may block, such as the creation of communicators.
    Run(Box<dyn FnOnce(&MpiTable) + Send>),
    Finalize,
}

// SAFETY: the caller keeps what the pointers refer to alive until the operation is complete, and handles of MPI may be
// passed between threads; only the thread of MPI uses them.
unsafe impl Send for Job {}

struct Shared {
    jobs: Mutex<VecDeque<Job>>,
    arrived: Condvar,
    /// A caller has given up: no further call of MPI is made.
    given_up: AtomicBool,
}

pub(super) struct MpiThread {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    ended: Mutex<mpsc::Receiver<()>>,
}

impl MpiThread {
    pub(super) fn spawn(mpi: &'static Mpi) -> Result<MpiThread, CommError> {
        let shared = Arc::new(Shared {
            jobs: Mutex::new(VecDeque::with_capacity(64)),
            arrived: Condvar::new(),
            given_up: AtomicBool::new(false),
        });
        let (sender, ended) = mpsc::channel();
        let of_thread = Arc::clone(&shared);
        let run = move || {
            of_thread.serve(&mpi.table);
            let _ = sender.send(());
        };
        let spawned = std::thread::Builder::new().name("mpi".into()).spawn(run);
        let thread =
            spawned.map_err(|e| CommError::Setup { what: "MPI", why: format!("no thread for it: {e}") })?;
        Ok(MpiThread { shared, thread: Mutex::new(Some(thread)), ended: Mutex::new(ended) })
    }

    /// Starts an operation. `done` counts it until it is complete.
    pub(super) fn start(&self, comm: Handle, operation: Operation, done: &Arc<Completion>) {
        done.lock().open += 1;
        self.push(Job::Start { comm, operation, done: Arc::clone(done) });
    }

    /// Waits until at most `open` of the counted operations are not complete.
    pub(super) fn wait(&self, done: &Completion, open: usize, limits: &Limits) -> Result<(), WaitError> {
        let start = Instant::now();
        let mut state = done.lock();
        loop {
            if let Some(status) = state.failed {
                self.give_up();
                return Err(WaitError::Failed(status));
            }
            if state.open <= open {
                return Ok(());
            }
            self.check(start, limits)?;
            state = done.changed.wait_timeout(state, LOOK).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// Runs calls of MPI on its thread, and waits for their result.
    pub(super) fn run<T: Send + 'static>(
        &self,
        limits: &Limits,
        calls: impl FnOnce(&MpiTable) -> T + Send + 'static,
    ) -> Result<T, WaitError> {
        let (sender, receiver) = mpsc::channel();
        let start = Instant::now();
        self.push(Job::Run(Box::new(move |table| {
            // The caller may have given up.
            let _ = sender.send(calls(table));
        })));
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(result) => return Ok(result),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(WaitError::GivenUp),
                Err(mpsc::RecvTimeoutError::Timeout) => self.check(start, limits)?,
            }
        }
    }

    /// Whether a caller has given up.
    pub(super) fn has_given_up(&self) -> bool {
        self.shared.given_up.load(Ordering::Acquire)
    }

    /// Ends all use of MPI in this process.
    pub(super) fn give_up(&self) {
        self.shared.given_up.store(true, Ordering::Release);
        self.shared.arrived.notify_all();
    }

    fn check(&self, start: Instant, limits: &Limits) -> Result<(), WaitError> {
        let why = match limits.abort.check() {
            Err(aborted) => WaitError::Aborted(aborted),
            Ok(()) if self.has_given_up() => WaitError::GivenUp,
            Ok(()) if start.elapsed() >= limits.deadline => WaitError::TimedOut(start.elapsed()),
            Ok(()) => return Ok(()),
        };
        self.give_up();
        Err(why)
    }

    fn push(&self, job: Job) {
        self.shared.lock().push_back(job);
        self.shared.arrived.notify_all();
    }

    /// Finalises MPI together with the other ranks, unless a caller has given up. Waits for a limited time.
    pub(super) fn finalize(&self) {
        let Some(thread) = self.thread.lock().unwrap_or_else(|e| e.into_inner()).take() else { return };
        self.push(Job::Finalize);
        let ended = self.ended.lock().unwrap_or_else(|e| e.into_inner());
        // A thread that hangs in the library ends with the process.
        if !self.has_given_up() && ended.recv_timeout(FINALIZE_LIMIT).is_ok() {
            let _ = thread.join();
        }
    }
}

/// An operation that MPI has started.
struct Active {
    request: Handle,
    done: Arc<Completion>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Job>> {
        self.jobs.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The work of the thread, until it is asked to finalise or a caller has given up.
    fn serve(&self, table: &MpiTable) {
        let mut active: Vec<Active> = Vec::with_capacity(64);
        let mut pause = Pause::default();
        while let Some(job) = self.next(active.is_empty()) {
            match job {
                None => {}
                Some(Job::Run(calls)) => calls(table),
                Some(Job::Finalize) => {
                    // SAFETY: MPI is initialised, and nothing uses it afterwards.
                    unsafe { (table.finalize)() };
                    return;
                }
                Some(Job::Start { comm, operation, done }) => {
                    let mut request = sys::REQUEST_NULL;
                    match operation.start(table, comm, &mut request) {
                        sys::SUCCESS => active.push(Active { request, done }),
                        status => done.complete(status),
                    }
                    pause = Pause::default();
                    // Start everything that has arrived before testing any of it.
                    continue;
                }
            }
            if advance(table, &mut active) {
                pause = Pause::default();
            } else if !active.is_empty() {
                pause.pause();
            }
        }
    }

    /// The next job, if one has arrived; if `wait` is set, waits for one. `None`: a caller has given up.
    fn next(&self, wait: bool) -> Option<Option<Job>> {
        let mut jobs = self.lock();
        loop {
            if self.given_up.load(Ordering::Acquire) {
                return None;
            }
            match jobs.pop_front() {
                None if wait => {
                    jobs = self
                        .arrived
                        .wait_timeout(jobs, Duration::from_millis(50))
                        .map_or_else(|e| e.into_inner().0, |(jobs, _)| jobs);
                }
                job => return Some(job),
            }
        }
    }
}

/// Tests what has been started. Returns whether something is complete.
fn advance(table: &MpiTable, active: &mut Vec<Active>) -> bool {
    let before = active.len();
    active.retain_mut(|one| {
        let mut is_complete = 0;
        // SAFETY: the request was started and is not complete; a null status is `MPI_STATUS_IGNORE`.
        let status = unsafe { (table.test)(&mut one.request, &mut is_complete, std::ptr::null_mut()) };
        if status != sys::SUCCESS || is_complete != 0 {
            one.done.complete(status);
            return false;
        }
        true
    });
    active.len() < before
}

// SAFETY of every call below: the communicator is alive, and the caller keeps buffers and arrays, of the sizes given, as
// they are until the operation is complete ([`Operation`]).
impl Operation {
    fn start(self, table: &MpiTable, comm: Handle, request: &mut Handle) -> Status {
        match self {
            // SAFETY: as above.
            Operation::Barrier => unsafe { (table.barrier)(comm, request) },
            // SAFETY: as above.
            Operation::Broadcast { data, bytes, root } => unsafe {
                (table.broadcast)(data, bytes, sys::BYTE, root, comm, request)
            },
            // SAFETY: as above.
            Operation::AllGather { to, counts, starts } => unsafe {
                (table.all_gather)(sys::IN_PLACE, 0, sys::BYTE, to, counts, starts, sys::BYTE, comm, request)
            },
            // SAFETY: as above.
            Operation::ReduceScatter { from, to, counts } => unsafe {
                (table.reduce_scatter)(from, to, counts, sys::FLOAT, sys::SUM, comm, request)
            },
            // SAFETY: as above.
            Operation::AllReduce { data, elems } => unsafe {
                (table.all_reduce)(sys::IN_PLACE, data, elems, sys::FLOAT, sys::SUM, comm, request)
            },
            // SAFETY: as above.
            Operation::Send { data, bytes, to, tag } => unsafe {
                (table.send)(data, bytes, sys::BYTE, to, tag, comm, request)
            },
            // SAFETY: as above.
            Operation::Receive { data, bytes, from, tag } => unsafe {
                (table.receive)(data, bytes, sys::BYTE, from, tag, comm, request)
            },
        }
    }
}

/// Pauses between tests: it first spins, then yields, then sleeps, to leave the core to others.
#[derive(Default)]
struct Pause {
    num_tests: u32,
}

impl Pause {
    fn pause(&mut self) {
        self.num_tests = self.num_tests.saturating_add(1);
        match self.num_tests {
            ..100 => std::hint::spin_loop(),
            100..5000 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}
