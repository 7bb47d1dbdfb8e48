//! Token embedding: one row of the table per token.

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_core::{Bytes, DType};
use lockstep_device::{Queue, View};

use crate::Mat;
use crate::disjoint::assert_disjoint;

/// x\[T, D\] = table\[tokens\]. `tokens`\[T\] in u32, each below the number of rows of the table.
pub fn forward(queue: &Queue, x: Mat, table: Mat, tokens: View) {
    assert_eq!((x.rows, x.cols), (tokens.len(), table.cols), "shapes of an embedding must match");
    assert_eq!(tokens.dtype(), DType::U32, "tokens must be u32");
    assert_disjoint(&[x.view], &[table.view, tokens]);
    match queue {
        Queue::Cpu(cpu) => cpu::forward(cpu, x, table, tokens),
        Queue::Cuda(cuda) => cuda::forward(cuda, x, table, tokens),
    }
}

/// Bytes of scratch that [`backward`] needs on a GPU for up to `tokens` tokens; none on the CPU.
pub fn scratch_bytes(tokens: usize) -> Bytes {
    // The order of the tokens, and the tokens in that order.
    Bytes(2 * tokens as u64 * DType::U32.size() as u64)
}

/// dtable\[tokens\] += dx. Rows of equal tokens are added in the order of their positions.
pub fn backward(queue: &Queue, dtable: Mat, dx: Mat, tokens: View, scratch: View) {
    assert_eq!((dx.rows, dx.cols), (tokens.len(), dtable.cols), "shapes of an embedding must match");
    assert_eq!((dtable.view.dtype(), tokens.dtype()), (DType::F32, DType::U32), "weight gradients are f32");
    assert_disjoint(&[dtable.view, scratch], &[dx.view, tokens]);
    match queue {
        Queue::Cpu(cpu) => cpu::backward(cpu, dtable, dx, tokens),
        Queue::Cuda(cuda) => cuda::backward(cuda, dtable, dx, tokens, scratch),
    }
}
