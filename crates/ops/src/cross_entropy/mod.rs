//! Log-probabilities of target tokens from a chunk of logits, and the gradient of the logits in their place.
//!
//! The head computes logits for one chunk of tokens at a time, so \[tokens, vocabulary\] is never materialized. An
//! objective is expressed as one coefficient per token, c = ∂L/∂log p(target); then
//! ∂L/∂logits = c · (onehot(target) − softmax(logits)).
//!
//! All numbers are those of softmax(logits / temperature); the gradient is with respect to the logits themselves, so
//! it has a factor 1 / temperature. Calls pass the inverse, because a product with 1 changes no bit.
//!
//! Two more numbers per token are available, each with a coefficient of its own ([`Channels`]): the entropy of the
//! distribution and the mean log-probability over the vocabulary. Calls that need neither use kernels without them;
//! log-probabilities have the same bits either way.

mod channels;
mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_core::DType;
use lockstep_device::{Queue, View};

use crate::Mat;
use crate::disjoint::assert_disjoint;

/// Numbers per token, each \[T\] in f32: the outputs of [`forward`], or the coefficients ∂L/∂output that
/// [`forward_backward`] reads. A single view converts to the log-probability alone.
#[derive(Clone, Copy, Debug)]
pub struct Channels<'m> {
    /// log p(target).
    pub log_prob: View<'m>,
    /// H = −Σⱼ pⱼ log pⱼ; ∂H/∂zⱼ = −pⱼ (log pⱼ + H).
    pub entropy: Option<View<'m>>,
    /// M = (1/V) Σⱼ log pⱼ; ∂M/∂zⱼ = 1/V − pⱼ.
    pub mean_log_prob: Option<View<'m>>,
}

impl<'m> From<View<'m>> for Channels<'m> {
    fn from(log_prob: View<'m>) -> Channels<'m> {
        Channels { log_prob, entropy: None, mean_log_prob: None }
    }
}

impl<'m> Channels<'m> {
    /// Whether there are channels besides the log-probability.
    fn has_more(&self) -> bool {
        self.entropy.is_some() || self.mean_log_prob.is_some()
    }

    /// All views; an absent one is empty.
    fn views(&self) -> [View<'m>; 3] {
        [Some(self.log_prob), self.entropy, self.mean_log_prob].map(|view| view.unwrap_or(View::empty()))
    }

    #[track_caller]
    fn check(&self, rows: usize, what: &str) {
        for view in [Some(self.log_prob), self.entropy, self.mean_log_prob].into_iter().flatten() {
            assert_eq!((view.len(), view.dtype()), (rows, DType::F32), "{what} per token");
        }
    }
}

/// `out.log_prob`\[T\] = log softmax(logits · `inverse_temperature`)\[target\], and the other channels of `out`. Does
/// not change the logits.
pub fn forward<'o>(
    queue: &Queue,
    out: impl Into<Channels<'o>>,
    logits: Mat,
    targets: View,
    inverse_temperature: f32,
) {
    let out = out.into();
    check(&out, &logits, targets, inverse_temperature);
    let more = out.has_more();
    match queue {
        Queue::Cpu(cpu) if more => channels::run(cpu, out, logits, targets, None, inverse_temperature),
        Queue::Cpu(cpu) => cpu::run(cpu, out.log_prob, logits, targets, None, inverse_temperature),
        Queue::Cuda(cuda) if more => cuda::forward_channels(cuda, out, logits, targets, inverse_temperature),
        Queue::Cuda(cuda) => cuda::forward(cuda, out.log_prob, logits, targets, inverse_temperature),
    }
}

/// As [`forward`], and replaces the logits by their gradient for coefficients `c`. The returned gradient uses the
/// logits' own bytes. On a GPU its type is `grad`, for the matmuls that read it; on the CPU it is f32. A channel may be
/// in `out`, in `c` or in both.
pub fn forward_backward<'m, 'o, 'c>(
    queue: &Queue,
    out: impl Into<Channels<'o>>,
    logits: Mat<'m>,
    targets: View,
    c: impl Into<Channels<'c>>,
    inverse_temperature: f32,
    grad: DType,
) -> Mat<'m> {
    let (out, c) = (out.into(), c.into());
    check(&out, &logits, targets, inverse_temperature);
    c.check(logits.rows, "one f32 coefficient");
    let [log_prob, entropy, mean_log_prob] = out.views();
    assert_disjoint(&[logits.view, log_prob, entropy, mean_log_prob], &c.views());
    let more = out.has_more() || c.has_more();
    match queue {
        Queue::Cpu(cpu) => {
            if more {
                channels::run(cpu, out, logits, targets, Some(c), inverse_temperature);
            } else {
                cpu::run(cpu, out.log_prob, logits, targets, Some(c.log_prob), inverse_temperature);
            }
            logits
        }
        Queue::Cuda(cuda) => {
            let args = cuda::BackwardArgs { logits, targets, inverse_temperature, grad };
            match more {
                true => cuda::forward_backward_channels(cuda, out, c, args),
                false => cuda::forward_backward(cuda, out.log_prob, c.log_prob, args),
            }
        }
    }
}

fn check(out: &Channels, logits: &Mat, targets: View, inverse_temperature: f32) {
    assert!(
        inverse_temperature.is_finite() && inverse_temperature > 0.0,
        "an inverse temperature of {inverse_temperature}"
    );
    assert_eq!((out.log_prob.len(), targets.len()), (logits.rows, logits.rows), "one target per token");
    assert_eq!((logits.view.dtype(), targets.dtype()), (DType::F32, DType::U32));
    out.check(logits.rows, "one f32 output");
    let [log_prob, entropy, mean_log_prob] = out.views();
    assert_disjoint(&[logits.view, log_prob, entropy, mean_log_prob], &[targets]);
}
