//! What a benchmark of operations runs on.

use lockstep_core::DType;
use lockstep_device::{Device, Machine, MemoryError, Queue};
use lockstep_engine::EngineError;

use crate::args::BenchOn;
use crate::gpu;
use crate::report::Failure;

pub(super) struct Place {
    pub(super) machine: Machine,
    pub(super) queue: Queue,
    pub(super) dtype: DType,
    pub(super) json: bool,
}

impl Place {
    pub(super) fn of(on: &BenchOn) -> Result<Place, Failure> {
        let all = || std::thread::available_parallelism().map_or(1, |n| n.get());
        let machine =
            Machine { device: gpu::chosen(on.device.into())?, num_threads: on.threads.unwrap_or_else(all) };
        let usual = match machine.device {
            Device::Cpu => DType::F32,
            Device::Cuda(_) => DType::BF16,
        };
        let queue = machine.queue().map_err(|e| -> Failure { Box::new(e) })?;
        Ok(Place { machine, queue, dtype: on.dtype.map_or(usual, DType::from), json: on.json })
    }

    pub(super) fn on_gpu(&self) -> bool {
        self.queue.cuda().is_some()
    }
}

pub(super) fn failed(error: MemoryError) -> Failure {
    Box::new(EngineError::from(error))
}
