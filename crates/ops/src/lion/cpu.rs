use lockstep_device::CpuQueue;

use super::{Hyperparams, ParamRange};
use crate::optimizer;

pub(super) fn update(cpu: &CpuQueue, range: ParamRange, params: &Hyperparams) {
    let (decay_factor, r) = (params.decay_factor(range.weight_decay), *params);
    optimizer::cpu::update(
        cpu,
        range.flat(),
        #[inline(always)]
        |p, [m], g| {
            for ((p, m), g) in p.iter_mut().zip(m).zip(g) {
                let g = g * r.clip;
                let direction = g.mul_add(r.one_minus_beta1, *m * r.beta1);
                *p = sign(direction).mul_add(-r.lr, *p * decay_factor);
                *m = g.mul_add(r.one_minus_beta2, *m * r.beta2);
            }
        },
    );
}

/// −1, 0 or 1. NaN stays NaN, so that a broken gradient is not hidden.
#[inline(always)]
fn sign(x: f32) -> f32 {
    if x == 0.0 || x.is_nan() { x } else { 1f32.copysign(x) }
}
