use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource, Launch};

use crate::Mat;
use crate::vectors::{rows_aligned, vector_elems};

pub(crate) static SOURCE: KernelSource =
    KernelSource { name: "swiglu", text: include_str!("kernels.cu"), defines: &[] };

pub(super) fn forward(cuda: &CudaQueue, y: Mat, g: Mat, u: Mat) {
    let (vectorized, items) = items(&[y, g, u]);
    let kernel = cuda.kernel(&SOURCE, y.view.dtype(), if vectorized { "forward_vec" } else { "forward" });
    let args = args![y.view, y.stride, g.view, g.stride, u.view, u.stride, items, y.cols];
    // SAFETY: these are the kernel's parameters; it writes y and reads g and u, which have the same shape.
    unsafe { cuda.launch(kernel, Launch::each(items), args) };
}

/// With `RECOMPUTE`, dy is replaced by y.
pub(super) fn backward_in_place<const RECOMPUTE: bool>(cuda: &CudaQueue, g: Mat, u: Mat, dy: Mat) {
    let (vectorized, items) = items(&[g, u, dy]);
    let name = match (RECOMPUTE, vectorized) {
        (false, false) => "backward",
        (false, true) => "backward_vec",
        (true, false) => "backward_recompute",
        (true, true) => "backward_recompute_vec",
    };
    let kernel = cuda.kernel(&SOURCE, dy.view.dtype(), name);
    let args = args![g.view, g.stride, u.view, u.stride, dy.view, dy.stride, items, dy.cols];
    // SAFETY: these are the kernel's parameters; a thread reads and writes its own elements of g, u and dy.
    unsafe { cuda.launch(kernel, Launch::each(items), args) };
}

/// Whether threads process vectors, and how many threads have work. The matrices have the same shape and storage type.
fn items(mats: &[Mat]) -> (bool, usize) {
    let pack = vector_elems(mats[0].view.dtype());
    let vectorized = rows_aligned(mats, pack);
    (vectorized, mats[0].rows * mats[0].cols / if vectorized { pack } else { 1 })
}
