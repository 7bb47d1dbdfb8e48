//! NVIDIA GPUs, found at run time: CUDA is needed neither to build nor to start this program.
//!
//! There is a table of functions for each library (`driver`, `nvrtc`, `cublas_lt`), loaded by file name, a [`Gpu`] that
//! owns the tables, and streams ([`CudaQueue`]) to which kernels and matmuls are issued.

#[cfg(any(test, feature = "testing"))]
pub mod fake;
pub mod library;

mod cache;
mod cublas_lt;
mod driver;
mod error;
mod gpu;
mod module;
mod nvml;
mod nvml_monitor;
mod nvrtc;
mod queue;
#[cfg(test)]
mod tests;

pub use cache::{KernelCache, KernelCacheError};
pub use cublas_lt::{CublasLt, Gemm, GemmOperand};
pub use driver::DevicePtr;
pub use error::GpuError;
pub use gpu::{DriverInfo, Gpu, find_driver};
pub use library::LibrarySearch;
pub use module::{Kernel, KernelSource, KernelVariant, VECTOR_BYTES, compile};
pub use nvml::{GpuReading, GpuSensors};
pub use nvml_monitor::{GpuMonitor, GpuUse};
pub use nvrtc::Nvrtc;
pub use queue::{Arg, CudaQueue, Event, Launch};
