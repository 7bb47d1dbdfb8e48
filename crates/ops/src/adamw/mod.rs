//! AdamW with decoupled weight decay over a flat range of parameters.
//!
//! p ← p·(1 − lr·wd); m ← β₁m + (1−β₁)g; v ← β₂v + (1−β₂)g²;
//! p ← p − lr/(1−β₁ᵗ) · m / (√v/√(1−β₂ᵗ) + ε), with g scaled by the clip factor first. The formula is in f32, whatever
//! the formats of parameters, gradients and moments ([`crate::optimizer`]).

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_device::{Queue, View};

use crate::optimizer::{FlatRange, Params, RangeRounding, State};
use crate::quant::dynamic_map::{SIGNED, UNSIGNED};

/// Hyperparameters of one step, the same for all parameters. Bias corrections and 1 − β are computed in f64: in f32,
/// 1 − β would be off by 1e-5 at β = 0.999 and by 1e-3 at 0.99999.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyperparams {
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    /// 1 − β₁
    pub one_minus_beta1: f32,
    /// 1 − β₂
    pub one_minus_beta2: f32,
    pub eps: f32,
    /// 1 − β₁ᵗ
    pub bias_correction1: f32,
    /// √(1 − β₂ᵗ)
    pub bias_correction2_sqrt: f32,
    /// Multiplies every gradient: 1, or less if the norm is clipped.
    pub clip: f32,
}

impl Hyperparams {
    /// The hyperparameters of update `t`, counted from 1.
    pub fn at(t: u64, lr: f64, betas: (f64, f64), eps: f64, clip: f32) -> Hyperparams {
        let power = |beta: f64| 1.0 - beta.powf(t as f64);
        Hyperparams {
            lr: lr as f32,
            beta1: betas.0 as f32,
            beta2: betas.1 as f32,
            one_minus_beta1: (1.0 - betas.0) as f32,
            one_minus_beta2: (1.0 - betas.1) as f32,
            eps: eps as f32,
            bias_correction1: power(betas.0) as f32,
            bias_correction2_sqrt: power(betas.1).sqrt() as f32,
            clip,
        }
    }
}

/// A range of parameters, its gradients (f32 or bf16) and its states, all of the same length.
#[derive(Clone, Copy, Debug)]
pub struct ParamRange<'m> {
    pub params: Params<'m>,
    pub grad: View<'m>,
    pub m: State<'m>,
    pub v: State<'m>,
    /// Needed if something is stored with stochastic rounding; the range then lies in one tensor.
    pub rounding: Option<RangeRounding>,
    pub weight_decay: f32,
}

impl<'m> ParamRange<'m> {
    fn flat(&self) -> FlatRange<'m, 2> {
        let ParamRange { params, grad, m, v, rounding, .. } = *self;
        FlatRange { params, grad, states: [m, v], maps: [&SIGNED, &UNSIGNED], rounding }
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
