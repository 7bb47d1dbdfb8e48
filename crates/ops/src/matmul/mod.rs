//! Matmul with a fixed order of summation.
//!
//! The names of the three layouts say whether A and B are transposed (`n`: as stored, `t`: transposed): [`nt`] is a
//! linear layer forward, [`nn`] the gradient of its input, [`tn`] the gradient of its weight.
//!
//! Every element of C is computed in the same way, whatever the shapes: the inner dimension is divided into blocks of
//! [`KC`]; a block is summed from 0 by one chain of fused multiply-adds in order of k; the block sums are added to the
//! initial value in order. So a row of C depends only on its own row of A and on B, not on the number of rows, the
//! tile, the threads or the instruction set. That is the row contract for matmul. Threads split outputs, never the
//! inner dimension.
//!
//! If both A and B are bf16 and the machine has AMX (`amx`), a block is summed in the order of the tiles; everything
//! else is the same. So these matmuls have bits of their own. Whether AMX is used depends only on the types and the
//! machine, and among matmuls that use it the row contract holds as well, for any number of rows and threads.
//!
//! B is packed into panels of [`NR`] columns; vector kernels widen bf16 and fp16 while packing. A is read in place,
//! unless it must be widened or is transposed. For few rows of A it is the other way round (`few_rows`). The caller
//! provides all scratch memory.

// Without AMX, nothing uses what is packed for it.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod amx;
mod cpu;
mod cuda;
mod few_rows;
mod kernel;
pub(crate) mod pack;
pub mod reference;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod transpose;

use lockstep_core::{Bytes, DType};
use lockstep_device::{Queue, View};

use crate::Mat;
use crate::disjoint::{assert_disjoint, assert_same_or_disjoint};

pub(crate) use kernel::{Tile, row, tile};

/// Inner-dimension block. It determines the bits of results, so it is the same on every machine.
pub const KC: usize = 384;
/// Columns of a packed panel of B.
pub(crate) const NR: usize = 32;
/// Rows of a tile of C.
pub(crate) const MR: usize = 12;

/// What a matmul's result is added to.
#[derive(Clone, Copy, Debug)]
pub enum Accumulate<'m> {
    /// C = A·B
    Overwrite,
    /// C = C + A·B
    Add,
    /// C = R + A·B; R may be C itself.
    Residual(Mat<'m>),
}

/// The scratch that a matmul of any shape needs on a queue of `num_threads`.
pub fn scratch_bytes(num_threads: usize) -> Bytes {
    cpu::scratch_bytes(num_threads)
}

/// The requirements of all layouts, besides the shapes of A and B. C must not overlap A or B, scratch must not overlap
/// anything, and the residual must be C itself or not overlap it.
fn check(c: &Mat, a: &Mat, b: &Mat, accumulate: &Accumulate, scratch: View) {
    assert_disjoint(&[c.view, scratch], &[a.view, b.view]);
    if let Accumulate::Residual(r) = accumulate {
        assert_eq!(
            (r.rows, r.cols, r.view.dtype()),
            (c.rows, c.cols, c.view.dtype()),
            "the residual must match C"
        );
        assert_same_or_disjoint(c, r);
        scratch.assert_disjoint(&r.view);
    }
}

/// C\[M, N\] = A\[M, K\] · B\[N, K\]ᵀ, accumulated as `accumulate` says: a linear layer forward.
pub fn nt(queue: &Queue, c: Mat, a: Mat, b: Mat, accumulate: Accumulate, scratch: View) {
    assert_eq!((c.rows, c.cols, a.cols), (a.rows, b.rows, b.cols), "shapes of A·Bᵀ must match");
    check(&c, &a, &b, &accumulate, scratch);
    match queue {
        Queue::Cpu(cpu) => cpu::matmul(cpu, c, cpu::A::Rows(a), cpu::B::Transposed(b), accumulate, scratch),
        Queue::Cuda(cuda) => cuda::matmul(cuda, c, (a, b), [false, true], accumulate, scratch),
    }
}

/// C\[M, N\] = A\[M, K\] · B\[K, N\], accumulated as `accumulate` says: the gradient of a linear layer's input.
pub fn nn(queue: &Queue, c: Mat, a: Mat, b: Mat, accumulate: Accumulate, scratch: View) {
    assert_eq!((c.rows, c.cols, a.cols), (a.rows, b.cols, b.rows), "shapes of A·B must match");
    check(&c, &a, &b, &accumulate, scratch);
    match queue {
        Queue::Cpu(cpu) => cpu::matmul(cpu, c, cpu::A::Rows(a), cpu::B::Natural(b), accumulate, scratch),
        Queue::Cuda(cuda) => cuda::matmul(cuda, c, (a, b), [false, false], accumulate, scratch),
    }
}

/// C\[M, N\] = A\[K, M\]ᵀ · B\[K, N\], accumulated as `accumulate` says: the gradient of a weight. C is f32, or bf16, to which
/// the f32 result is rounded.
pub fn tn(queue: &Queue, c: Mat, a: Mat, b: Mat, accumulate: Accumulate, scratch: View) {
    assert_eq!((c.rows, c.cols, a.rows), (a.cols, b.cols, b.rows), "shapes of Aᵀ·B must match");
    assert!(matches!(c.view.dtype(), DType::F32 | DType::BF16), "weight gradients are f32 or bf16");
    check(&c, &a, &b, &accumulate, scratch);
    match queue {
        Queue::Cpu(cpu) => cpu::matmul(cpu, c, cpu::A::Columns(a), cpu::B::Natural(b), accumulate, scratch),
        Queue::Cuda(cuda) => cuda::matmul(cuda, c, (a, b), [true, false], accumulate, scratch),
    }
}
