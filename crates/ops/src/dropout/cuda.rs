use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource, Launch};

use super::{Mask, PER_BLOCK};
use crate::Mat;
use crate::vectors::{rows_aligned, vector_elems};

pub(crate) static SOURCE: KernelSource = KernelSource {
    name: "dropout",
    text: include_str!("kernels.cu"),
    defines: &[("PER_BLOCK", PER_BLOCK as u32)],
};

/// to = mask · from, plus the residual if there is one. `from` or the residual may be `to`.
pub(super) fn drop(
    cuda: &CudaQueue,
    to: Mat,
    from: Mat,
    residual: Option<Mat>,
    cu_seqlens: View,
    mask: Option<&Mask>,
) {
    let dtype = to.view.dtype();
    let pack = vector_elems(dtype);
    let vectorized = rows_aligned(&[to, from, residual.unwrap_or(to)], pack);
    let columns = if vectorized { pack } else { PER_BLOCK };
    // One block per row.
    let threads = to.cols.div_ceil(columns).next_multiple_of(32).min(256);
    let kernel = cuda.kernel(&SOURCE, dtype, if vectorized { "drop_vec" } else { "drop" });
    let (samples, seed, step, place, threshold, scale) = match mask {
        None => (None, 0, 0, 0, 0, 1.0),
        Some(mask) => {
            (Some(mask.samples), mask.seed, mask.step, mask.index(), mask.threshold(), mask.scale())
        }
    };
    let docs = cu_seqlens.len().saturating_sub(1);
    let residual_stride = residual.map_or(0, |residual| residual.stride);
    let args = args![
        to.view,
        to.stride,
        from.view,
        from.stride,
        residual.map(|residual| residual.view),
        residual_stride,
        to.cols,
        samples,
        cu_seqlens,
        docs,
        seed,
        step,
        place,
        threshold,
        scale,
    ];
    // SAFETY: these are the kernel's parameters; a thread reads and writes its own elements of the rows, and every row
    // lies in a document that has a sample.
    unsafe { cuda.launch(kernel, Launch::new(to.rows, threads), args) };
}
