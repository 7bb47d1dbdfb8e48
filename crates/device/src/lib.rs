//! Where bytes live and where work runs.
//!
//! A [`Memory`] is taken once, before step one, and cut into [`View`]s by the plan's offsets. A
//! [`Queue`] is an in-order lane of work: on the CPU it is a thread pool and an instruction set, and an
//! operation is finished when its call returns. A GPU's stream is another variant of the same type ([`cuda`]),
//! so operations and models are written once.
//!
//! `unsafe` lives here, in `ops` and in `comm`, and nowhere else.

pub mod cuda;

mod amx;
mod c_library;
mod counting;
mod cpu;
mod memory;
mod pool;
mod queue;
mod real;
mod spill;
mod stream;

pub use amx::{Amx, Tiles};
pub use c_library::c_library;
pub use counting::CountingAllocator;
pub use cpu::{Isa, Set, fma_peak_gflops};
pub use memory::{Memory, MemoryError, View};
pub use pool::Pool;
pub use queue::{CpuQueue, Device, Machine, Queue};
pub use real::Real;
pub use spill::{Spill, SpillError};
pub use stream::copy_past_caches;
