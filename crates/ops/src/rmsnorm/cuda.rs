//! There are as many blocks as the GPU runs at once, and they share the items evenly. An item is one group of one row.
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
        ("MAX_THREADS", MAX_THREADS as u32),
        ("FORWARD_BLOCKS", (FORWARD_RESIDENT / MAX_THREADS) as u32),
        ("BACKWARD_BLOCKS", (BACKWARD_RESIDENT / MAX_THREADS) as u32),
        ("THREAD_VECS", THREAD_VECS as u32),
        ("FORWARD_PREFETCH", FORWARD_PREFETCH as u32),
        ("BACKWARD_PREFETCH", BACKWARD_PREFETCH as u32),
    ],
};

/// Threads of a block unless items are too wide for that, and threads of all blocks that a multiprocessor runs at once.
const FORWARD_THREADS: usize = 256;
const FORWARD_RESIDENT: usize = 1024;
const BACKWARD_THREADS: usize = 512;
const BACKWARD_RESIDENT: usize = 512;
/// The maximum number of threads of a block.
const MAX_THREADS: usize = 512;
const WARP: usize = 32;
/// Vectors of an item that a thread keeps in registers between reading and writing.
const THREAD_VECS: usize = 4;
/// Items of a team that are in flight.
const FORWARD_PREFETCH: usize = 1;
const BACKWARD_PREFETCH: usize = 1;

pub(super) fn forward(cuda: &CudaQueue, y: Mat, rstd: View, x: Mat, w: View, eps: f32) {
    let dtype = x.view.dtype();
    assert_eq!(w.dtype(), dtype, "storage types must match");
    let (dim, groups) = (w.len(), x.cols / w.len());
    let items = x.rows * groups;
    let Teams { vectorized, team, threads } = Teams::of(&[y, x], w, FORWARD_THREADS);
    let kernel = cuda.kernel(&SOURCE, dtype, if vectorized { "forward_vec" } else { "forward" });
    let blocks = blocks(cuda, items, threads / team, FORWARD_RESIDENT / threads);
    let launch = Launch {
        shared: prefetch_bytes(vectorized, FORWARD_PREFETCH, threads),
        ..Launch::new(blocks, threads)
    };
    let args = args![y.view, y.stride, rstd, x.view, x.stride, w, items, groups, dim, team, eps];
    // SAFETY: these are the kernel's parameters; it writes the rows of y and rstd and reads x and w, all within the
    // views.
    unsafe { cuda.launch(kernel, launch, args) };
}

pub(super) fn backward(cuda: &CudaQueue, call: BackwardArgs) {
    let BackwardArgs { dx, add, recompute, dw, dy, x, rstd, w, scratch } = call;
    let dtype = x.view.dtype();
    assert_eq!(w.dtype(), dtype, "storage types must match");
    let (dim, groups) = (w.len(), x.cols / w.len());
    let items = x.rows * groups;
    let Teams { vectorized, team, threads } = Teams::of(&[dx, dy, x], w, BACKWARD_THREADS);
    let kernel = cuda.kernel(&SOURCE, dtype, if vectorized { "backward_vec" } else { "backward" });
    let blocks = blocks(cuda, items, threads / team, BACKWARD_RESIDENT / threads).min(parts(x.rows));
    let sums = scratch.cast(DType::F32).first(blocks * dim);
    let operands = 2 + usize::from(add);
    let shared = prefetch_bytes(vectorized, operands * BACKWARD_PREFETCH, threads);
    let launch = Launch { shared, ..Launch::new(blocks, threads) };
    let rows = [dx, dy, x].map(|mat| (mat.view, mat.stride));
    let [(dx, dx_stride), (dy, dy_stride), (x, x_stride)] = rows;
    let (add, recompute) = (u32::from(add), u32::from(recompute));
    let args = args![
        dx, dx_stride, dy, dy_stride, x, x_stride, rstd, w, sums, items, groups, dim, team, add, recompute
    ];
    // SAFETY: these are the kernel's parameters; it writes the rows of dx, the sums and, with recompute, the rows of
    // dy, and reads the rest, all within the views. Where an element is read and written, one thread does both, in that
    // order.
    unsafe { cuda.launch(kernel, launch, args) };
    crate::reduce::add_rows(cuda, dw, sums);
}

/// The number of threads that process an item together, and of a block.
struct Teams {
    vectorized: bool,
    team: usize,
    threads: usize,
}

impl Teams {
    fn of(mats: &[Mat], w: View, threads: usize) -> Teams {
        let (dim, elems) = (w.len(), vector_elems(w.dtype()));
        let whole_packs = rows_aligned(mats, elems) && views_aligned(&[w]) && dim.is_multiple_of(elems);
        if whole_packs && dim / elems <= THREAD_VECS * MAX_THREADS {
            let team = (dim / elems).div_ceil(THREAD_VECS).next_power_of_two();
            Teams { vectorized: true, team, threads: team.max(threads) }
        } else {
            let team = dim.next_multiple_of(WARP).min(threads);
            Teams { vectorized: false, team, threads: team }
        }
    }
}

/// As many blocks as have work, but no more than run at once.
fn blocks(cuda: &CudaQueue, items: usize, at_once: usize, per_multiprocessor: usize) -> usize {
    items.div_ceil(at_once).min(per_multiprocessor * cuda.gpu.multiprocessors as usize)
}

/// Shared memory for the vectors that are in flight to all threads.
fn prefetch_bytes(vectorized: bool, items: usize, threads: usize) -> usize {
    if vectorized { VECTOR_BYTES * THREAD_VECS * items * threads } else { 0 }
}
