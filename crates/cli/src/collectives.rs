//! Collectives between the ranks of a run, over the transport that the run would use: what `bench collectives` measures and
//! `selftest` checks.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use lockstep_comm::{Call, Comm, CommError, GatherPart, Group, NcclWorld};
use lockstep_config::RunConfig;
use lockstep_core::fold::fold_scratch_elems;
use lockstep_core::{Axis, Bytes, DType, Fault, FaultClass, Mesh, Rank};
use lockstep_device::{Device, Memory, Pool, Queue, View};
use lockstep_launch::Session;
use lockstep_plan::Lane;

use crate::bench::failed;
use crate::ranks;
use crate::report::Failure;

/// A single rank has nothing to communicate.
#[derive(Debug)]
pub(crate) struct SingleRank;

impl fmt::Display for SingleRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "collectives need at least two ranks")
    }
}

impl std::error::Error for SingleRank {}

impl Fault for SingleRank {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        Some("Set --nproc to 2 or more.".into())
    }
}

/// A collective.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    AllReduce,
    AllGather,
    ReduceScatter,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Operation::AllReduce => "all-reduce",
            Operation::AllGather => "all-gather",
            Operation::ReduceScatter => "reduce-scatter",
        })
    }
}

impl Operation {
    pub(crate) const ALL: [Operation; 3] =
        [Operation::AllReduce, Operation::AllGather, Operation::ReduceScatter];
}

/// A rank's side of the collectives.
pub(crate) struct Collectives {
    comm: Comm,
    group: Group,
    queue: Queue,
    nccl: Option<NcclWorld>,
    /// The tensor, followed by the scratch space for reductions on the CPU. On the device of the rank.
    memory: Arc<Memory>,
    largest: usize,
    /// The transport, in words.
    pub(crate) carrier: String,
}

impl Collectives {
    /// Connects to the other ranks as a run with this configuration does. Tensors have up to `largest` bytes.
    pub(crate) fn connect(
        largest: usize,
        config: &RunConfig,
        session: &mut Session,
        device: Device,
    ) -> Result<Collectives, Failure> {
        let (rank, ranks) = (Rank(session.world().rank), session.world().world_size);
        let queue = device.queue(1).map_err(|e| -> Failure { Box::new(e) })?;
        let host = match device {
            Device::Cpu => largest + 4 * fold_scratch_elems(ranks),
            Device::Cuda(_) => 4096,
        };
        let shared = Arc::new(Memory::allocate_shared(Bytes(host as u64), &Pool::new(1)).map_err(failed)?);
        let connect = ranks::connect(session, config, device)?;
        let connection = connect(&shared).map_err(|e| -> Failure { Box::new(e) })?;
        let mut comm = connection.comms.into_comm_of(Lane::Comm);
        let group = Group::along(&Mesh::on_one_node(1, ranks), Axis::World, rank);
        let nccl = match connection.nccl {
            None => None,
            Some(spec) => {
                let world = NcclWorld::connect(&spec, std::slice::from_ref(&group), &mut comm, Call::HOST);
                Some((world.map_err(|e| -> Failure { Box::new(e) })?, spec.nccl.version_text()))
            }
        };
        let carrier = match &nccl {
            None => comm.note().to_string(),
            Some((_, version)) => format!("NCCL {version}"),
        };
        let memory = match device {
            Device::Cpu => shared,
            Device::Cuda(gpu) => Arc::new(Memory::allocate_on(gpu, Bytes(largest as u64)).map_err(failed)?),
        };
        Ok(Collectives { comm, group, queue, nccl: nccl.map(|(world, _)| world), memory, largest, carrier })
    }

    /// The seconds until all ranks have made `calls` calls.
    pub(crate) fn timed(
        &mut self,
        operation: Operation,
        bytes: usize,
        calls: usize,
    ) -> Result<f64, CommError> {
        let memory = Arc::clone(&self.memory);
        let view = memory.view(0, bytes / 4, DType::F32);
        self.comm.barrier(&self.group, Call::HOST)?;
        let start = Instant::now();
        for _ in 0..calls {
            self.call(operation, view)?;
        }
        if let (Some(nccl), Some(cuda)) = (&self.nccl, self.queue.cuda()) {
            nccl.wait(cuda, "a collective")?;
        }
        self.comm.barrier(&self.group, Call::HOST)?;
        Ok(start.elapsed().as_secs_f64())
    }

    fn call(&mut self, operation: Operation, view: View<'_>) -> Result<(), CommError> {
        let share = self.group.share(view.len(), self.group.me());
        let gathered = [GatherPart { own: view.slice(share.start, share.elems()), whole: view }];
        if let (Some(nccl), Some(cuda)) = (&self.nccl, self.queue.cuda()) {
            let comm = nccl.of(&self.group);
            return match operation {
                Operation::AllReduce => comm.all_reduce(cuda, &[view]),
                Operation::AllGather => comm.all_gather(cuda, &gathered),
                Operation::ReduceScatter => comm.reduce_scatter(cuda, &[view]),
            };
        }
        let memory = Arc::clone(&self.memory);
        let scratch = memory.view(self.largest, fold_scratch_elems(self.comm.world()), DType::F32);
        let tag = operation as u64;
        match operation {
            Operation::AllReduce => self.comm.all_reduce(&self.group, tag, &[view], scratch),
            Operation::AllGather => self.comm.all_gather(&self.group, tag, &gathered),
            Operation::ReduceScatter => self.comm.reduce_scatter(&self.group, tag, &[view], scratch),
        }
    }
    /// Makes a call with known values. Returns how many elements are wrong afterwards on this rank.
    pub(crate) fn count_wrong(&mut self, operation: Operation, elems: usize) -> Result<usize, Failure> {
        let memory = Arc::clone(&self.memory);
        let view = memory.view(0, elems, DType::F32);
        let (me, num_ranks) = (self.group.me(), self.group.len());
        let given: Vec<f32> = (0..elems).map(|idx| known_value(me, idx)).collect();
        view.write_f32(&given).map_err(|e| -> Failure { Box::new(e) })?;
        self.once(operation, view).map_err(|e| -> Failure { Box::new(e) })?;
        let mut found = vec![0.0; elems];
        view.read_f32(&mut found).map_err(|e| -> Failure { Box::new(e) })?;
        let sum = |idx: usize| (0..num_ranks).map(|rank| known_value(rank, idx)).sum::<f32>();
        let count = |range: std::ops::Range<usize>, expected: &dyn Fn(usize) -> f32| {
            range.filter(|idx| found[*idx] != expected(*idx)).count()
        };
        let share = |rank: usize| {
            let share = self.group.share(elems, rank);
            share.start..share.start + share.elems()
        };
        Ok(match operation {
            Operation::AllReduce => count(0..elems, &sum),
            Operation::ReduceScatter => count(share(me), &sum),
            Operation::AllGather => {
                (0..num_ranks).map(|rank| count(share(rank), &|idx| known_value(rank, idx))).sum()
            }
        })
    }

    /// One call, until its result is there on all ranks.
    fn once(&mut self, operation: Operation, view: View<'_>) -> Result<(), CommError> {
        self.comm.barrier(&self.group, Call::HOST)?;
        self.call(operation, view)?;
        if let (Some(nccl), Some(cuda)) = (&self.nccl, self.queue.cuda()) {
            nccl.wait(cuda, "a collective")?;
        }
        self.comm.barrier(&self.group, Call::HOST)
    }
}

/// The value of an element before a call. Sums of such values are exact in f32, in any order.
fn known_value(rank: usize, idx: usize) -> f32 {
    ((idx * 7 + rank * 13) % 101) as f32
}
