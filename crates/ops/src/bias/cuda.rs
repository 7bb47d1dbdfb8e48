use lockstep_core::DType;
use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource, Launch};

use super::GRAD_ROWS;
use crate::Mat;
use crate::vectors::{rows_aligned, vector_elems, views_aligned};

pub(crate) static SOURCE: KernelSource = KernelSource {
    name: "bias",
    text: include_str!("kernels.cu"),
    defines: &[("GRAD_ROWS", GRAD_ROWS as u32), ("GRAD_THREADS", GRAD_THREADS as u32)],
};

/// Threads of a block of backward. Adjacent lanes have adjacent columns.
const GRAD_THREADS: usize = 256;
const WARP: usize = 32;

pub(super) fn forward(cuda: &CudaQueue, y: Mat, b: View) {
    let dtype = y.view.dtype();
    assert_eq!(b.dtype(), dtype, "storage types must match");
    let pack = vector_elems(dtype);
    let vectorized = rows_aligned(&[y], pack) && views_aligned(&[b]);
    let items = y.rows * if vectorized { y.cols / pack } else { y.cols };
    let kernel = cuda.kernel(&SOURCE, dtype, if vectorized { "forward_vec" } else { "forward" });
    // SAFETY: these are the kernel's parameters; a thread reads and writes its own elements of y, and reads b.
    unsafe { cuda.launch(kernel, Launch::each(items), args![y.view, y.stride, b, items, y.cols]) };
}

pub(super) fn backward(cuda: &CudaQueue, db: View, dy: Mat, scratch: View) {
    let dtype = dy.view.dtype();
    let pack = vector_elems(dtype);
    let vectorized = rows_aligned(&[dy], pack);
    let blocks = dy.rows.div_ceil(GRAD_ROWS);
    let parts = scratch.cast(DType::F32).first(blocks * dy.cols);
    let columns_per_block = WARP * if vectorized { pack } else { 1 };
    let launch =
        Launch { grid: [dy.cols.div_ceil(columns_per_block), blocks, 1], threads: GRAD_THREADS, shared: 0 };
    let kernel = cuda.kernel(&SOURCE, dtype, if vectorized { "backward_vec" } else { "backward" });
    // SAFETY: these are the kernel's parameters; it writes the parts and reads the rows of dy.
    unsafe { cuda.launch(kernel, launch, args![parts, dy.view, dy.stride, dy.rows, dy.cols]) };
    crate::reduce::add_rows(cuda, db, parts);
}
