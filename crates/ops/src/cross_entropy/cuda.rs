//! Rows that a block can hold are shared out among as many blocks as the GPU runs at a time; of wider rows each has a
//! block of its own. A gradient in 16 bits lies in the first half of its row's bytes.

use lockstep_core::DType;
use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource, Launch};

use super::Channels;
use crate::Mat;
use crate::vectors::{rows_aligned, vector_elems};

pub(crate) static SOURCE: KernelSource = KernelSource {
    name: "cross_entropy",
    text: include_str!("kernels.cu"),
    defines: &[
        ("MOST_THREADS", MOST_THREADS as u32),
        ("HELD", HELD as u32),
        ("HELD_THREADS", HELD_THREADS as u32),
        ("HELD_STATIC", HELD_STATIC as u32),
    ],
};

const WARP: usize = 32;
/// The most threads of a block.
const MOST_THREADS: usize = 1024;
/// Packs of a row that a thread holds, and the threads that a multiprocessor has registers for.
const HELD: usize = 8;
const HELD_THREADS: usize = 1024;
/// Bytes of shared memory that the kernels use besides: two numbers of every warp, twice.
const HELD_STATIC: usize = 2 * (HELD_THREADS / WARP) * 8;

pub(super) fn forward(cuda: &CudaQueue, logp: View, logits: Mat, targets: View) {
    let (way, launch) = way(cuda, &logits);
    let kernel = cuda.kernel(&SOURCE, DType::F32, ["forward", "forward_vec", "forward_held"][way as usize]);
    let args = args![logp, logits.view, logits.stride, targets, logits.rows, logits.cols];
    // SAFETY: these are the kernel's parameters; it reads rows of logits and writes logp, and stops at a target that is none.
    unsafe { cuda.launch(kernel, launch, args) };
}

pub(super) fn forward_backward<'m>(
    cuda: &CudaQueue,
    logp: View,
    logits: Mat<'m>,
    targets: View,
    c: View,
    grad: DType,
) -> Mat<'m> {
    let (way, launch) = way(cuda, &logits);
    let names = ["forward_backward", "forward_backward_vec", "forward_backward_held"];
    let kernel = cuda.kernel(&SOURCE, grad, names[way as usize]);
    let args = args![logp, logits.view, logits.stride, targets, c, logits.rows, logits.cols];
    // SAFETY: these are the kernel's parameters; a block reads and writes its own rows of logits, in an order in which nothing
    // is read after it was overwritten.
    unsafe { cuda.launch(kernel, launch, args) };
    gradient_in(logits, grad)
}

pub(super) fn forward_channels(cuda: &CudaQueue, out: Channels, logits: Mat, targets: View) {
    let (way, launch) = way(cuda, &logits);
    let names = ["forward_channels", "forward_channels_vec", "forward_channels_held"];
    let kernel = cuda.kernel(&SOURCE, DType::F32, names[way as usize]);
    let Channels { log_prob, entropy, mean_log_prob } = out;
    let args = args![
        log_prob,
        entropy,
        mean_log_prob,
        logits.view,
        logits.stride,
        targets,
        logits.rows,
        logits.cols
    ];
    // SAFETY: these are the kernel's parameters; it reads rows of logits and writes the outputs that are there.
    unsafe { cuda.launch(kernel, launch, args) };
}

pub(super) fn forward_backward_channels<'m>(
    cuda: &CudaQueue,
    out: Channels,
    logits: Mat<'m>,
    targets: View,
    c: Channels,
    grad: DType,
) -> Mat<'m> {
    let (way, launch) = way(cuda, &logits);
    let names =
        ["forward_backward_channels", "forward_backward_channels_vec", "forward_backward_channels_held"];
    let kernel = cuda.kernel(&SOURCE, grad, names[way as usize]);
    let args = args![
        out.log_prob,
        out.entropy,
        out.mean_log_prob,
        logits.view,
        logits.stride,
        targets,
        c.log_prob,
        c.entropy,
        c.mean_log_prob,
        logits.rows,
        logits.cols,
    ];
    // SAFETY: as in `forward_backward`.
    unsafe { cuda.launch(kernel, launch, args) };
    gradient_in(logits, grad)
}

/// The gradient of the type `grad` that a kernel wrote from the first byte of each row of logits on.
fn gradient_in<'m>(logits: Mat<'m>, grad: DType) -> Mat<'m> {
    let stride = logits.stride * (DType::F32.size() / grad.size());
    Mat::strided(logits.view.cast(grad), logits.rows, logits.cols, stride)
}

/// How a row is read: an element or a pack at a time, or by vectorized into registers that hold it all.
#[derive(Clone, Copy)]
enum Way {
    Elements,
    Packs,
    Held,
}

/// Both directions go one way, with channels and without, so that their log-probabilities are the same.
fn way(cuda: &CudaQueue, logits: &Mat) -> (Way, Launch) {
    let Mat { rows, cols, .. } = *logits;
    let threads_of = |chunks: usize| chunks.next_multiple_of(WARP).clamp(WARP, MOST_THREADS);
    if !rows_aligned(&[*logits], vector_elems(DType::F32)) {
        return (Way::Elements, Launch::new(rows, threads_of(cols)));
    }
    let vectorized = cols / vector_elems(DType::F32);
    let row_bytes = DType::F32.size() * cols;
    if vectorized > HELD * HELD_THREADS || row_bytes + HELD_STATIC > cuda.gpu.shared_per_block as usize {
        return (Way::Packs, Launch::new(rows, threads_of(vectorized)));
    }
    let threads = threads_of(vectorized.div_ceil(HELD));
    let at_a_time = cuda.gpu.multiprocessors as usize * (HELD_THREADS / threads);
    (Way::Held, Launch { shared: row_bytes, ..Launch::new(rows.min(at_a_time), threads) })
}
