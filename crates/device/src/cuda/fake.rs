//! A fake GPU for tests. It uses host memory, counts every driver call, and can make any call fail.
//!
//! Its functions are plain C functions like the driver's. They find their GPU through the context that is current on
//! the calling thread, so a call without a context fails as it would on a real driver. Copies and memsets happen when
//! they are issued; kernels and matmuls do nothing. A source "compiles" to itself, so that the fake driver can report
//! the parameters that its kernels declare.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use super::Gpu;
use super::cache::KernelCache;
use super::cublas_lt::{
    Algorithm, Candidate, CublasLt, Desc, Handle, Layout as MatrixLayout, LtTable, Preference,
};
use super::driver::{
    self, Context, DevicePtr, DriverTable, EventHandle, FunctionHandle, ModuleHandle, Status, StreamHandle,
};
use super::library::LoadedLibrary;
use super::nvrtc::{Nvrtc, NvrtcTable, Program};

const INVALID_CONTEXT: Status = 201;
const NOT_FOUND: Status = 500;
/// The status of calls that are made to fail.
const LOST: Status = 999;
/// Real GPUs have smaller ordinals.
const FIRST_ORDINAL: usize = 1000;
const ALIGNMENT: usize = 256;

/// All fake GPUs that were created. Like real ones, they are never closed.
static CREATED: Mutex<Vec<&'static FakeGpu>> = Mutex::new(Vec::new());

thread_local! {
    /// The GPU whose context is current on this thread.
    static CURRENT: Cell<Option<&'static FakeGpu>> = const { Cell::new(None) };
}

/// A test's handle to its fake GPU.
#[derive(Debug)]
pub struct FakeGpu {
    sm: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    calls: Vec<&'static str>,
    /// The numbers of the calls that fail.
    failing: Range<usize>,
    handles: usize,
    memory: HashMap<DevicePtr, Layout>,
    /// By handle: the source of each module, and the name and parameter sizes of each kernel.
    modules: HashMap<usize, String>,
    kernels: HashMap<usize, (String, Vec<usize>)>,
    launched: BTreeSet<String>,
}

impl FakeGpu {
    /// Creates a GPU and the handle that controls it. Compiled kernels are stored in `cache`, if there is one.
    pub fn make(cache: Option<KernelCache>) -> (&'static Gpu, &'static FakeGpu) {
        FakeGpu::make_with_sm(90, cache)
    }

    /// As [`FakeGpu::make`], with a given compute capability: 90 means 9.0.
    pub fn make_with_sm(sm: u32, cache: Option<KernelCache>) -> (&'static Gpu, &'static FakeGpu) {
        let fake: &'static FakeGpu = Box::leak(Box::new(FakeGpu { sm, state: Mutex::default() }));
        let ordinal = {
            let mut created = CREATED.lock().unwrap_or_else(|e| e.into_inner());
            created.push(fake);
            FIRST_ORDINAL + created.len() - 1
        };
        let nvrtc = Nvrtc::over(nvrtc_table()).expect("the fake compiler opens");
        let open_cublas_lt = || CublasLt::over(lt_table());
        let gpu = Gpu::over(driver_table(), Some(param_info), nvrtc, open_cublas_lt, ordinal as u32, cache);
        let gpu = gpu.expect("the fake GPU opens");
        fake.forget_calls();
        (Box::leak(Box::new(gpu)), fake)
    }

    /// Makes calls fail. They are counted from now on: the next one is number 0.
    pub fn fail(&self, calls: Range<usize>) {
        let mut state = self.lock();
        let so_far = state.calls.len();
        state.failing = so_far.saturating_add(calls.start)..so_far.saturating_add(calls.end);
    }

    /// The names of the kernels that were launched.
    pub fn launched(&self) -> Vec<String> {
        self.lock().launched.iter().cloned().collect()
    }

    /// The calls so far in order, including those that failed.
    pub fn calls(&self) -> Vec<&'static str> {
        self.lock().calls.clone()
    }

    /// Resets the count of calls, and makes no more calls fail.
    pub fn forget_calls(&self) {
        let mut state = self.lock();
        state.calls.clear();
        state.failing = 0..0;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn call(&self, name: &'static str, work: impl FnOnce(&mut State)) -> Status {
        let mut state = self.lock();
        let number = state.calls.len();
        state.calls.push(name);
        if state.failing.contains(&number) {
            return LOST;
        }
        work(&mut state);
        driver::SUCCESS
    }
}

/// Makes a call on the GPU whose context is current on this thread.
fn call(name: &'static str, work: impl FnOnce(&mut State)) -> Status {
    CURRENT.get().map_or(INVALID_CONTEXT, |fake| fake.call(name, work))
}

fn find_gpu(device: c_int) -> Option<&'static FakeGpu> {
    let created = CREATED.lock().unwrap_or_else(|e| e.into_inner());
    created.get((device as usize).checked_sub(FIRST_ORDINAL)?).copied()
}

impl State {
    /// A new non-null handle.
    fn handle(&mut self) -> *mut c_void {
        self.handles += 1;
        self.handles as *mut c_void
    }
}

/// Writes an output parameter.
///
/// # Safety
/// `to` is valid for writes.
unsafe fn write_out<T>(to: *mut T, value: T) {
    // SAFETY: guaranteed by the caller.
    unsafe { to.write(value) }
}

// ---- the driver ---------------------------------------------------------------------------------------------------

unsafe extern "C" fn init(_: c_uint) -> Status {
    driver::SUCCESS
}

unsafe extern "C" fn version(version: *mut c_int) -> Status {
    // SAFETY: writes through a valid pointer.
    unsafe { write_out(version, 13_000) };
    driver::SUCCESS
}

unsafe extern "C" fn error_name(_: Status, name: *mut *const c_char) -> Status {
    // SAFETY: writes through a valid pointer.
    unsafe { write_out(name, c"CUDA_ERROR_UNKNOWN".as_ptr()) };
    driver::SUCCESS
}

unsafe extern "C" fn error_string(_: Status, text: *mut *const c_char) -> Status {
    // SAFETY: writes through a valid pointer.
    unsafe { write_out(text, c"the GPU is lost".as_ptr()) };
    driver::SUCCESS
}

unsafe extern "C" fn device_count(count: *mut c_int) -> Status {
    let created = CREATED.lock().unwrap_or_else(|e| e.into_inner()).len();
    // SAFETY: writes through a valid pointer.
    unsafe { write_out(count, (FIRST_ORDINAL + created) as c_int) };
    driver::SUCCESS
}

unsafe extern "C" fn device_get(device: *mut c_int, ordinal: c_int) -> Status {
    // SAFETY: writes through a valid pointer.
    unsafe { write_out(device, ordinal) };
    driver::SUCCESS
}

unsafe extern "C" fn device_name(name: *mut c_char, _: c_int, _: c_int) -> Status {
    let text = c"a GPU for tests";
    // SAFETY: the buffer is longer than the name.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), name, text.to_bytes_with_nul().len()) };
    driver::SUCCESS
}

unsafe extern "C" fn device_attribute(value: *mut c_int, which: c_int, device: c_int) -> Status {
    let sm = find_gpu(device).map_or(0, |fake| fake.sm as c_int);
    let found = match which {
        driver::MULTIPROCESSORS => 4,
        driver::CAPABILITY_MAJOR => sm / 10,
        driver::CAPABILITY_MINOR => sm % 10,
        driver::SHARED_PER_BLOCK_OPTIN => 227 << 10,
        driver::L2_BYTES => 1 << 20,
        _ => 0,
    };
    // SAFETY: writes through a valid pointer.
    unsafe { write_out(value, found) };
    driver::SUCCESS
}

unsafe extern "C" fn device_memory(bytes: *mut usize, _: c_int) -> Status {
    // SAFETY: writes through a valid pointer.
    unsafe { write_out(bytes, 1 << 30) };
    driver::SUCCESS
}

unsafe extern "C" fn context_retain(context: *mut Context, device: c_int) -> Status {
    let Some(fake) = find_gpu(device) else { return INVALID_CONTEXT };
    // SAFETY: writes through a valid pointer.
    unsafe { write_out(context, std::ptr::from_ref(fake).cast_mut().cast()) };
    driver::SUCCESS
}

unsafe extern "C" fn context_set(context: Context) -> Status {
    // SAFETY: created by `context_retain`, for a GPU that is never dropped.
    let fake: &'static FakeGpu = unsafe { &*context.cast::<FakeGpu>() };
    fake.call("cuCtxSetCurrent", |_| CURRENT.set(Some(fake)))
}

unsafe extern "C" fn memory_info(free: *mut usize, total: *mut usize) -> Status {
    // SAFETY: writes through two valid pointers.
    call("cuMemGetInfo", |_| unsafe {
        write_out(free, 1 << 30);
        write_out(total, 1 << 30);
    })
}

unsafe extern "C" fn memory_alloc(at: *mut DevicePtr, bytes: usize) -> Status {
    call("cuMemAlloc", |state| {
        let layout = Layout::from_size_align(bytes, ALIGNMENT).expect("a size that fits");
        // SAFETY: memory of zero bytes is never requested, and the pointer is valid. Memory on a real GPU is not zero
        // at first, so fill it with something else here.
        unsafe {
            let block = alloc_zeroed(layout);
            block.write_bytes(0xA5, bytes);
            state.memory.insert(block as DevicePtr, layout);
            write_out(at, block as DevicePtr);
        }
    })
}

unsafe extern "C" fn memory_free(at: DevicePtr) -> Status {
    call("cuMemFree", |state| {
        let layout = state.memory.remove(&at).expect("memory that was granted");
        // SAFETY: allocated by `memory_alloc` with this layout.
        unsafe { dealloc(at as *mut u8, layout) };
    })
}

unsafe extern "C" fn host_register(_: *mut c_void, _: usize, _: c_uint) -> Status {
    call("cuMemHostRegister", |_| {})
}

unsafe extern "C" fn host_unregister(_: *mut c_void) -> Status {
    call("cuMemHostUnregister", |_| {})
}

unsafe extern "C" fn copy_to_device(
    to: DevicePtr,
    from: *const c_void,
    bytes: usize,
    _: StreamHandle,
) -> Status {
    // SAFETY: guaranteed by the caller; device memory is host memory here.
    call("cuMemcpyHtoD", |_| unsafe { std::ptr::copy(from.cast::<u8>(), to as *mut u8, bytes) })
}

unsafe extern "C" fn copy_to_host(to: *mut c_void, from: DevicePtr, bytes: usize, _: StreamHandle) -> Status {
    // SAFETY: as above.
    call("cuMemcpyDtoH", |_| unsafe { std::ptr::copy(from as *const u8, to.cast::<u8>(), bytes) })
}

unsafe extern "C" fn copy_on_device(to: DevicePtr, from: DevicePtr, bytes: usize, _: StreamHandle) -> Status {
    // SAFETY: as above.
    call("cuMemcpyDtoD", |_| unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) })
}

unsafe extern "C" fn set_bytes(at: DevicePtr, value: u8, bytes: usize, _: StreamHandle) -> Status {
    // SAFETY: as above.
    call("cuMemsetD8", |_| unsafe { std::ptr::write_bytes(at as *mut u8, value, bytes) })
}

unsafe extern "C" fn stream_create(stream: *mut StreamHandle, _: c_uint) -> Status {
    // SAFETY: writes through a valid pointer.
    call("cuStreamCreate", |state| unsafe { write_out(stream, state.handle()) })
}

unsafe extern "C" fn stream_destroy(_: StreamHandle) -> Status {
    call("cuStreamDestroy", |_| {})
}

unsafe extern "C" fn stream_synchronize(_: StreamHandle) -> Status {
    call("cuStreamSynchronize", |_| {})
}

unsafe extern "C" fn stream_query(_: StreamHandle) -> Status {
    call("cuStreamQuery", |_| {})
}

unsafe extern "C" fn stream_wait(_: StreamHandle, _: EventHandle, _: c_uint) -> Status {
    call("cuStreamWaitEvent", |_| {})
}

unsafe extern "C" fn event_create(event: *mut EventHandle, _: c_uint) -> Status {
    // SAFETY: writes through a valid pointer.
    call("cuEventCreate", |state| unsafe { write_out(event, state.handle()) })
}

unsafe extern "C" fn event_destroy(_: EventHandle) -> Status {
    call("cuEventDestroy", |_| {})
}

unsafe extern "C" fn event_record(_: EventHandle, _: StreamHandle) -> Status {
    call("cuEventRecord", |_| {})
}

unsafe extern "C" fn event_query(_: EventHandle) -> Status {
    call("cuEventQuery", |_| {})
}

unsafe extern "C" fn event_synchronize(_: EventHandle) -> Status {
    call("cuEventSynchronize", |_| {})
}

unsafe extern "C" fn event_elapsed(milliseconds: *mut f32, _: EventHandle, _: EventHandle) -> Status {
    // SAFETY: writes through a valid pointer.
    call("cuEventElapsedTime", |_| unsafe { write_out(milliseconds, 1.0) })
}

unsafe extern "C" fn module_load(module: *mut ModuleHandle, code: *const c_void) -> Status {
    // SAFETY: the compiler's output ends with a zero byte; writes through a valid pointer.
    call("cuModuleLoadData", |state| unsafe {
        let (handle, text) = (state.handle(), CStr::from_ptr(code.cast()).to_string_lossy().into_owned());
        state.modules.insert(handle as usize, text);
        write_out(module, handle);
    })
}

unsafe extern "C" fn module_function(
    function: *mut FunctionHandle,
    module: ModuleHandle,
    name: *const c_char,
) -> Status {
    let Some(fake) = CURRENT.get() else { return INVALID_CONTEXT };
    // SAFETY: a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let params = fake.lock().modules.get(&(module as usize)).and_then(|text| declared(text, &name));
    let Some(params) = params else { return NOT_FOUND };
    // SAFETY: writes through a valid pointer.
    call("cuModuleGetFunction", |state| unsafe {
        let handle = state.handle();
        state.kernels.insert(handle as usize, (name, params));
        write_out(function, handle);
    })
}

/// Sizes of the parameters that a source declares for the kernel `name`.
fn declared(source: &str, name: &str) -> Option<Vec<usize>> {
    let kernels = source.split("__global__ void").skip(1);
    let params = kernels.filter_map(|kernel| {
        let kernel = kernel.trim_start();
        let bounded = kernel.strip_prefix("__launch_bounds__").and_then(|rest| rest.split_once(')'));
        let (found, rest) = bounded.map_or(kernel, |(_, rest)| rest).split_once('(')?;
        (found.trim() == name).then(|| rest.split_once(')').expect("parameters end").0)
    });
    let bytes = |param: &str| match param.trim().rsplit_once([' ', '*']).expect("a type and a name").0.trim()
    {
        _ if param.contains('*') => 8,
        "u64" | "f64" => 8,
        "u32" | "f32" | "int" => 4,
        other => panic!("a parameter of type {other} in kernel {name}"),
    };
    let params = params.map(|text| text.split(',').filter(|p| !p.trim().is_empty()).map(bytes).collect());
    params.last()
}

unsafe extern "C" fn function_set(_: FunctionHandle, _: c_int, _: c_int) -> Status {
    call("cuFuncSetAttribute", |_| {})
}

unsafe extern "C" fn param_info(
    function: FunctionHandle,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> Status {
    let Some(fake) = CURRENT.get() else { return INVALID_CONTEXT };
    let params = fake.lock().kernels[&(function as usize)].1.clone();
    let Some(bytes) = params.get(index) else { return driver::INVALID_VALUE };
    let start = params[..index].iter().fold(0usize, |at, bytes| at.next_multiple_of(*bytes) + bytes);
    // SAFETY: writes through two valid pointers.
    call("cuFuncGetParamInfo", |_| unsafe {
        write_out(offset, start.next_multiple_of(*bytes));
        write_out(size, *bytes);
    })
}

unsafe extern "C" fn launch(
    function: FunctionHandle,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: StreamHandle,
    _: *mut *mut c_void,
    _: *mut *mut c_void,
) -> Status {
    call("cuLaunchKernel", |state| {
        let name = state.kernels[&(function as usize)].0.clone();
        state.launched.insert(name);
    })
}

fn driver_table() -> DriverTable {
    DriverTable {
        init,
        version,
        error_name,
        error_string,
        device_count,
        device_get,
        device_name,
        device_attribute,
        device_memory,
        context_retain,
        context_set,
        memory_info,
        memory_alloc,
        memory_free,
        host_register,
        host_unregister,
        copy_to_device,
        copy_to_host,
        copy_on_device,
        set_bytes,
        stream_create,
        stream_destroy,
        stream_synchronize,
        stream_query,
        stream_wait,
        event_create,
        event_destroy,
        event_record,
        event_query,
        event_synchronize,
        event_elapsed,
        module_load,
        module_function,
        function_set,
        launch,
        library: LoadedLibrary::this_program(),
    }
}

// ---- NVRTC --------------------------------------------------------------------------------------------------------

unsafe extern "C" fn nvrtc_version(major: *mut c_int, minor: *mut c_int) -> c_int {
    // SAFETY: writes through two valid pointers.
    unsafe {
        write_out(major, 13);
        write_out(minor, 0);
    }
    0
}

unsafe extern "C" fn nvrtc_error_string(_: c_int) -> *const c_char {
    c"the compiler is lost".as_ptr()
}

unsafe extern "C" fn nvrtc_create(
    program: *mut Program,
    text: *const c_char,
    _: *const c_char,
    _: c_int,
    _: *const *const c_char,
    _: *const *const c_char,
) -> c_int {
    // SAFETY: a C string, and a valid pointer to write the handle to.
    unsafe { write_out(program, CStr::from_ptr(text).to_owned().into_raw().cast()) };
    0
}

unsafe extern "C" fn nvrtc_destroy(program: *mut Program) -> c_int {
    // SAFETY: created by `nvrtc_create`, and not used afterwards.
    drop(unsafe { CString::from_raw((*program).cast()) });
    0
}

unsafe extern "C" fn nvrtc_compile(_: Program, _: c_int, _: *const *const c_char) -> c_int {
    call("nvrtcCompileProgram", |_| {})
}

unsafe extern "C" fn nvrtc_log_size(_: Program, size: *mut usize) -> c_int {
    // SAFETY: writes through a valid pointer.
    unsafe { write_out(size, 1) };
    0
}

unsafe extern "C" fn nvrtc_log(_: Program, log: *mut c_char) -> c_int {
    // SAFETY: the log has the one byte that was reported.
    unsafe { write_out(log, 0) };
    0
}

unsafe extern "C" fn nvrtc_cubin_size(program: Program, size: *mut usize) -> c_int {
    // SAFETY: created by `nvrtc_create`; writes through a valid pointer.
    unsafe { write_out(size, CStr::from_ptr(program.cast()).to_bytes_with_nul().len()) };
    0
}

unsafe extern "C" fn nvrtc_cubin(program: Program, code: *mut c_char) -> c_int {
    // SAFETY: created by `nvrtc_create`; the buffer has the size that was reported.
    unsafe {
        let text = CStr::from_ptr(program.cast()).to_bytes_with_nul();
        std::ptr::copy_nonoverlapping(text.as_ptr(), code.cast(), text.len());
    }
    0
}

fn nvrtc_table() -> NvrtcTable {
    NvrtcTable {
        version: nvrtc_version,
        error_string: nvrtc_error_string,
        create: nvrtc_create,
        destroy: nvrtc_destroy,
        compile: nvrtc_compile,
        log_size: nvrtc_log_size,
        log: nvrtc_log,
        cubin_size: nvrtc_cubin_size,
        cubin: nvrtc_cubin,
        library: LoadedLibrary::this_program(),
    }
}

// ---- cuBLASLt -----------------------------------------------------------------------------------------------------

unsafe extern "C" fn lt_create(handle: *mut Handle) -> c_int {
    // SAFETY: writes through a valid pointer.
    call("cublasLtCreate", |state| unsafe { write_out(handle, state.handle()) })
}

unsafe extern "C" fn lt_version() -> usize {
    130_000
}

unsafe extern "C" fn lt_status_string(_: c_int) -> *const c_char {
    c"the library is lost".as_ptr()
}

unsafe extern "C" fn lt_desc_create(desc: *mut Desc, _: c_int, _: c_int) -> c_int {
    // SAFETY: writes through a valid pointer.
    call("cublasLtMatmulDescCreate", |state| unsafe { write_out(desc, state.handle()) })
}

unsafe extern "C" fn lt_desc_set(_: Desc, _: c_int, _: *const c_void, _: usize) -> c_int {
    call("cublasLtMatmulDescSetAttribute", |_| {})
}

unsafe extern "C" fn lt_layout_create(layout: *mut MatrixLayout, _: c_int, _: u64, _: u64, _: i64) -> c_int {
    // SAFETY: writes through a valid pointer.
    call("cublasLtMatrixLayoutCreate", |state| unsafe { write_out(layout, state.handle()) })
}

unsafe extern "C" fn lt_preference_create(preference: *mut Preference) -> c_int {
    // SAFETY: writes through a valid pointer.
    call("cublasLtMatmulPreferenceCreate", |state| unsafe { write_out(preference, state.handle()) })
}

unsafe extern "C" fn lt_preference_set(_: Preference, _: c_int, _: *const c_void, _: usize) -> c_int {
    call("cublasLtMatmulPreferenceSetAttribute", |_| {})
}

unsafe extern "C" fn lt_preference_destroy(_: Preference) -> c_int {
    0
}

unsafe extern "C" fn lt_heuristic(
    _: Handle,
    _: Desc,
    _: MatrixLayout,
    _: MatrixLayout,
    _: MatrixLayout,
    _: MatrixLayout,
    _: Preference,
    _: c_int,
    _: *mut Candidate,
    count: *mut c_int,
) -> c_int {
    // SAFETY: writes through a valid pointer. The candidate stays all zeros.
    call("cublasLtMatmulAlgoGetHeuristic", |_| unsafe { write_out(count, 1) })
}

unsafe extern "C" fn lt_matmul(
    _: Handle,
    _: Desc,
    _: *const c_void,
    _: *const c_void,
    _: MatrixLayout,
    _: *const c_void,
    _: MatrixLayout,
    _: *const c_void,
    _: *const c_void,
    _: MatrixLayout,
    _: *mut c_void,
    _: MatrixLayout,
    _: *const Algorithm,
    _: *mut c_void,
    _: usize,
    _: StreamHandle,
) -> c_int {
    call("cublasLtMatmul", |_| {})
}

fn lt_table() -> LtTable {
    LtTable {
        create: lt_create,
        version: lt_version,
        status_string: lt_status_string,
        desc_create: lt_desc_create,
        desc_set: lt_desc_set,
        layout_create: lt_layout_create,
        preference_create: lt_preference_create,
        preference_set: lt_preference_set,
        preference_destroy: lt_preference_destroy,
        heuristic: lt_heuristic,
        matmul: lt_matmul,
        library: LoadedLibrary::this_program(),
    }
}
