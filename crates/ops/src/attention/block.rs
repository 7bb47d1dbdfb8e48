//! Small products on one document's head: blocks of rows against packed panels.

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

/// B of a product: panels of NR columns, `panel` elements apart, whose rows lie `row` apart.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    pub(super) ptr: *const f32,
    pub(super) row: usize,
    pub(super) panel: usize,
}

impl Panels {
    /// Without the rows before `first`.
    pub(super) fn rows_from(self, first: usize) -> Panels {
        Panels { ptr: self.ptr.wrapping_add(first * self.row), ..self }
    }

    /// Without the panels before the one that begins with column `first`.
    pub(super) fn columns_from(self, first: usize) -> Panels {
        Panels { ptr: self.ptr.wrapping_add(first / NR * self.panel), ..self }
    }
}

/// C\[rows, cols\] (+)= A\[rows, depth\] · B.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) depth: usize,
    pub(super) a: Operand,
    pub(super) b: Panels,
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
        // SAFETY: guaranteed by the caller.
        unsafe { self.run(isa, |rows| (seen(rows.end - 1), 0..self.depth)) }
    }

    /// A is zero from column `seen(i)` on in row i, which does not fall: the sum ends there.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    pub(super) unsafe fn over_seen(&self, isa: Isa, seen: impl Fn(usize) -> usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.run(isa, |rows| (self.cols, 0..seen(rows.end - 1))) }
    }

    /// A is zero before column `first(i)` in row i, which does not fall: the sum starts there.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    pub(super) unsafe fn over_seeing(&self, isa: Isa, first: impl Fn(usize) -> usize) {
        // SAFETY: guaranteed by the caller.
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

/// Rows that are summed up in f32, `row` elements apart.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    pub(super) ptr: *mut f32,
    pub(super) row: usize,
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
        if R::DTYPE == DType::F32 {
            return Operand { ptr: self.mat.view.as_ptr(), row: self.mat.stride, col: 1 };
        }
        let (rows, cols) = (self.mat.rows, self.mat.cols);
        isa.run(
            #[inline(always)]
            || matmul::pack::widen_rows(self.source::<R>(), self.mat.stride, rows, cols, room),
        );
        Operand { ptr: room.as_ptr(), row: cols, col: 1 }
    }

    /// xᵀ as B, packed into `room`: panel p is \[h, NR\] and holds rows p·NR.. as columns.
    pub(super) fn transposed<R: Real>(&self, isa: Isa, room: &mut [f32]) -> Panels {
        let width = self.mat.cols;
        for (p, panel) in room.chunks_mut(width * NR).take(self.len().div_ceil(NR)).enumerate() {
            let cols = (self.len() - p * NR).min(NR);
            let source = &self.source::<R>()[p * NR * self.mat.stride..];
            isa.run(
                #[inline(always)]
                || matmul::pack::transposed::<_, NR>(isa, source, self.mat.stride, width, cols, panel),
            );
        }
        Panels { ptr: room.as_ptr(), row: NR, panel: width * NR }
    }

    /// x as B: panel p is \[rows, NR\] and holds columns p·NR... Where they lie if that is in f32 and in whole vectors,
    /// or packed into `room`.
    pub(super) fn natural<R: Real>(&self, isa: Isa, room: &mut [f32]) -> Panels {
        let (rows, width) = (self.len(), self.mat.cols);
        if R::DTYPE == DType::F32 && width.is_multiple_of(LANES) {
            return Panels { ptr: self.mat.view.as_ptr(), row: self.mat.stride, panel: NR };
        }
        let panel = rows * NR;
        assert!(rows * padded(width) <= room.len(), "room for all panels");
        let out = room.as_mut_ptr();
        // SAFETY: the panels were just checked to lie inside the slice, which is ours alone.
        isa.run(
            #[inline(always)]
            || unsafe { matmul::pack::natural(self.source::<R>(), self.mat.stride, rows, width, out, panel) },
        );
        Panels { ptr: out, row: NR, panel }
    }

    /// Where sums of these rows are made, beginning with zeros: in their place if they are stored in f32, or in `room`,
    /// from where [`Head::round`] takes them.
    ///
    /// # Safety
    /// As [`Head::row_mut`], as long as the sums are used.
    pub(super) unsafe fn sums<R: Real>(&self, isa: Isa, room: &mut [f32]) -> Sums {
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
        let room = &mut room[..self.len() * self.mat.cols];
        room.fill(0.0);
        Sums { ptr: room.as_mut_ptr(), row: self.mat.cols }
    }

    /// Rounds sums that were not made in place.
    ///
    /// # Safety
    /// They are this head's, and their room is still there.
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
