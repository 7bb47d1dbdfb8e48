//! Weight gradients are summed over blocks of GRAD_ROWS rows into scratch, and then over blocks in order, so that the
//! order of additions does not depend on the threads.

use lockstep_core::DType;
use lockstep_device::{CpuQueue, Real, View};

use super::{BackwardArgs, GRAD_ROWS};
use crate::dispatch::with_real;
use crate::math::sum2;
use crate::{Mat, ROWS_PER_ITEM};

pub(super) fn forward(cpu: &CpuQueue, y: View, x: Mat, w: View) {
    with_real!(x.view.dtype(), R => with_real!(w.dtype(), W => {
        cpu.pool.run(x.rows.div_ceil(ROWS_PER_ITEM), &|item, _| {
            let first = item * ROWS_PER_ITEM;
            let rows = ROWS_PER_ITEM.min(x.rows - first);
            // SAFETY: items write disjoint parts of y; x and w are only read.
            let (y, x_rows, w) = unsafe {
                (
                    y.slice(first, rows).as_mut::<f32>(),
                    x.row_range(first, rows).view.as_slice::<R>(),
                    w.as_slice::<W>(),
                )
            };
            cpu.isa.run(#[inline(always)] || forward_rows(y, x_rows, x.stride, w));
        });
    }));
}

#[inline(always)]
fn forward_rows<R: Real, W: Real>(y: &mut [f32], x: &[R], stride: usize, w: &[W]) {
    for (i, y) in y.iter_mut().enumerate() {
        *y = sum2(&x[i * stride..][..w.len()], w, |x, w| x * w);
    }
}

pub(super) fn backward(cpu: &CpuQueue, call: BackwardArgs) {
    let BackwardArgs { dx, add_dx, dw, add_dw, c, x, w, scratch } = call;
    let dim = w.len();
    let blocks = x.rows.div_ceil(GRAD_ROWS);
    with_real!(x.view.dtype(), R => with_real!(w.dtype(), W => {
        cpu.pool.run(blocks, &|block, _| {
            let first = block * GRAD_ROWS;
            let rows = GRAD_ROWS.min(x.rows - first);
            // SAFETY: items write disjoint rows of dx and disjoint parts of scratch; the rest is only read.
            let (dx_rows, c, w) = unsafe {
                (
                    dx.row_range(first, rows).view.as_mut::<R>(),
                    c.slice(first, rows).as_slice::<f32>(),
                    w.as_slice::<W>(),
                )
            };
            match add_dx {
                true => cpu.isa.run(#[inline(always)] || dx_rows_of::<R, W, true>(dx_rows, dx.stride, c, w)),
                false => cpu.isa.run(#[inline(always)] || dx_rows_of::<R, W, false>(dx_rows, dx.stride, c, w)),
            }
            if dw.is_some() {
                // SAFETY: as above.
                let (part, x_rows) = unsafe {
                    (
                        scratch.cast(DType::F32).slice(block * dim, dim).as_mut::<f32>(),
                        x.row_range(first, rows).view.as_slice::<R>(),
                    )
                };
                cpu.isa.run(#[inline(always)] || sum_rows(part, x_rows, x.stride, c));
            }
        });
    }));
    let Some(dw) = dw else { return };
    let parts = scratch.cast(DType::F32).first(blocks * dim);
    // SAFETY: only this call uses dw and scratch, and the parallel part is over.
    let (dw, parts) = unsafe { (dw.as_mut::<f32>(), parts.as_slice::<f32>()) };
    cpu.isa.run(
        #[inline(always)]
        || {
            if !add_dw {
                dw.fill(0.0);
            }
            for part in parts.chunks_exact(dim.max(1)) {
                dw.iter_mut().zip(part).for_each(|(sum, value)| *sum += value);
            }
        },
    );
}

/// dx = c · w, added to dx if ADD.
#[inline(always)]
fn dx_rows_of<R: Real, W: Real, const ADD: bool>(dx: &mut [R], stride: usize, c: &[f32], w: &[W]) {
    for (i, c) in c.iter().enumerate() {
        for (dx, w) in dx[i * stride..][..w.len()].iter_mut().zip(w) {
            let before = if ADD { dx.to_f32() } else { 0.0 };
            *dx = R::from_f32(c.mul_add(w.to_f32(), before));
        }
    }
}

/// part = Σ c · x over the rows of a block.
#[inline(always)]
fn sum_rows<R: Real>(part: &mut [f32], x: &[R], stride: usize, c: &[f32]) {
    part.fill(0.0);
    for (i, c) in c.iter().enumerate() {
        for (sum, x) in part.iter_mut().zip(&x[i * stride..]) {
            *sum = c.mul_add(x.to_f32(), *sum);
        }
    }
}
