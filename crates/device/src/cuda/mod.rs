//! NVIDIA GPUs, found at run time: nothing of CUDA is needed to build or to start this program.
//!
//! A table per library (`driver`, `nvrtc`, `lt`) of the functions that are used, opened by file name; a
//! [`Gpu`] that holds them; streams ([`CudaQueue`]) that kernels and products are issued to.

#[cfg(any(test, feature = "testing"))]
pub mod fake;
pub mod library;

mod cache;
mod driver;
mod error;
mod gpu;
mod lt;
mod module;
mod nvrtc;
mod queue;
#[cfg(test)]
mod tests;

pub use cache::{CacheError, KernelCache};
pub use driver::DevicePtr;
pub use error::GpuError;
pub use gpu::{Gpu, Installed, installed};
pub use library::Search;
pub use lt::{Factor, Gemm, Lt};
pub use module::{Kernel, PACK_BYTES, Source, Variant, compile};
pub use nvrtc::Nvrtc;
pub use queue::{Arg, CudaQueue, Event, Launch};
