//! Matrix products with a fixed order of summation.
//!
//! Every element of C is computed the same way whatever the shape around it: the inner dimension is cut
//! into blocks of [`KC`]; a block is summed from 0 by one chain of fused multiply-adds in order of k; the
//! block sums are added to the initial value in order. So a row of C depends on its own row of A (and on
//! B) alone, not on the number of rows, the tile it fell into, the threads or the instruction set. That
//! is the row contract for products. Threads split outputs, never the inner dimension.
//!
//! Where both A and B are bf16 and the machine has tiles for that (`amx`), a block is summed in another order, which is
//! that of the tiles; all else in the definition is the same. So such products are a class of their own: whether a
//! product is of it depends on the types and the machine, and within it the row contract holds as it does elsewhere,
//! for any number of rows and threads.
//!
//! B is packed into panels of [`NR`] columns; for vectors bf16 and fp16 are widened while packing. A is read where
//! it lies, except where it must be widened or is used transposed. For few rows of A it is the other way
//! round (`few`). All scratch is the caller's.

// Without tiles nothing is made of what is packed for them.
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

/// Inner-dimension block: part of the definition of a result, so it never changes with the machine.
pub const KC: usize = 384;
/// Columns of a packed panel of B.
pub(crate) const NR: usize = 32;
/// Rows of a tile of C.
pub(crate) const MR: usize = 12;

/// What a product is added to.
#[derive(Clone, Copy, Debug)]
pub enum Accumulate<'m> {
    /// C = A·B
    Overwrite,
    /// C = C + A·B
    Add,
    /// C = R + A·B; R may be C itself
    Residual(Mat<'m>),
}

/// The scratch a product of any shape needs on a queue of `num_threads`.
pub fn scratch_bytes(num_threads: usize) -> Bytes {
    cpu::scratch_bytes(num_threads)
}

/// What every layout asks of its operands, besides the shapes of the factors. The result lies apart from the factors,
/// the scratch apart from everything; what the product is added to is C itself or lies apart from it.
fn check(c: &Mat, a: &Mat, b: &Mat, init: &Accumulate, scratch: View) {
    assert_disjoint(&[c.view, scratch], &[a.view, b.view]);
    if let Accumulate::Residual(r) = init {
        assert_eq!(
            (r.rows, r.cols, r.view.dtype()),
            (c.rows, c.cols, c.view.dtype()),
            "shape of the residual"
        );
        assert_same_or_disjoint(c, r);
        scratch.assert_disjoint(&r.view);
    }
}

/// C\[M, N\] = init + A\[M, K\] · B\[N, K\]ᵀ: a linear layer forward.
pub fn nt(queue: &Queue, c: Mat, a: Mat, b: Mat, init: Accumulate, scratch: View) {
    assert_eq!((c.rows, c.cols, a.cols), (a.rows, b.rows, b.cols), "shapes of A·Bᵀ");
    check(&c, &a, &b, &init, scratch);
    match queue {
        Queue::Cpu(cpu) => cpu::matmul(cpu, c, cpu::A::Rows(a), cpu::B::Transposed(b), init, scratch),
        Queue::Cuda(cuda) => cuda::matmul(cuda, c, (a, b), [false, true], init, scratch),
    }
}

/// C\[M, N\] = init + A\[M, K\] · B\[K, N\]: the gradient of a linear layer's input.
pub fn nn(queue: &Queue, c: Mat, a: Mat, b: Mat, init: Accumulate, scratch: View) {
    assert_eq!((c.rows, c.cols, a.cols), (a.rows, b.cols, b.rows), "shapes of A·B");
    check(&c, &a, &b, &init, scratch);
    match queue {
        Queue::Cpu(cpu) => cpu::matmul(cpu, c, cpu::A::Rows(a), cpu::B::Natural(b), init, scratch),
        Queue::Cuda(cuda) => cuda::matmul(cuda, c, (a, b), [false, false], init, scratch),
    }
}

/// C\[M, N\] = init + A\[K, M\]ᵀ · B\[K, N\]: the gradient of a weight. C is f32.
pub fn tn(queue: &Queue, c: Mat, a: Mat, b: Mat, init: Accumulate, scratch: View) {
    assert_eq!((c.rows, c.cols, a.rows), (a.cols, b.cols, b.rows), "shapes of Aᵀ·B");
    assert_eq!(c.view.dtype(), DType::F32, "weight gradients are f32");
    check(&c, &a, &b, &init, scratch);
    match queue {
        Queue::Cpu(cpu) => cpu::matmul(cpu, c, cpu::A::Columns(a), cpu::B::Natural(b), init, scratch),
        Queue::Cuda(cuda) => cuda::matmul(cuda, c, (a, b), [true, false], init, scratch),
    }
}
