//! CUDA streams: work on the GPU runs in the order in which it was issued.

use std::ffi::c_void;
use std::sync::OnceLock;

use lockstep_core::DType;

use super::driver::{self, DriverTable, EventHandle, Status, StreamHandle};
use super::error::GpuError;
use super::gpu::Gpu;
use super::module::{Kernel, KernelSource, KernelVariant};
use crate::{Pool, View};

/// A stream of a GPU. Calls return when work has been issued, not when it is done.
///
/// Calls that issue work do not return errors. The stream keeps the first failure, which [`CudaQueue::check`] returns,
/// and ignores all work issued after it. So operations have the same signatures on every device.
pub struct CudaQueue {
    pub gpu: &'static Gpu,
    stream: StreamHandle,
    failure: OnceLock<GpuError>,
    /// Host threads that work beside the stream.
    pub(crate) pool: Pool,
    /// Whether f32 matmuls may round their operands to tf32.
    pub tf32: bool,
}

// SAFETY: a stream handle may be used from any thread; the rest is locked or immutable.
unsafe impl Send for CudaQueue {}
// SAFETY: as above.
unsafe impl Sync for CudaQueue {}

/// The grid, the threads of a block, and the bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    pub grid: [usize; 3],
    pub threads: usize,
    pub shared: usize,
}

impl Launch {
    pub const fn new(blocks: usize, threads: usize) -> Launch {
        Launch { grid: [blocks, 1, 1], threads, shared: 0 }
    }

    /// One thread per item, in blocks of 256.
    pub const fn each(items: usize) -> Launch {
        Launch::new(items.div_ceil(256), 256)
    }
}

/// An argument of a kernel: its bits and the size of the parameter in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Arg {
    bits: u64,
    bytes: usize,
}

impl Arg {
    const fn wide(bits: u64) -> Arg {
        Arg { bits, bytes: 8 }
    }

    /// Little-endian: a 32-bit parameter reads the low half.
    const fn narrow(bits: u32) -> Arg {
        Arg { bits: bits as u64, bytes: 4 }
    }
}

impl From<View<'_>> for Arg {
    fn from(view: View<'_>) -> Arg {
        assert!(view.on_gpu() || view.is_empty(), "kernels can only access GPU memory");
        Arg::wide(view.as_ptr::<u8>() as u64)
    }
}

impl From<Option<View<'_>>> for Arg {
    /// A null pointer for `None`.
    fn from(view: Option<View<'_>>) -> Arg {
        view.map_or(Arg::wide(0), Arg::from)
    }
}

impl From<u32> for Arg {
    fn from(value: u32) -> Arg {
        Arg::narrow(value)
    }
}

impl From<u64> for Arg {
    fn from(value: u64) -> Arg {
        Arg::wide(value)
    }
}

/// Sizes are passed to kernels as 32-bit integers; a size that does not fit is a bug in the plan.
impl From<usize> for Arg {
    fn from(value: usize) -> Arg {
        Arg::narrow(u32::try_from(value).expect("a size that fits in 32 bits"))
    }
}

impl From<i32> for Arg {
    fn from(value: i32) -> Arg {
        Arg::narrow(value as u32)
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Arg {
        Arg::narrow(value.to_bits())
    }
}

impl From<f64> for Arg {
    fn from(value: f64) -> Arg {
        Arg::wide(value.to_bits())
    }
}

/// The arguments of a launch, in the order of the kernel's parameters: views (as pointers), u32, i32, f32, usize (as a
/// 32-bit integer), u64 and f64.
#[macro_export]
macro_rules! args {
    ($($arg:expr),* $(,)?) => { [$($crate::cuda::Arg::from($arg)),*] };
}

impl CudaQueue {
    /// Creates a stream, with `num_threads` host threads beside it.
    pub fn new(gpu: &'static Gpu, num_threads: usize) -> Result<CudaQueue, GpuError> {
        let stream = gpu.make_stream()?;
        Ok(CudaQueue { gpu, stream, failure: OnceLock::new(), pool: Pool::new(num_threads), tf32: false })
    }

    /// The stream's handle, for libraries that issue work themselves. An error after a failure.
    pub fn raw_stream(&self) -> Result<*mut c_void, GpuError> {
        self.check()?;
        self.gpu.enter()?;
        Ok(self.stream)
    }

    /// The kernel of an operation, compiled on first use. `None` after a failure.
    pub fn kernel(
        &self,
        source: &'static KernelSource,
        real: DType,
        name: &'static str,
    ) -> Option<&'static Kernel> {
        self.kernel_variant(source, KernelVariant::of(real), name)
    }

    pub fn kernel_variant(
        &self,
        source: &'static KernelSource,
        variant: KernelVariant,
        name: &'static str,
    ) -> Option<&'static Kernel> {
        self.check().ok()?;
        self.gpu.kernel(source, variant, name).map_err(|cause| self.fail(cause)).ok()
    }

    /// Launches a kernel. An empty grid is a no-op.
    ///
    /// # Safety
    /// The arguments match the kernel's parameters in number, order and size, and the plan allows this lane to use
    /// every address that the kernel computes from them.
    pub unsafe fn launch<const N: usize>(&self, kernel: Option<&Kernel>, launch: Launch, mut args: [Arg; N]) {
        let (Some(kernel), false, true) = (kernel, launch.grid.contains(&0), self.check().is_ok()) else {
            return;
        };
        let shared = launch.shared as u32;
        let ready = kernel.check_args(args.map(|arg| arg.bytes));
        if let Err(cause) = ready.and_then(|()| kernel.allow_shared(self.gpu, shared)) {
            return self.fail(cause);
        }
        let mut pointers: [*mut c_void; N] = [std::ptr::null_mut(); N];
        for (pointer, arg) in pointers.iter_mut().zip(&mut args) {
            *pointer = (&raw mut arg.bits).cast();
        }
        let ([x, y, z], threads, extra) =
            (launch.grid.map(|n| n as u32), launch.threads as u32, std::ptr::null_mut());
        let (function, pointers) = (kernel.function, pointers.as_mut_ptr());
        self.issue("cuLaunchKernel", |driver, stream| {
            // SAFETY: there is a pointer to an argument of the right size for each parameter. The caller guarantees
            // this, and `check_args` has verified it where the driver reports the parameters.
            unsafe { (driver.launch)(function, x, y, z, threads, 1, 1, shared, stream, pointers, extra) }
        });
    }

    /// Sets a range to zero, in stream order.
    pub fn zero(&self, view: View<'_>) {
        if view.is_empty() {
            return;
        }
        assert!(view.on_gpu(), "a stream can only set GPU memory");
        self.issue("cuMemsetD8Async", |driver, stream| {
            // SAFETY: the view lies in live device memory, and the plan allows this lane to write it now.
            unsafe { (driver.set_bytes)(view.device_ptr(), 0, view.bytes(), stream) }
        });
    }

    /// Copies between host and GPU, or within the GPU, in stream order. If the host memory is not pinned, the call
    /// waits for the copy.
    pub fn copy(&self, to: View<'_>, from: View<'_>) {
        assert_eq!(
            (to.len(), to.dtype()),
            (from.len(), from.dtype()),
            "copy between views that differ in length or type"
        );
        let bytes = to.bytes();
        if bytes == 0 {
            return;
        }
        self.issue("cuMemcpyAsync", |driver, stream| {
            // SAFETY: both views lie in live memory, and the plan's waits keep others off them until the copy is done.
            unsafe {
                match (to.on_gpu(), from.on_gpu()) {
                    (true, true) => {
                        (driver.copy_on_device)(to.device_ptr(), from.device_ptr(), bytes, stream)
                    }
                    (true, false) => (driver.copy_to_device)(to.device_ptr(), from.as_ptr(), bytes, stream),
                    (false, true) => (driver.copy_to_host)(to.as_ptr(), from.device_ptr(), bytes, stream),
                    (false, false) => panic!("a stream cannot copy from host to host"),
                }
            }
        });
    }

    /// Records the event at this point of the stream.
    pub fn record(&self, event: &Event) {
        self.issue("cuEventRecord", |driver, stream| {
            // SAFETY: event and stream are alive and belong to the same context.
            unsafe { (driver.event_record)(event.handle, stream) }
        });
    }

    /// Makes work issued from now on wait for the event. The wait happens on the GPU; the call returns at once.
    pub fn wait_for(&self, event: &Event) {
        self.issue("cuStreamWaitEvent", |driver, stream| {
            // SAFETY: as in `record`.
            unsafe { (driver.stream_wait)(stream, event.handle, 0) }
        });
    }

    /// Makes a driver call for this stream and keeps its failure. Does nothing after a failure.
    fn issue(&self, name: &'static str, call: impl FnOnce(&DriverTable, StreamHandle) -> Status) {
        let outcome =
            self.raw_stream().and_then(|stream| self.gpu.check(name, call(&self.gpu.driver, stream)));
        self.keep_failure(outcome);
    }

    /// Waits until all issued work is done.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        // SAFETY: the stream is alive.
        self.issue("cuStreamSynchronize", |driver, stream| unsafe { (driver.stream_synchronize)(stream) });
        self.check()
    }

    /// Whether all issued work is done.
    pub fn is_idle(&self) -> Result<bool, GpuError> {
        let mut is_idle = true;
        // SAFETY: the stream is alive.
        self.issue("cuStreamQuery", |driver, stream| match unsafe { (driver.stream_query)(stream) } {
            driver::NOT_READY => {
                is_idle = false;
                driver::SUCCESS
            }
            status => status,
        });
        self.check().map(|()| is_idle)
    }

    /// The first failure, if there was one.
    pub fn check(&self) -> Result<(), GpuError> {
        self.failure.get().map_or(Ok(()), |cause| Err(cause.clone()))
    }

    /// Keeps a failure for [`CudaQueue::check`]. Later failures do not replace the first.
    pub fn fail(&self, cause: GpuError) {
        let _ = self.failure.set(cause);
    }

    pub(crate) fn keep_failure(&self, outcome: Result<(), GpuError>) {
        if let Err(cause) = outcome {
            self.fail(cause);
        }
    }
}

impl Drop for CudaQueue {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: created by `new`; the driver destroys it once its work is done.
            unsafe { (self.gpu.driver.stream_destroy)(self.stream) };
        }
    }
}

impl std::fmt::Debug for CudaQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaQueue({:?})", self.gpu)
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    gpu: &'static Gpu,
    handle: EventHandle,
}

// SAFETY: an event handle may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub fn new(gpu: &'static Gpu) -> Result<Event, GpuError> {
        Event::with_flags(gpu, driver::EVENT_DISABLE_TIMING)
    }

    /// An event that records its time, for [`Event::milliseconds_since`].
    pub fn timed(gpu: &'static Gpu) -> Result<Event, GpuError> {
        Event::with_flags(gpu, 0)
    }

    fn with_flags(gpu: &'static Gpu, flags: u32) -> Result<Event, GpuError> {
        gpu.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes through a valid pointer.
        gpu.check("cuEventCreate", unsafe { (gpu.driver.event_create)(&mut handle, flags) })?;
        Ok(Event { gpu, handle })
    }

    /// Blocks the host until the work before the event is done.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.gpu.enter()?;
        // SAFETY: the event is alive.
        self.gpu.check("cuEventSynchronize", unsafe { (self.gpu.driver.event_synchronize)(self.handle) })
    }

    pub fn is_done(&self) -> Result<bool, GpuError> {
        self.gpu.enter()?;
        // SAFETY: the event is alive.
        match unsafe { (self.gpu.driver.event_query)(self.handle) } {
            driver::NOT_READY => Ok(false),
            status => self.gpu.check("cuEventQuery", status).map(|()| true),
        }
    }

    /// The time between two timed events that are both done.
    pub fn milliseconds_since(&self, earlier: &Event) -> Result<f32, GpuError> {
        self.gpu.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: writes to a local variable; both events are live.
        let status =
            unsafe { (self.gpu.driver.event_elapsed)(&mut milliseconds, earlier.handle, self.handle) };
        self.gpu.check("cuEventElapsedTime", status)?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: created by `with_flags`.
            unsafe { (self.gpu.driver.event_destroy)(self.handle) };
        }
    }
}
