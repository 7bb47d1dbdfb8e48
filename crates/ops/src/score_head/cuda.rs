use lockstep_core::DType;
use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource, Launch};

use super::{BackwardArgs, GRAD_ROWS};
use crate::Mat;
use crate::vectors::{rows_aligned, vector_elems, views_aligned};

pub(crate) static SOURCE: KernelSource = KernelSource {
    name: "score_head",
    text: include_str!("kernels.cu"),
    defines: &[("GRAD_ROWS", GRAD_ROWS as u32), ("GRAD_THREADS", GRAD_THREADS as u32)],
};

/// Threads of a block of backward, whose lanes have neighbouring columns.
const GRAD_THREADS: usize = 256;
const WARP: usize = 32;

pub(super) fn forward(cuda: &CudaQueue, y: View, x: Mat, w: View) {
    let dtype = x.view.dtype();
    assert_eq!(w.dtype(), dtype, "storage types must match");
    let vectorized = rows_aligned(&[x], vector_elems(dtype)) && views_aligned(&[w]);
    let kernel = cuda.kernel(&SOURCE, dtype, if vectorized { "score_vec" } else { "score" });
    let args = args![y, x.view, x.stride, w, x.rows, x.cols];
    // SAFETY: these are the kernel's parameters; a warp reads its row of x and w and writes an element of y.
    unsafe { cuda.launch(kernel, Launch::each(WARP * x.rows), args) };
}

pub(super) fn backward(cuda: &CudaQueue, call: BackwardArgs) {
    let BackwardArgs { dx, add_dx, dw, add_dw, c, x, w, scratch } = call;
    let dtype = x.view.dtype();
    assert_eq!(w.dtype(), dtype, "storage types must match");
    let pack = vector_elems(dtype);
    let vectorized = rows_aligned(&[dx, x], pack) && views_aligned(&[w]);
    let blocks = x.rows.div_ceil(GRAD_ROWS);
    let parts = dw.map(|_| scratch.cast(DType::F32).first(blocks * x.cols));
    let columns_per_block = WARP * if vectorized { pack } else { 1 };
    let launch =
        Launch { grid: [x.cols.div_ceil(columns_per_block), blocks, 1], threads: GRAD_THREADS, shared: 0 };
    let kernel =
        cuda.kernel(&SOURCE, dtype, if vectorized { "score_backward_vec" } else { "score_backward" });
    let add = u32::from(add_dx);
    let args = args![dx.view, dx.stride, add, parts, x.view, x.stride, c, w, x.rows, x.cols];
    // SAFETY: these are the kernel's parameters; a thread writes its own elements of dx, a block its own elements of
    // `parts`, and the rest is only read.
    unsafe { cuda.launch(kernel, launch, args) };
    if let (Some(dw), Some(parts)) = (dw, parts) {
        if !add_dw {
            cuda.zero(dw);
        }
        crate::reduce::add_rows(cuda, dw, parts);
    }
}
