//! Log-probabilities of target tokens from a chunk of logits, and the logits' gradient in their place.
//!
//! The head computes logits a chunk of tokens at a time, so \[tokens, vocabulary\] never exists. What an
//! algorithm wants is expressed as one coefficient per token, c = ∂L/∂log p(target): then
//! ∂L/∂logits = c · (onehot(target) − softmax(logits)).

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_core::DType;
use lockstep_device::{Queue, View};

use crate::Mat;
use crate::apart::assert_apart;

/// `logp`\[T\] = log softmax(logits)\[target\]. Leaves the logits as they are.
pub fn forward(queue: &Queue, logp: View, logits: Mat, targets: View) {
    check(logp, &logits, targets);
    match queue {
        Queue::Cpu(cpu) => cpu::run(cpu, logp, logits, targets, None),
        Queue::Cuda(cuda) => cuda::forward(cuda, logp, logits, targets),
    }
}

/// As [`forward`], and turns the logits into their gradient for coefficients `c`\[T\], which is returned and lies in
/// the logits' own bytes. On a GPU it is of the type `grad`, in which products want it; on the CPU, in f32.
pub fn forward_backward<'m>(
    queue: &Queue,
    logp: View,
    logits: Mat<'m>,
    targets: View,
    c: View,
    grad: DType,
) -> Mat<'m> {
    check(logp, &logits, targets);
    assert_eq!((c.len(), c.dtype()), (logits.rows, DType::F32), "a coefficient per token");
    assert_apart(&[logits.view, logp], &[c]);
    match queue {
        Queue::Cpu(cpu) => {
            cpu::run(cpu, logp, logits, targets, Some(c));
            logits
        }
        Queue::Cuda(cuda) => cuda::forward_backward(cuda, logp, logits, targets, c, grad),
    }
}

fn check(logp: View, logits: &Mat, targets: View) {
    assert_eq!((logp.len(), targets.len()), (logits.rows, logits.rows), "a target per token");
    assert_eq!((logp.dtype(), logits.view.dtype(), targets.dtype()), (DType::F32, DType::F32, DType::U32));
    assert_apart(&[logits.view, logp], &[targets]);
}
