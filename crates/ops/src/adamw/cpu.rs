use lockstep_device::CpuQueue;

use super::{Hyperparams, ParamRange};
use crate::optimizer;

pub(super) fn update(cpu: &CpuQueue, range: ParamRange, params: &Hyperparams) {
    let weight_decay = range.weight_decay;
    optimizer::cpu::update(
        cpu,
        range.flat(),
        #[inline(always)]
        |p, [m, v], g| update_part(p, m, v, g, weight_decay, params),
    );
}

#[inline(always)]
fn update_part(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], weight_decay: f32, r: &Hyperparams) {
    let decay_factor = 1.0 - r.lr * weight_decay;
    let step = r.lr / r.bias_correction1;
    for (((p, m), v), g) in p.iter_mut().zip(m).zip(v).zip(g) {
        let g = g * r.clip;
        *m = r.beta1.mul_add(*m, r.one_minus_beta1 * g);
        *v = r.beta2.mul_add(*v, r.one_minus_beta2 * g * g);
        let denominator = v.sqrt() / r.bias_correction2_sqrt + r.eps;
        *p = *p * decay_factor - step * (*m / denominator);
    }
}
