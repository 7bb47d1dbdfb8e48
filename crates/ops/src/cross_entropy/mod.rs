//! Log-probabilities of target tokens from a chunk of logits, and the logits' gradient in their place.
//!
//! The head computes logits a chunk of tokens at a time, so \[tokens, vocabulary\] never exists. What an
//! algorithm wants is expressed as one coefficient per token, c = ∂L/∂log p(target): then
//! ∂L/∂logits = c · (onehot(target) − softmax(logits)).

mod cpu;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_core::DType;
use lockstep_device::{Queue, View};

use crate::Mat;

/// `logp`\[T\] = log softmax(logits)\[target\]. Leaves the logits as they are.
pub fn forward(queue: &Queue, logp: View, logits: Mat, targets: View) {
    check(&logp, &logits, &targets);
    cpu::run(crate::cpu(queue), logp, logits, targets, None);
}

/// As [`forward`], and turns the logits into their gradient for coefficients `c`\[T\].
pub fn forward_backward(queue: &Queue, logp: View, logits: Mat, targets: View, c: View) {
    check(&logp, &logits, &targets);
    assert_eq!((c.len(), c.dtype()), (logits.rows, DType::F32), "a coefficient per token");
    cpu::run(crate::cpu(queue), logp, logits, targets, Some(c));
}

fn check(logp: &View, logits: &Mat, targets: &View) {
    assert_eq!((logp.len(), targets.len()), (logits.rows, logits.rows), "a target per token");
    assert_eq!((logp.dtype(), logits.view.dtype(), targets.dtype()), (DType::F32, DType::F32, DType::U32));
    logits.view.assert_apart(logp);
}
