//! Matrices in views.

use lockstep_device::View;

/// A row-major matrix in a view: `rows` rows of `cols` elements, `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'m> {
    pub view: View<'m>,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl<'m> Mat<'m> {
    /// A matrix whose rows lie one after the other from the start of `view`.
    pub fn dense(view: View<'m>, rows: usize, cols: usize) -> Mat<'m> {
        Mat::strided(view, rows, cols, cols)
    }

    pub fn strided(view: View<'m>, rows: usize, cols: usize, stride: usize) -> Mat<'m> {
        assert!(stride >= cols, "rows of {cols} cannot lie {stride} apart");
        let needed = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * stride + cols };
        assert!(needed <= view.len(), "[{rows}, {cols}] by {stride} in a view of {}", view.len());
        Mat { view: view.first(needed), rows, cols, stride }
    }

    /// Columns `[start, start + cols)`.
    pub fn columns(&self, start: usize, cols: usize) -> Mat<'m> {
        assert!(start + cols <= self.cols, "columns [{start}, +{cols}] of {}", self.cols);
        if self.rows == 0 {
            return Mat { cols, ..*self };
        }
        Mat::strided(self.view.slice(start, self.view.len() - start), self.rows, cols, self.stride)
    }

    /// One row.
    pub fn row(&self, row: usize) -> View<'m> {
        self.view.slice(row * self.stride, self.cols)
    }

    /// Panics if the two share an element. Column ranges of one matrix are apart, though their views are not.
    #[track_caller]
    pub fn assert_apart(&self, other: &Mat<'_>) {
        let bytes = |elems: usize| elems * self.view.dtype().size();
        let alike = self.view.dtype() == other.view.dtype() && self.stride == other.stride;
        if alike && !self.view.is_empty() && !other.view.is_empty() {
            // How far the other's rows begin behind the start of a row of this one.
            let [from, to] = [self.view, other.view].map(|view| view.as_ptr::<u8>() as usize);
            let behind = to.wrapping_sub(from) as isize;
            let behind = behind.rem_euclid(bytes(self.stride) as isize) as usize;
            if bytes(self.cols) <= behind && behind + bytes(other.cols) <= bytes(self.stride) {
                return;
            }
        }
        self.view.assert_apart(&other.view);
    }

    /// Rows `[start, start + rows)`.
    pub fn row_range(&self, start: usize, rows: usize) -> Mat<'m> {
        assert!(start + rows <= self.rows, "rows [{start}, +{rows}] of {}", self.rows);
        let from = if rows == 0 { 0 } else { start * self.stride };
        Mat::strided(self.view.slice(from, self.view.len() - from), rows, self.cols, self.stride)
    }
}
