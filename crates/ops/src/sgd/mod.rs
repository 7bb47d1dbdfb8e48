//! SGD over a flat range of parameters, as `torch.optim.SGD` with dampening 0.
//!
//! g ← clip·g + wd·p; with momentum μ: b ← μb + g, then g ← b, or g ← g + μb for Nesterov; p ← p − lr·g.
//! Weight decay is an L2 term of the gradient, not decoupled. The momentum buffer starts as zeros, so after the first
//! step it equals the gradient, as in torch. Every operation is rounded where torch rounds it.

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_device::{Queue, View};

use crate::optimizer::{FlatRange, Params, RangeRounding, State};
use crate::quant::dynamic_map::SIGNED;

/// Hyperparameters of one step, the same for all parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyperparams {
    pub lr: f32,
    /// 0 for a range without a momentum buffer.
    pub momentum: f32,
    pub nesterov: bool,
    /// Multiplies every gradient: 1, or less if the norm is clipped.
    pub clip: f32,
}

/// A range of parameters, its gradients (f32 or bf16) and its momentum buffer, all of the same length. Without momentum
/// there is no buffer.
#[derive(Clone, Copy, Debug)]
pub struct ParamRange<'m> {
    pub params: Params<'m>,
    pub grad: View<'m>,
    pub momentum: Option<State<'m>>,
    /// Needed if something is stored with stochastic rounding; the range then lies in one tensor.
    pub rounding: Option<RangeRounding>,
    pub weight_decay: f32,
}

impl<'m> ParamRange<'m> {
    fn flat<const S: usize>(&self, states: [State<'m>; S]) -> FlatRange<'m, S> {
        let ParamRange { params, grad, rounding, .. } = *self;
        FlatRange { params, grad, states, maps: [&SIGNED; S], rounding }
    }
}

/// Updates a range. On a GPU the clip factor and whether to skip can come from a step decision in device memory
/// ([`crate::reduce::decide_step`]), which replaces `params.clip`. On the CPU they are known before the update.
pub fn update(queue: &Queue, range: ParamRange, params: &Hyperparams, decision: Option<View>) {
    match range.momentum {
        Some(momentum) => range.flat([momentum]).check(decision),
        None => range.flat([]).check(decision),
    }
    assert_eq!(
        range.momentum.is_some(),
        params.momentum != 0.0,
        "momentum needs a buffer, and only momentum does"
    );
    assert!(params.momentum != 0.0 || !params.nesterov, "Nesterov needs momentum");
    match queue {
        Queue::Cpu(cpu) => {
            assert!(decision.is_none(), "on the CPU the clip factor is known before the update");
            cpu::update(cpu, range, params)
        }
        Queue::Cuda(cuda) => cuda::update(cuda, range, params, decision),
    }
}
