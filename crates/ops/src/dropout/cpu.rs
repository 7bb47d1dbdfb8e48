use lockstep_device::{CpuQueue, Real, View};

use super::{DocMask, Mask};
use crate::dispatch::with_real;
use crate::{Mat, ROWS_PER_ITEM};

/// Columns whose mask is generated at once.
const CHUNK: usize = 64;

pub(super) fn forward(cpu: &CpuQueue, y: Mat, residual: Mat, cu_seqlens: View, mask: Option<&Mask>) {
    with_real!(y.view.dtype(), R => {
        each_row(cpu, y.rows, cu_seqlens, mask, &|row, doc| {
            // SAFETY: every row is written once, and the residual does not overlap it.
            let (y, residual) = unsafe { (row_of(&y, row).as_mut::<R>(), row_of(&residual, row).as_slice::<R>()) };
            cpu.isa.run(#[inline(always)] || with_mask(doc, y.len(), |columns, kept| {
                let pairs = y[columns.clone()].iter_mut().zip(&residual[columns]);
                for ((y, residual), kept) in pairs.zip(kept) {
                    *y = R::from_f32(residual.to_f32() + y.to_f32() * kept);
                }
            }));
        });
    });
}

pub(super) fn backward(cpu: &CpuQueue, dx: Mat, dy: Mat, cu_seqlens: View, mask: Option<&Mask>) {
    with_real!(dx.view.dtype(), R => {
        each_row(cpu, dx.rows, cu_seqlens, mask, &|row, doc| {
            // SAFETY: as in forward.
            let (dx, dy) = unsafe { (row_of(&dx, row).as_mut::<R>(), row_of(&dy, row).as_slice::<R>()) };
            cpu.isa.run(#[inline(always)] || with_mask(doc, dx.len(), |columns, kept| {
                let pairs = dx[columns.clone()].iter_mut().zip(&dy[columns]);
                for ((dx, dy), kept) in pairs.zip(kept) {
                    *dx = R::from_f32(dy.to_f32() * kept);
                }
            }));
        });
    });
}

pub(super) fn add(cpu: &CpuQueue, y: Mat, x: Mat, cu_seqlens: View, mask: Option<&Mask>) {
    with_real!(y.view.dtype(), R => {
        each_row(cpu, y.rows, cu_seqlens, mask, &|row, doc| {
            // SAFETY: as in forward.
            let (y, x) = unsafe { (row_of(&y, row).as_mut::<R>(), row_of(&x, row).as_slice::<R>()) };
            cpu.isa.run(#[inline(always)] || with_mask(doc, y.len(), |columns, kept| {
                let pairs = y[columns.clone()].iter_mut().zip(&x[columns]);
                for ((y, x), kept) in pairs.zip(kept) {
                    *y = R::from_f32(y.to_f32() + x.to_f32() * kept);
                }
            }));
        });
    });
}

fn row_of<'m>(mat: &Mat<'m>, row: usize) -> View<'m> {
    mat.view.slice(row * mat.stride, mat.cols)
}

/// A row's mask and its position in the document.
type RowMask = Option<(DocMask, usize)>;

fn each_row(
    cpu: &CpuQueue,
    rows: usize,
    cu_seqlens: View,
    mask: Option<&Mask>,
    f: &(dyn Fn(usize, RowMask) + Sync),
) {
    // SAFETY: bounds are only read.
    let bounds = unsafe { cu_seqlens.as_slice::<u32>() };
    cpu.pool.run(rows.div_ceil(ROWS_PER_ITEM), &|item, _| {
        let first = item * ROWS_PER_ITEM;
        let mut doc = bounds.partition_point(|start| *start as usize <= first) - 1;
        let mut of_doc = mask.map(|mask| mask.of_doc(doc));
        for row in first..rows.min(first + ROWS_PER_ITEM) {
            while row >= bounds[doc + 1] as usize {
                doc += 1;
                of_doc = mask.map(|mask| mask.of_doc(doc));
            }
            f(row, of_doc.map(|mask| (mask, row - bounds[doc] as usize)));
        }
    });
}

/// Calls `f` with ranges of columns and the factors of their elements.
#[inline(always)]
fn with_mask(row: RowMask, cols: usize, mut f: impl FnMut(std::ops::Range<usize>, &[f32])) {
    let mut kept = [1f32; CHUNK];
    for first in (0..cols).step_by(CHUNK) {
        let columns = first..cols.min(first + CHUNK);
        let kept = &mut kept[..columns.len()];
        if let Some((mask, position)) = row {
            mask.fill(0, position, first, kept);
        }
        f(columns, kept);
    }
}
