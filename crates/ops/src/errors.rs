//! The error of a result against its reference: of the whole tensor, of its worst row and of its worst element.
//!
//! The norm of a whole tensor hides errors in a part of it: one row in four thousand that is off by a tenth changes it
//! by a thousandth. So rows are compared relative to their own norm, and elements relative to their row's.
//!
//! Tolerances are stated for whole tensors. They allow for a few roundings to the storage type, whose errors partly
//! cancel. With u the unit roundoff (2⁻⁸ for bf16, 2⁻¹¹ for f16, 2⁻²⁴ for f32), one rounding changes an element by at
//! most u and a large tensor by about 0.4 u, and the tolerances of 16-bit types are 2 u. In the worst row, which may
//! have a single element, nothing cancels: [`ROW_ALLOWANCE`] times the tolerance is eight roundings in the same
//! direction. A row's error may be a multiple of another row, whose worst element is four to five times its root mean
//! square: [`ELEMENT_ALLOWANCE`] is four times as much. In f32 the tolerance is 50 u, for sums of hundreds of terms.

/// The permitted error of the worst row, in units of the tolerance of the whole tensor.
pub(crate) const ROW_ALLOWANCE: f64 = 4.0;
/// The permitted error of the worst element, relative to its own magnitude or its row's, whichever is larger.
pub(crate) const ELEMENT_ALLOWANCE: f64 = 16.0;
/// Rows smaller than this fraction of an average row are compared as if they had that size: what remains after terms
/// have cancelled says little about their errors.
const SMALLEST_ROW: f64 = 1e-3;

/// Relative errors, and where the worst ones are. NaN where a value is NaN.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Errors {
    /// ‖got − want‖ / ‖want‖.
    pub(crate) whole: f64,
    /// The same for the worst row, and its index.
    pub(crate) row: (f64, usize),
    /// |got − want| of the worst element relative to the larger of |want| and its row's root mean square, and its
    /// index.
    pub(crate) element: (f64, usize),
}

impl Errors {
    /// The errors of a tensor with rows of `cols` elements. Where terms may cancel, `scale` is a norm to measure the
    /// whole against; rows are then measured against their share of it.
    pub(crate) fn of(got: &[f64], want: &[f64], cols: usize, scale: f64) -> Errors {
        let num_rows = (got.len() / cols.max(1)).max(1) as f64;
        Errors::of_rows(got, want, cols, scale, |_| scale / num_rows.sqrt())
    }

    /// As [`Errors::of`], with a norm to measure each row against.
    pub(crate) fn of_rows(
        got: &[f64],
        want: &[f64],
        cols: usize,
        scale: f64,
        of_row: impl Fn(usize) -> f64,
    ) -> Errors {
        assert_eq!(got.len(), want.len(), "result and reference must have the same length");
        let cols = cols.clamp(1, got.len().max(1));
        assert!(got.len().is_multiple_of(cols), "{} elements in rows of {cols}", got.len());
        let num_rows = got.len() / cols;
        let size = norm(want.iter().copied());
        let smallest = SMALLEST_ROW * size / (num_rows.max(1) as f64).sqrt();
        let mut errors = Errors {
            whole: relative(norm(got.iter().zip(want).map(|(g, w)| g - w)), size.max(scale).max(1e-30)),
            ..Errors::default()
        };
        for (row, (got, want)) in got.chunks_exact(cols).zip(want.chunks_exact(cols)).enumerate() {
            let size = norm(want.iter().copied()).max(of_row(row)).max(smallest).max(1e-30);
            let off = relative(norm(got.iter().zip(want).map(|(g, w)| g - w)), size);
            keep_worse(&mut errors.row, off, row);
            let usual = size / (cols as f64).sqrt();
            for (column, (got, want)) in got.iter().zip(want).enumerate() {
                keep_worse(
                    &mut errors.element,
                    relative((got - want).abs(), want.abs().max(usual)),
                    row * cols + column,
                );
            }
        }
        errors
    }

    /// The worst of the three, in units of a tolerance for the whole tensor.
    pub(crate) fn worst(&self) -> f64 {
        let all = [self.whole, self.row.0 / ROW_ALLOWANCE, self.element.0 / ELEMENT_ALLOWANCE];
        all.into_iter().fold(0.0, |worst, error| if error.is_nan() || error > worst { error } else { worst })
    }

    /// Describes the first part whose error exceeds its allowance, if any.
    pub(crate) fn failure(&self, tolerance: f64) -> Option<String> {
        // Written so that NaN fails.
        let within = |error: f64, most: f64| error <= most;
        if !within(self.row.0, ROW_ALLOWANCE * tolerance) {
            return Some(format!("row {} is off by {:.1e} of its norm", self.row.1, self.row.0));
        }
        if !within(self.element.0, ELEMENT_ALLOWANCE * tolerance) {
            return Some(format!(
                "element {} is off by {:.1e} of its row's magnitude",
                self.element.1, self.element.0
            ));
        }
        (!within(self.whole, tolerance)).then(|| format!("the whole tensor is off by {:.1e}", self.whole))
    }
}

fn keep_worse(worst: &mut (f64, usize), error: f64, at: usize) {
    if !worst.0.is_nan() && (error.is_nan() || error > worst.0) {
        *worst = (error, at);
    }
}

/// Zero difference is zero error, whatever the size.
fn relative(difference: f64, size: f64) -> f64 {
    if difference == 0.0 { 0.0 } else { difference / size }
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: usize = 4096;
    const COLS: usize = 16;
    /// The tolerance of bf16.
    const TOLERANCE: f64 = 8e-3;

    fn reference() -> Vec<f64> {
        (0..ROWS * COLS).map(|i| (i as f64 * 0.7).sin()).collect()
    }

    /// A wrong row is reported even if the norm of the whole tensor hides it.
    #[test]
    fn one_wrong_row_is_found() {
        let want = reference();
        let mut got = want.clone();
        got[1234 * COLS..][..COLS].iter_mut().for_each(|x| *x *= 1.1);
        let errors = Errors::of(&got, &want, COLS, 0.0);
        assert!(errors.whole < TOLERANCE / 4.0, "the whole tensor shows the error: {errors:?}");
        assert!(errors.worst() > TOLERANCE);
        assert!(errors.failure(TOLERANCE).unwrap().starts_with("row 1234 is off by 1.0e-1"));
        assert_eq!(Errors::of(&want, &want, COLS, 0.0).failure(0.0), None);
    }

    /// A wrong element of a long row changes neither the whole nor the row by much.
    #[test]
    fn one_wrong_element_is_found() {
        let want = reference();
        let mut got = want.clone();
        got[77] += 0.3;
        let errors = Errors::of(&got, &want, ROWS * COLS, 0.0);
        assert!(errors.whole < TOLERANCE && errors.row.0 < TOLERANCE);
        assert!(errors.worst() > TOLERANCE);
        assert!(errors.failure(TOLERANCE).unwrap().starts_with("element 77 is off by"));
    }

    /// A row a thousand times smaller than the others is compared relative to its own norm.
    #[test]
    fn small_rows_are_not_hidden_by_large_ones() {
        let mut want = reference();
        want[9 * COLS..][..COLS].iter_mut().for_each(|x| *x *= 2e-3);
        let mut got = want.clone();
        got[9 * COLS..][..COLS].iter_mut().for_each(|x| *x *= 1.1);
        assert!(Errors::of(&got, &want, COLS, 0.0).failure(TOLERANCE).is_some());
        // With a scale, rows of this size count as what remains of larger terms.
        assert_eq!(Errors::of(&got, &want, COLS, norm(want.iter().copied())).failure(TOLERANCE), None);
    }

    #[test]
    fn nan_never_passes() {
        let want = reference();
        let mut got = want.clone();
        (got[5], got[6]) = (f64::NAN, 0.0);
        let errors = Errors::of(&got, &want, COLS, 0.0);
        assert!(errors.worst().is_nan() && errors.failure(1e9).is_some());
        assert!(Errors::of(&[], &[], 5, 0.0).failure(0.0).is_none());
    }
}
