//! Operations on parameters, gradients and moments: the norm of gradients and the update.

use lockstep_core::{ALIGN_ELEMS, DType};
use lockstep_device::MemoryError;

use super::Step;
use super::bench::{Bench, Row};
use super::operand::{doubles, normals, zeros};
use crate::{adamw, reduce};

pub(super) fn run(bench: &Bench, step: &Step) -> Result<(), MemoryError> {
    let (dim, layers) = (step.dim, step.layers);
    let whole = |elems: usize| elems.next_multiple_of(ALIGN_ELEMS);
    let (block, table) = (whole(step.block_elems()), whole(step.vocab * dim));
    // A block's norms decay otherwise, and so are a range of their own.
    let ranges =
        [("a block", block, layers), ("norms of a block", whole(2 * dim), layers + 1), ("a table", table, 2)];
    for (name, len, times) in ranges {
        update(bench, step, name, len, times)?;
    }
    let norms = whole(2 * dim);
    for (name, len, times) in [("a block", block + norms, layers), ("a table", table, 2)] {
        let row = Row::moves(format!("squares of {name}"), times, 4 * len);
        let operands = [zeros(len / ALIGN_ELEMS, DType::F64), normals(len, DType::F32)];
        bench.rate(row, operands, |queue, [leaves, x]| reduce::square_leaves(queue, leaves, x))?;
    }
    let leaves = (layers * (block + norms) + 2 * table + whole(dim)) / ALIGN_ELEMS;
    let row = Row::moves("sum of squares and verdict", 1, 8 * leaves);
    bench.rate(row, [zeros(leaves, DType::F64), doubles(&[1.0; 4])], |queue, [leaves, verdict]| {
        reduce::sum_leaves(queue, verdict.first(1), leaves);
        reduce::judge(queue, verdict, Some(1.0), 1.0);
    })
}

fn update(bench: &Bench, step: &Step, name: &str, len: usize, times: usize) -> Result<(), MemoryError> {
    // In f32 the master is what computes.
    let working = if step.dtype == DType::F32 { 0 } else { len };
    let bytes = 7 * 4 * len + working * step.dtype.size();
    let rates = adamw::Rates::at(3, 1e-3, (0.9, 0.95), 1e-8, 1.0);
    let on_gpu = bench.on_gpu();
    let operands = [
        normals(len, DType::F32),
        zeros(working, step.dtype),
        normals(len, DType::F32),
        zeros(len, DType::F32),
        zeros(len, DType::F32),
        doubles(&[1.0, 1.0, 1.0, 0.0]),
    ];
    let row = Row::moves(format!("adamw of {name}"), times, bytes);
    bench.rate(row, operands, |queue, [master, working, grad, m, v, verdict]| {
        let working = (!working.is_empty()).then_some(working);
        let range = adamw::Range { master, working, grad, m, v, weight_decay: 0.1 };
        adamw::update(queue, range, &rates, on_gpu.then_some(verdict));
    })
}
