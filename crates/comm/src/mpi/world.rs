//! MPI in this process: it is initialised once, and finalised when nothing uses it any more.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lockstep_core::Rank;
use lockstep_device::Memory;

use super::communicator::MpiComm;
use super::library::Mpi;
use super::sys::{self, Handle, MpiTable, Status};
use super::thread::{Limits, MpiThread, WaitError};
use crate::comm::Comm;
use crate::error::{Abort, CommError};

/// What [`MpiWorld::start`] needs to know.
pub struct MpiSpec {
    pub mpi: &'static Mpi,
    /// This rank and the number of ranks, as the launcher says. MPI must say the same.
    pub rank: Rank,
    pub world: u32,
    /// The limit for setting up MPI and communicators, and for collectives unless [`Comm::set_deadline`] sets another.
    pub deadline: Duration,
    pub abort: Abort,
}

/// A handle that is passed to the thread of MPI.
#[derive(Clone, Copy, Debug)]
pub(super) struct SentHandle(pub(super) Handle);

// SAFETY: handles are names of objects; only the thread of MPI uses them.
unsafe impl Send for SentHandle {}
// SAFETY: as above.
unsafe impl Sync for SentHandle {}

/// MPI in this process.
pub struct MpiWorld {
    pub(super) mpi: &'static Mpi,
    pub(super) thread: MpiThread,
    pub(super) rank: Rank,
    pub(super) world: u32,
    pub(super) limits: Limits,
    /// The ranks of this host, and their communicator.
    pub(super) host_members: Vec<Rank>,
    pub(super) host_comm: SentHandle,
}

impl MpiWorld {
    /// Initialises MPI. Every rank must call it, once in its process.
    pub fn start(spec: MpiSpec) -> Result<Arc<MpiWorld>, CommError> {
        static STARTED: AtomicBool = AtomicBool::new(false);
        if STARTED.swap(true, Ordering::AcqRel) {
            return Err(setup("a process can initialise it only once".into()));
        }
        let limits = Limits { deadline: spec.deadline, abort: spec.abort };
        let thread = MpiThread::spawn(spec.mpi)?;
        let found = thread.run(&limits, init).map_err(|e| setup_failed(spec.mpi, "initialising it", e))?;
        let found = found.map_err(|(call, status)| {
            thread.give_up();
            setup(format!("{call} failed: {}", spec.mpi.meaning_of(status).0))
        })?;
        if (found.rank, found.size) != (spec.rank.0 as c_int, spec.world as c_int) {
            thread.give_up();
            let (path, version) = (spec.mpi.path().display(), &spec.mpi.version);
            return Err(setup(format!(
                "{version} ({path}) takes this process for rank {} of {}, but its launcher started it as {} of {}; \
                 start ranks with the mpiexec of that library",
                found.rank, found.size, spec.rank, spec.world
            )));
        }
        Ok(Arc::new(MpiWorld {
            mpi: spec.mpi,
            thread,
            rank: spec.rank,
            world: spec.world,
            limits,
            host_members: found.host_members.iter().map(|rank| Rank(*rank as u32)).collect(),
            host_comm: found.host_comm,
        }))
    }

    /// The signal that ends every wait.
    pub fn abort(&self) -> Abort {
        self.limits.abort.clone()
    }

    /// A communicator of its own for one lane. All ranks must call it in the same order. `regions` is the memory that
    /// collectives read and write; it is kept if the run fails, because MPI may still know its addresses.
    pub fn comm(self: &Arc<MpiWorld>, regions: Vec<Arc<Memory>>) -> Result<Comm, CommError> {
        let note = format!("{} ({})", self.mpi.version, self.mpi.path().display());
        Ok(Comm::over_mpi(MpiComm::connect(Arc::clone(self), regions)?).with_note(note))
    }

    /// Runs calls of MPI on its thread. `what` names them in error messages.
    pub(super) fn run<T: Send + 'static>(
        &self,
        what: &str,
        calls: impl FnOnce(&MpiTable) -> Result<T, Failed> + Send + 'static,
    ) -> Result<T, CommError> {
        match self.thread.run(&self.limits, calls) {
            Ok(Ok(result)) => Ok(result),
            Ok(Err((call, status))) => {
                self.thread.give_up();
                Err(setup(format!("{call} failed in {what}: {}", self.mpi.meaning_of(status).0)))
            }
            Err(why) => Err(setup_failed(self.mpi, what, why)),
        }
    }
}

impl std::fmt::Debug for MpiWorld {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MpiWorld({} of {}, {})", self.rank, self.world, self.mpi.version)
    }
}

impl Drop for MpiWorld {
    fn drop(&mut self) {
        // Ranks that fail do not reach `MPI_Finalize`, so this one must not wait for them.
        if std::thread::panicking() || self.limits.abort.check().is_err() {
            self.thread.give_up();
        }
        self.thread.finalize();
    }
}

/// The call that failed, and its status.
pub(super) type Failed = (&'static str, Status);

pub(super) fn accept(call: &'static str, status: Status) -> Result<(), Failed> {
    if status == sys::SUCCESS { Ok(()) } else { Err((call, status)) }
}

fn setup(why: String) -> CommError {
    CommError::Setup { what: "MPI", why }
}

fn setup_failed(mpi: &Mpi, what: &str, why: WaitError) -> CommError {
    match why {
        WaitError::Aborted(aborted) => aborted,
        WaitError::Failed(status) => setup(format!("{what} failed: {}", mpi.meaning_of(status).0)),
        WaitError::GivenUp => setup(format!("{what} was not tried, because MPI has failed before")),
        WaitError::TimedOut(waited) => setup(format!(
            "{what} did not finish within {:.1} s; every rank must take part in it with the same library ({})",
            waited.as_secs_f64(),
            mpi.path().display()
        )),
    }
}

/// What MPI says about this process.
struct Found {
    rank: c_int,
    size: c_int,
    host_members: Vec<c_int>,
    host_comm: SentHandle,
}

fn init(table: &MpiTable) -> Result<Found, Failed> {
    let (null, mut provided) = (std::ptr::null_mut(), 0);
    // SAFETY: this thread makes all calls, and MPI is initialised once. Null pointers stand for no arguments. The
    // results are written before each call returns, and the communicators and groups that are used are alive.
    unsafe {
        accept(
            "MPI_Init_thread",
            (table.init_thread)(null, std::ptr::null_mut(), sys::THREAD_FUNNELED, &mut provided),
        )?;
        if provided < sys::THREAD_FUNNELED {
            return Err((
                "MPI_Init_thread (this library allows no other threads in the process)",
                sys::OTHER,
            ));
        }
        accept("MPI_Comm_set_errhandler", (table.comm_set_errhandler)(sys::COMM_WORLD, sys::ERRORS_RETURN))?;
        let (mut rank, mut size) = (0, 0);
        accept("MPI_Comm_rank", (table.comm_rank)(sys::COMM_WORLD, &mut rank))?;
        accept("MPI_Comm_size", (table.comm_size)(sys::COMM_WORLD, &mut size))?;
        let mut host_comm = sys::COMM_NULL;
        let split =
            (table.comm_split_type)(sys::COMM_WORLD, sys::TYPE_SHARED, rank, sys::INFO_NULL, &mut host_comm);
        accept("MPI_Comm_split_type", split)?;
        let mut on_host = 0;
        accept("MPI_Comm_size", (table.comm_size)(host_comm, &mut on_host))?;
        let (mut here, mut all) = (null.cast(), null.cast());
        accept("MPI_Comm_group", (table.comm_group)(host_comm, &mut here))?;
        accept("MPI_Comm_group", (table.comm_group)(sys::COMM_WORLD, &mut all))?;
        let own: Vec<c_int> = (0..on_host).collect();
        let mut host_members = vec![0; own.len()];
        let translated = (table.group_translate)(here, on_host, own.as_ptr(), all, host_members.as_mut_ptr());
        accept("MPI_Group_translate_ranks", translated)?;
        accept("MPI_Group_free", (table.group_free)(&mut here))?;
        accept("MPI_Group_free", (table.group_free)(&mut all))?;
        Ok(Found { rank, size, host_members, host_comm: SentHandle(host_comm) })
    }
}
