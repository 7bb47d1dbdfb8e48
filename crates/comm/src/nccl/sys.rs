//! The functions and types of NCCL that are used here, as declared in `nccl.h` since 2.24.

use std::ffi::{c_char, c_int, c_uint, c_void};

use lockstep_core::DType;
use lockstep_device::cuda::library::function_table;

pub(crate) type Status = c_int;
/// `ncclComm_t`
pub(crate) type Handle = *mut c_void;
/// `cudaStream_t`, the same as the driver's `CUstream`.
pub(crate) type Stream = *mut c_void;

pub(crate) const SUCCESS: Status = 0;
pub(crate) const SYSTEM_ERROR: Status = 2;
/// Another process ended, or the network failed.
pub(crate) const REMOTE_ERROR: Status = 6;
pub(crate) const IN_PROGRESS: Status = 7;

/// `ncclSum`
pub(crate) const SUM: c_int = 0;

pub(crate) const UNIQUE_ID_BYTES: usize = 128;

/// `ncclUniqueId`: identifies a communicator while its members connect.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId(pub(crate) [u8; UNIQUE_ID_BYTES]);

/// `ncclConfig_t` of versions 2.17 to 2.24. Later versions are longer; the library reads `size` bytes and uses its
/// defaults for the rest.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

/// `NCCL_CONFIG_UNDEF_INT`: the library decides.
const UNDEFINED: c_int = c_int::MIN;

impl Config {
    /// A communicator whose calls return immediately.
    pub(crate) fn non_blocking() -> Config {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            // The version of the header that this struct mirrors.
            version: 22403,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// `ncclDataType_t`
pub(crate) fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::U8 => 1,
        DType::U32 => 3,
        // NCCL has no 16-bit integers. These are only copied, never summed, so another type of their size serves.
        DType::F16 | DType::I16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
    }
}

function_table! {
    /// The functions of `libnccl`.
    pub(crate) struct NcclTable {
        fn version = "ncclGetVersion"(*mut c_int) -> Status;
        fn error_string = "ncclGetErrorString"(Status) -> *const c_char;
        fn last_error = "ncclGetLastError"(Handle) -> *const c_char;
        fn unique_id = "ncclGetUniqueId"(*mut UniqueId) -> Status;
        fn init = "ncclCommInitRankConfig"(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> Status;
        fn async_error = "ncclCommGetAsyncError"(Handle, *mut Status) -> Status;
        fn finalize = "ncclCommFinalize"(Handle) -> Status;
        fn destroy = "ncclCommDestroy"(Handle) -> Status;
        fn abort = "ncclCommAbort"(Handle) -> Status;
        fn group_start = "ncclGroupStart"() -> Status;
        fn group_end = "ncclGroupEnd"() -> Status;
        // All take sendbuff, recvbuff, count and datatype, then op and root where they apply, comm and stream.
        fn all_gather = "ncclAllGather"(
            *const c_void, *mut c_void, usize, c_int, Handle, Stream,
        ) -> Status;
        fn reduce_scatter = "ncclReduceScatter"(
            *const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream,
        ) -> Status;
        fn all_reduce = "ncclAllReduce"(
            *const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream,
        ) -> Status;
        fn broadcast = "ncclBroadcast"(
            *const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream,
        ) -> Status;
        fn reduce = "ncclReduce"(
            *const c_void, *mut c_void, usize, c_int, c_int, c_int, Handle, Stream,
        ) -> Status;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn struct_layouts_match_the_header() {
        assert_eq!(size_of::<UniqueId>(), 128);
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(std::mem::offset_of!(Config, split_share), 40);
    }
}
