//! Forward keeps a group in registers between its two passes. Backward sums weight gradients by blocks of
//! GRAD_ROWS rows into scratch, as on the CPU, and then over the blocks.

use lockstep_core::DType;
use lockstep_device::View;
use lockstep_device::args;
use lockstep_device::cuda::{CudaQueue, Launch, Source};

use super::{Backward, GRAD_ROWS};
use crate::Mat;
use crate::packs::{pack_elems, rows_fit, views_fit};

pub(crate) static SOURCE: Source = Source { name: "rmsnorm", text: include_str!("kernels.cu") };

const THREADS: usize = 256;
const WARP: usize = 32;
/// Chunks that a thread keeps in registers, as in the kernels.
const KEPT: usize = 4;

pub(super) fn forward(cuda: &CudaQueue, y: Mat, rstd: View, x: Mat, w: View, eps: f32) {
    let dtype = x.view.dtype();
    assert_eq!((w.dtype(), rstd.dtype()), (dtype, DType::F32), "one storage type, statistics in f32");
    let (dim, groups) = (w.len(), x.cols / w.len());
    let packs = fits(&[y, x], w);
    let chunks = if packs { dim / pack_elems(dtype) } else { dim };
    let team = chunks.div_ceil(KEPT).next_power_of_two().min(1024);
    // A team is part of a warp, or a block of its own.
    let threads = if team > WARP { team } else { THREADS };
    let items = x.rows * groups;
    let kernel = cuda.kernel(&SOURCE, dtype, if packs { "forward_packs" } else { "forward" });
    let launch = Launch::new(items.div_ceil(threads / team), threads);
    let args = args![y.view, y.stride, rstd, x.view, x.stride, w, items, groups, dim, team, eps];
    // SAFETY: the kernel's parameters; it writes the rows of y and rstd and reads x and w, all within the views.
    unsafe { cuda.launch(kernel, launch, args) };
}

pub(super) fn backward(cuda: &CudaQueue, call: Backward) {
    let Backward { dx, add, dw, dy, x, rstd, w, scratch } = call;
    let dtype = x.view.dtype();
    assert_eq!((w.dtype(), rstd.dtype()), (dtype, DType::F32), "one storage type, statistics in f32");
    let (dim, groups, blocks) = (w.len(), x.cols / w.len(), x.rows.div_ceil(GRAD_ROWS));
    let parts = scratch.cast(DType::F32).first(blocks * dim);
    let packs = fits(&[dx, dy, x], w);
    let chunks = if packs { dim / pack_elems(dtype) } else { dim };
    let held = packs && (WARP..=KEPT * THREADS).contains(&chunks);
    let (name, team) = match (packs, held) {
        (_, true) => ("backward_held_packs", chunks.div_ceil(KEPT).next_power_of_two().max(WARP)),
        (true, false) => ("backward_packs", chunks.div_ceil(2).next_power_of_two().min(WARP)),
        (false, false) => ("backward", chunks.div_ceil(2).next_power_of_two().min(WARP)),
    };
    let kernel = cuda.kernel(&SOURCE, dtype, name);
    let (add, launch) = (u32::from(add), Launch::new(blocks, THREADS));
    let rows = [(dx.view, dx.stride), (dy.view, dy.stride), (x.view, x.stride)];
    let [(dx, dx_stride), (dy, dy_stride), (x_view, x_stride)] = rows;
    let args = args![
        dx, dx_stride, dy, dy_stride, x_view, x_stride, rstd, w, parts, x.rows, groups, dim, team, add,
    ];
    // SAFETY: the kernel's parameters; it writes the rows of dx and the parts, and reads the rest, all within the
    // views. Where dx is dy, an element is read and written by one thread, in that order.
    unsafe { cuda.launch(kernel, launch, args) };
    crate::reduce::add_rows(cuda, dw, parts);
}

fn fits(mats: &[Mat], w: View) -> bool {
    let elems = pack_elems(w.dtype());
    rows_fit(mats, elems) && views_fit(&[w]) && w.len().is_multiple_of(elems)
}
