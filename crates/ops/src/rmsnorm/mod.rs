//! RMS normalization: y = x · rstd · w with rstd = 1 / √(mean(x²) + ε), over groups of `dim` columns.
//!
//! An ordinary norm has one group as wide as the row; the norms of queries and keys have one group per head.

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_core::DType;
use lockstep_device::{Queue, View};

use crate::Mat;
use crate::disjoint::{assert_disjoint, assert_same_or_disjoint};

/// On the CPU, rows whose weight gradients are summed together before their sum is added to the total, in row order.
const GRAD_ROWS: usize = 64;
/// On a GPU each block has a sum of its own, over whichever rows it processes: enough blocks for any GPU.
const GRAD_BLOCKS: usize = 512;

/// Sums of weight gradients that scratch must hold. Never decreases with the number of rows.
fn parts(rows: usize) -> usize {
    rows.div_ceil(GRAD_ROWS).max(rows.min(GRAD_BLOCKS))
}

/// f32 elements of scratch that [`backward`] needs for up to `rows` rows.
pub fn scratch_elems(rows: usize, dim: usize) -> usize {
    parts(rows) * dim
}

/// y\[T, groups·dim\] from x; `rstd`\[T, groups\] is saved for backward. `w`\[dim\].
pub fn forward(queue: &Queue, y: Mat, rstd: View, x: Mat, w: View, eps: f32) {
    check(&y, &rstd, &x, &w);
    assert_disjoint(&[y.view, rstd], &[x.view, w]);
    match queue {
        Queue::Cpu(cpu) => cpu::forward(cpu, y, rstd, x, w, eps),
        Queue::Cuda(cuda) => cuda::forward(cuda, y, rstd, x, w, eps),
    }
}

/// dx = ∂L/∂x, added to dx if `add`, and dw += ∂L/∂w. `dx` may be `dy` itself unless `add` or `recompute` is set.
#[derive(Clone, Copy, Debug)]
pub struct BackwardArgs<'m> {
    pub dx: Mat<'m>,
    pub add: bool,
    /// Recomputes y in the place of dy. This saves a pass if y was not kept.
    pub recompute: bool,
    pub dw: View<'m>,
    pub dy: Mat<'m>,
    pub x: Mat<'m>,
    pub rstd: View<'m>,
    pub w: View<'m>,
    pub scratch: View<'m>,
}

pub fn backward(queue: &Queue, call: BackwardArgs) {
    check_backward(&call);
    match queue {
        Queue::Cpu(cpu) => cpu::backward(cpu, call),
        Queue::Cuda(cuda) => cuda::backward(cuda, call),
    }
}

fn check_backward(call: &BackwardArgs) {
    let BackwardArgs { dx, add, recompute, dw, dy, x, rstd, w, scratch } = *call;
    check(&dy, &rstd, &x, &w);
    check(&dx, &rstd, &x, &w);
    assert_eq!(
        (dw.len(), dw.dtype()),
        (w.len(), DType::F32),
        "the weight gradient must be f32, with the shape of the weight"
    );
    if add || recompute {
        dx.view.assert_disjoint(&dy.view);
    } else {
        assert_same_or_disjoint(&dx, &dy);
    }
    assert_disjoint(&[dx.view, dw, scratch], &[x.view, rstd, w]);
    assert_disjoint(&[dw, scratch], &[dy.view]);
    if recompute {
        assert_disjoint(&[dy.view], &[x.view, rstd, w]);
    }
    assert!(
        scratch.bytes() >= 4 * scratch_elems(x.rows, w.len()),
        "scratch is too small for a norm's backward"
    );
}

fn check(y: &Mat, rstd: &View, x: &Mat, w: &View) {
    assert_eq!((y.rows, y.cols), (x.rows, x.cols), "shapes of a norm must match");
    assert!(x.cols.is_multiple_of(w.len()), "{} columns in groups of {}", x.cols, w.len());
    let groups = x.rows * (x.cols / w.len());
    assert_eq!((rstd.len(), rstd.dtype()), (groups, DType::F32), "one rstd per group, in f32");
    assert_eq!(y.view.dtype(), x.view.dtype(), "storage types must match");
}
