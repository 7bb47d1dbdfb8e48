//! One pass over each row forward, and one backward. Weight gradients are summed over blocks of GRAD_ROWS rows into
//! scratch, and then over blocks in order, so that the order of additions does not depend on the threads.

use lockstep_device::{CpuQueue, Real, View};

use super::{BackwardArgs, GRAD_ROWS};
use crate::dispatch::with_real;
use crate::math::{LANES, sum2, sum3};
use crate::{Mat, ROWS_PER_ITEM};

pub(super) fn forward(cpu: &CpuQueue, y: Mat, rstd: View, x: Mat, w: View, eps: f32) {
    let groups = x.cols / w.len();
    with_real!(x.view.dtype(), R => with_real!(w.dtype(), W => {
        cpu.pool.run(x.rows.div_ceil(ROWS_PER_ITEM), &|item, _| {
            let first = item * ROWS_PER_ITEM;
            let rows = ROWS_PER_ITEM.min(x.rows - first);
            // SAFETY: items write disjoint rows of y and rstd; inputs are only read and do not overlap.
            let (y_rows, x_rows, w, rstd) = unsafe {
                (
                    y.row_range(first, rows).view.as_mut::<R>(),
                    x.row_range(first, rows).view.as_slice::<R>(),
                    w.as_slice::<W>(),
                    rstd.slice(first * groups, rows * groups).as_mut::<f32>(),
                )
            };
            cpu.isa.run(#[inline(always)] || forward_rows(y_rows, y.stride, x_rows, x.stride, w, rstd, groups, eps));
        });
    }));
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn forward_rows<R: Real, W: Real>(
    y: &mut [R],
    y_stride: usize,
    x: &[R],
    x_stride: usize,
    w: &[W],
    rstd: &mut [f32],
    groups: usize,
    eps: f32,
) {
    let dim = w.len();
    for (i, rstd) in rstd.iter_mut().enumerate() {
        let (row, start) = (i / groups, i % groups * dim);
        let x = &x[row * x_stride + start..][..dim];
        let y = &mut y[row * y_stride + start..][..dim];
        let squares = sum2(x, x, |a, b| a * b);
        *rstd = 1.0 / (squares / dim as f32 + eps).sqrt();
        for j in 0..dim {
            y[j] = R::from_f32(x[j].to_f32() * *rstd * w[j].to_f32());
        }
    }
}

pub(super) fn backward(cpu: &CpuQueue, call: BackwardArgs) {
    let BackwardArgs { dx, add, recompute, dw, dy, x, rstd, w, scratch } = call;
    let dim = w.len();
    let groups = x.cols / dim;
    let blocks = x.rows.div_ceil(GRAD_ROWS);
    with_real!(x.view.dtype(), R => with_real!(w.dtype(), W => {
        cpu.pool.run(blocks, &|block, _| {
            let first = block * GRAD_ROWS;
            let rows = GRAD_ROWS.min(x.rows - first);
            let part = scratch.slice(block * dim, dim);
            // SAFETY: items write disjoint rows of dx and dy and disjoint parts of scratch. If dx is dy, each element
            // is read before it is written.
            let call = unsafe {
                Rows::<R, W> {
                    dx: dx.row_range(first, rows).view.as_ptr(),
                    dx_stride: dx.stride,
                    dy: dy.row_range(first, rows).view.as_ptr(),
                    dy_stride: dy.stride,
                    x: x.row_range(first, rows).view.as_slice::<R>(),
                    x_stride: x.stride,
                    rstd: rstd.slice(first * groups, rows * groups).as_slice::<f32>(),
                    w: w.as_slice::<W>(),
                    dw: part.as_mut::<f32>(),
                    groups,
                }
            };
            match (add, recompute) {
                (false, false) => cpu.isa.run(#[inline(always)] || backward_rows::<R, W, false, false>(call)),
                (false, true) => cpu.isa.run(#[inline(always)] || backward_rows::<R, W, false, true>(call)),
                (true, false) => cpu.isa.run(#[inline(always)] || backward_rows::<R, W, true, false>(call)),
                (true, true) => cpu.isa.run(#[inline(always)] || backward_rows::<R, W, true, true>(call)),
            }
        });
    }));
    // SAFETY: only this call uses dw and scratch, and the parallel part is over.
    let (dw, parts) = unsafe { (dw.as_mut::<f32>(), scratch.first(blocks * dim).as_slice::<f32>()) };
    cpu.isa.run(
        #[inline(always)]
        || add_parts(dw, parts),
    );
}

struct Rows<'a, R, W> {
    dx: *mut R,
    dx_stride: usize,
    dy: *mut R,
    dy_stride: usize,
    x: &'a [R],
    x_stride: usize,
    rstd: &'a [f32],
    w: &'a [W],
    dw: &'a mut [f32],
    groups: usize,
}

// An index is the clearest way to iterate over five arrays together.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
fn backward_rows<R: Real, W: Real, const ADD: bool, const RECOMPUTE: bool>(call: Rows<R, W>) {
    let dim = call.w.len();
    call.dw.fill(0.0);
    for (i, rstd) in call.rstd.iter().copied().enumerate() {
        let (row, start) = (i / call.groups, i % call.groups * dim);
        let x = &call.x[row * call.x_stride + start..][..dim];
        // SAFETY: the row lies inside the block of rows that the pointers were taken from.
        let (dx, dy) =
            unsafe { (call.dx.add(row * call.dx_stride + start), call.dy.add(row * call.dy_stride + start)) };
        // SAFETY: dy is only read until the sum is complete; dx, which may be dy, is written afterwards.
        let dy_row = unsafe { std::slice::from_raw_parts(dy, dim) };
        let mean = sum3(dy_row, call.w, x, |dy, w, x| dy * w * x) * rstd / dim as f32;
        let grad = |dy: f32, w: f32, normed: f32| rstd * (-normed).mul_add(mean, dy * w);
        let whole = dim - dim % LANES;
        for start in (0..whole).step_by(LANES) {
            // Read and write whole vectors by value, because dx may be dy.
            let [dx, dy_at] = [dx, dy].map(|row| row.wrapping_add(start).cast::<[R; LANES]>());
            // SAFETY: the vector lies inside the row.
            let (dy, before) = unsafe { (dy_at.read(), dx.read()) };
            let x: &[R; LANES] = x[start..start + LANES].try_into().expect("a whole vector");
            let w: &[W; LANES] = call.w[start..start + LANES].try_into().expect("a whole vector");
            let dw: &mut [f32; LANES] =
                (&mut call.dw[start..start + LANES]).try_into().expect("a whole vector");
            let normed = x.map(|x| x.to_f32() * rstd);
            let mut dw_now = *dw;
            for j in 0..LANES {
                dw_now[j] = dy[j].to_f32().mul_add(normed[j], dw_now[j]);
            }
            *dw = dw_now;
            let mut out = before;
            for j in 0..LANES {
                let base = if ADD { before[j].to_f32() } else { 0.0 };
                out[j] = R::from_f32(base + grad(dy[j].to_f32(), w[j].to_f32(), normed[j]));
            }
            // SAFETY: as above.
            unsafe { dx.write(out) };
            if RECOMPUTE {
                let y = std::array::from_fn(|j| R::from_f32(normed[j] * w[j].to_f32()));
                // SAFETY: as above.
                unsafe { dy_at.write(y) };
            }
        }
        for j in whole..dim {
            // SAFETY: j < dim, inside the row; element j of dy is read before element j of dx is written.
            unsafe {
                let (grad_y, normed, w) = ((*dy.add(j)).to_f32(), x[j].to_f32() * rstd, call.w[j].to_f32());
                call.dw[j] = grad_y.mul_add(normed, call.dw[j]);
                let base = if ADD { (*dx.add(j)).to_f32() } else { 0.0 };
                *dx.add(j) = R::from_f32(base + grad(grad_y, w, normed));
                if RECOMPUTE {
                    *dy.add(j) = R::from_f32(normed * w);
                }
            }
        }
    }
}

/// dw += the parts, each column in the order of the parts.
#[inline(always)]
fn add_parts(dw: &mut [f32], parts: &[f32]) {
    for part in parts.chunks_exact(dw.len()) {
        for (sum, value) in dw.iter_mut().zip(part) {
            *sum += value;
        }
    }
}
