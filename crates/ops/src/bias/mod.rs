//! The bias of a linear layer: b is added to every row of y, in place. Its gradient is the sum of rows.

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_core::DType;
use lockstep_device::{Queue, View};

use crate::Mat;
use crate::disjoint::assert_disjoint;

/// Rows that are summed together before their sum is added to the total, in row order.
const GRAD_ROWS: usize = 64;

/// f32 elements of scratch that [`backward`] needs for up to `rows` rows.
pub fn scratch_elems(rows: usize, dim: usize) -> usize {
    rows.div_ceil(GRAD_ROWS) * dim
}

/// y\[T, dim\] += b\[dim\].
pub fn forward(queue: &Queue, y: Mat, b: View) {
    assert_eq!(b.len(), y.cols, "one bias per column");
    y.view.assert_disjoint(&b);
    match queue {
        Queue::Cpu(cpu) => cpu::forward(cpu, y, b),
        Queue::Cuda(cuda) => cuda::forward(cuda, y, b),
    }
}

/// db\[dim\] += the sum of dy\[T, dim\]'s rows.
pub fn backward(queue: &Queue, db: View, dy: Mat, scratch: View) {
    assert_eq!(
        (db.len(), db.dtype()),
        (dy.cols, DType::F32),
        "the bias gradient must be f32, one per column"
    );
    assert_disjoint(&[db, scratch], &[dy.view]);
    assert!(
        scratch.bytes() >= 4 * scratch_elems(dy.rows, dy.cols),
        "scratch is too small for a bias gradient"
    );
    match queue {
        Queue::Cpu(cpu) => cpu::backward(cpu, db, dy, scratch),
        Queue::Cuda(cuda) => cuda::backward(cuda, db, dy, scratch),
    }
}
