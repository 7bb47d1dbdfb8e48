//! Operations on parameters, gradients and moments: the norm of gradients and the update.

use lockstep_core::{ALIGN_ELEMS, DType};
use lockstep_device::MemoryError;

use super::StepShape;
use super::operand::{doubles, normals, zeros};
use super::runner::{Case, Runner};
use crate::optimizer::Params;
use crate::{adamw, reduce};

pub(super) fn run(runner: &Runner, step: &StepShape) -> Result<(), MemoryError> {
    let (dim, layers) = (step.dim, step.layers);
    let whole = |elems: usize| elems.next_multiple_of(ALIGN_ELEMS);
    let (block, table) = (whole(step.block_elems()), whole(step.vocab * dim));
    // A block's norms have no weight decay, so they are a range of their own.
    let ranges =
        [("a block", block, layers), ("norms of a block", whole(2 * dim), layers + 1), ("a table", table, 2)];
    for (name, len, times) in ranges {
        update(runner, step, name, len, times)?;
    }
    let norms = whole(2 * dim);
    for (name, len, times) in [("a block", block + norms, layers), ("a table", table, 2)] {
        let case = Case::moves(format!("squared norm of {name}"), times, 4 * len);
        let operands = [zeros(len / ALIGN_ELEMS, DType::F64), normals(len, DType::F32)];
        runner.measure(case, operands, |queue, [leaves, x]| reduce::squared_sum_leaves(queue, leaves, x))?;
    }
    let leaves = (layers * (block + norms) + 2 * table + whole(dim)) / ALIGN_ELEMS;
    let case = Case::moves("gradient norm and step decision", 1, 8 * leaves);
    runner.measure(case, [zeros(leaves, DType::F64), doubles(&[1.0; 4])], |queue, [leaves, decision]| {
        reduce::sum_leaves(queue, decision.first(1), leaves);
        reduce::decide_step(queue, decision, Some(1.0), 1.0);
    })
}

fn update(
    runner: &Runner,
    step: &StepShape,
    name: &str,
    len: usize,
    times: usize,
) -> Result<(), MemoryError> {
    // In f32 there is no working copy: the master parameters are used directly.
    let working = if step.dtype == DType::F32 { 0 } else { len };
    let bytes = 7 * 4 * len + working * step.dtype.size();
    let params = adamw::Hyperparams::at(3, 1e-3, (0.9, 0.95), 1e-8, 1.0);
    let on_gpu = runner.on_gpu();
    let operands = [
        normals(len, DType::F32),
        zeros(working, step.dtype),
        normals(len, DType::F32),
        zeros(len, DType::F32),
        zeros(len, DType::F32),
        doubles(&[1.0, 1.0, 1.0, 0.0]),
    ];
    let case = Case::moves(format!("adamw of {name}"), times, bytes);
    runner.measure(case, operands, |queue, [master, working, grad, m, v, decision]| {
        let working = (!working.is_empty()).then_some(working);
        let range = adamw::ParamRange {
            params: Params::Master { master, working },
            grad,
            m: m.into(),
            v: v.into(),
            rounding: None,
            weight_decay: 0.1,
        };
        adamw::update(queue, range, &params, on_gpu.then_some(decision));
    })
}
