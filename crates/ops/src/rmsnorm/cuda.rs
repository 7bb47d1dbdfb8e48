//! As many blocks as the GPU runs at a time share the items out among them, an item being one group of one row.
//! Backward sums weight gradients over each block's items into scratch, and then over the blocks.

use lockstep_core::DType;
use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, KernelSource, Launch, VECTOR_BYTES};

use super::{BackwardArgs, parts};
use crate::Mat;
use crate::vectors::{rows_aligned, vector_elems, views_aligned};

pub(crate) static SOURCE: KernelSource = KernelSource {
    name: "rmsnorm",
    text: include_str!("kernels.cu"),
    defines: &[
        ("MOST_THREADS", MOST_THREADS as u32),
        ("FORWARD_BLOCKS", (FORWARD_AT_ONCE / MOST_THREADS) as u32),
        ("BACKWARD_BLOCKS", (BACKWARD_AT_ONCE / MOST_THREADS) as u32),
        ("KEPT", KEPT as u32),
        ("FORWARD_AHEAD", FORWARD_AHEAD as u32),
        ("BACKWARD_AHEAD", BACKWARD_AHEAD as u32),
    ],
};

/// Threads of a block where items are not too wide for them, and of all blocks that a multiprocessor runs at a time.
const FORWARD_THREADS: usize = 256;
const FORWARD_AT_ONCE: usize = 1024;
const BACKWARD_THREADS: usize = 512;
const BACKWARD_AT_ONCE: usize = 512;
/// The most threads of a block.
const MOST_THREADS: usize = 512;
const WARP: usize = 32;
/// Packs of an item that a thread keeps in registers between reading and writing.
const KEPT: usize = 4;
/// Items of a team that are on their way.
const FORWARD_AHEAD: usize = 1;
const BACKWARD_AHEAD: usize = 1;

pub(super) fn forward(cuda: &CudaQueue, y: Mat, rstd: View, x: Mat, w: View, eps: f32) {
    let dtype = x.view.dtype();
    assert_eq!(w.dtype(), dtype, "one storage type");
    let (dim, groups) = (w.len(), x.cols / w.len());
    let items = x.rows * groups;
    let Teams { vectorized, team, threads } = Teams::of(&[y, x], w, FORWARD_THREADS);
    let kernel = cuda.kernel(&SOURCE, dtype, if vectorized { "forward_vec" } else { "forward" });
    let blocks = blocks(cuda, items, threads / team, FORWARD_AT_ONCE / threads);
    let launch =
        Launch { shared: ahead_bytes(vectorized, FORWARD_AHEAD, threads), ..Launch::new(blocks, threads) };
    let args = args![y.view, y.stride, rstd, x.view, x.stride, w, items, groups, dim, team, eps];
    // SAFETY: these are the kernel's parameters; it writes the rows of y and rstd and reads x and w, all within the views.
    unsafe { cuda.launch(kernel, launch, args) };
}

pub(super) fn backward(cuda: &CudaQueue, call: BackwardArgs) {
    let BackwardArgs { dx, add, recompute, dw, dy, x, rstd, w, scratch } = call;
    let dtype = x.view.dtype();
    assert_eq!(w.dtype(), dtype, "one storage type");
    let (dim, groups) = (w.len(), x.cols / w.len());
    let items = x.rows * groups;
    let Teams { vectorized, team, threads } = Teams::of(&[dx, dy, x], w, BACKWARD_THREADS);
    let kernel = cuda.kernel(&SOURCE, dtype, if vectorized { "backward_vec" } else { "backward" });
    let blocks = blocks(cuda, items, threads / team, BACKWARD_AT_ONCE / threads).min(parts(x.rows));
    let sums = scratch.cast(DType::F32).first(blocks * dim);
    let operands = 2 + usize::from(add);
    let shared = ahead_bytes(vectorized, operands * BACKWARD_AHEAD, threads);
    let launch = Launch { shared, ..Launch::new(blocks, threads) };
    let rows = [dx, dy, x].map(|mat| (mat.view, mat.stride));
    let [(dx, dx_stride), (dy, dy_stride), (x, x_stride)] = rows;
    let (add, recompute) = (u32::from(add), u32::from(recompute));
    let args = args![
        dx, dx_stride, dy, dy_stride, x, x_stride, rstd, w, sums, items, groups, dim, team, add, recompute
    ];
    // SAFETY: these are the kernel's parameters; it writes the rows of dx, perhaps of dy, and the sums, and reads the rest, all
    // within the views. What is both read and written, or dy itself as dx, is so by one thread, in that order.
    unsafe { cuda.launch(kernel, launch, args) };
    crate::reduce::add_rows(cuda, dw, sums);
}

/// Threads that work on an item together, and those of a block.
struct Teams {
    vectorized: bool,
    team: usize,
    threads: usize,
}

impl Teams {
    fn of(mats: &[Mat], w: View, threads: usize) -> Teams {
        let (dim, elems) = (w.len(), vector_elems(w.dtype()));
        let whole_packs = rows_aligned(mats, elems) && views_aligned(&[w]) && dim.is_multiple_of(elems);
        if whole_packs && dim / elems <= KEPT * MOST_THREADS {
            let team = (dim / elems).div_ceil(KEPT).next_power_of_two();
            Teams { vectorized: true, team, threads: team.max(threads) }
        } else {
            let team = dim.next_multiple_of(WARP).min(threads);
            Teams { vectorized: false, team, threads: team }
        }
    }
}

/// No more than have items to work on, and no more than run at a time.
fn blocks(cuda: &CudaQueue, items: usize, at_once: usize, per_multiprocessor: usize) -> usize {
    items.div_ceil(at_once).min(per_multiprocessor * cuda.gpu.multiprocessors as usize)
}

/// Shared memory for the vectorized that are on their way to every thread.
fn ahead_bytes(vectorized: bool, items: usize, threads: usize) -> usize {
    if vectorized { VECTOR_BYTES * KEPT * items * threads } else { 0 }
}
