use lockstep_core::{ALIGN_ELEMS, DType};
use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, Kernel, KernelSource, Launch};

use crate::vectors::{vector_elems, views_aligned};

pub(crate) static SOURCE: KernelSource = KernelSource {
    name: "reduce",
    text: include_str!("kernels.cu"),
    defines: &[
        ("LEAF", ALIGN_ELEMS as u32),
        ("LEAF_THREADS", LEAF_THREADS as u32),
        ("FOLD", FOLD as u32),
        ("SUM_THREADS", SUM_THREADS as u32),
    ],
};

/// Threads that compute a leaf.
const LEAF_THREADS: usize = 8;
/// Leaves that a block adds.
const FOLD: usize = 4096;
/// Threads of a block that adds leaves or rows.
const SUM_THREADS: usize = 1024;
const WARP: usize = 32;

fn kernel(cuda: &CudaQueue, name: &'static str) -> Option<&'static Kernel> {
    cuda.kernel(&SOURCE, DType::F32, name)
}

pub(super) fn squared_sum_leaves(cuda: &CudaQueue, leaves: View, x: View) {
    let launch = Launch::each(LEAF_THREADS * leaves.len());
    let name = if x.dtype() == DType::BF16 { "squared_sum_leaves_bf16" } else { "squared_sum_leaves" };
    // SAFETY: these are the kernel's parameters; it writes a leaf for each block of x.
    unsafe { cuda.launch(kernel(cuda, name), launch, args![leaves, x, leaves.len()]) };
}

pub(super) fn sum_leaves(cuda: &CudaQueue, out: View, leaves: View) {
    let (mut count, mut step) = (leaves.len(), 1);
    if count > FOLD {
        let blocks = count.div_ceil(FOLD);
        // SAFETY: these are the kernel's parameters; a block adds its own leaves into the first of them.
        unsafe {
            cuda.launch(kernel(cuda, "fold_leaves"), Launch::new(blocks, SUM_THREADS), args![leaves, count])
        };
        (count, step) = (blocks, FOLD);
    }
    // SAFETY: these are the kernel's parameters; every `step`th leaf is read, the last one within the view.
    unsafe {
        cuda.launch(kernel(cuda, "sum_leaves"), Launch::new(1, SUM_THREADS), args![out, leaves, count, step])
    };
}

pub(super) fn decide_step(cuda: &CudaQueue, decision: View, max_norm: Option<f64>, loss_scale: f64) {
    let args = args![decision, max_norm.unwrap_or(f64::INFINITY), loss_scale];
    // SAFETY: these are the kernel's parameters; the decision has four elements.
    unsafe { cuda.launch(kernel(cuda, "decide_step"), Launch::new(1, 1), args) };
}

pub(super) fn add(cuda: &CudaQueue, sum: View, x: View) {
    let vectorized = views_aligned(&[sum, x]);
    let threads = if vectorized { sum.len().div_ceil(vector_elems(DType::F32)) } else { sum.len() };
    let kernel = kernel(cuda, if vectorized { "add_vec" } else { "add" });
    // SAFETY: these are the kernel's parameters; both ranges have this length.
    unsafe { cuda.launch(kernel, Launch::each(threads), args![sum, x, sum.len() as u64]) };
}

pub(super) fn round(cuda: &CudaQueue, to: View, x: View) {
    // Four elements of 16 and 8 bytes, if the addresses allow it.
    let vectorized = views_aligned(&[to, x]);
    let threads = if vectorized { x.len().div_ceil(vector_elems(DType::F32)) } else { x.len() };
    let kernel = kernel(cuda, if vectorized { "round_bf16_vec" } else { "round_bf16" });
    // SAFETY: these are the kernel's parameters; both ranges have this length.
    unsafe { cuda.launch(kernel, Launch::each(threads), args![to, x, x.len() as u64]) };
}

/// sum\[cols\] += the rows of parts\[rows, cols\], in a fixed order.
pub(crate) fn add_rows(cuda: &CudaQueue, sum: View, parts: View) {
    let cols = sum.len();
    let rows = parts.len().checked_div(cols).unwrap_or(0);
    let launch = Launch::new(if rows == 0 { 0 } else { cols.div_ceil(WARP) }, SUM_THREADS);
    // SAFETY: these are the kernel's parameters; the parts are whole rows.
    unsafe { cuda.launch(kernel(cuda, "add_rows"), launch, args![sum, parts, rows, cols]) };
}
