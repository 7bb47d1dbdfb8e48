//! `lockstep bench collectives`: measures collectives between ranks of this host.
//!
//! Starts this program again as every rank, as `train --nproc` does. All ranks make the same calls, and rank 0 measures
//! the time.

use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use lockstep_comm::{Call, Comm, CommError, GatherPart, Group, NcclWorld};
use lockstep_config::{Purpose, RunConfig};
use lockstep_core::fold::fold_scratch_elems;
use lockstep_core::{Axis, Bytes, DType, Fault, FaultClass, Mesh, Rank};
use lockstep_device::{Device, Memory, Pool, Queue, View};
use lockstep_launch::{Session, World};
use serde_json::json;

use super::machine::failed;
use super::table::per_second;
use crate::args::{BenchCollectives, LaunchFlags};
use crate::report::{self, Failure};
use crate::train::launch_failed;
use crate::{gpu, inputs, launch, ranks};

const SMALLEST: usize = 1 << 20;
/// Measurements per size. The first is not counted.
const BATCHES: usize = 8;
/// The bytes of one measurement: small sizes are called many times.
const BATCH_BYTES: usize = 64 << 20;

/// A single rank has nothing to communicate.
#[derive(Debug)]
struct SingleRank;

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

#[derive(Clone, Copy, Debug)]
enum Operation {
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

/// The times of one call in seconds, sorted.
struct Measured {
    operation: Operation,
    bytes: usize,
    seconds: Vec<f64>,
}

pub(crate) fn run(args: &BenchCollectives) -> Result<ExitCode, Failure> {
    match ranks::world(None).map_err(launch_failed)? {
        Some(world) if world.world_size > 1 => as_rank(args, &world),
        Some(_) => Err(Box::new(SingleRank)),
        None => start(args),
    }
}

/// The settings of the ranks. The model is not used, but every configuration has one.
fn settings(args: &BenchCollectives) -> Vec<String> {
    [String::from("model=tiny")].into_iter().chain(args.settings.iter().cloned()).collect()
}

fn start(args: &BenchCollectives) -> Result<ExitCode, Failure> {
    let world = launch::world_settings(None, Some(args.nproc))?;
    let (config, _) = inputs::load(Purpose::Plan, &settings(args), &world)?;
    if config.plan.world_size() == 1 {
        return Err(Box::new(SingleRank));
    }
    let largest = format!("--largest={}", args.largest);
    let mut words = vec!["bench", "collectives", &largest];
    words.extend(args.json.then_some("--json"));
    launch::start(&LaunchFlags::default(), &config, &words, &args.settings)
}

fn as_rank(args: &BenchCollectives, world: &World) -> Result<ExitCode, Failure> {
    let (config, text) = ranks::load(Purpose::Plan, &settings(args), world)?;
    let mut session = match ranks::join_world(world, &text, None) {
        Ok(session) => session,
        Err(error) => return Ok(ExitCode::from(ranks::report_abort(&error, world))),
    };
    if let Err(fault) = measure(args, &config, &mut session) {
        return Ok(ranks::fail(session, &*fault));
    }
    match session.leave() {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => Ok(ExitCode::from(ranks::report_abort(&error, world))),
    }
}

fn measure(args: &BenchCollectives, config: &RunConfig, session: &mut Session) -> Result<(), Failure> {
    let world = session.world().clone();
    let device = gpu::choose_for_rank(config.device, world.local_rank, world.local_world_size)?;
    let mut bench = Bench::new(args, config, session, device)?;
    let prints = world.rank == 0;
    if prints && !args.json {
        report::print_line(&format!("{} ranks, {}", world.world_size, bench.carrier));
    }
    let mut all = Vec::new();
    for operation in [Operation::AllReduce, Operation::AllGather, Operation::ReduceScatter] {
        let mut bytes = SMALLEST;
        while bytes <= usize::from(args.largest) << 20 {
            let seconds = bench.measure(operation, bytes).map_err(|e| -> Failure { Box::new(e) })?;
            let measured = Measured { operation, bytes, seconds };
            if prints && !args.json {
                report::print_line(&measured.line());
            }
            all.push(measured);
            bytes *= 4;
        }
    }
    if prints && args.json {
        let rates: Vec<_> = all.iter().map(Measured::as_json).collect();
        let object = json!({
            "program": "lockstep", "version": env!("CARGO_PKG_VERSION"), "ranks": world.world_size,
            "carrier": bench.carrier, "rates": rates,
        });
        report::print(&format!("{object}\n"))?;
    }
    Ok(())
}

impl Measured {
    fn median(&self) -> f64 {
        self.seconds[self.seconds.len() / 2]
    }

    fn line(&self) -> String {
        let Measured { operation, bytes, .. } = self;
        let rate = per_second(*bytes as f64 / self.median(), "B");
        format!(
            "{:<16}{:>12}{:>12.1} µs{rate:>15}",
            operation.to_string(),
            Bytes(*bytes as u64).to_string(),
            1e6 * self.median()
        )
    }

    fn as_json(&self) -> serde_json::Value {
        json!({
            "operation": self.operation.to_string(), "bytes": self.bytes, "seconds": self.median(),
            "fastest": self.seconds[0], "slowest": self.seconds[self.seconds.len() - 1],
            "bytes_per_second": self.bytes as f64 / self.median(),
        })
    }
}

/// A rank's side of the measurement.
struct Bench {
    comm: Comm,
    group: Group,
    queue: Queue,
    nccl: Option<NcclWorld>,
    /// The tensor, followed by the scratch space for reductions on the CPU. On the device of the rank.
    memory: Arc<Memory>,
    largest: usize,
    /// The transport, in words.
    carrier: String,
}

impl Bench {
    fn new(
        args: &BenchCollectives,
        config: &RunConfig,
        session: &mut Session,
        device: Device,
    ) -> Result<Bench, Failure> {
        let (rank, ranks) = (Rank(session.world().rank), session.world().world_size);
        let queue = device.queue(1).map_err(|e| -> Failure { Box::new(e) })?;
        let largest = usize::from(args.largest) << 20;
        let host = match device {
            Device::Cpu => largest + 4 * fold_scratch_elems(ranks),
            Device::Cuda(_) => 4096,
        };
        let shared = Arc::new(Memory::allocate_shared(Bytes(host as u64), &Pool::new(1)).map_err(failed)?);
        let connect = ranks::connect(session, config, device)?;
        let connection = connect(&shared).map_err(|e| -> Failure { Box::new(e) })?;
        let mut comm = connection.comms.lane;
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
        Ok(Bench { comm, group, queue, nccl: nccl.map(|(world, _)| world), memory, largest, carrier })
    }

    fn measure(&mut self, operation: Operation, bytes: usize) -> Result<Vec<f64>, CommError> {
        let calls = BATCH_BYTES.div_ceil(bytes);
        let mut seconds = Vec::with_capacity(BATCHES);
        for batch in 0..BATCHES {
            let one = self.batch(operation, bytes, calls)?;
            if batch > 0 {
                seconds.push(one / calls as f64);
            }
        }
        seconds.sort_by(f64::total_cmp);
        Ok(seconds)
    }

    /// The seconds until all ranks have made `calls` calls.
    fn batch(&mut self, operation: Operation, bytes: usize, calls: usize) -> Result<f64, CommError> {
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
}
