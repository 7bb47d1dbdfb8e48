//! The GPU of this process: its driver, its context and its compiled kernels.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock};

use lockstep_core::Bytes;

use super::cache::KernelCache;
use super::cublas_lt::CublasLt;
use super::driver::{self, Context, DevicePtr, DriverTable, ParamInfo, Status};
use super::error::GpuError;
use super::library::{LibrarySearch, open};
use super::module::Modules;
use super::nvrtc::Nvrtc;

/// The GPU that this process uses. It is opened once and stays open until the process ends.
pub struct Gpu {
    pub(crate) driver: DriverTable,
    /// Queries the parameters of a kernel, if the driver can.
    pub(crate) param_info: Option<ParamInfo>,
    context: Context,
    pub ordinal: u32,
    pub name: String,
    /// Compute capability: 90 means 9.0.
    pub sm: u32,
    pub multiprocessors: u32,
    /// The maximum shared memory of a block.
    pub shared_per_block: u32,
    pub l2: Bytes,
    pub total: Bytes,
    /// The CUDA version of the driver: 13000 means 13.0.
    pub driver_version: u32,
    pub(crate) nvrtc: Nvrtc,
    pub(crate) cublas_lt: CublasLt,
    pub(crate) modules: Modules,
    /// For copies by the host between steps.
    host_stream: Mutex<HostStream>,
}

/// A stream that the host waits for. Nothing is issued to it after a failure.
struct HostStream {
    handle: driver::StreamHandle,
    failure: Option<GpuError>,
}

// SAFETY: the context and the stream are handles that any thread may use; all mutable state on this side is behind
// locks.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// The oldest supported driver, that of CUDA 12.0.
const OLDEST_DRIVER: u32 = 12000;

thread_local! {
    /// The GPU whose context is current on this thread.
    static ENTERED: Cell<Option<u32>> = const { Cell::new(None) };
}

/// What a driver reports without opening a GPU.
#[derive(Debug)]
pub struct DriverInfo {
    pub driver_version: u32,
    pub driver_path: PathBuf,
    /// Name, compute capability and memory of each visible GPU.
    pub gpus: Vec<(String, u32, Bytes)>,
}

/// Finds the driver and its GPUs.
pub fn find_driver(search: &LibrarySearch) -> Result<DriverInfo, GpuError> {
    let driver = open_driver(search)?;
    let mut gpus = Vec::new();
    for ordinal in 0..count(&driver)? {
        gpus.push(describe(&driver, ordinal)?);
    }
    let driver_version = version(&driver)?;
    Ok(DriverInfo { driver_version, driver_path: driver.library.path.clone(), gpus })
}

fn open_driver(search: &LibrarySearch) -> Result<DriverTable, GpuError> {
    let driver = DriverTable::load(open("the NVIDIA driver", &["libcuda.so.1", "libcuda.so"], search)?)?;
    // SAFETY: takes only a number.
    check(&driver, "cuInit", unsafe { (driver.init)(0) })?;
    let found = version(&driver)?;
    if found < OLDEST_DRIVER {
        let found = format!("of CUDA {}.{}", found / 1000, found % 1000 / 10);
        return Err(GpuError::TooOld { what: "the NVIDIA driver", found, needed: "one of CUDA 12.0" });
    }
    Ok(driver)
}

fn version(driver: &DriverTable) -> Result<u32, GpuError> {
    let mut version = 0;
    // SAFETY: writes through a valid pointer.
    check(driver, "cuDriverGetVersion", unsafe { (driver.version)(&mut version) })?;
    Ok(version as u32)
}

fn count(driver: &DriverTable) -> Result<u32, GpuError> {
    let mut count = 0;
    // SAFETY: writes through a valid pointer.
    check(driver, "cuDeviceGetCount", unsafe { (driver.device_count)(&mut count) })?;
    Ok(count as u32)
}

fn attribute(driver: &DriverTable, device: c_int, which: c_int) -> Result<u32, GpuError> {
    let mut value = 0;
    // SAFETY: writes to a local variable; the driver returned this device.
    check(driver, "cuDeviceGetAttribute", unsafe { (driver.device_attribute)(&mut value, which, device) })?;
    Ok(value as u32)
}

fn describe(driver: &DriverTable, ordinal: u32) -> Result<(String, u32, Bytes), GpuError> {
    let device = device(driver, ordinal)?;
    let (mut name, mut total) = ([0 as c_char; 128], 0usize);
    // SAFETY: the buffer's length is passed, and the name is terminated within it.
    let name = unsafe {
        check(driver, "cuDeviceGetName", (driver.device_name)(name.as_mut_ptr(), 128, device))?;
        check(driver, "cuDeviceTotalMem", (driver.device_memory)(&mut total, device))?;
        CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
    };
    let major = attribute(driver, device, driver::CAPABILITY_MAJOR)?;
    let minor = attribute(driver, device, driver::CAPABILITY_MINOR)?;
    Ok((name, major * 10 + minor, Bytes(total as u64)))
}

fn device(driver: &DriverTable, ordinal: u32) -> Result<c_int, GpuError> {
    let count = count(driver)?;
    if ordinal >= count {
        return Err(GpuError::NoDevice { ordinal, count });
    }
    let mut device = 0;
    // SAFETY: writes to a local variable; the ordinal is below the count.
    check(driver, "cuDeviceGet", unsafe { (driver.device_get)(&mut device, ordinal as c_int) })?;
    Ok(device)
}

pub(crate) fn check(driver: &DriverTable, call: &'static str, status: Status) -> Result<(), GpuError> {
    if status == driver::SUCCESS {
        return Ok(());
    }
    let text = |function: unsafe extern "C" fn(Status, *mut *const c_char) -> Status| {
        let mut at: *const c_char = std::ptr::null();
        // SAFETY: on success the pointer refers to a static C string.
        unsafe {
            if function(status, &mut at) != driver::SUCCESS || at.is_null() {
                return format!("error {status}");
            }
            CStr::from_ptr(at).to_string_lossy().into_owned()
        }
    };
    Err(GpuError::Call { call, text: format!("{} ({})", text(driver.error_string), text(driver.error_name)) })
}

impl Gpu {
    /// Opens GPU `ordinal` among those that the driver reports. Compiled kernels are stored in `cache`, if there is
    /// one. Later calls return the same GPU. A process can open only one.
    pub fn open(
        ordinal: u32,
        search: &LibrarySearch,
        cache: Option<KernelCache>,
    ) -> Result<&'static Gpu, GpuError> {
        static OPENED: OnceLock<&'static Gpu> = OnceLock::new();
        static OPENING: Mutex<()> = Mutex::new(());
        let _one_at_a_time = OPENING.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(gpu) = OPENED.get() {
            assert_eq!(gpu.ordinal, ordinal, "a process can open only one GPU");
            return Ok(gpu);
        }
        let gpu: &'static Gpu = Box::leak(Box::new(Gpu::new(ordinal, search, cache)?));
        Ok(OPENED.get_or_init(|| gpu))
    }

    fn new(ordinal: u32, search: &LibrarySearch, cache: Option<KernelCache>) -> Result<Gpu, GpuError> {
        let driver = open_driver(search)?;
        let (name, sm, _) = describe(&driver, ordinal)?;
        if sm < 80 {
            return Err(GpuError::UnsupportedGpu { name, sm });
        }
        let param_info = driver::param_info(&driver);
        Gpu::over(driver, param_info, Nvrtc::open(search)?, || CublasLt::open(search), ordinal, cache)
    }

    /// A GPU on this driver. cuBLASLt is opened once the GPU's context is current, because it requires that.
    pub(crate) fn over(
        driver: DriverTable,
        param_info: Option<ParamInfo>,
        nvrtc: Nvrtc,
        open_cublas_lt: impl FnOnce() -> Result<CublasLt, GpuError>,
        ordinal: u32,
        cache: Option<KernelCache>,
    ) -> Result<Gpu, GpuError> {
        let (name, sm, total) = describe(&driver, ordinal)?;
        let device = device(&driver, ordinal)?;
        let mut context: Context = std::ptr::null_mut();
        // SAFETY: the driver returned the device; the context is current before any other call.
        unsafe {
            check(&driver, "cuDevicePrimaryCtxRetain", (driver.context_retain)(&mut context, device))?;
            check(&driver, "cuCtxSetCurrent", (driver.context_set)(context))?;
        }
        let cublas_lt = open_cublas_lt()?;
        let attribute = |which| attribute(&driver, device, which);
        let gpu = Gpu {
            multiprocessors: attribute(driver::MULTIPROCESSORS)?,
            shared_per_block: attribute(driver::SHARED_PER_BLOCK_OPTIN)?,
            l2: Bytes(u64::from(attribute(driver::L2_BYTES)?)),
            driver_version: version(&driver)?,
            modules: Modules::new(cache),
            host_stream: Mutex::new(HostStream { handle: std::ptr::null_mut(), failure: None }),
            driver,
            param_info,
            context,
            ordinal,
            name,
            sm,
            total,
            nvrtc,
            cublas_lt,
        };
        let handle = gpu.make_stream()?;
        gpu.host_stream.lock().unwrap_or_else(|e| e.into_inner()).handle = handle;
        Ok(gpu)
    }

    /// Makes this GPU's context current on the calling thread, which every driver call requires.
    #[inline]
    pub fn enter(&self) -> Result<(), GpuError> {
        if ENTERED.get() != Some(self.ordinal) {
            // SAFETY: the context was retained when the GPU was opened and is never released.
            self.check("cuCtxSetCurrent", unsafe { (self.driver.context_set)(self.context) })?;
            ENTERED.set(Some(self.ordinal));
        }
        Ok(())
    }

    pub fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
    }

    pub fn cublas_lt(&self) -> &CublasLt {
        &self.cublas_lt
    }

    pub fn driver_path(&self) -> &std::path::Path {
        &self.driver.library.path
    }

    /// The address of the GPU on its bus, by which other libraries find it.
    pub(crate) fn pci_bus_id(&self) -> Result<CString, GpuError> {
        type BusId = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> Status;
        // SAFETY: the signature is the one in the driver's header.
        let bus_id = unsafe { self.driver.library.symbol::<BusId>("cuDeviceGetPCIBusId")? };
        let device = device(&self.driver, self.ordinal)?;
        let mut text = [0 as c_char; 32];
        // SAFETY: the buffer's length is passed, and the driver ends the text within it.
        unsafe {
            check(&self.driver, "cuDeviceGetPCIBusId", bus_id(text.as_mut_ptr(), 32, device))?;
            Ok(CStr::from_ptr(text.as_ptr()).to_owned())
        }
    }

    /// Free bytes on the GPU, as the driver reports them for all processes together.
    pub fn free_bytes(&self) -> Result<Bytes, GpuError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes to two local variables.
        self.check("cuMemGetInfo", unsafe { (self.driver.memory_info)(&mut free, &mut total) })?;
        Ok(Bytes(free as u64))
    }

    pub(crate) fn check(&self, call: &'static str, status: Status) -> Result<(), GpuError> {
        check(&self.driver, call, status)
    }

    pub(crate) fn allocate(&self, bytes: Bytes) -> Result<DevicePtr, GpuError> {
        self.enter()?;
        let mut at = 0;
        // SAFETY: writes through a valid pointer.
        let status = unsafe { (self.driver.memory_alloc)(&mut at, bytes.0 as usize) };
        if status == driver::OUT_OF_MEMORY {
            return Err(GpuError::OutOfMemory { wanted: bytes, free: self.free_bytes()?, total: self.total });
        }
        self.check("cuMemAlloc", status)?;
        Ok(at)
    }

    /// Frees memory. For drops, which cannot report a failure.
    pub(crate) fn free(&self, at: DevicePtr) {
        if self.enter().is_ok() {
            // SAFETY: the address came from `allocate`, and its owner is being dropped.
            unsafe { (self.driver.memory_free)(at) };
        }
    }

    /// Pins host memory, so that copies to and from it are asynchronous.
    pub(crate) fn pin(&self, at: *mut u8, bytes: usize) -> Result<(), GpuError> {
        self.enter()?;
        // SAFETY: the caller owns the mapping and unpins it before unmapping it.
        self.check("cuMemHostRegister", unsafe { (self.driver.host_register)(at.cast(), bytes, 0) })
    }

    /// Unpins host memory. For drops, as [`Gpu::free`].
    pub(crate) fn unpin(&self, at: *mut u8) {
        if self.enter().is_ok() {
            // SAFETY: pinned by `pin`.
            unsafe { (self.driver.host_unregister)(at.cast()) };
        }
    }

    pub(crate) fn make_stream(&self) -> Result<driver::StreamHandle, GpuError> {
        self.enter()?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: writes through a valid pointer.
        let status = unsafe { (self.driver.stream_create)(&mut stream, driver::STREAM_NON_BLOCKING) };
        self.check("cuStreamCreate", status)?;
        Ok(stream)
    }

    /// Issues a copy to the host's stream and waits for it. For use between steps.
    fn host_copy(
        &self,
        call: &'static str,
        copy: impl FnOnce(driver::StreamHandle) -> Status,
    ) -> Result<(), GpuError> {
        let mut stream = self.host_stream.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(cause) = &stream.failure {
            return Err(cause.clone());
        }
        let outcome = self.enter().and_then(|()| {
            self.check(call, copy(stream.handle))?;
            // SAFETY: the stream lives as long as the process.
            self.check("cuStreamSynchronize", unsafe { (self.driver.stream_synchronize)(stream.handle) })
        });
        stream.failure = outcome.as_ref().err().cloned();
        outcome
    }

    /// # Safety
    /// `bytes` are readable at `from` and writable at `to` on this device; nobody else uses them during the call.
    pub(crate) unsafe fn write_bytes(
        &self,
        to: DevicePtr,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), GpuError> {
        self.host_copy("cuMemcpyHtoDAsync", |stream| {
            // SAFETY: guaranteed by the caller.
            unsafe { (self.driver.copy_to_device)(to, from.cast(), bytes, stream) }
        })
    }

    /// # Safety
    /// As `write_bytes`, in the other direction.
    pub(crate) unsafe fn read_bytes(
        &self,
        to: *mut u8,
        from: DevicePtr,
        bytes: usize,
    ) -> Result<(), GpuError> {
        self.host_copy("cuMemcpyDtoHAsync", |stream| {
            // SAFETY: guaranteed by the caller.
            unsafe { (self.driver.copy_to_host)(to.cast(), from, bytes, stream) }
        })
    }

    /// # Safety
    /// Both ranges lie in this device's memory, and nobody else uses them during the call.
    pub(crate) unsafe fn copy_bytes(
        &self,
        to: DevicePtr,
        from: DevicePtr,
        bytes: usize,
    ) -> Result<(), GpuError> {
        self.host_copy("cuMemcpyDtoDAsync", |stream| {
            // SAFETY: guaranteed by the caller.
            unsafe { (self.driver.copy_on_device)(to, from, bytes, stream) }
        })
    }

    /// # Safety
    /// The range lies in this device's memory, and nobody else uses it during the call.
    pub(crate) unsafe fn zero_bytes(&self, at: DevicePtr, bytes: usize) -> Result<(), GpuError> {
        self.host_copy("cuMemsetD8Async", |stream| {
            // SAFETY: guaranteed by the caller.
            unsafe { (self.driver.set_bytes)(at, 0, bytes, stream) }
        })
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpu({} {}, sm_{})", self.ordinal, self.name, self.sm)
    }
}
