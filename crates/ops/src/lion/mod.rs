//! Lion ("Symbolic Discovery of Optimization Algorithms", Chen et al. 2023) over a flat range of parameters.
//!
//! p ← p·(1 − lr·wd); p ← p − lr·sign(β₁m + (1−β₁)g); m ← β₂m + (1−β₂)g, with g scaled by the clip factor first and
//! sign(0) = 0. Weight decay is decoupled.

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_device::{Queue, View};

use crate::optimizer::{FlatRange, Params, RangeRounding, State};
use crate::quant::dynamic_map::SIGNED;

/// Hyperparameters of one step, the same for all parameters. 1 − β is computed in f64, as for AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyperparams {
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    /// 1 − β₁
    pub one_minus_beta1: f32,
    /// 1 − β₂
    pub one_minus_beta2: f32,
    /// Multiplies every gradient: 1, or less if the norm is clipped.
    pub clip: f32,
}

impl Hyperparams {
    pub fn new(lr: f64, betas: (f64, f64), clip: f32) -> Hyperparams {
        Hyperparams {
            lr: lr as f32,
            beta1: betas.0 as f32,
            beta2: betas.1 as f32,
            one_minus_beta1: (1.0 - betas.0) as f32,
            one_minus_beta2: (1.0 - betas.1) as f32,
            clip,
        }
    }

    /// 1 − lr·wd, rounded once, as in PyTorch.
    fn decay_factor(&self, weight_decay: f32) -> f32 {
        (1.0 - f64::from(self.lr) * f64::from(weight_decay)) as f32
    }
}

/// A range of parameters, its gradients (f32 or bf16) and their moving average, all of the same length.
#[derive(Clone, Copy, Debug)]
pub struct ParamRange<'m> {
    pub params: Params<'m>,
    pub grad: View<'m>,
    pub m: State<'m>,
    /// Needed if something is stored with stochastic rounding; the range then lies in one tensor.
    pub rounding: Option<RangeRounding>,
    pub weight_decay: f32,
}

impl<'m> ParamRange<'m> {
    fn flat(&self) -> FlatRange<'m, 1> {
        let ParamRange { params, grad, m, rounding, .. } = *self;
        FlatRange { params, grad, states: [m], maps: [&SIGNED], rounding }
    }
}

/// Updates a range. On a GPU the clip factor and whether to skip can come from a step decision in device memory
/// ([`crate::reduce::decide_step`]), which replaces `params.clip`. On the CPU they are known before the update.
pub fn update(queue: &Queue, range: ParamRange, params: &Hyperparams, decision: Option<View>) {
    range.flat().check(decision);
    match queue {
        Queue::Cpu(cpu) => {
            assert!(decision.is_none(), "on the CPU the clip factor is known before the update");
            cpu::update(cpu, range, params)
        }
        Queue::Cuda(cuda) => cuda::update(cuda, range, params, decision),
    }
}
