//! Sums over flat ranges: squared norms, the step decision, adding one range to another, and copies that round.

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_core::{ALIGN_ELEMS, DType};
use lockstep_device::{Queue, View};

pub(crate) use cuda::add_rows;

/// `leaves`\[i\] = Σ x² over block i of 256 elements, in f64: the leaves of the norm's summation tree
/// (`lockstep_core::sum`). The range is a whole number of blocks.
pub fn squared_sum_leaves(queue: &Queue, leaves: View, x: View) {
    assert!(x.len().is_multiple_of(ALIGN_ELEMS), "{} elements are not whole blocks", x.len());
    assert_eq!((leaves.len(), leaves.dtype()), (x.len() / ALIGN_ELEMS, DType::F64), "one f64 leaf per block");
    assert!(matches!(x.dtype(), DType::F32 | DType::BF16), "x must be f32 or bf16");
    leaves.assert_disjoint(&x);
    match queue {
        Queue::Cpu(cpu) => cpu::squared_sum_leaves(cpu, leaves, x),
        Queue::Cuda(cuda) => cuda::squared_sum_leaves(cuda, leaves, x),
    }
}

/// `out`\[0\] = the sum of all leaves, in a fixed order. On a GPU this overwrites some of the leaves with partial sums.
pub fn sum_leaves(queue: &Queue, out: View, leaves: View) {
    assert!(!out.is_empty(), "out must hold the sum");
    assert_eq!((out.dtype(), leaves.dtype()), (DType::F64, DType::F64), "sums must be f64");
    out.assert_disjoint(&leaves);
    match queue {
        Queue::Cpu(_) => cpu::sum_leaves(out, leaves),
        Queue::Cuda(cuda) => cuda::sum_leaves(cuda, out, leaves),
    }
}

/// Completes a step decision, given the sum of squares in `decision`\[0\]: {sum of squares, norm, gradient factor,
/// skip}. Gradients are `loss_scale` times too large; the factor undoes that and clips the norm to `max_norm`, as torch
/// does. `skip` is 1 if the norm is not finite, else 0.
pub fn decide_step(queue: &Queue, decision: View, max_norm: Option<f64>, loss_scale: f64) {
    assert_eq!((decision.len(), decision.dtype()), (4, DType::F64), "a step decision is four f64");
    match queue {
        Queue::Cpu(_) => cpu::decide_step(decision, max_norm, loss_scale),
        Queue::Cuda(cuda) => cuda::decide_step(cuda, decision, max_norm, loss_scale),
    }
}

/// sum += x.
pub fn add(queue: &Queue, sum: View, x: View) {
    assert_eq!((sum.len(), sum.dtype(), x.dtype()), (x.len(), DType::F32, DType::F32));
    sum.assert_disjoint(&x);
    match queue {
        Queue::Cpu(cpu) => cpu::add(cpu, sum, x),
        Queue::Cuda(cuda) => cuda::add(cuda, sum, x),
    }
}

/// to = x. From f32 to bf16 this rounds to nearest, ties to even.
pub fn copy(queue: &Queue, to: View, x: View) {
    assert_eq!(to.len(), x.len());
    let rounds = (x.dtype(), to.dtype()) == (DType::F32, DType::BF16);
    assert!(rounds || to.dtype() == x.dtype(), "a copy from {} to {}", x.dtype(), to.dtype());
    to.assert_disjoint(&x);
    match queue {
        Queue::Cpu(cpu) if rounds => cpu::round(cpu, to, x),
        Queue::Cuda(cuda) if rounds => cuda::round(cuda, to, x),
        Queue::Cpu(cpu) => cpu::copy(cpu, to, x),
        Queue::Cuda(cuda) => cuda.copy(to, x),
    }
}

/// Sets a range to zero, on all threads.
pub fn zero(queue: &Queue, x: View) {
    match queue {
        Queue::Cpu(cpu) => cpu::zero(cpu, x),
        Queue::Cuda(cuda) => cuda.zero(x),
    }
}
