use lockstep_device::{CpuQueue, Real, copy_past_caches};

use super::{Range, Rates};
use crate::dispatch::with_real;

const ELEMS_PER_ITEM: usize = 32 * 1024;

/// What is rounded while it is still in the nearest cache: all states go through memory once.
const ELEMS_PER_BLOCK: usize = 1024;

/// A rounded copy of so many bytes is not found in a cache when it is read again, by a GPU's copies or the next
/// forward.
const PAST_THE_CACHES: usize = 64 << 20;

pub(super) fn update(cpu: &CpuQueue, range: Range, rates: &Rates) {
    update_with(cpu, range, rates, PAST_THE_CACHES);
}

pub(super) fn update_with(cpu: &CpuQueue, range: Range, rates: &Rates, past_the_caches: usize) {
    let len = range.master.len();
    cpu.pool.run(len.div_ceil(ELEMS_PER_ITEM), &|item, _| {
        let start = item * ELEMS_PER_ITEM;
        let part = ELEMS_PER_ITEM.min(len - start);
        // SAFETY: items write disjoint parts of the states; gradients are only read.
        let (p, m, v, g) = unsafe {
            (
                range.master.slice(start, part).as_mut::<f32>(),
                range.m.slice(start, part).as_mut::<f32>(),
                range.v.slice(start, part).as_mut::<f32>(),
                range.grad.slice(start, part).as_slice::<f32>(),
            )
        };
        match range.working {
            None => cpu.isa.run(
                #[inline(always)]
                || update_part(p, m, v, g, range.weight_decay, rates),
            ),
            Some(working) => with_real!(working.dtype(), R => {
                let streams = working.bytes() >= past_the_caches;
                // SAFETY: items write disjoint parts of the working copy.
                let working = unsafe { working.slice(start, part).as_mut::<R>() };
                cpu.isa.run(
                    #[inline(always)]
                    || {
                        for (i, working) in working.chunks_mut(ELEMS_PER_BLOCK).enumerate() {
                            let block = i * ELEMS_PER_BLOCK..i * ELEMS_PER_BLOCK + working.len();
                            let p = &mut p[block.clone()];
                            let (m, v, g) = (&mut m[block.clone()], &mut v[block.clone()], &g[block]);
                            update_part(p, m, v, g, range.weight_decay, rates);
                            if streams {
                                let mut rounded = [R::from_f32(0.0); ELEMS_PER_BLOCK];
                                let rounded = &mut rounded[..p.len()];
                                round(rounded, p);
                                let (from, to) = (rounded.as_ptr().cast(), working.as_mut_ptr().cast());
                                // SAFETY: both have so many bytes, and one is on this stack.
                                unsafe { copy_past_caches(from, to, size_of_val(rounded)) };
                            } else {
                                round(working, p);
                            }
                        }
                    },
                );
            }),
        }
    });
}

#[inline(always)]
fn update_part(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], weight_decay: f32, r: &Rates) {
    let keep = 1.0 - r.lr * weight_decay;
    let step = r.lr / r.correction1;
    for (((p, m), v), g) in p.iter_mut().zip(m).zip(v).zip(g) {
        let g = g * r.clip;
        *m = r.beta1.mul_add(*m, r.complement1 * g);
        *v = r.beta2.mul_add(*v, r.complement2 * g * g);
        let denominator = v.sqrt() / r.correction2_sqrt + r.eps;
        *p = *p * keep - step * (*m / denominator);
    }
}

#[inline(always)]
fn round<R: Real>(working: &mut [R], p: &[f32]) {
    for (working, p) in working.iter_mut().zip(p) {
        *working = R::from_f32(*p);
    }
}
