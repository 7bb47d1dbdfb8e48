//! Multiply-adds are fused, except for the decay of the momentum, as in torch's vectorized kernels.

use lockstep_device::CpuQueue;

use super::{Hyperparams, ParamRange};
use crate::optimizer;

pub(super) fn update(cpu: &CpuQueue, range: ParamRange, params: &Hyperparams) {
    let (weight_decay, r) = (range.weight_decay, *params);
    match range.momentum {
        None => optimizer::cpu::update(
            cpu,
            range.flat([]),
            #[inline(always)]
            |p, [], g| {
                for (p, g) in p.iter_mut().zip(g) {
                    let g = p.mul_add(weight_decay, g * r.clip);
                    *p = g.mul_add(-r.lr, *p);
                }
            },
        ),
        Some(momentum) => optimizer::cpu::update(
            cpu,
            range.flat([momentum]),
            #[inline(always)]
            |p, [momentum], g| {
                for ((p, b), g) in p.iter_mut().zip(momentum).zip(g) {
                    let g = p.mul_add(weight_decay, g * r.clip);
                    *b = *b * r.momentum + g;
                    let g = if r.nesterov { b.mul_add(r.momentum, g) } else { *b };
                    *p = g.mul_add(-r.lr, *p);
                }
            },
        ),
    }
}
