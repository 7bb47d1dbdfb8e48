//! The collectives. Each issues all of its parts to a stream as one NCCL group.

use std::ffi::{c_int, c_void};

use lockstep_core::{DType, Rank};
use lockstep_device::View;
use lockstep_device::cuda::CudaQueue;

use super::communicator::NcclComm;
use super::shares::equal_share;
use super::sys::{self, Handle, Status, Stream, data_type};
use crate::call::CallKind;
use crate::comm::{GatherPart, share};
use crate::error::CommError;

/// A communicator and a stream, between `ncclGroupStart` and `ncclGroupEnd`.
struct Issue<'a> {
    comm: &'a NcclComm,
    handle: Handle,
    stream: Stream,
}

impl NcclComm {
    /// Gathers every member's shards on every member, like [`crate::Comm::all_gather`].
    pub fn all_gather(&self, queue: &CudaQueue, parts: &[GatherPart<'_>]) -> Result<(), CommError> {
        for part in parts {
            let own = self.group.share(part.whole.len(), self.group.me()).elems();
            assert_eq!(
                (part.own.len(), part.own.dtype()),
                (own, part.whole.dtype()),
                "`own` must be this rank's share of `whole`"
            );
        }
        if self.group.len() == 1 {
            for part in parts.iter().filter(|part| address(part.own) != address(part.whole)) {
                queue.copy(part.whole, part.own);
            }
            return Ok(());
        }
        let wholes = parts.iter().map(|part| part.whole);
        self.issue(queue, CallKind::AllGather, wholes, |to| {
            first_failure(parts.iter().map(|part| to.all_gather(part)))
        })
    }

    /// Sums f32 parts over the members. Each member ends with the sum in its own share of each part; the contents of
    /// the other shares are unspecified.
    pub fn reduce_scatter(&self, queue: &CudaQueue, parts: &[View<'_>]) -> Result<(), CommError> {
        assert!(parts.iter().all(|part| part.dtype() == DType::F32), "reduce-scatter sums f32 parts only");
        let all = parts.iter().copied();
        self.issue(queue, CallKind::ReduceScatter, all, |to| {
            first_failure(parts.iter().map(|part| to.reduce_scatter(*part)))
        })
    }

    /// Sums f32 or f64 parts over the members: every member ends with the whole sum in place.
    pub fn all_reduce(&self, queue: &CudaQueue, parts: &[View<'_>]) -> Result<(), CommError> {
        let is_sum = |part: &View<'_>| matches!(part.dtype(), DType::F32 | DType::F64);
        assert!(parts.iter().all(is_sum), "all-reduce sums f32 or f64 parts only");
        let all = parts.iter().copied();
        self.issue(queue, CallKind::AllReduce, all, |to| {
            first_failure(parts.iter().map(|part| to.all_reduce(*part)))
        })
    }

    /// Copies the root's parts to every member, in place. `root` must be a member.
    pub fn broadcast(&self, queue: &CudaQueue, root: Rank, parts: &[View<'_>]) -> Result<(), CommError> {
        let from = self
            .group
            .member_idx(root)
            .unwrap_or_else(|| panic!("{root} is not a member of this collective"));
        let all = parts.iter().copied();
        self.issue(queue, CallKind::Broadcast, all, |to| {
            first_failure(parts.iter().map(|part| to.broadcast(from, *part, *part)))
        })
    }

    fn issue<'v>(
        &self,
        queue: &CudaQueue,
        kind: CallKind,
        parts: impl Iterator<Item = View<'v>> + Clone,
        each: impl FnOnce(&Issue<'_>) -> Status,
    ) -> Result<(), CommError> {
        assert!(parts.clone().all(|part| part.on_gpu() || part.is_empty()), "NCCL moves GPU memory only");
        // All members see the same parts as empty, so none waits for a call that another skips.
        if self.group.len() == 1 || parts.clone().all(|part| part.is_empty()) {
            return Ok(());
        }
        let what = || {
            let elems: usize = parts.clone().map(|part| part.len()).sum();
            let dtype = parts.clone().next().map_or(DType::F32, |part| part.dtype());
            format!("{kind} of {elems} {dtype} among {} ranks", self.group.len())
        };
        self.grouped(queue, &what, |handle, stream| each(&Issue { comm: self, handle, stream }))
    }
}

/// Makes the calls in order, up to the first that fails.
fn first_failure(mut calls: impl Iterator<Item = Status>) -> Status {
    let fails = |status: &Status| !matches!(*status, sys::SUCCESS | sys::IN_PROGRESS);
    calls.find(fails).unwrap_or(sys::SUCCESS)
}

fn address(view: View<'_>) -> *mut c_void {
    view.as_ptr::<u8>().cast()
}

// SAFETY of every call below: the communicator is alive and its lock is held. Views lie in live memory of this GPU
// and have the element counts that are passed. The plan's waits keep other operations off them until the collective
// has completed in the stream.
impl Issue<'_> {
    fn share<'m>(&self, part: View<'m>, member: usize) -> View<'m> {
        share(&self.comm.group, part, member)
    }

    fn all_gather(&self, part: &GatherPart<'_>) -> Status {
        let (me, dtype) = (self.comm.group.me(), data_type(part.whole.dtype()));
        if part.whole.is_empty() {
            return sys::SUCCESS;
        }
        if let Some(count) = equal_share(&self.comm.group, part.whole.len()) {
            let (from, to) = (address(part.own), address(part.whole));
            // SAFETY: as above; the whole holds every member's share.
            return unsafe {
                (self.comm.nccl.table.all_gather)(from, to, count, dtype, self.handle, self.stream)
            };
        }
        first_failure((0..self.comm.group.len()).map(|member| {
            let to = self.share(part.whole, member);
            self.broadcast(member, if member == me { part.own } else { to }, to)
        }))
    }

    fn reduce_scatter(&self, part: View<'_>) -> Status {
        if part.is_empty() {
            return sys::SUCCESS;
        }
        let dtype = data_type(part.dtype());
        let table = &self.comm.nccl.table;
        if let Some(count) = equal_share(&self.comm.group, part.len()) {
            let own = address(self.share(part, self.comm.group.me()));
            // SAFETY: as above; the sum goes to this rank's share of the part, which NCCL treats as in-place.
            return unsafe {
                (table.reduce_scatter)(address(part), own, count, dtype, sys::SUM, self.handle, self.stream)
            };
        }
        let members = (0..self.comm.group.len()).map(|member| (member, self.share(part, member)));
        first_failure(members.filter(|(_, share)| !share.is_empty()).map(|(member, share)| {
            let (at, len, root) = (address(share), share.len(), member as c_int);
            // SAFETY: as above; in place at the root, only read on the other members.
            unsafe { (table.reduce)(at, at, len, dtype, sys::SUM, root, self.handle, self.stream) }
        }))
    }

    fn all_reduce(&self, part: View<'_>) -> Status {
        if part.is_empty() {
            return sys::SUCCESS;
        }
        let (at, dtype) = (address(part), data_type(part.dtype()));
        // SAFETY: as above, in place.
        unsafe {
            (self.comm.nccl.table.all_reduce)(at, at, part.len(), dtype, sys::SUM, self.handle, self.stream)
        }
    }

    /// Copies `from` of member `root` to `to` on every member.
    fn broadcast(&self, root: usize, from: View<'_>, to: View<'_>) -> Status {
        if to.is_empty() {
            return sys::SUCCESS;
        }
        let dtype = data_type(to.dtype());
        // SAFETY: as above; both have the same number of elements.
        unsafe {
            (self.comm.nccl.table.broadcast)(
                address(from),
                address(to),
                to.len(),
                dtype,
                root as c_int,
                self.handle,
                self.stream,
            )
        }
    }
}
