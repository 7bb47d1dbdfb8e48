//! Views as slices for host code that runs between two operations of a step, such as the objective.

use lockstep_core::DType;
use lockstep_device::View;

/// Element types with exactly one dtype.
pub trait HostElem: Copy {
    const DTYPE: DType;
}

impl HostElem for f32 {
    const DTYPE: DType = DType::F32;
}

impl HostElem for f64 {
    const DTYPE: DType = DType::F64;
}

impl HostElem for u32 {
    const DTYPE: DType = DType::U32;
}

/// Calls `f` with a view as a slice.
pub fn with_slice<T: HostElem, R>(view: View, f: impl FnOnce(&[T]) -> R) -> R {
    assert_eq!(view.dtype(), T::DTYPE, "element type of a host view");
    // SAFETY: the caller runs this as an operation of the compute lane, in order. On the CPU every earlier operation is
    // finished, and the plan's waits keep other lanes off the buffer.
    f(unsafe { view.as_slice::<T>() })
}

/// Calls `f` with a view as a mutable slice.
pub fn with_slice_mut<T: HostElem, R>(view: View, f: impl FnOnce(&mut [T]) -> R) -> R {
    assert_eq!(view.dtype(), T::DTYPE, "element type of a host view");
    // SAFETY: as in `with_slice`.
    f(unsafe { view.as_mut::<T>() })
}
