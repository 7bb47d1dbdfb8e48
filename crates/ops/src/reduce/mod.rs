//! Sums over flat f32 ranges: squared-norm leaves, and adding one range to another.

mod cpu;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_core::{ALIGN_ELEMS, DType};
use lockstep_device::{Queue, View};

/// `leaves`\[i\] = Σ x² over block i of 256 elements, in f64: the leaves of the norm tree
/// (`lockstep_core::sum`). The range is a whole number of blocks.
pub fn square_leaves(queue: &Queue, leaves: View, x: View) {
    assert!(x.len().is_multiple_of(ALIGN_ELEMS), "{} elements are not whole blocks", x.len());
    assert_eq!((leaves.len(), leaves.dtype()), (x.len() / ALIGN_ELEMS, DType::F64), "a leaf per block");
    cpu::square_leaves(crate::cpu(queue), leaves, x);
}

/// sum += x.
pub fn add(queue: &Queue, sum: View, x: View) {
    assert_eq!((sum.len(), sum.dtype(), x.dtype()), (x.len(), DType::F32, DType::F32));
    sum.assert_apart(&x);
    cpu::add(crate::cpu(queue), sum, x);
}

/// to = x.
pub fn copy(queue: &Queue, to: View, x: View) {
    assert_eq!((to.len(), to.dtype()), (x.len(), x.dtype()));
    to.assert_apart(&x);
    cpu::copy(crate::cpu(queue), to, x);
}

/// Sets a range to zero on all threads.
pub fn zero(queue: &Queue, x: View) {
    cpu::zero(crate::cpu(queue), x);
}
