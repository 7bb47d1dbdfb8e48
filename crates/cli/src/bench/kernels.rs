//! `lockstep bench kernels`: measures every operation of a training step by itself.

use lockstep_ops::bench::{self as ops_bench, StepShape};
use lockstep_shape::ModelShape;
use serde_json::json;

use super::machine::{BenchTarget, failed};
use super::table::Table;
use crate::args::{BenchKernels, Recompute};
use crate::report::Failure;

/// The defaults: model size, rows, tokens per row, vocabulary size.
const ON_GPU: (&str, usize, usize, usize) = ("300m", 16, 2048, 32_000);
const ON_CPU: (&str, usize, usize, usize) = ("15m", 8, 256, 4096);

pub(crate) fn run(args: &BenchKernels) -> Result<(), Failure> {
    let target = BenchTarget::open(&args.machine)?;
    let (size, rows, length, vocab) = if target.on_gpu() { ON_GPU } else { ON_CPU };
    let size = args.size.as_deref().unwrap_or(size);
    let (rows, length) = (args.rows.unwrap_or(rows), args.length.unwrap_or(length));
    let vocab = args.vocab.unwrap_or(vocab);
    let shape = ModelShape::named(size, vocab).map_err(|e| -> Failure { Box::new(e) })?;
    let step = StepShape {
        dtype: target.dtype,
        tokens: rows * length,
        docs: rows,
        dim: shape.dim,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        ffn: shape.ffn,
        vocab,
        layers: shape.layers,
        head_chunk: lockstep_plan::default_head_chunk_tokens(
            vocab,
            lockstep_train::device_memory(target.machine.into()),
        ),
        recompute: match args.recompute {
            Recompute::None => ops_bench::Recompute::Nothing,
            Recompute::Selective => ops_bench::Recompute::Cheap,
            Recompute::Full => ops_bench::Recompute::Blocks,
        },
    };
    let mut table = Table::begin(&target, true)?;
    ops_bench::step(&target.queue, &step, &mut |rate| table.add(rate)).map_err(failed)?;
    table.end(&target, json!({ "size": size, "rows": rows, "length": length, "vocab": vocab }), step.tokens)
}
