//! Matrices in views.

use lockstep_device::View;

/// A row-major matrix in a view: `rows` rows of `cols` elements; row starts are `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'m> {
    pub view: View<'m>,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl<'m> Mat<'m> {
    /// A matrix whose rows are contiguous from the start of `view`.
    pub fn dense(view: View<'m>, rows: usize, cols: usize) -> Mat<'m> {
        Mat::strided(view, rows, cols, cols)
    }

    pub fn strided(view: View<'m>, rows: usize, cols: usize, stride: usize) -> Mat<'m> {
        assert!(stride >= cols, "rows of {cols} elements cannot have a stride of {stride}");
        let whole_rows = if cols == 0 { Some(0) } else { rows.saturating_sub(1).checked_mul(stride) };
        let last_row = if rows == 0 { 0 } else { cols };
        let needed = whole_rows.and_then(|elems| elems.checked_add(last_row));
        match needed.filter(|needed| *needed <= view.len()) {
            Some(needed) => Mat { view: view.first(needed), rows, cols, stride },
            None => panic!("[{rows}, {cols}] with stride {stride} does not fit a view of {}", view.len()),
        }
    }

    /// Columns `[start, start + cols)`.
    pub fn columns(&self, start: usize, cols: usize) -> Mat<'m> {
        let fits = start <= self.cols && cols <= self.cols - start;
        assert!(fits, "columns [{start}, +{cols}] of {}", self.cols);
        if self.rows == 0 {
            return Mat { cols, ..*self };
        }
        Mat::strided(self.view.slice(start, self.view.len() - start), self.rows, cols, self.stride)
    }

    /// One row.
    pub fn row(&self, row: usize) -> View<'m> {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        self.view.slice(row * self.stride, self.cols)
    }

    /// Panics if the two share an element. Column ranges of one matrix are disjoint even though their views overlap.
    #[track_caller]
    pub fn assert_disjoint(&self, other: &Mat<'_>) {
        let bytes = |elems: usize| elems * self.view.dtype().size();
        let alike = self.view.dtype() == other.view.dtype() && self.stride == other.stride;
        if alike && !self.view.is_empty() && !other.view.is_empty() {
            // The distance of the other's row starts behind the start of a row of this one.
            let [from, to] = [self.view, other.view].map(|view| view.as_ptr::<u8>() as usize);
            let behind = to.wrapping_sub(from) as isize;
            let behind = behind.rem_euclid(bytes(self.stride) as isize) as usize;
            if bytes(self.cols) <= behind && behind + bytes(other.cols) <= bytes(self.stride) {
                return;
            }
        }
        self.view.assert_disjoint(&other.view);
    }

    /// Rows `[start, start + rows)`.
    pub fn row_range(&self, start: usize, rows: usize) -> Mat<'m> {
        let fits = start <= self.rows && rows <= self.rows - start;
        assert!(fits, "rows [{start}, +{rows}] of {}", self.rows);
        let from = if rows == 0 { 0 } else { start * self.stride };
        Mat::strided(self.view.slice(from, self.view.len() - from), rows, self.cols, self.stride)
    }
}

#[cfg(test)]
mod tests {
    use lockstep_core::DType;

    use super::*;
    use crate::testing::{Operands, TestArena, panic_message};

    /// Sizes whose product or sum overflows must not bypass the bounds check.
    #[test]
    fn huge_sizes_are_refused() {
        let arena = TestArena::new(1);
        let view = arena.output(100, DType::F32);
        let half = 1 << (usize::BITS / 2);
        for (rows, cols, stride) in [
            (half + 1, 4, half),
            (2, 2, usize::MAX),
            (3, 1, usize::MAX / 2 + 1),
            (usize::MAX, 1, 1),
            (11, 10, 10),
        ] {
            let message = panic_message(|| _ = Mat::strided(view, rows, cols, stride));
            assert!(message.starts_with(&format!("[{rows}, {cols}] with stride {stride}")), "{message}");
        }
        let mat = Mat::dense(view, 10, 10);
        for (start, len) in [(usize::MAX, 2), (2, usize::MAX), (11, 0), (10, 1)] {
            let message = panic_message(|| _ = mat.columns(start, len));
            assert!(message.starts_with(&format!("columns [{start}, +{len}]")), "{message}");
            let message = panic_message(|| _ = mat.row_range(start, len));
            assert!(message.starts_with(&format!("rows [{start}, +{len}]")), "{message}");
        }
        for row in [10, usize::MAX / 10 + 1, usize::MAX] {
            assert_eq!(panic_message(|| _ = mat.row(row)), format!("row {row} of 10"));
        }
    }

    #[test]
    fn empty_matrices_need_no_memory() {
        let empty = View::empty();
        for (rows, cols) in [(0, 5), (5, 0), (usize::MAX, 0), (0, 0)] {
            assert_eq!(Mat::strided(empty, rows, cols, usize::MAX).view.len(), 0);
        }
    }
}
