use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, Launch, Source};

use crate::Mat;
use crate::packs::{pack_elems, rows_fit};

pub(crate) static SOURCE: Source = Source { name: "swiglu", text: include_str!("kernels.cu"), numbers: &[] };

pub(super) fn forward(cuda: &CudaQueue, y: Mat, g: Mat, u: Mat) {
    let (packs, items) = items(&[y, g, u]);
    let kernel = cuda.kernel(&SOURCE, y.view.dtype(), if packs { "forward_packs" } else { "forward" });
    let args = args![y.view, y.stride, g.view, g.stride, u.view, u.stride, items, y.cols];
    // SAFETY: the kernel's parameters; it writes y and reads g and u, of one shape.
    unsafe { cuda.launch(kernel, Launch::each(items), args) };
}

/// `AGAIN`: dy becomes y.
pub(super) fn backward_in_place<const AGAIN: bool>(cuda: &CudaQueue, g: Mat, u: Mat, dy: Mat) {
    let (packs, items) = items(&[g, u, dy]);
    let name = match (AGAIN, packs) {
        (false, false) => "backward",
        (false, true) => "backward_packs",
        (true, false) => "backward_again",
        (true, true) => "backward_again_packs",
    };
    let kernel = cuda.kernel(&SOURCE, dy.view.dtype(), name);
    let args = args![g.view, g.stride, u.view, u.stride, dy.view, dy.stride, items, dy.cols];
    // SAFETY: the kernel's parameters; a thread reads and writes its own elements of g, u and dy.
    unsafe { cuda.launch(kernel, Launch::each(items), args) };
}

/// Whether threads take packs, and how many take something. Matrices of one shape and storage type.
fn items(mats: &[Mat]) -> (bool, usize) {
    let pack = pack_elems(mats[0].view.dtype());
    let packs = rows_fit(mats, pack);
    (packs, mats[0].rows * mats[0].cols / if packs { pack } else { 1 })
}
