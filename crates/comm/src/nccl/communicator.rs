//! The communicator of one group: setup, status checks and shutdown.

use std::ffi::c_int;
use std::fmt;
use std::sync::{Mutex, MutexGuard, mpsc};
use std::time::{Duration, Instant};

use lockstep_core::Rank;
use lockstep_device::cuda::{CudaQueue, Gpu, GpuError};

use super::library::Nccl;
use super::sys::{self, Config, Handle, Status, UniqueId};
use crate::error::{Abort, CommError};
use crate::group::Group;

/// The limit for destroying a communicator. After that it is left behind; the process can end without it.
const TEARDOWN_LIMIT: Duration = Duration::from_secs(10);

/// The collectives of one group between GPUs.
///
/// All members must issue the same collectives in the same order. A collective returns once its work is in the
/// stream; its buffers may be touched only after the stream has completed it. After an error the communicator must
/// not be used again. A group of one rank does nothing and never calls NCCL.
pub struct NcclComm {
    pub(super) nccl: &'static Nccl,
    gpu: &'static Gpu,
    pub(super) group: Group,
    deadline: Duration,
    abort: Abort,
    state: Mutex<State>,
}

/// The mutable state, protected by a lock.
struct State {
    /// Null in a group of one rank, and after shutdown.
    handle: Handle,
    /// All members have connected; from now on a system error is most likely caused by a peer that ended.
    is_up: bool,
    failure: Option<CommError>,
}

// SAFETY: the handle is only used under the lock, and NCCL lets any thread use it, one at a time.
unsafe impl Send for NcclComm {}
// SAFETY: as above.
unsafe impl Sync for NcclComm {}

impl NcclComm {
    /// Connects to the other members. `id` is the same on all of them, and `None` in a group of one rank.
    pub(super) fn meet(
        (nccl, gpu): (&'static Nccl, &'static Gpu),
        group: &Group,
        id: Option<UniqueId>,
        (deadline, abort): (Duration, Abort),
    ) -> Result<NcclComm, CommError> {
        assert_eq!(id.is_some(), group.len() > 1, "a group of several members needs a unique id");
        let state = Mutex::new(State { handle: std::ptr::null_mut(), is_up: false, failure: None });
        let comm = NcclComm { nccl, gpu, group: group.clone(), deadline, abort, state };
        if let Some(id) = id {
            let what = || format!("setting up NCCL among {} ranks", comm.group.len());
            let mut state = comm.lock();
            comm.gpu.enter().map_err(|cause| comm.gpu_failed(&mut state, &what, cause))?;
            let (members, me) = (comm.group.len() as c_int, comm.group.me() as c_int);
            let mut config = Config::non_blocking();
            // SAFETY: NCCL writes the handle and reads the configuration before it returns. The GPU's context is
            // current.
            let status = unsafe { (nccl.table.init)(&mut state.handle, members, id, me, &mut config) };
            comm.accept(&mut state, status, &what)?;
            comm.settle(&mut state, &what)?;
            state.is_up = true;
        }
        Ok(comm)
    }

    pub fn group(&self) -> &Group {
        &self.group
    }

    pub fn rank(&self) -> Rank {
        self.group.members()[self.group.me()]
    }

    /// Sets the limit for a single wait, starting with the next call.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Fails if the communicator has failed or the run was aborted. Does not wait.
    pub fn check(&self) -> Result<(), CommError> {
        let mut state = self.lock();
        self.check_alive(&mut state)?;
        match self.status(&state) {
            sys::SUCCESS | sys::IN_PROGRESS => Ok(()),
            status => Err(self.failed(&mut state, status, &|| "a collective issued earlier".into())),
        }
    }

    /// Waits until the stream has completed everything issued to it. `what` names the work in error messages.
    pub fn wait(&self, queue: &CudaQueue, what: &str) -> Result<(), CommError> {
        super::world::wait(std::slice::from_ref(self), queue, what)
    }

    /// Aborts the communicator and its kernels on the GPU. The first reason wins; later ones are ignored.
    pub fn end(&self, why: &CommError) {
        self.shut_down(&mut self.lock(), why.clone());
    }

    /// Why the communicator was aborted, if it was.
    pub(super) fn failure(&self) -> Option<CommError> {
        self.lock().failure.clone()
    }

    // ---- issuing ------------------------------------------------------------------------------------------

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Runs `issue` inside an NCCL group and waits until its work is in the stream. NCCL may first have to connect to
    /// peers, and waits for them.
    pub(super) fn grouped(
        &self,
        queue: &CudaQueue,
        what: &dyn Fn() -> String,
        issue: impl FnOnce(Handle, sys::Stream) -> Status,
    ) -> Result<(), CommError> {
        let mut state = self.lock();
        self.check_alive(&mut state)?;
        let stream = queue.raw_stream().map_err(|cause| self.gpu_failed(&mut state, what, cause))?;
        // SAFETY: the group is opened and closed on this thread, and everything in it uses this communicator.
        let (opened, issued, closed) = unsafe {
            let opened = (self.nccl.table.group_start)();
            let issued = issue(state.handle, stream);
            (opened, issued, (self.nccl.table.group_end)())
        };
        for status in [opened, issued, closed] {
            self.accept(&mut state, status, what)?;
        }
        self.settle(&mut state, what)
    }

    // ---- status -------------------------------------------------------------------------------------------

    fn check_alive(&self, state: &mut State) -> Result<(), CommError> {
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        self.abort.check().map_err(|why| self.shut_down(state, why))
    }

    fn status(&self, state: &State) -> Status {
        if state.handle.is_null() {
            return sys::SUCCESS;
        }
        let mut found = sys::SUCCESS;
        // SAFETY: the handle is alive until it is taken out of the state.
        match unsafe { (self.nccl.table.async_error)(state.handle, &mut found) } {
            sys::SUCCESS => found,
            status => status,
        }
    }

    /// Waits until NCCL has finished its work on the host.
    fn settle(&self, state: &mut State, what: &dyn Fn() -> String) -> Result<(), CommError> {
        let mut wait = PollWait::new(self.deadline);
        loop {
            match self.status(state) {
                sys::SUCCESS => return Ok(()),
                sys::IN_PROGRESS => {}
                status => return Err(self.failed(state, status, what)),
            }
            self.check_alive(state)?;
            if let Err(waited) = wait.pause() {
                return Err(self.stalled(state, what, waited));
            }
        }
    }

    /// Checks the status that a call returned: success and in-progress are both fine.
    fn accept(&self, state: &mut State, status: Status, what: &dyn Fn() -> String) -> Result<(), CommError> {
        match status {
            sys::SUCCESS | sys::IN_PROGRESS => Ok(()),
            status => Err(self.failed(state, status, what)),
        }
    }

    // ---- failures -----------------------------------------------------------------------------------------

    fn failed(&self, state: &mut State, status: Status, what: &dyn Fn() -> String) -> CommError {
        // When a peer ends, the first symptom may be a broken connection, which is a system error.
        let by_peer = status == sys::REMOTE_ERROR || (state.is_up && status == sys::SYSTEM_ERROR);
        let text = self.nccl.text_of(status, state.handle);
        self.shut_down(state, CommError::Nccl { rank: self.rank(), call: what(), text, by_peer })
    }

    fn stalled(&self, state: &mut State, what: &dyn Fn() -> String, waited: Duration) -> CommError {
        self.shut_down(state, CommError::Stalled { rank: self.rank(), call: what(), waited })
    }

    fn gpu_failed(&self, state: &mut State, what: &dyn Fn() -> String, cause: GpuError) -> CommError {
        self.shut_down(state, CommError::Gpu { rank: self.rank(), call: what(), cause })
    }

    pub(super) fn end_stalled(&self, what: &str, waited: Duration) -> CommError {
        self.stalled(&mut self.lock(), &|| what.into(), waited)
    }

    pub(super) fn end_gpu_failed(&self, what: &str, cause: GpuError) -> CommError {
        self.gpu_failed(&mut self.lock(), &|| what.into(), cause)
    }

    /// Aborts the communicator. Returns the first reason, which is `why` unless there was an earlier one.
    fn shut_down(&self, state: &mut State, why: CommError) -> CommError {
        let why = state.failure.get_or_insert(why).clone();
        self.release(state, self.nccl.table.abort);
        why
    }

    /// Passes the handle to `ncclCommDestroy` or `ncclCommAbort`, and waits for at most [`TEARDOWN_LIMIT`].
    fn release(&self, state: &mut State, last: unsafe extern "C" fn(Handle) -> Status) {
        let handle = std::mem::replace(&mut state.handle, std::ptr::null_mut());
        if handle.is_null() {
            return;
        }
        let (gpu, at) = (self.gpu, handle as usize);
        let (sender, receiver) = mpsc::channel();
        let run = move || {
            // An error of a lost GPU does not matter: the communicator is destroyed either way.
            let _ = gpu.enter();
            // SAFETY: the handle was alive, and was taken from the only place that held it.
            let status = unsafe { last(at as Handle) };
            let _ = sender.send(status);
        };
        // If no thread can be created the process is about to end, and the communicator with it.
        if std::thread::Builder::new().name("nccl-end".into()).spawn(run).is_ok() {
            let _ = receiver.recv_timeout(TEARDOWN_LIMIT);
        }
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        let mut state = self.lock();
        if state.handle.is_null() {
            return;
        }
        let is_clean = !std::thread::panicking() && self.abort.check().is_ok() && self.finalize(&state);
        self.release(&mut state, if is_clean { self.nccl.table.destroy } else { self.nccl.table.abort });
    }
}

impl NcclComm {
    /// Finalizes the communicator together with the other members. Returns `false` if that fails.
    fn finalize(&self, state: &State) -> bool {
        if self.gpu.enter().is_err() {
            return false;
        }
        // SAFETY: the handle is alive.
        let mut status = unsafe { (self.nccl.table.finalize)(state.handle) };
        let mut wait = PollWait::new(TEARDOWN_LIMIT);
        while status == sys::IN_PROGRESS && self.abort.check().is_ok() && wait.pause().is_ok() {
            status = self.status(state);
        }
        status == sys::SUCCESS
    }
}

impl fmt::Debug for NcclComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclComm({} of {})", self.group.me(), self.group.len())
    }
}

/// A polling wait: it first spins, then yields, then sleeps between polls to leave the core to others.
pub(super) struct PollWait {
    start: Instant,
    deadline: Duration,
    num_polls: u32,
}

impl PollWait {
    pub(super) fn new(deadline: Duration) -> PollWait {
        PollWait { start: Instant::now(), deadline, num_polls: 0 }
    }

    /// Pauses between two polls. Returns the time waited once the deadline has passed.
    pub(super) fn pause(&mut self) -> Result<(), Duration> {
        let waited = self.start.elapsed();
        if waited >= self.deadline {
            return Err(waited);
        }
        self.num_polls += 1;
        match self.num_polls {
            ..100 => std::hint::spin_loop(),
            100..2000 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(100)),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_at_its_deadline() {
        let start = Instant::now();
        let mut wait = PollWait::new(Duration::from_millis(30));
        let waited = loop {
            if let Err(waited) = wait.pause() {
                break waited;
            }
        };
        assert!(waited >= Duration::from_millis(30) && start.elapsed() < Duration::from_secs(5));
    }
}
