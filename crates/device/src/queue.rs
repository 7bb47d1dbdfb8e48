//! In-order lanes of work.

use crate::{Isa, Pool};

/// A lane that operations are issued to, in order. On the CPU an operation is done when its call
/// returns; on a GPU it will be a stream.
#[derive(Debug)]
#[non_exhaustive]
pub enum Queue {
    Cpu(CpuQueue),
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
        let Queue::Cpu(cpu) = self;
        &cpu.pool
    }

    pub fn num_threads(&self) -> usize {
        self.pool().num_threads()
    }
}
