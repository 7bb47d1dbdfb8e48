//! The device and data type of a benchmark of operations.

use lockstep_core::DType;
use lockstep_device::{Device, Machine, MemoryError, Queue};
use lockstep_engine::EngineError;

use crate::args::BenchMachine;
use crate::gpu;
use crate::report::Failure;

pub(super) struct BenchTarget {
    pub(super) machine: Machine,
    pub(super) queue: Queue,
    pub(super) dtype: DType,
    pub(super) json: bool,
}

impl BenchTarget {
    pub(super) fn open(args: &BenchMachine) -> Result<BenchTarget, Failure> {
        let all = || std::thread::available_parallelism().map_or(1, |n| n.get());
        let machine = Machine {
            device: gpu::choose(args.device.into())?,
            num_threads: args.threads.unwrap_or_else(all),
        };
        let default = match machine.device {
            Device::Cpu => DType::F32,
            Device::Cuda(_) => DType::BF16,
        };
        let queue = machine.queue().map_err(|e| -> Failure { Box::new(e) })?;
        Ok(BenchTarget { machine, queue, dtype: args.dtype.map_or(default, DType::from), json: args.json })
    }

    pub(super) fn on_gpu(&self) -> bool {
        self.queue.cuda().is_some()
    }
}

pub(crate) fn failed(error: MemoryError) -> Failure {
    Box::new(EngineError::from(error))
}
