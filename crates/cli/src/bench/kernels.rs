//! `lockstep bench kernels`: every operation of a training step by itself.

use lockstep_ops::bench::{self as ops_bench, StepShape};
use lockstep_shape::ModelShape;
use serde_json::json;

use super::place::{Place, failed};
use super::table::Table;
use crate::args::{Again, BenchKernels};
use crate::report::Failure;

/// What is measured where nobody says: size, documents, tokens of each, vocabulary.
const ON_GPU: (&str, usize, usize, usize) = ("300m", 16, 2048, 32_000);
const ON_CPU: (&str, usize, usize, usize) = ("15m", 8, 256, 4096);

pub(crate) fn run(args: &BenchKernels) -> Result<(), Failure> {
    let place = Place::of(&args.on)?;
    let (size, rows, length, vocab) = if place.on_gpu() { ON_GPU } else { ON_CPU };
    let size = args.size.as_deref().unwrap_or(size);
    let (rows, length) = (args.rows.unwrap_or(rows), args.length.unwrap_or(length));
    let vocab = args.vocab.unwrap_or(vocab);
    let shape = ModelShape::named(size, vocab).map_err(|e| -> Failure { Box::new(e) })?;
    let step = StepShape {
        dtype: place.dtype,
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
            lockstep_train::device_memory(place.machine.into()),
        ),
        recompute: match args.recompute {
            Again::None => ops_bench::Recompute::Nothing,
            Again::Selective => ops_bench::Recompute::Cheap,
            Again::Full => ops_bench::Recompute::Blocks,
        },
    };
    let mut table = Table::begin(&place, true)?;
    ops_bench::step(&place.queue, &step, &mut |rate| table.add(rate)).map_err(failed)?;
    table.end(&place, json!({ "size": size, "rows": rows, "length": length, "vocab": vocab }), step.tokens)
}
