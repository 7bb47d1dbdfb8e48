//! Row-wise operations on activations: norms, RoPE, SwiGLU, biases, dropout.

use lockstep_core::DType;
use lockstep_device::{MemoryError, View};

use super::operand::{bounds, normals, numbers, zeros};
use super::runner::{Case, Runner};
use super::{Recompute, StepShape};
use crate::dropout::{Mask, Site};
use crate::{Mat, bias, dropout, reduce, rmsnorm, rope, swiglu};

pub(super) fn run(runner: &Runner, step: &StepShape) -> Result<(), MemoryError> {
    norm(runner, step)?;
    rotate(runner, step)?;
    gate(runner, step)?;
    biased(runner, step)?;
    dropped(runner, step)
}

fn norm(runner: &Runner, step: &StepShape) -> Result<(), MemoryError> {
    let StepShape { tokens, dim, dtype, .. } = *step;
    let (elems, bytes) = (tokens * dim, tokens * dim * dtype.size());
    let activation = || normals(elems, dtype);
    let case = Case::moves("norm, forward", 2 * step.forward_times() + 1, 2 * bytes);
    let operands = [zeros(elems, dtype), zeros(tokens, DType::F32), activation(), normals(dim, dtype)];
    runner.measure(case, operands, |queue, [y, rstd, x, w]| {
        let [y, x] = [y, x].map(|view| Mat::dense(view, tokens, dim));
        rmsnorm::forward(queue, y, rstd, x, w, 1e-5);
    })?;
    let scratch = runner.workspace().first(rmsnorm::scratch_elems(tokens, dim));
    let (kept, made) =
        if step.recompute == Recompute::Cheap { (0, 2 * step.layers) } else { (2 * step.layers, 0) };
    let kinds = [
        ("norm, backward added", [true, false], kept),
        ("norm, backward added, recompute", [true, true], made),
        ("norm, backward", [false, false], 1),
    ];
    for (name, [add, recompute], times) in kinds {
        let case = Case::moves(name, times, (3 + usize::from(add) + usize::from(recompute)) * bytes);
        let operands = [
            activation(),
            activation(),
            activation(),
            normals(dim, dtype),
            normals(tokens, DType::F32),
            zeros(dim, DType::F32),
        ];
        runner.measure(case, operands, |queue, [dx, dy, x, w, rstd, dw]| {
            let [dx, dy, x] = [dx, dy, x].map(|view| Mat::dense(view, tokens, dim));
            rmsnorm::backward(
                queue,
                rmsnorm::BackwardArgs { dx, add, recompute, dw, dy, x, rstd, w, scratch },
            );
        })?;
    }
    let case = Case::moves("norm, zero gradient", 2 * step.layers + 1, 4 * dim);
    runner.measure(case, [zeros(dim, DType::F32)], |queue, [dw]| reduce::zero(queue, dw))
}

/// Queries and keys are rotated in place; they are adjacent columns of one matrix.
fn rotate(runner: &Runner, step: &StepShape) -> Result<(), MemoryError> {
    let StepShape { tokens, docs, dtype, head_dim, .. } = *step;
    let (q, kv, half) = (step.q_width(), step.kv_width(), head_dim / 2);
    let (width, length) = (q + 2 * kv, tokens / docs);
    let (cols, times) = (q + kv, step.forward_times() + step.layers);
    let case = Case::moves("rope of q and k", times, 2 * tokens * cols * dtype.size());
    let operands = [
        normals(tokens * width, dtype),
        numbers((0..tokens).map(|i| (i % length) as u32)),
        normals(length * half, DType::F32),
        normals(length * half, DType::F32),
    ];
    runner.measure(case, operands, |queue, [qkv, positions, cos, sin]| {
        let x = Mat::dense(qkv, tokens, width).columns(0, cols);
        rope::apply(queue, x, positions, rope::Table { cos, sin, half }, rope::Direction::Forward);
    })
}

fn gate(runner: &Runner, step: &StepShape) -> Result<(), MemoryError> {
    let (elems, dtype) = (step.tokens * step.ffn, step.dtype);
    let bytes = elems * dtype.size();
    // Gate and up are columns of one matrix.
    let operands = || [normals(2 * elems, dtype), normals(elems, dtype)];
    let case = Case::moves("swiglu, forward", step.layers, 3 * bytes);
    runner.measure(case, operands(), |queue, [both, y]| {
        let [g, u] = gate_and_up(both, step);
        swiglu::forward(queue, Mat::dense(y, step.tokens, step.ffn), g, u);
    })?;
    let (kept, recomputed) = match step.recompute {
        Recompute::Nothing => (step.layers, 0),
        Recompute::Cheap | Recompute::Blocks => (0, step.layers),
    };
    let case = Case::moves("swiglu, backward", kept, 5 * bytes);
    runner.measure(case, operands(), |queue, [both, dy]| {
        let [g, u] = gate_and_up(both, step);
        swiglu::backward_in_place(queue, g, u, Mat::dense(dy, step.tokens, step.ffn));
    })?;
    let case = Case::moves("swiglu, backward and recompute", recomputed, 6 * bytes);
    runner.measure(case, operands(), |queue, [both, dy]| {
        let [g, u] = gate_and_up(both, step);
        swiglu::backward_and_recompute_in_place(queue, g, u, Mat::dense(dy, step.tokens, step.ffn));
    })
}

fn gate_and_up<'m>(both: View<'m>, step: &StepShape) -> [Mat<'m>; 2] {
    let both = Mat::dense(both, step.tokens, 2 * step.ffn);
    [both.columns(0, step.ffn), both.columns(step.ffn, step.ffn)]
}

/// The bias of queries, as in Qwen2.
fn biased(runner: &Runner, step: &StepShape) -> Result<(), MemoryError> {
    let (tokens, dtype, cols) = (step.tokens, step.dtype, step.q_width());
    let bytes = tokens * cols * dtype.size();
    let operands = [normals(tokens * cols, dtype), normals(cols, dtype)];
    runner.measure(Case::moves("bias of q, forward", 0, 2 * bytes), operands, |queue, [y, b]| {
        bias::forward(queue, Mat::dense(y, tokens, cols), b);
    })?;
    let scratch = runner.workspace();
    let operands = [zeros(cols, DType::F32), normals(tokens * cols, dtype)];
    runner.measure(Case::moves("bias of q, backward", 0, bytes), operands, |queue, [db, dy]| {
        bias::backward(queue, db, Mat::dense(dy, tokens, cols), scratch);
    })
}

fn dropped(runner: &Runner, step: &StepShape) -> Result<(), MemoryError> {
    let StepShape { tokens, docs, dim, dtype, .. } = *step;
    let bytes = tokens * dim * dtype.size();
    for (name, is_forward) in [("dropout, forward", true), ("dropout, backward", false)] {
        let operands = [
            normals(tokens * dim, dtype),
            normals(tokens * dim, dtype),
            bounds(docs, tokens / docs),
            numbers(0..docs as u32),
        ];
        let case = Case::moves(name, 0, (2 + usize::from(is_forward)) * bytes);
        runner.measure(case, operands, |queue, [y, x, cu_seqlens, samples]| {
            let [y, x] = [y, x].map(|view| Mat::dense(view, tokens, dim));
            let mask = Mask { rate: 0.1, seed: 1, step: 2, layer: 3, site: Site::MlpOut, samples };
            let run = if is_forward { dropout::forward } else { dropout::backward };
            run(queue, y, x, cu_seqlens, Some(&mask));
        })?;
    }
    Ok(())
}
