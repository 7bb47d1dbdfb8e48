//! A block a row. A gradient in 16 bits lies in the first half of its row's bytes.

use lockstep_core::DType;
use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, Launch, Source};

use crate::Mat;
use crate::packs::{pack_elems, rows_fit};

pub(crate) static SOURCE: Source = Source { name: "cross_entropy", text: include_str!("kernels.cu") };

pub(super) fn forward(cuda: &CudaQueue, logp: View, logits: Mat, targets: View) {
    let packs = fits(&logits);
    let kernel = cuda.kernel(&SOURCE, DType::F32, if packs { "forward_packs" } else { "forward" });
    let args = args![logp, logits.view, logits.stride, targets, logits.cols];
    // SAFETY: the kernel's parameters; it reads rows of logits and writes logp, and stops at a target that is none.
    unsafe { cuda.launch(kernel, launch(&logits, packs), args) };
}

pub(super) fn forward_backward<'m>(
    cuda: &CudaQueue,
    logp: View,
    logits: Mat<'m>,
    targets: View,
    c: View,
    grad: DType,
) -> Mat<'m> {
    let packs = fits(&logits);
    let name = if packs { "forward_backward_packs" } else { "forward_backward" };
    let kernel = cuda.kernel(&SOURCE, grad, name);
    let args = args![logp, logits.view, logits.stride, targets, c, logits.cols];
    // SAFETY: the kernel's parameters; a block reads and writes its own row of logits, in an order in which nothing
    // is read after it was overwritten.
    unsafe { cuda.launch(kernel, launch(&logits, packs), args) };
    let stride = logits.stride * (DType::F32.size() / grad.size());
    Mat::strided(logits.view.cast(grad), logits.rows, logits.cols, stride)
}

fn fits(logits: &Mat) -> bool {
    rows_fit(&[*logits], pack_elems(DType::F32))
}

fn launch(logits: &Mat, packs: bool) -> Launch {
    let chunks = if packs { logits.cols / pack_elems(DType::F32) } else { logits.cols };
    Launch::new(logits.rows, chunks.next_multiple_of(32).clamp(32, 1024))
}
