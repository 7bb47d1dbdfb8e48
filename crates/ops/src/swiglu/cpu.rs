use lockstep_device::{CpuQueue, Real, View};

use crate::dispatch::with_real;
use crate::math::sigmoid;

const ELEMS_PER_ITEM: usize = 16 * 1024;

pub(super) fn forward(cpu: &CpuQueue, y: View, g: View, u: View) {
    with_real!(y.dtype(), R => each_part(cpu, y.len(), &|start, len| {
        // SAFETY: items write disjoint parts of y; g and u are only read and lie apart.
        let (y, g, u) = unsafe {
            (
                y.slice(start, len).as_mut::<R>(),
                g.slice(start, len).as_slice::<R>(),
                u.slice(start, len).as_slice::<R>(),
            )
        };
        cpu.isa.run(#[inline(always)] || forward_part(y, g, u));
    }));
}

pub(super) fn backward_in_place(cpu: &CpuQueue, g: View, u: View, dy: View) {
    with_real!(dy.dtype(), R => each_part(cpu, dy.len(), &|start, len| {
        // SAFETY: items write disjoint parts of g and u, which lie apart; dy is only read.
        let (g, u, dy) = unsafe {
            (
                g.slice(start, len).as_mut::<R>(),
                u.slice(start, len).as_mut::<R>(),
                dy.slice(start, len).as_slice::<R>(),
            )
        };
        cpu.isa.run(#[inline(always)] || backward_part(g, u, dy));
    }));
}

fn each_part(cpu: &CpuQueue, len: usize, f: &(dyn Fn(usize, usize) + Sync)) {
    cpu.pool.run(len.div_ceil(ELEMS_PER_ITEM), &|item, _| {
        let start = item * ELEMS_PER_ITEM;
        f(start, ELEMS_PER_ITEM.min(len - start));
    });
}

#[inline(always)]
fn forward_part<R: Real>(y: &mut [R], g: &[R], u: &[R]) {
    for ((y, g), u) in y.iter_mut().zip(g).zip(u) {
        let g = g.to_f32();
        *y = R::from_f32(g * sigmoid(g) * u.to_f32());
    }
}

#[inline(always)]
fn backward_part<R: Real>(g: &mut [R], u: &mut [R], dy: &[R]) {
    for ((g, u), dy) in g.iter_mut().zip(u).zip(dy) {
        let (gate, up, dy) = (g.to_f32(), u.to_f32(), dy.to_f32());
        let s = sigmoid(gate);
        let silu = gate * s;
        *u = R::from_f32(dy * silu);
        *g = R::from_f32(dy * up * (s + silu * (1.0 - s)));
    }
}
