//! Views as slices for the host, while lanes are quiet: the objective between two operations of a step.

use lockstep_core::DType;
use lockstep_device::View;

/// Element types that have one dtype.
pub trait HostElem: Copy {
    const DTYPE: DType;
}

impl HostElem for f32 {
    const DTYPE: DType = DType::F32;
}

impl HostElem for f64 {
    const DTYPE: DType = DType::F64;
}

/// Reads a view as a slice for the length of a call.
pub fn with_slice<T: HostElem, R>(view: View, f: impl FnOnce(&[T]) -> R) -> R {
    assert_eq!(view.dtype(), T::DTYPE, "element type of a host view");
    // SAFETY: the caller runs this as an operation of the compute lane, in its order; on the CPU every
    // earlier operation is finished, and other lanes are kept off the buffer by the plan's waits.
    f(unsafe { view.as_slice::<T>() })
}

/// Writes a view as a slice for the length of a call.
pub fn with_slice_mut<T: HostElem, R>(view: View, f: impl FnOnce(&mut [T]) -> R) -> R {
    assert_eq!(view.dtype(), T::DTYPE, "element type of a host view");
    // SAFETY: as in `with_slice`.
    f(unsafe { view.as_mut::<T>() })
}
