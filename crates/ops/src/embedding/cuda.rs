//! Backward sorts the tokens first, so that every row of the table has one owner and sums have a fixed order.

use lockstep_core::DType;
use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource, Launch};

use super::scratch_bytes;
use crate::Mat;
use crate::vectors::{rows_aligned, vector_elems};

pub(crate) static SOURCE: KernelSource = KernelSource {
    name: "embedding",
    text: include_str!("kernels.cu"),
    defines: &[("THREADS", THREADS as u32), ("LONG_RUN", LONG_RUN as u32)],
};

/// Threads of a block in backward.
const THREADS: usize = 256;
const WARP: usize = 32;
/// Runs of equal tokens of this length or more are summed by blocks, shorter ones by a warp.
const LONG_RUN: usize = 32;

pub(super) fn forward(cuda: &CudaQueue, x: Mat, table: Mat, tokens: View) {
    let dtype = x.view.dtype();
    assert_eq!(table.view.dtype(), dtype, "storage types must match");
    let pack = vector_elems(dtype);
    let vectorized = rows_aligned(&[x, table], pack);
    let items = x.rows * if vectorized { x.cols / pack } else { x.cols };
    let kernel = cuda.kernel(&SOURCE, dtype, if vectorized { "forward_vec" } else { "forward" });
    let args = args![x.view, x.stride, table.view, table.stride, tokens, items, x.cols, table.rows];
    // SAFETY: these are the kernel's parameters; it writes the rows of x and traps on a token outside the table.
    unsafe { cuda.launch(kernel, Launch::each(items), args) };
}

pub(super) fn backward(cuda: &CudaQueue, dtable: Mat, dx: Mat, tokens: View, scratch: View) {
    let (dtype, len, cols) = (dx.view.dtype(), tokens.len(), dx.cols);
    assert!(
        scratch.bytes() as u64 >= scratch_bytes(len).0,
        "scratch is too small for an embedding's backward"
    );
    let scratch = scratch.cast(DType::U32);
    let (order, sorted) = (scratch.first(len), scratch.slice(len, len));
    let kernel = cuda.kernel(&SOURCE, dtype, "sort_tokens");
    let by_tokens = Launch::new(len.div_ceil(THREADS), THREADS);
    // SAFETY: these are the kernel's parameters; order and sorted have one element per token.
    unsafe { cuda.launch(kernel, by_tokens, args![order, sorted, tokens, len, dtable.rows]) };

    let pack = vector_elems(dtype);
    let vectorized = rows_aligned(&[dtable, dx], pack);
    let kernels = if vectorized { ["short_runs_vec", "long_runs_vec"] } else { ["short_runs", "long_runs"] };
    let columns_per_block = WARP * if vectorized { pack } else { 1 };
    let by_warps = Launch::new(len.div_ceil(THREADS / WARP), THREADS);
    let by_blocks = Launch {
        grid: [len.div_ceil(LONG_RUN), cols.div_ceil(columns_per_block), 1],
        threads: THREADS,
        shared: 0,
    };
    for (name, launch) in kernels.into_iter().zip([by_warps, by_blocks]) {
        let kernel = cuda.kernel(&SOURCE, dtype, name);
        let args = args![dtable.view, dtable.stride, dx.view, dx.stride, order, sorted, len, cols];
        // SAFETY: these are the kernel's parameters; each row of the table is written by the owner of its token's run.
        unsafe { cuda.launch(kernel, launch, args) };
    }
}
