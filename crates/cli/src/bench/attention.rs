//! `lockstep bench attention`: measures attention in training and in decoding.

use std::fmt;

use lockstep_core::{DType, Fault, FaultClass};
use lockstep_ops::bench::{self as ops_bench, AttentionShape, DecodeShape};
use serde_json::json;

use super::machine::{BenchTarget, failed};
use super::table::Table;
use crate::args::BenchAttention;
use crate::report::Failure;

/// Query heads that key-value heads do not divide.
#[derive(Debug)]
struct UnevenHeads {
    heads: usize,
    kv_heads: usize,
}

impl fmt::Display for UnevenHeads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} query heads are not a multiple of {} key-value heads", self.heads, self.kv_heads)
    }
}

impl std::error::Error for UnevenHeads {}

impl Fault for UnevenHeads {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        Some("Set --kv-heads to a divisor of --heads.".into())
    }
}

pub(crate) fn run(args: &BenchAttention) -> Result<(), Failure> {
    let target = BenchTarget::open(&args.machine)?;
    let shapes = shapes(args, &target)?;
    let mut table = Table::begin(&target, false)?;
    for shape in &shapes {
        ops_bench::attention(&target.queue, shape, &mut |rate| table.add(rate)).map_err(failed)?;
    }
    for shape in &shapes {
        let decode = decode_shape(shape);
        ops_bench::decode(&target.queue, &decode, &mut |rate| table.add(rate)).map_err(failed)?;
    }
    table.end(&target, json!({}), 0)
}

/// Decodes one more token for each row.
fn decode_shape(shape: &AttentionShape) -> DecodeShape {
    DecodeShape {
        dtype: shape.dtype,
        docs: shape.docs,
        past: shape.length,
        new: 1,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        window: shape.window,
    }
}

/// The shape from the flags, or the default shapes.
fn shapes(args: &BenchAttention, target: &BenchTarget) -> Result<Vec<AttentionShape>, Failure> {
    let given = [args.rows, args.length, args.heads, args.kv_heads, args.head_dim, args.window];
    if given.iter().all(Option::is_none) {
        return Ok(if target.on_gpu() {
            defaults_on_gpu(target.dtype)
        } else {
            defaults_on_cpu(target.dtype)
        });
    }
    let (docs, length) = if target.on_gpu() { (16, 2048) } else { (8, 256) };
    let heads = args.heads.unwrap_or(16);
    let kv_heads = args.kv_heads.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        return Err(Box::new(UnevenHeads { heads, kv_heads }));
    }
    Ok(vec![AttentionShape {
        dtype: target.dtype,
        docs: args.rows.unwrap_or(docs),
        length: args.length.unwrap_or(length),
        heads,
        kv_heads,
        head_dim: args.head_dim.unwrap_or(64),
        window: args.window,
    }])
}

fn train(
    dtype: DType,
    [docs, length]: [usize; 2],
    [heads, kv_heads, head_dim]: [usize; 3],
) -> AttentionShape {
    AttentionShape { dtype, docs, length, heads, kv_heads, head_dim, window: None }
}

/// Shapes of the named model sizes, short rows, and a long one.
fn defaults_on_gpu(dtype: DType) -> Vec<AttentionShape> {
    let long = train(dtype, [1, 16_384], [32, 8, 128]);
    vec![
        train(dtype, [16, 2048], [16, 16, 64]),
        train(dtype, [8, 2048], [32, 4, 64]),
        train(dtype, [4, 2048], [32, 32, 128]),
        train(dtype, [64, 512], [16, 16, 64]),
        long,
        AttentionShape { window: Some(4096), ..long },
    ]
}

fn defaults_on_cpu(dtype: DType) -> Vec<AttentionShape> {
    vec![train(dtype, [8, 256], [6, 6, 48]), train(dtype, [2, 512], [12, 12, 64])]
}
