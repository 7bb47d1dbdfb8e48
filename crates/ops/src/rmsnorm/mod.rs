//! RMS normalisation: y = x · rstd · w with rstd = 1 / √(mean(x²) + ε), over groups of `dim` columns.
//!
//! A plain norm has one group as wide as the row; the norms of queries and keys have a group per head.

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_core::DType;
use lockstep_device::{Queue, View};

use crate::Mat;
use crate::disjoint::{assert_disjoint, assert_same_or_disjoint};

/// Rows whose weight gradients are summed together before they join the total, in row order, on the CPU.
const GRAD_ROWS: usize = 64;
/// On a GPU a block's are, whichever rows it takes: enough blocks for any GPU.
const GRAD_BLOCKS: usize = 512;

/// Sums of weight gradients that there is scratch for: more rows never have fewer.
fn parts(rows: usize) -> usize {
    rows.div_ceil(GRAD_ROWS).max(rows.min(GRAD_BLOCKS))
}

/// f32 elements of scratch that [`backward`] needs for up to `rows` rows.
pub fn scratch_elems(rows: usize, dim: usize) -> usize {
    parts(rows) * dim
}

/// y\[T, groups·dim\] from x; `rstd`\[T, groups\] is kept for backward. `w`\[dim\].
pub fn forward(queue: &Queue, y: Mat, rstd: View, x: Mat, w: View, eps: f32) {
    check(&y, &rstd, &x, &w);
    assert_disjoint(&[y.view, rstd], &[x.view, w]);
    match queue {
        Queue::Cpu(cpu) => cpu::forward(cpu, y, rstd, x, w, eps),
        Queue::Cuda(cuda) => cuda::forward(cuda, y, rstd, x, w, eps),
    }
}

/// dx = (add: dx +) ∂L/∂x and dw += ∂L/∂w. `dx` may be `dy` itself when neither adding nor again.
#[derive(Clone, Copy, Debug)]
pub struct BackwardArgs<'m> {
    pub dx: Mat<'m>,
    pub add: bool,
    /// Replaces dy by y as forward made it: a pass less for who did not keep it.
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
    assert_eq!((dw.len(), dw.dtype()), (w.len(), DType::F32), "weight gradient");
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
    assert!(scratch.bytes() >= 4 * scratch_elems(x.rows, w.len()), "scratch of a norm's backward");
}

fn check(y: &Mat, rstd: &View, x: &Mat, w: &View) {
    assert_eq!((y.rows, y.cols), (x.rows, x.cols), "norm shapes");
    assert!(x.cols.is_multiple_of(w.len()), "{} columns in groups of {}", x.cols, w.len());
    let groups = x.rows * (x.cols / w.len());
    assert_eq!((rstd.len(), rstd.dtype()), (groups, DType::F32), "one rstd per group, in f32");
    assert_eq!(y.view.dtype(), x.view.dtype(), "one storage type");
}
