use lockstep_device::{CpuQueue, Real};

use crate::Mat;
use crate::dispatch::with_real;
use crate::math::sigmoid;

const ELEMS_PER_ITEM: usize = 16 * 1024;

pub(super) fn forward(cpu: &CpuQueue, y: Mat, g: Mat, u: Mat) {
    with_real!(y.view.dtype(), R => each_part(cpu, y, &|first, rows| {
        let [y, g, u] = [y, g, u].map(|mat| mat.row_range(first, rows));
        cpu.isa.run(#[inline(always)] || for row in 0..rows {
            // SAFETY: items write disjoint rows of y; g and u are only read and do not overlap.
            let (y, g, u) =
                unsafe { (y.row(row).as_mut::<R>(), g.row(row).as_slice::<R>(), u.row(row).as_slice::<R>()) };
            forward_row(y, g, u);
        });
    }));
}

/// With `RECOMPUTE`, dy is replaced by y.
pub(super) fn backward_in_place<const RECOMPUTE: bool>(cpu: &CpuQueue, g: Mat, u: Mat, dy: Mat) {
    with_real!(dy.view.dtype(), R => each_part(cpu, dy, &|first, rows| {
        let [g, u, dy] = [g, u, dy].map(|mat| mat.row_range(first, rows));
        cpu.isa.run(#[inline(always)] || for row in 0..rows {
            // SAFETY: items write disjoint rows of g, u and dy, which do not overlap.
            let (g, u, dy) =
                unsafe { (g.row(row).as_mut::<R>(), u.row(row).as_mut::<R>(), dy.row(row).as_mut::<R>()) };
            backward_row::<R, RECOMPUTE>(g, u, dy);
        });
    }));
}

/// Calls `f` with ranges of rows: the first row and the number of rows.
fn each_part(cpu: &CpuQueue, like: Mat, f: &(dyn Fn(usize, usize) + Sync)) {
    let rows_per_item = (ELEMS_PER_ITEM / like.cols.max(1)).max(1);
    cpu.pool.run(like.rows.div_ceil(rows_per_item), &|item, _| {
        let first = item * rows_per_item;
        f(first, rows_per_item.min(like.rows - first));
    });
}

#[inline(always)]
fn forward_row<R: Real>(y: &mut [R], g: &[R], u: &[R]) {
    for ((y, g), u) in y.iter_mut().zip(g).zip(u) {
        let g = g.to_f32();
        *y = R::from_f32(g * sigmoid(g) * u.to_f32());
    }
}

#[inline(always)]
fn backward_row<R: Real, const RECOMPUTE: bool>(g: &mut [R], u: &mut [R], dy: &mut [R]) {
    for ((g, u), dy) in g.iter_mut().zip(u).zip(dy) {
        let (gate, up, grad) = (g.to_f32(), u.to_f32(), dy.to_f32());
        let s = sigmoid(gate);
        let silu = gate * s;
        *u = R::from_f32(grad * silu);
        *g = R::from_f32(grad * up * (s + silu * (1.0 - s)));
        if RECOMPUTE {
            *dy = R::from_f32(silu * up);
        }
    }
}
