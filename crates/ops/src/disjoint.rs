//! Checks that operands do not share memory.

use lockstep_device::View;

use crate::Mat;

/// Panics if an output shares a byte with an input or with another output. Inputs may overlap.
#[track_caller]
pub(crate) fn assert_disjoint(outputs: &[View], inputs: &[View]) {
    for (i, output) in outputs.iter().enumerate() {
        for other in outputs[i + 1..].iter().chain(inputs) {
            output.assert_disjoint(other);
        }
    }
}

/// Panics unless the two are the same matrix or share nothing: for operations that may run in place.
#[track_caller]
pub(crate) fn assert_same_or_disjoint(a: &Mat, b: &Mat) {
    let place = |mat: &Mat| (mat.view.as_ptr::<u8>(), mat.view.dtype(), mat.rows, mat.cols, mat.stride);
    if place(a) != place(b) {
        a.assert_disjoint(b);
    }
}
