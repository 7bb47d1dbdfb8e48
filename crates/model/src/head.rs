//! The LM head, one chunk of rows at a time: \[chunk, V\] logits, never \[T, V\].

use lockstep_device::View;
use lockstep_ops::cross_entropy::Channels;
use lockstep_ops::matmul::Accumulate;
use lockstep_ops::{Mat, cross_entropy, matmul, score_head};
use lockstep_shape::{Channel, Param, Slot};

use crate::unit::{PerChannel, Unit};

/// The first row of each chunk, and its number of rows.
fn chunks(unit: &Unit) -> impl Iterator<Item = (usize, usize)> + use<> {
    let (rows, chunk) = (unit.num_head_rows(), unit.head_chunk);
    // A micro-batch without rows still has one empty chunk, so that a gradient that is to be overwritten becomes zero.
    (0..rows.max(1)).step_by(chunk).map(move |first| (first, chunk.min(rows - first)))
}

/// Logits of the rows from which next tokens are sampled.
pub(crate) fn next_logits(unit: &Unit, x: Slot, w: Param, logits: Slot) {
    let (x, w) = (unit.mat(x.into()), unit.weight_mat(w));
    matmul::nt(unit.queue, unit.chunk_mat(logits, x.rows), x, w, Accumulate::Overwrite, unit.workspace);
}

/// Some rows of the channels of a language model's head.
fn channels<'m>(of: &PerChannel<'m>, first: usize, rows: usize) -> Channels<'m> {
    let part = |channel: Channel| of[channel as usize].map(|view| view.slice(first, rows));
    Channels {
        log_prob: part(Channel::LogProb).expect("a language model's head computes log-probabilities"),
        entropy: part(Channel::Entropy),
        mean_log_prob: part(Channel::MeanLogProb),
    }
}

/// The head's outputs for all of its rows.
pub(crate) fn outputs(unit: &Unit, x: Slot, w: Param, logits: Slot) {
    let (x, w) = (unit.mat(x.into()), unit.weight_mat(w));
    for (first, rows) in chunks(unit) {
        let logits = Mat::dense(unit.view(logits), rows, w.rows);
        matmul::nt(unit.queue, logits, x.row_range(first, rows), w, Accumulate::Overwrite, unit.workspace);
        let targets = unit.inputs.targets.slice(first, rows);
        let outputs = channels(&unit.inputs.outputs, first, rows);
        cross_entropy::forward(unit.queue, outputs, logits, targets, unit.inverse_temperature);
    }
}

/// The same, and backward for the given coefficients: dx, and dw, which is added to or overwritten.
pub(crate) fn fused(unit: &Unit, x: Slot, param: Param, logits: Slot, dx: Slot) {
    let (x, dx, w) = (unit.mat(x.into()), unit.mat(dx.into()), unit.weight_mat(param));
    let coefficients = unit.inputs.coefficients.expect("backward needs coefficients");
    for (first, rows) in chunks(unit) {
        let logits = Mat::dense(unit.view(logits), rows, w.rows);
        let x = x.row_range(first, rows);
        matmul::nt(unit.queue, logits, x, w, Accumulate::Overwrite, unit.workspace);
        let gradient = cross_entropy::forward_backward(
            unit.queue,
            channels(&unit.inputs.outputs, first, rows),
            logits,
            unit.inputs.targets.slice(first, rows),
            channels(&coefficients, first, rows),
            unit.inverse_temperature,
            x.view.dtype(),
        );
        matmul::nn(unit.queue, dx.row_range(first, rows), gradient, w, Accumulate::Overwrite, unit.workspace);
        if let Some(dw) = unit.grad_mat(param) {
            let init =
                if unit.overwrite_grads && first == 0 { Accumulate::Overwrite } else { Accumulate::Add };
            matmul::tn(unit.queue, dw, gradient, x, init, unit.workspace);
        }
    }
}

/// The output of the score head.
pub(crate) fn score(unit: &Unit, x: Slot, w: Param) {
    score_head::forward(unit.queue, value(&unit.inputs.outputs), unit.mat(x.into()), unit.weight(w));
}

/// Backward of the score head for the given coefficients: dx, and dw, which is added to or overwritten.
pub(crate) fn score_back(unit: &Unit, x: Slot, param: Param, dx: Slot) {
    let x = unit.mat(x.into());
    let call = score_head::BackwardArgs {
        dx: unit.mat(dx.into()),
        add_dx: false,
        dw: unit.grad(param),
        add_dw: !unit.overwrite_grads,
        c: value(&unit.inputs.coefficients.expect("backward needs coefficients")),
        x,
        w: unit.weight(param),
        scratch: unit.workspace.first(score_head::scratch_elems(x.rows, x.cols)),
    };
    score_head::backward(unit.queue, call);
}

fn value<'m>(of: &PerChannel<'m>) -> View<'m> {
    of[Channel::Value as usize].expect("a score head has a value channel")
}
