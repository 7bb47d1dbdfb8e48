//! Whether kernels may read 16 bytes at a time.

use lockstep_core::DType;
use lockstep_device::View;
use lockstep_device::cuda::VECTOR_BYTES;

use crate::Mat;

/// Elements of a pack: `Pack<REAL>::N` of the kernels.
pub(crate) const fn vector_elems(dtype: DType) -> usize {
    VECTOR_BYTES / dtype.size()
}

/// Whether every one of these ranges starts at a multiple of 16 bytes.
pub(crate) fn views_aligned(views: &[View]) -> bool {
    views.iter().all(|view| view.is_empty() || view.device_ptr().is_multiple_of(VECTOR_BYTES as u64))
}

/// Whether every row of these matrices starts at a multiple of 16 bytes and is a whole number of packs of
/// `elems` elements.
pub(crate) fn rows_aligned(mats: &[Mat], elems: usize) -> bool {
    mats.iter().all(|mat| {
        let stride_bytes = mat.stride * mat.view.dtype().size();
        views_aligned(&[mat.view])
            && stride_bytes.is_multiple_of(VECTOR_BYTES)
            && mat.cols.is_multiple_of(elems)
    })
}
