//! Where bytes live and where work runs.
//!
//! A [`Memory`] is allocated once, before the first step, and divided into [`View`]s at the plan's offsets. A
//! [`Queue`] runs operations in order. On the CPU it is a thread pool with an instruction set, and an operation is
//! finished when its call returns. On a GPU it is a stream ([`cuda`]). Both are variants of one type, so operations
//! and models are written once.
//!
//! Only this crate, `ops` and `comm` contain `unsafe` code.

pub mod cuda;

mod amx;
mod c_library;
mod counting;
mod cpu;
mod host_memory;
mod memory;
mod nontemporal;
mod offload_file;
mod pool;
mod process_memory;
mod queue;
mod real;

pub use amx::{Amx, Tiles};
pub use c_library::c_library;
pub use counting::CountingAllocator;
pub use cpu::{InstructionSet, Isa, fma_peak_gflops};
pub use host_memory::HostMemory;
pub use memory::{Memory, MemoryError, View};
pub use nontemporal::copy_nontemporal;
pub use offload_file::{OffloadFile, OffloadFileError};
pub use pool::Pool;
pub use process_memory::ProcessMemory;
pub use queue::{CpuQueue, Device, Machine, Queue};
pub use real::Real;
