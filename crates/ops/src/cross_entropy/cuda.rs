//! Rows that fit in a block's registers are shared by as many blocks as the GPU runs at once; a wider row has a block
//! of its own. A 16-bit gradient is in the first half of its row's bytes.

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
        ("MAX_THREADS", MAX_THREADS as u32),
        ("THREAD_VECS", THREAD_VECS as u32),
        ("REGISTER_THREADS", REGISTER_THREADS as u32),
        ("STATIC_SHARED_BYTES", STATIC_SHARED_BYTES as u32),
    ],
};

const WARP: usize = 32;
/// The maximum number of threads of a block.
const MAX_THREADS: usize = 1024;
/// Vectors of a row that a thread holds in registers, and threads that a multiprocessor has registers for.
const THREAD_VECS: usize = 8;
const REGISTER_THREADS: usize = 1024;
/// Static shared memory of the kernels: two numbers per warp, twice.
const STATIC_SHARED_BYTES: usize = 2 * (REGISTER_THREADS / WARP) * 8;

pub(super) fn forward(cuda: &CudaQueue, logp: View, logits: Mat, targets: View, inverse_temperature: f32) {
    let (access, launch) = row_access(cuda, &logits);
    let kernel =
        cuda.kernel(&SOURCE, DType::F32, ["forward", "forward_vec", "forward_registers"][access as usize]);
    let args =
        args![logp, logits.view, logits.stride, targets, logits.rows, logits.cols, inverse_temperature];
    // SAFETY: these are the kernel's parameters; it reads rows of logits and writes logp, and traps on a target outside
    // the vocabulary.
    unsafe { cuda.launch(kernel, launch, args) };
}

/// What both versions of forward with backward take.
pub(super) struct BackwardArgs<'m, 't> {
    pub(super) logits: Mat<'m>,
    pub(super) targets: View<'t>,
    pub(super) inverse_temperature: f32,
    /// The type of the gradient.
    pub(super) grad: DType,
}

pub(super) fn forward_backward<'m>(
    cuda: &CudaQueue,
    logp: View,
    c: View,
    call: BackwardArgs<'m, '_>,
) -> Mat<'m> {
    let BackwardArgs { logits, targets, inverse_temperature, grad } = call;
    let (access, launch) = row_access(cuda, &logits);
    let names = ["forward_backward", "forward_backward_vec", "forward_backward_registers"];
    let kernel = cuda.kernel(&SOURCE, grad, names[access as usize]);
    let args =
        args![logp, logits.view, logits.stride, targets, c, logits.rows, logits.cols, inverse_temperature];
    // SAFETY: these are the kernel's parameters; a block reads and writes its own rows of logits, and nothing is read
    // after it was overwritten.
    unsafe { cuda.launch(kernel, launch, args) };
    gradient_in(logits, grad)
}

pub(super) fn forward_channels(
    cuda: &CudaQueue,
    out: Channels,
    logits: Mat,
    targets: View,
    inverse_temperature: f32,
) {
    let (access, launch) = row_access(cuda, &logits);
    let names = ["forward_channels", "forward_channels_vec", "forward_channels_registers"];
    let kernel = cuda.kernel(&SOURCE, DType::F32, names[access as usize]);
    let Channels { log_prob, entropy, mean_log_prob } = out;
    let args = args![
        log_prob,
        entropy,
        mean_log_prob,
        logits.view,
        logits.stride,
        targets,
        logits.rows,
        logits.cols,
        inverse_temperature,
    ];
    // SAFETY: these are the kernel's parameters; it reads rows of logits and writes the outputs that are not null.
    unsafe { cuda.launch(kernel, launch, args) };
}

pub(super) fn forward_backward_channels<'m>(
    cuda: &CudaQueue,
    out: Channels,
    c: Channels,
    call: BackwardArgs<'m, '_>,
) -> Mat<'m> {
    let BackwardArgs { logits, targets, inverse_temperature, grad } = call;
    let (access, launch) = row_access(cuda, &logits);
    let names =
        ["forward_backward_channels", "forward_backward_channels_vec", "forward_backward_channels_registers"];
    let kernel = cuda.kernel(&SOURCE, grad, names[access as usize]);
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
        inverse_temperature,
    ];
    // SAFETY: as in `forward_backward`.
    unsafe { cuda.launch(kernel, launch, args) };
    gradient_in(logits, grad)
}

/// The gradient of type `grad` that a kernel wrote, starting at the first byte of each row of logits.
fn gradient_in<'m>(logits: Mat<'m>, grad: DType) -> Mat<'m> {
    let stride = logits.stride * (DType::F32.size() / grad.size());
    Mat::strided(logits.view.cast(grad), logits.rows, logits.cols, stride)
}

/// How a row is read: by element, by vector, or by vector into registers that hold all of it.
#[derive(Clone, Copy)]
enum RowAccess {
    Elements,
    Vectors,
    Registers,
}

/// Forward and backward, with and without channels, read rows in the same way, so their log-probabilities are equal.
fn row_access(cuda: &CudaQueue, logits: &Mat) -> (RowAccess, Launch) {
    let Mat { rows, cols, .. } = *logits;
    let threads_of = |chunks: usize| chunks.next_multiple_of(WARP).clamp(WARP, MAX_THREADS);
    if !rows_aligned(&[*logits], vector_elems(DType::F32)) {
        return (RowAccess::Elements, Launch::new(rows, threads_of(cols)));
    }
    let vectors = cols / vector_elems(DType::F32);
    let row_bytes = DType::F32.size() * cols;
    if vectors > THREAD_VECS * REGISTER_THREADS
        || row_bytes + STATIC_SHARED_BYTES > cuda.gpu.shared_per_block as usize
    {
        return (RowAccess::Vectors, Launch::new(rows, threads_of(vectors)));
    }
    let threads = threads_of(vectors.div_ceil(THREAD_VECS));
    let resident = cuda.gpu.multiprocessors as usize * (REGISTER_THREADS / threads);
    (RowAccess::Registers, Launch { shared: row_bytes, ..Launch::new(rows.min(resident), threads) })
}
