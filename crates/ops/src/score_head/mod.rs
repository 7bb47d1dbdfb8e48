//! The score head of a reward or value model: y = x · w for every token, without a bias.
//!
//! Given one coefficient per token, c = ∂L/∂y, the gradients are dx = c · w for the hidden state and dw = Σ c · x for
//! the weight.

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_core::DType;
use lockstep_device::{Queue, View};

use crate::Mat;
use crate::disjoint::assert_disjoint;

/// Rows whose weight gradients are summed together before their sum is added to the total, in row order.
const GRAD_ROWS: usize = 64;

/// f32 elements of scratch that [`backward`] needs for the weight gradient of up to `rows` rows.
pub fn scratch_elems(rows: usize, dim: usize) -> usize {
    rows.div_ceil(GRAD_ROWS) * dim
}

/// y\[T\] = x\[T, D\] · w\[D\], in f32.
pub fn forward(queue: &Queue, y: View, x: Mat, w: View) {
    check(y, &x, w, "one f32 score per token");
    assert_disjoint(&[y], &[x.view, w]);
    match queue {
        Queue::Cpu(cpu) => cpu::forward(cpu, y, x, w),
        Queue::Cuda(cuda) => cuda::forward(cuda, y, x, w),
    }
}

/// dx\[T, D\] = c · w in the storage type, added to dx if `add_dx`, and dw\[D\] = Σ c · x in f32, added to dw if
/// `add_dw`.
#[derive(Clone, Copy, Debug)]
pub struct BackwardArgs<'m> {
    pub dx: Mat<'m>,
    pub add_dx: bool,
    /// `None` if the weight is frozen; x and scratch are then not read.
    pub dw: Option<View<'m>>,
    pub add_dw: bool,
    /// ∂L/∂y\[T\], in f32.
    pub c: View<'m>,
    pub x: Mat<'m>,
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
    let BackwardArgs { dx, dw, c, x, w, scratch, .. } = *call;
    check(c, &x, w, "one f32 coefficient per token");
    assert_eq!((dx.rows, dx.cols, dx.view.dtype()), (x.rows, x.cols, x.view.dtype()), "dx must match x");
    let Some(dw) = dw else { return assert_disjoint(&[dx.view], &[c, x.view, w]) };
    assert_eq!(
        (dw.len(), dw.dtype()),
        (w.len(), DType::F32),
        "the weight gradient must be f32, with the shape of the weight"
    );
    assert!(
        scratch.bytes() >= 4 * scratch_elems(x.rows, w.len()),
        "scratch is too small for a score head's backward"
    );
    assert_disjoint(&[dx.view, dw, scratch], &[c, x.view, w]);
}

fn check(per_token: View, x: &Mat, w: View, what: &str) {
    assert_eq!(w.len(), x.cols, "one weight per column");
    assert_eq!((per_token.len(), per_token.dtype()), (x.rows, DType::F32), "{what}");
}
