//! The functions and constants of MPI that are used here, as the standard ABI of MPI 5 defines them.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::without_provenance_mut;

use lockstep_device::cuda::library::function_table;

pub(crate) type Status = c_int;
/// `MPI_Comm`, `MPI_Datatype` and the other handles: pointers, of which the predefined ones are small constants.
pub(crate) type Handle = *mut c_void;
/// `MPI_Count`
pub(crate) type Count = i64;
/// `MPI_Aint`
pub(crate) type Displacement = isize;

pub(crate) const SUCCESS: Status = 0;
/// `MPI_ERR_OTHER`
pub(crate) const OTHER: Status = 16;
/// `MPI_ERR_TRUNCATE`: a message is longer than what the receiver expects.
pub(crate) const TRUNCATED: c_int = 15;

pub(crate) const COMM_NULL: Handle = without_provenance_mut(0x100);
pub(crate) const COMM_WORLD: Handle = without_provenance_mut(0x101);
pub(crate) const INFO_NULL: Handle = without_provenance_mut(0x130);
pub(crate) const ERRORS_RETURN: Handle = without_provenance_mut(0x143);
pub(crate) const REQUEST_NULL: Handle = without_provenance_mut(0x180);
/// `MPI_SUM`
pub(crate) const SUM: Handle = without_provenance_mut(0x21);
/// `MPI_FLOAT`
pub(crate) const FLOAT: Handle = without_provenance_mut(0x210);
/// `MPI_BYTE`
pub(crate) const BYTE: Handle = without_provenance_mut(0x247);
pub(crate) const IN_PLACE: *const c_void = without_provenance_mut::<c_void>(1);

/// `MPI_THREAD_FUNNELED`: only the thread that initialised MPI calls it.
pub(crate) const THREAD_FUNNELED: c_int = 1024;
/// `MPI_COMM_TYPE_SHARED`: ranks that can share memory.
pub(crate) const TYPE_SHARED: c_int = 221;

/// `MPI_MAX_ERROR_STRING`
pub(crate) const ERROR_STRING_BYTES: usize = 512;
/// `MPI_MAX_LIBRARY_VERSION_STRING`
pub(crate) const VERSION_STRING_BYTES: usize = 8192;

function_table! {
    /// The functions of `libmpi_abi`. Those that end in `_c` take 64-bit counts.
    pub(crate) struct MpiTable {
        fn abi_version = "MPI_Abi_get_version"(*mut c_int, *mut c_int) -> Status;
        fn library_version = "MPI_Get_library_version"(*mut c_char, *mut c_int) -> Status;
        fn error_string = "MPI_Error_string"(c_int, *mut c_char, *mut c_int) -> Status;
        fn error_class = "MPI_Error_class"(c_int, *mut c_int) -> Status;
        fn init_thread = "MPI_Init_thread"(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> Status;
        fn finalize = "MPI_Finalize"() -> Status;
        fn comm_rank = "MPI_Comm_rank"(Handle, *mut c_int) -> Status;
        fn comm_size = "MPI_Comm_size"(Handle, *mut c_int) -> Status;
        fn comm_dup = "MPI_Comm_dup"(Handle, *mut Handle) -> Status;
        // Type, key and info.
        fn comm_split_type = "MPI_Comm_split_type"(Handle, c_int, c_int, Handle, *mut Handle) -> Status;
        fn comm_create_group = "MPI_Comm_create_group"(Handle, Handle, c_int, *mut Handle) -> Status;
        fn comm_set_errhandler = "MPI_Comm_set_errhandler"(Handle, Handle) -> Status;
        fn comm_group = "MPI_Comm_group"(Handle, *mut Handle) -> Status;
        fn group_incl = "MPI_Group_incl"(Handle, c_int, *const c_int, *mut Handle) -> Status;
        fn group_translate = "MPI_Group_translate_ranks"(
            Handle, c_int, *const c_int, Handle, *mut c_int,
        ) -> Status;
        fn group_free = "MPI_Group_free"(*mut Handle) -> Status;
        fn test = "MPI_Test"(*mut Handle, *mut c_int, *mut c_void) -> Status;
        fn barrier = "MPI_Ibarrier"(Handle, *mut Handle) -> Status;
        // Buffer, count, datatype, root, communicator and request.
        fn broadcast = "MPI_Ibcast_c"(*mut c_void, Count, Handle, c_int, Handle, *mut Handle) -> Status;
        // What is sent, count and datatype; where to, counts, displacements and datatype; communicator and request.
        fn all_gather = "MPI_Iallgatherv_c"(
            *const c_void, Count, Handle, *mut c_void, *const Count, *const Displacement, Handle, Handle,
            *mut Handle,
        ) -> Status;
        // From, to, counts, datatype, operator, communicator and request.
        fn reduce_scatter = "MPI_Ireduce_scatter_c"(
            *const c_void, *mut c_void, *const Count, Handle, Handle, Handle, *mut Handle,
        ) -> Status;
        fn all_reduce = "MPI_Iallreduce_c"(
            *const c_void, *mut c_void, Count, Handle, Handle, Handle, *mut Handle,
        ) -> Status;
        // Buffer, count, datatype, the other rank, tag, communicator and request. Completes once it is received.
        fn send = "MPI_Issend_c"(*const c_void, Count, Handle, c_int, c_int, Handle, *mut Handle) -> Status;
        fn receive = "MPI_Irecv_c"(*mut c_void, Count, Handle, c_int, c_int, Handle, *mut Handle) -> Status;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_pointers_and_constants_small_numbers() {
        assert_eq!((size_of::<Handle>(), size_of::<Count>(), size_of::<Displacement>()), (8, 8, 8));
        // The standard's tables: communicators from 0x100, datatypes from 0x200, operators from 0x20.
        let number = |handle: Handle| handle.addr();
        assert_eq!([COMM_NULL, COMM_WORLD, ERRORS_RETURN].map(number), [0x100, 0x101, 0x143]);
        assert_eq!(
            [FLOAT, BYTE, SUM, REQUEST_NULL, INFO_NULL].map(number),
            [0x210, 0x247, 0x21, 0x180, 0x130]
        );
        assert_eq!(IN_PLACE.addr(), 1);
    }
}
