//! Whether kernels may use 16-byte vector loads and stores.

use lockstep_core::DType;
use lockstep_device::View;
use lockstep_device::cuda::VECTOR_BYTES;

use crate::Mat;

/// Elements of a vector: `Vec16<REAL>::N` in the kernels.
pub(crate) const fn vector_elems(dtype: DType) -> usize {
    VECTOR_BYTES / dtype.size()
}

/// Whether all of these ranges start at a multiple of 16 bytes.
pub(crate) fn views_aligned(views: &[View]) -> bool {
    views.iter().all(|view| view.is_empty() || view.device_ptr().is_multiple_of(VECTOR_BYTES as u64))
}

/// Whether every row of these matrices starts at a multiple of 16 bytes and is a whole number of vectors of `elems`
/// elements.
pub(crate) fn rows_aligned(mats: &[Mat], elems: usize) -> bool {
    mats.iter().all(|mat| {
        let stride_bytes = mat.stride * mat.view.dtype().size();
        views_aligned(&[mat.view])
            && stride_bytes.is_multiple_of(VECTOR_BYTES)
            && mat.cols.is_multiple_of(elems)
    })
}
