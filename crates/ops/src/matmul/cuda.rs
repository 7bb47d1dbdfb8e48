//! Products through cuBLASLt. Factors have one type; the library accumulates in f32.

use lockstep_device::View;
use lockstep_device::cuda::{CudaQueue, Factor, Gemm};

use super::Init;
use crate::Mat;

/// `transposed`: whether A and B are used so.
pub(super) fn product(
    cuda: &CudaQueue,
    c: Mat,
    (a, b): (Mat, Mat),
    transposed: [bool; 2],
    init: Init,
    scratch: View,
) {
    let k = if transposed[0] { a.rows } else { a.cols };
    let start = match init {
        Init::Zero => None,
        Init::Accumulate => Some((c.view, c.stride)),
        Init::Residual(residual) => Some((residual.view, residual.stride)),
    };
    cuda.gemm(&Gemm {
        m: c.rows,
        n: c.cols,
        k,
        a: factor(a, transposed[0]),
        b: factor(b, transposed[1]),
        c: start,
        d: (c.view, c.stride),
        workspace: scratch,
    });
}

fn factor(mat: Mat<'_>, transposed: bool) -> Factor<'_> {
    Factor { view: mat.view, stride: mat.stride, transposed }
}
