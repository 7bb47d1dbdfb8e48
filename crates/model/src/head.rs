//! The LM head, a chunk of tokens at a time: \[chunk, V\] logits, never \[T, V\].

use lockstep_ops::matmul::Init;
use lockstep_ops::{Mat, cross_entropy, matmul};
use lockstep_shape::{Param, Slot};

use crate::unit::Unit;

/// The chunk of `rows` tokens that starts at `first`.
fn chunks(unit: &Unit) -> impl Iterator<Item = (usize, usize)> + use<> {
    let (tokens, chunk) = (unit.tokens(), unit.head_chunk);
    // An empty micro-batch still has one empty chunk, so that a fresh gradient is set to zero.
    (0..tokens.max(1)).step_by(chunk).map(move |first| (first, chunk.min(tokens - first)))
}

/// Logits of the rows that next tokens are drawn from.
pub(crate) fn next_logits(unit: &Unit, x: Slot, w: Param, logits: Slot) {
    let rows = unit.growing().picks.len();
    let (x, w) = (unit.chunk_mat(x, rows), unit.weight_mat(w));
    matmul::nt(unit.queue, unit.chunk_mat(logits, rows), x, w, Init::Zero, unit.workspace);
}

/// Log-probability of every target.
pub(crate) fn log_probs(unit: &Unit, x: Slot, w: Param, logits: Slot) {
    let (x, w) = (unit.mat(x.into()), unit.weight_mat(w));
    for (first, rows) in chunks(unit) {
        let logits = Mat::dense(unit.view(logits), rows, w.rows);
        matmul::nt(unit.queue, logits, x.row_range(first, rows), w, Init::Zero, unit.workspace);
        let (log_probs, targets) =
            (unit.inputs.log_probs.slice(first, rows), unit.inputs.targets.slice(first, rows));
        cross_entropy::forward(unit.queue, log_probs, logits, targets);
    }
}

/// The same, and for the coefficients given: dx, and dw added to (or begun).
pub(crate) fn fused(unit: &Unit, x: Slot, param: Param, logits: Slot, dx: Slot) {
    let (x, dx, w) = (unit.mat(x.into()), unit.mat(dx.into()), unit.weight_mat(param));
    let coefficients = unit.inputs.coefficients.expect("backward is given coefficients");
    for (first, rows) in chunks(unit) {
        let logits = Mat::dense(unit.view(logits), rows, w.rows);
        let x = x.row_range(first, rows);
        matmul::nt(unit.queue, logits, x, w, Init::Zero, unit.workspace);
        let gradient = cross_entropy::forward_backward(
            unit.queue,
            unit.inputs.log_probs.slice(first, rows),
            logits,
            unit.inputs.targets.slice(first, rows),
            coefficients.slice(first, rows),
            x.view.dtype(),
        );
        matmul::nn(unit.queue, dx.row_range(first, rows), gradient, w, Init::Zero, unit.workspace);
        if let Some(dw) = unit.grad_mat(param) {
            let init = if unit.fresh && first == 0 { Init::Zero } else { Init::Accumulate };
            matmul::tn(unit.queue, dw, gradient, x, init, unit.workspace);
        }
    }
}
