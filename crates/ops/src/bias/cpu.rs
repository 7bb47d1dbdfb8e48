//! Gradients are summed over blocks of GRAD_ROWS rows into scratch, and then over blocks in order, so that the order of
//! additions does not depend on the threads.

use lockstep_device::{CpuQueue, Real, View};

use super::GRAD_ROWS;
use crate::dispatch::with_real;
use crate::{Mat, ROWS_PER_ITEM};

pub(super) fn forward(cpu: &CpuQueue, y: Mat, b: View) {
    with_real!(y.view.dtype(), R => with_real!(b.dtype(), W => {
        cpu.pool.run(y.rows.div_ceil(ROWS_PER_ITEM), &|item, _| {
            let first = item * ROWS_PER_ITEM;
            let rows = ROWS_PER_ITEM.min(y.rows - first);
            // SAFETY: items write disjoint rows; a range of rows ends with the last row's columns.
            let (data, b) = unsafe { (y.row_range(first, rows).view.as_mut::<R>(), b.as_slice::<W>()) };
            cpu.isa.run(#[inline(always)] || add_to_rows(data, y.stride, b));
        });
    }));
}

#[inline(always)]
fn add_to_rows<R: Real, W: Real>(y: &mut [R], stride: usize, b: &[W]) {
    for row in y.chunks_mut(stride) {
        for (y, b) in row.iter_mut().zip(b) {
            *y = R::from_f32(y.to_f32() + b.to_f32());
        }
    }
}

pub(super) fn backward(cpu: &CpuQueue, db: View, dy: Mat, scratch: View) {
    let dim = db.len();
    let blocks = dy.rows.div_ceil(GRAD_ROWS);
    with_real!(dy.view.dtype(), R => {
        cpu.pool.run(blocks, &|block, _| {
            let first = block * GRAD_ROWS;
            let rows = GRAD_ROWS.min(dy.rows - first);
            // SAFETY: items write disjoint parts of scratch; dy is only read.
            let (part, dy_rows) = unsafe {
                (
                    scratch.slice(block * dim, dim).as_mut::<f32>(),
                    dy.row_range(first, rows).view.as_slice::<R>(),
                )
            };
            cpu.isa.run(#[inline(always)] || {
                part.fill(0.0);
                for row in dy_rows.chunks(dy.stride) {
                    add(part, &row[..dim]);
                }
            });
        });
    });
    // SAFETY: only this call uses db and scratch, and the parallel part is over.
    let (db, parts) = unsafe { (db.as_mut::<f32>(), scratch.first(blocks * dim).as_slice::<f32>()) };
    cpu.isa.run(
        #[inline(always)]
        || parts.chunks_exact(dim).for_each(|part| add(db, part)),
    );
}

#[inline(always)]
fn add<R: Real>(sums: &mut [f32], row: &[R]) {
    for (sum, value) in sums.iter_mut().zip(row) {
        *sum += value.to_f32();
    }
}
