use lockstep_device::{CpuQueue, Real, View};

use crate::dispatch::with_real;
use crate::{Mat, ROWS_PER_ITEM};

/// Columns of a backward item: four cache lines, for all tokens.
const COLS_PER_ITEM: usize = 64;

pub(super) fn forward(cpu: &CpuQueue, x: Mat, table: Mat, tokens: View) {
    with_real!(x.view.dtype(), R => with_real!(table.view.dtype(), W => {
        cpu.pool.run(x.rows.div_ceil(ROWS_PER_ITEM), &|item, _| {
            let first = item * ROWS_PER_ITEM;
            let rows = ROWS_PER_ITEM.min(x.rows - first);
            // SAFETY: items write disjoint rows of x; the table and the tokens are only read.
            let (out, table_rows, tokens) = unsafe {
                (x.row_range(first, rows).view.as_mut::<R>(), table.view.as_slice::<W>(), tokens.as_slice::<u32>())
            };
            for (row, token) in out.chunks_mut(x.stride).zip(&tokens[first..]) {
                let from = &table_rows[*token as usize * table.stride..][..table.cols];
                cpu.isa.run(#[inline(always)] || copy_row(&mut row[..table.cols], from));
            }
        });
    }));
}

#[inline(always)]
fn copy_row<R: Real, W: Real>(to: &mut [R], from: &[W]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = R::from_f32(from.to_f32());
    }
}

pub(super) fn backward(cpu: &CpuQueue, dtable: Mat, dx: Mat, tokens: View) {
    with_real!(dx.view.dtype(), R => {
        cpu.pool.run(dx.cols.div_ceil(COLS_PER_ITEM), &|item, _| {
            let first = item * COLS_PER_ITEM;
            let cols = COLS_PER_ITEM.min(dx.cols - first);
            // SAFETY: dx and the tokens are only read.
            let (dx_rows, tokens) = unsafe { (dx.view.as_slice::<R>(), tokens.as_slice::<u32>()) };
            for (t, token) in tokens.iter().enumerate() {
                assert!((*token as usize) < dtable.rows, "token {token} of {}", dtable.rows);
                // SAFETY: items write disjoint columns of dtable.
                let to = unsafe { dtable.view.slice(*token as usize * dtable.stride + first, cols).as_mut::<f32>() };
                let from = &dx_rows[t * dx.stride + first..][..cols];
                cpu.isa.run(#[inline(always)] || add_row(to, from));
            }
        });
    });
}

#[inline(always)]
fn add_row<R: Real>(to: &mut [f32], from: &[R]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += from.to_f32();
    }
}
