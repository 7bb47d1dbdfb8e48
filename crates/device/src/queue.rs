//! In-order lanes of work.

use crate::cuda::{CudaQueue, GpuError};
use crate::{Isa, Pool};

/// A lane that operations are issued to, in order. On the CPU an operation is done when its call
/// returns; on a GPU when its stream has come to it.
#[derive(Debug)]
pub enum Queue {
    Cpu(CpuQueue),
    Cuda(CudaQueue),
}

/// A thread pool and the instruction set its kernels use.
#[derive(Debug)]
pub struct CpuQueue {
    pub pool: Pool,
    pub isa: Isa,
}

impl Queue {
    /// A CPU lane of `num_threads`, with the best instruction set this machine has.
    pub fn cpu(num_threads: usize) -> Queue {
        Queue::Cpu(CpuQueue { pool: Pool::new(num_threads), isa: Isa::detect() })
    }

    /// A CPU lane with a chosen instruction set.
    pub fn cpu_with(num_threads: usize, isa: Isa) -> Queue {
        Queue::Cpu(CpuQueue { pool: Pool::new(num_threads), isa })
    }

    /// The host's threads behind the lane.
    pub fn pool(&self) -> &Pool {
        match self {
            Queue::Cpu(cpu) => &cpu.pool,
            Queue::Cuda(cuda) => &cuda.pool,
        }
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
