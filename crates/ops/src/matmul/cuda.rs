//! Matmul through cuBLASLt. A and B have the same type; the library accumulates in f32.

use lockstep_device::View;
use lockstep_device::cuda::{CudaQueue, Gemm, GemmOperand};

use super::Accumulate;
use crate::Mat;

/// `transposed` says whether A and B are used transposed.
pub(super) fn matmul(
    cuda: &CudaQueue,
    c: Mat,
    (a, b): (Mat, Mat),
    transposed: [bool; 2],
    accumulate: Accumulate,
    scratch: View,
) {
    let k = if transposed[0] { a.rows } else { a.cols };
    let start = match accumulate {
        Accumulate::Overwrite => None,
        Accumulate::Add => Some((c.view, c.stride)),
        Accumulate::Residual(residual) => Some((residual.view, residual.stride)),
    };
    cuda.gemm(&Gemm {
        m: c.rows,
        n: c.cols,
        k,
        a: operand(a, transposed[0]),
        b: operand(b, transposed[1]),
        c: start,
        d: (c.view, c.stride),
        workspace: scratch,
    });
}

fn operand(mat: Mat<'_>, transposed: bool) -> GemmOperand<'_> {
    GemmOperand { view: mat.view, stride: mat.stride, transposed }
}
