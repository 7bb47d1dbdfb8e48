//! One group's communicator: how it comes up, how it is asked whether it is well, how it goes down.

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

/// How long a communicator that is no longer needed may take to go. The process can end without.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// A rank's side of the collectives of one group on a GPU.
///
/// Members issue the same collectives in the same order. They return when the work is in the stream, and what it
/// touches is at rest when the stream has come that far. After an error the communicator is of no further use. A
/// group of one has nothing to do, and needs no library for it.
pub struct NcclComm {
    pub(super) nccl: &'static Nccl,
    gpu: &'static Gpu,
    pub(super) group: Group,
    deadline: Duration,
    abort: Abort,
    state: Mutex<State>,
}

/// What changes.
struct State {
    /// Null in a group of one, and after the end.
    handle: Handle,
    /// All members have met; what goes wrong from now on is more likely another's fault.
    is_up: bool,
    failure: Option<CommError>,
}

// SAFETY: the handle is only used under the lock, and NCCL lets any thread use it, one at a time.
unsafe impl Send for NcclComm {}
// SAFETY: as above.
unsafe impl Sync for NcclComm {}

impl NcclComm {
    /// Meets the other members at `id`, which is the same for all; `None` in a group of one.
    pub(super) fn meet(
        (nccl, gpu): (&'static Nccl, &'static Gpu),
        group: &Group,
        id: Option<UniqueId>,
        (deadline, abort): (Duration, Abort),
    ) -> Result<NcclComm, CommError> {
        assert_eq!(id.is_some(), group.len() > 1, "several members meet, and one does not");
        let state = Mutex::new(State { handle: std::ptr::null_mut(), is_up: false, failure: None });
        let comm = NcclComm { nccl, gpu, group: group.clone(), deadline, abort, state };
        if let Some(id) = id {
            let what = || format!("setting up NCCL among {} ranks", comm.group.len());
            let mut state = comm.lock();
            comm.gpu.enter().map_err(|cause| comm.gpu_failed(&mut state, &what, cause))?;
            let (members, me) = (comm.group.len() as c_int, comm.group.me() as c_int);
            let mut config = Config::non_blocking();
            // SAFETY: places for the handle and of the configuration, which the library reads before it returns; the
            // GPU's context is current.
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

    /// How long one wait may last, from the next call on.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Whether the communicator and the run are well. Does not wait.
    pub fn check(&self) -> Result<(), CommError> {
        let mut state = self.lock();
        self.check_alive(&mut state)?;
        match self.status(&state) {
            sys::SUCCESS | sys::IN_PROGRESS => Ok(()),
            status => Err(self.failed(&mut state, status, &|| "what was issued".into())),
        }
    }

    /// Waits until the stream has done all that was issued to it. `what` names it in an error.
    pub fn wait(&self, queue: &CudaQueue, what: &str) -> Result<(), CommError> {
        super::world::wait(std::slice::from_ref(self), queue, what)
    }

    /// Ends the communicator, and with it what it has on the GPU. The first reason given stays.
    pub fn end(&self, why: &CommError) {
        self.take_down(&mut self.lock(), why.clone());
    }

    /// Why it ended, if it did.
    pub(super) fn failure(&self) -> Option<CommError> {
        self.lock().failure.clone()
    }

    // ---- for those who issue ------------------------------------------------------------------------------

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Issues what `issue` issues as one, and waits until it is in the stream: NCCL may first have to connect to
    /// peers, which takes as long as they take to come.
    pub(super) fn grouped(
        &self,
        queue: &CudaQueue,
        what: &dyn Fn() -> String,
        issue: impl FnOnce(Handle, sys::Stream) -> Status,
    ) -> Result<(), CommError> {
        let mut state = self.lock();
        self.check_alive(&mut state)?;
        let stream = queue.raw_stream().map_err(|cause| self.gpu_failed(&mut state, what, cause))?;
        // SAFETY: a group is opened and closed on this thread, and what is between them is of this communicator.
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

    // ---- asking -------------------------------------------------------------------------------------------

    fn check_alive(&self, state: &mut State) -> Result<(), CommError> {
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        self.abort.check().map_err(|why| self.take_down(state, why))
    }

    fn status(&self, state: &State) -> Status {
        if state.handle.is_null() {
            return sys::SUCCESS;
        }
        let mut found = sys::SUCCESS;
        // SAFETY: the handle is alive, as it is until it is taken from the state.
        match unsafe { (self.nccl.table.async_error)(state.handle, &mut found) } {
            sys::SUCCESS => found,
            status => status,
        }
    }

    /// Waits until NCCL has done on the host what it was asked for.
    fn settle(&self, state: &mut State, what: &dyn Fn() -> String) -> Result<(), CommError> {
        let mut wait = Wait::new(self.deadline);
        loop {
            match self.status(state) {
                sys::SUCCESS => return Ok(()),
                sys::IN_PROGRESS => {}
                status => return Err(self.failed(state, status, what)),
            }
            self.check_alive(state)?;
            if let Err(waited) = wait.a_moment() {
                return Err(self.stalled(state, what, waited));
            }
        }
    }

    /// A call's own answer: done, or begun.
    fn accept(&self, state: &mut State, status: Status, what: &dyn Fn() -> String) -> Result<(), CommError> {
        match status {
            sys::SUCCESS | sys::IN_PROGRESS => Ok(()),
            status => Err(self.failed(state, status, what)),
        }
    }

    // ---- failing ------------------------------------------------------------------------------------------

    fn failed(&self, state: &mut State, status: Status, what: &dyn Fn() -> String) -> CommError {
        // When a peer ends, what is first seen of it may be a connection that broke.
        let by_peer = status == sys::REMOTE_ERROR || (state.is_up && status == sys::SYSTEM_ERROR);
        let text = self.nccl.text_of(status, state.handle);
        self.take_down(state, CommError::Nccl { rank: self.rank(), call: what(), text, by_peer })
    }

    fn stalled(&self, state: &mut State, what: &dyn Fn() -> String, waited: Duration) -> CommError {
        self.take_down(state, CommError::Stalled { rank: self.rank(), call: what(), waited })
    }

    fn gpu_failed(&self, state: &mut State, what: &dyn Fn() -> String, cause: GpuError) -> CommError {
        self.take_down(state, CommError::Gpu { rank: self.rank(), call: what(), cause })
    }

    pub(super) fn end_stalled(&self, what: &str, waited: Duration) -> CommError {
        self.stalled(&mut self.lock(), &|| what.into(), waited)
    }

    pub(super) fn end_gpu_failed(&self, what: &str, cause: GpuError) -> CommError {
        self.gpu_failed(&mut self.lock(), &|| what.into(), cause)
    }

    /// Aborts the communicator for this reason, unless there was one before. Returns the reason that counts.
    fn take_down(&self, state: &mut State, why: CommError) -> CommError {
        let why = state.failure.get_or_insert(why).clone();
        self.release(state, self.nccl.table.abort);
        why
    }

    /// Gives the handle to a last function, which gets [`LAST_WAIT`].
    fn release(&self, state: &mut State, last: unsafe extern "C" fn(Handle) -> Status) {
        let handle = std::mem::replace(&mut state.handle, std::ptr::null_mut());
        if handle.is_null() {
            return;
        }
        let (gpu, at) = (self.gpu, handle as usize);
        let (tell, told) = mpsc::channel();
        let run = move || {
            // What a lost GPU answers does not matter: the communicator goes either way.
            let _ = gpu.enter();
            // SAFETY: the handle was alive, and was taken from the only place that held it.
            let status = unsafe { last(at as Handle) };
            let _ = tell.send(status);
        };
        // Where there is no thread to be had the process is about to end, and takes the communicator along.
        if std::thread::Builder::new().name("nccl-end".into()).spawn(run).is_ok() {
            let _ = told.recv_timeout(LAST_WAIT);
        }
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        let mut state = self.lock();
        if state.handle.is_null() {
            return;
        }
        let is_well = !std::thread::panicking() && self.abort.check().is_ok() && self.finalize(&state);
        self.release(&mut state, if is_well { self.nccl.table.destroy } else { self.nccl.table.abort });
    }
}

impl NcclComm {
    /// Takes leave of the other members. `false` if that does not work.
    fn finalize(&self, state: &State) -> bool {
        if self.gpu.enter().is_err() {
            return false;
        }
        // SAFETY: the handle is alive.
        let begun = unsafe { (self.nccl.table.finalize)(state.handle) };
        let mut wait = Wait::new(LAST_WAIT);
        let mut status = begun;
        while status == sys::IN_PROGRESS && self.abort.check().is_ok() && wait.a_moment().is_ok() {
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

/// A wait that asks again and again: at first at once, later with pauses that leave the core to others.
pub(super) struct Wait {
    start: Instant,
    deadline: Duration,
    asked: u32,
}

impl Wait {
    pub(super) fn new(deadline: Duration) -> Wait {
        Wait { start: Instant::now(), deadline, asked: 0 }
    }

    /// Passes a moment. The time waited, once it is the deadline.
    pub(super) fn a_moment(&mut self) -> Result<(), Duration> {
        let waited = self.start.elapsed();
        if waited >= self.deadline {
            return Err(waited);
        }
        self.asked += 1;
        match self.asked {
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
    fn a_wait_ends() {
        let start = Instant::now();
        let mut wait = Wait::new(Duration::from_millis(30));
        let waited = loop {
            if let Err(waited) = wait.a_moment() {
                break waited;
            }
        };
        assert!(waited >= Duration::from_millis(30) && start.elapsed() < Duration::from_secs(5));
    }
}
