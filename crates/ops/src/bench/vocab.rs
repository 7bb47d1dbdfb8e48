//! Operations over the vocabulary: the embedding, and log-probabilities from logits.

use lockstep_core::DType;
use lockstep_device::MemoryError;

use super::StepShape;
use super::operand::{below, normals, zeros};
use super::runner::{Case, Runner};
use crate::{Mat, cross_entropy, embedding, reduce};

pub(super) fn run(runner: &Runner, step: &StepShape) -> Result<(), MemoryError> {
    table(runner, step)?;
    log_probs(runner, step)
}

fn table(runner: &Runner, step: &StepShape) -> Result<(), MemoryError> {
    let StepShape { tokens, dim, vocab, dtype, .. } = *step;
    let bytes = tokens * dim * dtype.size();
    let operands = [zeros(tokens * dim, dtype), normals(vocab * dim, dtype), below(tokens, vocab)];
    runner.measure(Case::moves("embedding, forward", 1, 2 * bytes), operands, |queue, [x, table, ids]| {
        embedding::forward(queue, Mat::dense(x, tokens, dim), Mat::dense(table, vocab, dim), ids);
    })?;
    let scratch = runner.workspace();
    // Every row that some token selects is read and written once.
    let touched = 8 * tokens.min(vocab) * dim;
    let operands = [zeros(vocab * dim, DType::F32), normals(tokens * dim, dtype), below(tokens, vocab)];
    runner.measure(
        Case::moves("embedding, backward", 1, bytes + touched),
        operands,
        |queue, [dtable, dx, ids]| {
            // The scratch holds two u32 per token.
            let scratch = scratch.cast(DType::U32);
            embedding::backward(
                queue,
                Mat::dense(dtable, vocab, dim),
                Mat::dense(dx, tokens, dim),
                ids,
                scratch,
            );
        },
    )?;
    let case = Case::moves("embedding, zero gradient", 1, 4 * vocab * dim);
    runner.measure(case, [zeros(vocab * dim, DType::F32)], |queue, [dtable]| reduce::zero(queue, dtable))
}

/// Log-probabilities of one chunk of tokens.
fn log_probs(runner: &Runner, step: &StepShape) -> Result<(), MemoryError> {
    let ((chunks, rows), StepShape { vocab, dtype, .. }) = (step.chunks(), *step);
    let elems = rows * vocab;
    let operands = || {
        [normals(elems, DType::F32), below(rows, vocab), zeros(rows, DType::F32), normals(rows, DType::F32)]
    };
    let case = Case::moves("log-probabilities", 0, 4 * elems);
    runner.measure(case, operands(), |queue, [logits, targets, logp, _]| {
        cross_entropy::forward(queue, logp, Mat::dense(logits, rows, vocab), targets, 1.0);
    })?;
    let written = if runner.on_gpu() { dtype.size() } else { DType::F32.size() };
    let case = Case::moves("log-probabilities and gradient", chunks, elems * (4 + written));
    runner.measure(case, operands(), |queue, [logits, targets, logp, c]| {
        cross_entropy::forward_backward(queue, logp, Mat::dense(logits, rows, vocab), targets, c, 1.0, dtype);
    })
}
