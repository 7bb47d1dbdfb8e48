//! Small matmuls on one head of a document: blocks of rows against packed panels.

use std::ops::Range;

use lockstep_core::DType;
use lockstep_device::{Isa, Real, View};

use crate::math::{LANES, map_lanes};
use crate::matmul::{MR, NR, Tile, row, tile};
use crate::{Mat, matmul};

/// A dense or strided f32 operand: element (i, j) at `ptr + i * row + j * col`.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub(super) ptr: *const f32,
    pub(super) row: usize,
    pub(super) col: usize,
}

/// The B operand of a matmul: panels of NR columns, `panel` elements apart, whose rows are `row` elements apart.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    pub(super) ptr: *const f32,
    pub(super) row: usize,
    pub(super) panel: usize,
}

impl Panels {
    /// Skips the rows before `first`.
    pub(super) fn rows_from(self, first: usize) -> Panels {
        Panels { ptr: self.ptr.wrapping_add(first * self.row), ..self }
    }

    /// Skips the panels before the one that starts with column `first`.
    pub(super) fn columns_from(self, first: usize) -> Panels {
        Panels { ptr: self.ptr.wrapping_add(first / NR * self.panel), ..self }
    }
}

/// C\[rows, cols\] = A\[rows, depth\] · B, added to C if `accumulate`.
#[derive(Clone, Copy)]
pub(super) struct BlockMatmul {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) depth: usize,
    pub(super) a: Operand,
    pub(super) b: Panels,
    pub(super) c: *mut f32,
    pub(super) c_row: usize,
    pub(super) accumulate: bool,
}

impl BlockMatmul {
    /// Computes, in row i, the columns below `visible(i)`, which must not decrease with i. Other columns keep their
    /// values or become unspecified.
    ///
    /// # Safety
    /// The operands cover the sizes; C overlaps neither A nor B.
    #[inline(always)]
    pub(super) unsafe fn run_columns_below(&self, isa: Isa, visible: impl Fn(usize) -> usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.run(isa, |rows| (visible(rows.end - 1), 0..self.depth)) }
    }

    /// Sums, in row i, over the inner indices below `visible(i)`, which must not decrease with i: A is zero from there
    /// on.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    pub(super) unsafe fn run_inner_below(&self, isa: Isa, visible: impl Fn(usize) -> usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.run(isa, |rows| (self.cols, 0..visible(rows.end - 1))) }
    }

    /// Sums, in row i, over the inner indices from `first(i)` on, which must not decrease with i: A is zero before.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    pub(super) unsafe fn run_inner_from(&self, isa: Isa, first: impl Fn(usize) -> usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.run(isa, |rows| (self.cols, first(rows.start)..self.depth)) }
    }

    /// Runs over rows of tiles, each with its columns and its part of the inner dimension. What is skipped are products
    /// with zero, which do not change a sum.
    #[inline(always)]
    unsafe fn run(&self, isa: Isa, part: impl Fn(Range<usize>) -> (usize, Range<usize>)) {
        for first_row in (0..self.rows).step_by(MR) {
            let rows = (self.rows - first_row).min(MR);
            let (cols, inner) = part(first_row..first_row + rows);
            let (cols, inner) = (cols.min(self.cols), inner.start..inner.end.min(self.depth));
            if inner.is_empty() {
                continue;
            }
            // SAFETY: inside the sizes that the caller guarantees.
            unsafe {
                let c = self.c.add(first_row * self.c_row);
                let all = Tile {
                    depth: inner.len(),
                    a: self.a.ptr.add(first_row * self.a.row + inner.start * self.a.col),
                    a_row: self.a.row,
                    a_col: self.a.col,
                    b: self.b.ptr.add(inner.start * self.b.row),
                    b_row: self.b.row,
                    init: if self.accumulate { c } else { std::ptr::null() },
                    init_row: self.c_row,
                    c,
                    c_row: self.c_row,
                    rows,
                    cols,
                };
                if rows == 1 && cols > 0 {
                    row(isa, &all, self.b.panel);
                    continue;
                }
                for first_col in (0..cols).step_by(NR) {
                    let c = c.add(first_col);
                    let b = all.b.add(first_col / NR * self.b.panel);
                    let init = if self.accumulate { c } else { std::ptr::null() };
                    tile(isa, &Tile { b, init, c, cols: (cols - first_col).min(NR), ..all });
                }
            }
        }
    }
}

/// Rows that are accumulated in f32, `row` elements apart.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    pub(super) ptr: *mut f32,
    pub(super) row: usize,
}

/// One head's columns of a document's rows.
#[derive(Clone, Copy)]
pub(super) struct HeadRows<'m> {
    mat: Mat<'m>,
}

impl<'m> HeadRows<'m> {
    pub(super) fn new(mat: &Mat<'m>, first: usize, len: usize, head: usize, width: usize) -> HeadRows<'m> {
        HeadRows { mat: mat.row_range(first, len).columns(head * width, width) }
    }

    pub(super) fn len(&self) -> usize {
        self.mat.rows
    }

    /// The rows in f32: in place, or widened into `scratch`.
    pub(super) fn rows<R: Real>(&self, isa: Isa, scratch: &mut [f32]) -> Operand {
        if R::DTYPE == DType::F32 {
            return Operand { ptr: self.mat.view.as_ptr(), row: self.mat.stride, col: 1 };
        }
        let (rows, cols) = (self.mat.rows, self.mat.cols);
        isa.run(
            #[inline(always)]
            || matmul::pack::widen_rows(self.source::<R>(), self.mat.stride, rows, cols, scratch),
        );
        Operand { ptr: scratch.as_ptr(), row: cols, col: 1 }
    }

    /// xᵀ as a B operand, packed into `scratch`: panel p is \[h, NR\] and holds rows p·NR.. as columns.
    pub(super) fn transposed<R: Real>(&self, isa: Isa, scratch: &mut [f32]) -> Panels {
        let width = self.mat.cols;
        for (p, panel) in scratch.chunks_mut(width * NR).take(self.len().div_ceil(NR)).enumerate() {
            let cols = (self.len() - p * NR).min(NR);
            let source = &self.source::<R>()[p * NR * self.mat.stride..];
            isa.run(
                #[inline(always)]
                || matmul::pack::transposed::<_, NR>(isa, source, self.mat.stride, width, cols, panel),
            );
        }
        Panels { ptr: scratch.as_ptr(), row: NR, panel: width * NR }
    }

    /// x as a B operand: panel p is \[rows, NR\] and holds columns p·NR... In place if x is f32 and its rows are whole
    /// vectors; otherwise packed into `scratch`.
    pub(super) fn natural<R: Real>(&self, isa: Isa, scratch: &mut [f32]) -> Panels {
        let (rows, width) = (self.len(), self.mat.cols);
        if R::DTYPE == DType::F32 && width.is_multiple_of(LANES) {
            return Panels { ptr: self.mat.view.as_ptr(), row: self.mat.stride, panel: NR };
        }
        let panel = rows * NR;
        assert!(rows * padded(width) <= scratch.len(), "scratch for all panels");
        let out = scratch.as_mut_ptr();
        // SAFETY: the panels were just checked to lie inside the slice, which only this call uses.
        isa.run(
            #[inline(always)]
            || unsafe { matmul::pack::natural(self.source::<R>(), self.mat.stride, rows, width, out, panel) },
        );
        Panels { ptr: out, row: NR, panel }
    }

    /// Zeroed sums for these rows: in place if they are stored in f32, otherwise in `scratch`, from where
    /// [`HeadRows::round`] reads them.
    ///
    /// # Safety
    /// As [`HeadRows::row_mut`], for as long as the sums are used.
    pub(super) unsafe fn sums<R: Real>(&self, isa: Isa, scratch: &mut [f32]) -> Sums {
        if R::DTYPE == DType::F32 {
            isa.run(
                #[inline(always)]
                || {
                    for i in 0..self.len() {
                        // SAFETY: guaranteed by the caller.
                        let (whole, tail) = unsafe { self.row_mut::<f32>(i) }.as_chunks_mut::<LANES>();
                        whole.iter_mut().for_each(|lanes| *lanes = [0.0; LANES]);
                        tail.fill(0.0);
                    }
                },
            );
            return Sums { ptr: self.mat.view.as_ptr(), row: self.mat.stride };
        }
        let scratch = &mut scratch[..self.len() * self.mat.cols];
        scratch.fill(0.0);
        Sums { ptr: scratch.as_mut_ptr(), row: self.mat.cols }
    }

    /// Rounds sums that are not in place.
    ///
    /// # Safety
    /// They are this head's sums, and their scratch is still valid.
    pub(super) unsafe fn round<R: Real>(&self, isa: Isa, sums: Sums) {
        if R::DTYPE == DType::F32 {
            return;
        }
        isa.run(
            #[inline(always)]
            || {
                for i in 0..self.len() {
                    // SAFETY: guaranteed by the caller; `sums` has a row for each of these.
                    unsafe {
                        let from = std::slice::from_raw_parts(sums.ptr.add(i * sums.row), self.mat.cols);
                        map_lanes(self.row_mut::<R>(i), from, R::from_f32);
                    }
                }
            },
        );
    }

    /// Row i as stored.
    #[inline(always)]
    pub(super) fn row<R: Real>(&self, i: usize) -> &'m [R] {
        let view: View<'m> = self.mat.view.slice(i * self.mat.stride, self.mat.cols);
        // SAFETY: inputs are not written while an operation reads them.
        unsafe { view.as_slice::<R>() }
    }

    /// Row i, to be written.
    ///
    /// # Safety
    /// No other item writes this head of this document.
    #[inline(always)]
    pub(super) unsafe fn row_mut<R: Real>(&self, i: usize) -> &'m mut [R] {
        // SAFETY: guaranteed by the caller.
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
