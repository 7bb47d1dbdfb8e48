//! In-order lanes of work.

use lockstep_core::Bytes;

use crate::cuda::{CudaQueue, Gpu, GpuError};
use crate::{Amx, Isa, Memory, MemoryError, Pool};

/// What a rank computes on.
#[derive(Clone, Copy, Debug)]
pub enum Device {
    Cpu,
    Cuda(&'static Gpu),
}

/// A device, and the threads that the host has for a rank.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    pub device: Device,
    pub num_threads: usize,
}

impl Machine {
    pub const fn cpu(num_threads: usize) -> Machine {
        Machine { device: Device::Cpu, num_threads }
    }

    /// The lane that computes.
    pub fn queue(&self) -> Result<Queue, GpuError> {
        self.device.queue(self.num_threads)
    }
}

impl Device {
    /// A lane on this device, with `num_threads` of the host.
    pub fn queue(&self, num_threads: usize) -> Result<Queue, GpuError> {
        match self {
            Device::Cpu => Ok(Queue::cpu(num_threads)),
            Device::Cuda(gpu) => CudaQueue::new(gpu, num_threads).map(Queue::Cuda),
        }
    }

    /// Takes memory of this device.
    pub fn take(&self, bytes: Bytes, pool: &Pool) -> Result<Memory, MemoryError> {
        match self {
            Device::Cpu => Memory::take(bytes, pool),
            Device::Cuda(gpu) => Memory::take_on(gpu, bytes),
        }
    }
}

/// A lane that operations are issued to, in order. On the CPU an operation is done when its call
/// returns; on a GPU when its stream has come to it.
#[derive(Debug)]
pub enum Queue {
    Cpu(CpuQueue),
    Cuda(CudaQueue),
}

/// A thread pool and the instructions its kernels use.
#[derive(Debug)]
pub struct CpuQueue {
    pub pool: Pool,
    pub isa: Isa,
    /// Where there are tiles, products of bf16 are computed on them.
    pub amx: Option<Amx>,
}

impl Queue {
    /// A CPU lane of `num_threads`, with the best instructions this machine has.
    pub fn cpu(num_threads: usize) -> Queue {
        Queue::Cpu(CpuQueue { pool: Pool::new(num_threads), isa: Isa::detect(), amx: Amx::detect() })
    }

    /// A CPU lane with a chosen instruction set, and no tiles.
    pub fn cpu_with(num_threads: usize, isa: Isa) -> Queue {
        Queue::Cpu(CpuQueue { pool: Pool::new(num_threads), isa, amx: None })
    }

    /// The host's threads behind the lane.
    pub fn pool(&self) -> &Pool {
        match self {
            Queue::Cpu(cpu) => &cpu.pool,
            Queue::Cuda(cuda) => &cuda.pool,
        }
    }

    pub fn device(&self) -> Device {
        self.cuda().map_or(Device::Cpu, |cuda| Device::Cuda(cuda.gpu))
    }

    /// The stream, where the lane is one.
    pub fn cuda(&self) -> Option<&CudaQueue> {
        match self {
            Queue::Cpu(_) => None,
            Queue::Cuda(cuda) => Some(cuda),
        }
    }

    /// Waits until everything issued is done.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.cuda().map_or(Ok(()), CudaQueue::synchronize)
    }

    /// Whether anything issued so far is known to have failed.
    pub fn check(&self) -> Result<(), GpuError> {
        self.cuda().map_or(Ok(()), CudaQueue::check)
    }

    pub fn num_threads(&self) -> usize {
        self.pool().num_threads()
    }
}
