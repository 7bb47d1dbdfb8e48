//! Small products on one document's head: blocks of rows against packed panels.

use std::ops::Range;

use lockstep_device::{Isa, Real, View};

use crate::matmul::{MR, NR, Tile, row, tile};
use crate::{Mat, matmul};

/// A dense or strided f32 operand: element (i, j) at `ptr + i * row + j * col`.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub(super) ptr: *const f32,
    pub(super) row: usize,
    pub(super) col: usize,
}

/// C\[rows, cols\] (+)= A\[rows, depth\] · B, with B in panels of NR columns, `panel_elems` apart.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) depth: usize,
    pub(super) a: Operand,
    pub(super) b: *const f32,
    pub(super) panel_elems: usize,
    pub(super) c: *mut f32,
    pub(super) c_row: usize,
    pub(super) accumulate: bool,
}

impl Product {
    /// Computes the columns that somebody looks at: those below `seen(i)` for row i, which does not fall. Others keep
    /// what they hold, or get what comes.
    ///
    /// # Safety
    /// The operands cover the sizes; C overlaps neither A nor B.
    #[inline(always)]
    pub(super) unsafe fn of_seen_columns(&self, isa: Isa, seen: impl Fn(usize) -> usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.run(isa, |rows| (seen(rows.end - 1), 0..self.depth)) }
    }

    /// A is zero from column `seen(i)` on in row i, which does not fall: the sum ends there.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    pub(super) unsafe fn over_seen(&self, isa: Isa, seen: impl Fn(usize) -> usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.run(isa, |rows| (self.cols, 0..seen(rows.end - 1))) }
    }

    /// A is zero before column `first(i)` in row i, which does not fall: the sum starts there.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    pub(super) unsafe fn over_seeing(&self, isa: Isa, first: impl Fn(usize) -> usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.run(isa, |rows| (self.cols, first(rows.start)..self.depth)) }
    }

    /// Row by row of tiles, each with its columns and its part of the inner dimension. What is left out are products
    /// with zero, which change no sum.
    #[inline(always)]
    unsafe fn run(&self, isa: Isa, part: impl Fn(Range<usize>) -> (usize, Range<usize>)) {
        for first_row in (0..self.rows).step_by(MR) {
            let rows = (self.rows - first_row).min(MR);
            let (cols, inner) = part(first_row..first_row + rows);
            let (cols, inner) = (cols.min(self.cols), inner.start..inner.end.min(self.depth));
            if inner.is_empty() {
                continue;
            }
            // SAFETY: inside the sizes the caller vouched for.
            unsafe {
                let c = self.c.add(first_row * self.c_row);
                let all = Tile {
                    depth: inner.len(),
                    a: self.a.ptr.add(first_row * self.a.row + inner.start * self.a.col),
                    a_row: self.a.row,
                    a_col: self.a.col,
                    b: self.b.add(inner.start * NR),
                    b_row: NR,
                    init: if self.accumulate { c } else { std::ptr::null() },
                    init_row: self.c_row,
                    c,
                    c_row: self.c_row,
                    rows,
                    cols,
                };
                if rows == 1 && cols > 0 {
                    row(isa, &all, self.panel_elems);
                    continue;
                }
                for first_col in (0..cols).step_by(NR) {
                    let c = c.add(first_col);
                    let b = all.b.add(first_col / NR * self.panel_elems);
                    let init = if self.accumulate { c } else { std::ptr::null() };
                    tile(isa, &Tile { b, init, c, cols: (cols - first_col).min(NR), ..all });
                }
            }
        }
    }
}

/// One head's columns of a document's rows.
#[derive(Clone, Copy)]
pub(super) struct Head<'m> {
    mat: Mat<'m>,
}

impl<'m> Head<'m> {
    pub(super) fn new(mat: &Mat<'m>, first: usize, len: usize, head: usize, width: usize) -> Head<'m> {
        Head { mat: mat.row_range(first, len).columns(head * width, width) }
    }

    pub(super) fn len(&self) -> usize {
        self.mat.rows
    }

    /// The rows in f32: where they lie, or widened into `room`.
    pub(super) fn rows<R: Real>(&self, isa: Isa, room: &mut [f32]) -> Operand {
        if self.mat.view.dtype() == lockstep_core::DType::F32 {
            return Operand { ptr: self.mat.view.as_ptr(), row: self.mat.stride, col: 1 };
        }
        let (rows, cols) = (self.mat.rows, self.mat.cols);
        isa.run(
            #[inline(always)]
            || matmul::pack::widen_rows(self.source::<R>(), self.mat.stride, rows, cols, room),
        );
        Operand { ptr: room.as_ptr(), row: cols, col: 1 }
    }

    /// Panels over the rows: panel p is \[h, NR\] and holds rows p·NR.. as columns (xᵀ as B).
    pub(super) fn pack_transposed<R: Real>(&self, isa: Isa, panels: &mut [f32]) {
        let width = self.mat.cols;
        for (p, panel) in panels.chunks_mut(width * NR).take(self.len().div_ceil(NR)).enumerate() {
            let cols = (self.len() - p * NR).min(NR);
            let source = &self.source::<R>()[p * NR * self.mat.stride..];
            isa.run(
                #[inline(always)]
                || matmul::pack::transposed::<_, NR>(isa, source, self.mat.stride, width, cols, panel),
            );
        }
    }

    /// Panels over the head's columns: panel p is \[rows, NR\] and holds columns p·NR.. (x as B).
    /// Panels lie `rows_padded * NR` apart.
    pub(super) fn pack_natural<R: Real>(&self, isa: Isa, rows_padded: usize, panels: &mut [f32]) {
        let (rows, width) = (self.len(), self.mat.cols);
        assert!(rows <= rows_padded && rows_padded * padded(width) <= panels.len(), "room for all panels");
        let out = panels.as_mut_ptr();
        // SAFETY: the panels were just checked to lie inside the slice, which is ours alone.
        isa.run(
            #[inline(always)]
            || unsafe {
                matmul::pack::natural(self.source::<R>(), self.mat.stride, rows, width, out, rows_padded * NR)
            },
        );
    }

    /// Row i as stored.
    pub(super) fn row<R: Real>(&self, i: usize) -> &'m [R] {
        let view: View<'m> = self.mat.view.slice(i * self.mat.stride, self.mat.cols);
        // SAFETY: inputs are not written while an operation reads them.
        unsafe { view.as_slice::<R>() }
    }

    /// Row i, to be written.
    ///
    /// # Safety
    /// No other item writes this head of this document.
    pub(super) unsafe fn row_mut<R: Real>(&self, i: usize) -> &'m mut [R] {
        // SAFETY: the caller's promise.
        unsafe { self.mat.view.slice(i * self.mat.stride, self.mat.cols).as_mut::<R>() }
    }

    fn source<R: Real>(&self) -> &'m [R] {
        // SAFETY: as in `row`.
        unsafe { self.mat.view.as_slice::<R>() }
    }
}

/// Rounds `width` up to whole panels.
pub(super) const fn padded(width: usize) -> usize {
    width.next_multiple_of(NR)
}
