//! The functions of the CUDA driver that this crate uses.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::library::function_table;

pub(crate) type Status = c_int;
/// An address on the device.
pub type DevicePtr = u64;
/// Opaque handles.
pub(crate) type Context = *mut c_void;
pub(crate) type StreamHandle = *mut c_void;
pub(crate) type EventHandle = *mut c_void;
pub(crate) type ModuleHandle = *mut c_void;
pub(crate) type FunctionHandle = *mut c_void;

pub(crate) const SUCCESS: Status = 0;
pub(crate) const INVALID_VALUE: Status = 1;
pub(crate) const OUT_OF_MEMORY: Status = 2;
pub(crate) const NOT_READY: Status = 600;
pub(crate) const NOT_SUPPORTED: Status = 801;

/// CU_DEVICE_ATTRIBUTE_*
pub(crate) const MULTIPROCESSORS: c_int = 16;
pub(crate) const CAPABILITY_MAJOR: c_int = 75;
pub(crate) const CAPABILITY_MINOR: c_int = 76;
pub(crate) const SHARED_PER_BLOCK_OPTIN: c_int = 97;
pub(crate) const L2_BYTES: c_int = 38;
/// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
pub(crate) const MAX_DYNAMIC_SHARED: c_int = 8;
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;

/// `cuFuncGetParamInfo`: takes a function and a parameter's index, and returns the parameter's offset and size. Drivers
/// of CUDA 12.4 and newer have it.
pub(crate) type ParamInfo = unsafe extern "C" fn(FunctionHandle, usize, *mut usize, *mut usize) -> Status;

/// The function, if the driver has it.
pub(crate) fn param_info(driver: &DriverTable) -> Option<ParamInfo> {
    // SAFETY: the signature is the one in the driver's header.
    unsafe { driver.library.symbol::<ParamInfo>("cuFuncGetParamInfo") }.ok()
}

function_table! {
    /// Functions of `libcuda.so.1`.
    pub(crate) struct DriverTable {
        fn init = "cuInit"(c_uint) -> Status;
        fn version = "cuDriverGetVersion"(*mut c_int) -> Status;
        fn error_name = "cuGetErrorName"(Status, *mut *const c_char) -> Status;
        fn error_string = "cuGetErrorString"(Status, *mut *const c_char) -> Status;
        fn device_count = "cuDeviceGetCount"(*mut c_int) -> Status;
        fn device_get = "cuDeviceGet"(*mut c_int, c_int) -> Status;
        fn device_name = "cuDeviceGetName"(*mut c_char, c_int, c_int) -> Status;
        fn device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int) -> Status;
        fn device_memory = "cuDeviceTotalMem_v2"(*mut usize, c_int) -> Status;
        fn context_retain = "cuDevicePrimaryCtxRetain"(*mut Context, c_int) -> Status;
        fn context_set = "cuCtxSetCurrent"(Context) -> Status;
        fn memory_info = "cuMemGetInfo_v2"(*mut usize, *mut usize) -> Status;
        fn memory_alloc = "cuMemAlloc_v2"(*mut DevicePtr, usize) -> Status;
        fn memory_free = "cuMemFree_v2"(DevicePtr) -> Status;
        fn host_register = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint) -> Status;
        fn host_unregister = "cuMemHostUnregister"(*mut c_void) -> Status;
        fn copy_to_device = "cuMemcpyHtoDAsync_v2"(DevicePtr, *const c_void, usize, StreamHandle) -> Status;
        fn copy_to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, DevicePtr, usize, StreamHandle) -> Status;
        fn copy_on_device = "cuMemcpyDtoDAsync_v2"(DevicePtr, DevicePtr, usize, StreamHandle) -> Status;
        fn set_bytes = "cuMemsetD8Async"(DevicePtr, u8, usize, StreamHandle) -> Status;
        fn stream_create = "cuStreamCreate"(*mut StreamHandle, c_uint) -> Status;
        fn stream_destroy = "cuStreamDestroy_v2"(StreamHandle) -> Status;
        fn stream_synchronize = "cuStreamSynchronize"(StreamHandle) -> Status;
        fn stream_query = "cuStreamQuery"(StreamHandle) -> Status;
        fn stream_wait = "cuStreamWaitEvent"(StreamHandle, EventHandle, c_uint) -> Status;
        fn event_create = "cuEventCreate"(*mut EventHandle, c_uint) -> Status;
        fn event_destroy = "cuEventDestroy_v2"(EventHandle) -> Status;
        fn event_record = "cuEventRecord"(EventHandle, StreamHandle) -> Status;
        fn event_query = "cuEventQuery"(EventHandle) -> Status;
        fn event_synchronize = "cuEventSynchronize"(EventHandle) -> Status;
        fn event_elapsed = "cuEventElapsedTime"(*mut f32, EventHandle, EventHandle) -> Status;
        fn module_load = "cuModuleLoadData"(*mut ModuleHandle, *const c_void) -> Status;
        fn module_function = "cuModuleGetFunction"(*mut FunctionHandle, ModuleHandle, *const c_char) -> Status;
        fn function_set = "cuFuncSetAttribute"(FunctionHandle, c_int, c_int) -> Status;
        fn launch = "cuLaunchKernel"(
            FunctionHandle,
            c_uint, c_uint, c_uint,
            c_uint, c_uint, c_uint,
            c_uint,
            StreamHandle,
            *mut *mut c_void,
            *mut *mut c_void,
        ) -> Status;
    }
}
