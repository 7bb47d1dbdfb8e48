use lockstep_device::{CpuQueue, Real};

use crate::dispatch::with_real;
use crate::{Mat, ROWS_PER_ITEM};

pub(super) fn in_place(cpu: &CpuQueue, x: Mat, factor: f32) {
    with_real!(x.view.dtype(), R => {
        cpu.pool.run(x.rows.div_ceil(ROWS_PER_ITEM), &|item, _| {
            let first = item * ROWS_PER_ITEM;
            let rows = ROWS_PER_ITEM.min(x.rows - first);
            // SAFETY: items write disjoint rows; a range of rows ends with the last row's columns.
            let data = unsafe { x.row_range(first, rows).view.as_mut::<R>() };
            cpu.isa.run(#[inline(always)] || scale_rows(data, x.stride, x.cols, factor));
        });
    });
}

#[inline(always)]
fn scale_rows<R: Real>(x: &mut [R], stride: usize, cols: usize, factor: f32) {
    for row in x.chunks_mut(stride) {
        for x in &mut row[..cols] {
            *x = R::from_f32(x.to_f32() * factor);
        }
    }
}
