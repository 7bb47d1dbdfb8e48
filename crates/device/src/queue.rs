//! Queues: where operations are issued, in order.

use lockstep_core::Bytes;

use crate::cuda::{CudaQueue, Gpu, GpuError};
use crate::{Amx, Isa, Memory, MemoryError, Pool};

/// The device that a rank computes on.
#[derive(Clone, Copy, Debug)]
pub enum Device {
    Cpu,
    Cuda(&'static Gpu),
}

/// A device and the number of host threads of a rank.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    pub device: Device,
    pub num_threads: usize,
}

impl Machine {
    pub const fn cpu(num_threads: usize) -> Machine {
        Machine { device: Device::Cpu, num_threads }
    }

    /// Creates the queue that runs compute operations.
    pub fn queue(&self) -> Result<Queue, GpuError> {
        self.device.queue(self.num_threads)
    }
}

impl Device {
    /// Creates a queue on this device, with `num_threads` host threads.
    pub fn queue(&self, num_threads: usize) -> Result<Queue, GpuError> {
        match self {
            Device::Cpu => Ok(Queue::cpu(num_threads)),
            Device::Cuda(gpu) => CudaQueue::new(gpu, num_threads).map(Queue::Cuda),
        }
    }

    /// Allocates memory on this device.
    pub fn allocate(&self, bytes: Bytes, pool: &Pool) -> Result<Memory, MemoryError> {
        match self {
            Device::Cpu => Memory::allocate(bytes, pool),
            Device::Cuda(gpu) => Memory::allocate_on(gpu, bytes),
        }
    }
}

/// An in-order queue of operations. On the CPU an operation is done when its call returns; on a GPU, when its stream
/// has run it.
#[derive(Debug)]
pub enum Queue {
    Cpu(CpuQueue),
    Cuda(CudaQueue),
}

/// A thread pool and the instruction set of its kernels.
#[derive(Debug)]
pub struct CpuQueue {
    pub pool: Pool,
    pub isa: Isa,
    /// Where there is AMX, matmul of bf16 matrices uses it.
    pub amx: Option<Amx>,
}

impl Queue {
    /// A CPU queue of `num_threads` threads, with the best instruction set of this machine.
    pub fn cpu(num_threads: usize) -> Queue {
        Queue::Cpu(CpuQueue { pool: Pool::new(num_threads), isa: Isa::detect(), amx: Amx::detect() })
    }

    /// A CPU queue with a chosen instruction set and without AMX.
    pub fn cpu_with(num_threads: usize, isa: Isa) -> Queue {
        Queue::Cpu(CpuQueue { pool: Pool::new(num_threads), isa, amx: None })
    }

    /// The host threads of this queue.
    pub fn pool(&self) -> &Pool {
        match self {
            Queue::Cpu(cpu) => &cpu.pool,
            Queue::Cuda(cuda) => &cuda.pool,
        }
    }

    pub fn device(&self) -> Device {
        self.cuda().map_or(Device::Cpu, |cuda| Device::Cuda(cuda.gpu))
    }

    /// The stream, if this queue is one.
    pub fn cuda(&self) -> Option<&CudaQueue> {
        match self {
            Queue::Cpu(_) => None,
            Queue::Cuda(cuda) => Some(cuda),
        }
    }

    /// Waits until everything that was issued is done.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.cuda().map_or(Ok(()), CudaQueue::synchronize)
    }

    /// Returns the first known failure of anything issued so far.
    pub fn check(&self) -> Result<(), GpuError> {
        self.cuda().map_or(Ok(()), CudaQueue::check)
    }

    pub fn num_threads(&self) -> usize {
        self.pool().num_threads()
    }
}
