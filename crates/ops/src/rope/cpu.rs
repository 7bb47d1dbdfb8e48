use lockstep_device::{CpuQueue, Real, View};

use super::{Direction, Table};
use crate::dispatch::with_real;
use crate::{Mat, ROWS_PER_ITEM};

pub(super) fn apply(cpu: &CpuQueue, x: Mat, positions: View, table: Table, direction: Direction) {
    let (half, known) = (table.half, table.positions());
    with_real!(x.view.dtype(), R => {
        cpu.pool.run(x.rows.div_ceil(ROWS_PER_ITEM), &|item, _| {
            let first = item * ROWS_PER_ITEM;
            let rows = ROWS_PER_ITEM.min(x.rows - first);
            // SAFETY: items write disjoint rows; positions and angles are only read. The range ends with the last row,
            // so it does not include the next item's columns.
            let (data, positions, cos, sin) = unsafe {
                (
                    x.row_range(first, rows).view.as_mut::<R>(),
                    &positions.as_slice::<u32>()[first..first + rows],
                    table.cos.as_slice::<f32>(),
                    table.sin.as_slice::<f32>(),
                )
            };
            cpu.isa.run(#[inline(always)] || {
                for (row, position) in data.chunks_mut(x.stride).zip(positions) {
                    assert!((*position as usize) < known, "position {position} of {known}");
                    let at = *position as usize * half;
                    rotate_heads(&mut row[..x.cols], &cos[at..at + half], &sin[at..at + half], direction);
                }
            });
        });
    });
}

#[inline(always)]
fn rotate_heads<R: Real>(row: &mut [R], cos: &[f32], sin: &[f32], direction: Direction) {
    let half = cos.len();
    let sign = if direction == Direction::Forward { 1.0 } else { -1.0 };
    for head in row.chunks_exact_mut(2 * half) {
        let (low, high) = head.split_at_mut(half);
        for i in 0..half {
            let (a, b, c, s) = (low[i].to_f32(), high[i].to_f32(), cos[i], sign * sin[i]);
            low[i] = R::from_f32(a * c - b * s);
            high[i] = R::from_f32(b * c + a * s);
        }
    }
}
