//! The ends of a model: the embedding's table, and log-probabilities from logits.

use lockstep_core::DType;
use lockstep_device::MemoryError;

use super::Step;
use super::bench::{Bench, Row};
use super::operand::{below, normals, zeros};
use crate::{Mat, cross_entropy, embedding, reduce};

pub(super) fn run(bench: &Bench, step: &Step) -> Result<(), MemoryError> {
    table(bench, step)?;
    log_probs(bench, step)
}

fn table(bench: &Bench, step: &Step) -> Result<(), MemoryError> {
    let Step { tokens, dim, vocab, dtype, .. } = *step;
    let bytes = tokens * dim * dtype.size();
    let operands = [zeros(tokens * dim, dtype), normals(vocab * dim, dtype), below(tokens, vocab)];
    bench.rate(Row::moves("embedding, forward", 1, 2 * bytes), operands, |queue, [x, table, ids]| {
        embedding::forward(queue, Mat::dense(x, tokens, dim), Mat::dense(table, vocab, dim), ids);
    })?;
    let scratch = bench.workspace();
    // Every row that a token names is read and written once.
    let touched = 8 * tokens.min(vocab) * dim;
    let operands = [zeros(vocab * dim, DType::F32), normals(tokens * dim, dtype), below(tokens, vocab)];
    bench.rate(
        Row::moves("embedding, backward", 1, bytes + touched),
        operands,
        |queue, [dtable, dx, ids]| {
            // The scratch is of numbers, two for each token.
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
    let row = Row::moves("embedding, zero of its gradient", 1, 4 * vocab * dim);
    bench.rate(row, [zeros(vocab * dim, DType::F32)], |queue, [dtable]| reduce::zero(queue, dtable))
}

/// Of a chunk of tokens.
fn log_probs(bench: &Bench, step: &Step) -> Result<(), MemoryError> {
    let ((chunks, rows), Step { vocab, dtype, .. }) = (step.chunks(), *step);
    let elems = rows * vocab;
    let operands = || {
        [normals(elems, DType::F32), below(rows, vocab), zeros(rows, DType::F32), normals(rows, DType::F32)]
    };
    let row = Row::moves("log-probabilities", 0, 4 * elems);
    bench.rate(row, operands(), |queue, [logits, targets, logp, _]| {
        cross_entropy::forward(queue, logp, Mat::dense(logits, rows, vocab), targets);
    })?;
    let written = if bench.on_gpu() { dtype.size() } else { DType::F32.size() };
    let row = Row::moves("log-probabilities and gradient", chunks, elems * (4 + written));
    bench.rate(row, operands(), |queue, [logits, targets, logp, c]| {
        cross_entropy::forward_backward(queue, logp, Mat::dense(logits, rows, vocab), targets, c, dtype);
    })
}
