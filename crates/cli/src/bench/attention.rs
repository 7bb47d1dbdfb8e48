//! `lockstep bench attention`

use std::fmt;

use lockstep_core::{DType, Fault, FaultClass};
use lockstep_ops::bench::{self as ops_bench, AttentionShape, DecodeShape};
use serde_json::json;

use super::place::{Place, failed};
use super::table::Table;
use crate::args::BenchAttention;
use crate::report::Failure;

/// Heads that cannot be shared out.
#[derive(Debug)]
struct Uneven {
    heads: usize,
    kv_heads: usize,
}

impl fmt::Display for Uneven {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} query heads cannot share {} key-value heads evenly", self.heads, self.kv_heads)
    }
}

impl std::error::Error for Uneven {}

impl Fault for Uneven {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        Some("Give --kv-heads a divisor of --heads.".into())
    }
}

pub(crate) fn run(args: &BenchAttention) -> Result<(), Failure> {
    let place = Place::of(&args.on)?;
    let shapes = shapes(args, &place)?;
    let mut table = Table::begin(&place, false)?;
    for shape in &shapes {
        ops_bench::attention(&place.queue, shape, &mut |rate| table.add(rate)).map_err(failed)?;
    }
    for shape in &shapes {
        let decode = one_more(shape);
        ops_bench::decode(&place.queue, &decode, &mut |rate| table.add(rate)).map_err(failed)?;
    }
    table.end(&place, json!({}), 0)
}

/// A token more for each of the documents.
fn one_more(shape: &AttentionShape) -> DecodeShape {
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

/// The shape that was given, or several.
fn shapes(args: &BenchAttention, place: &Place) -> Result<Vec<AttentionShape>, Failure> {
    let given = [args.rows, args.length, args.heads, args.kv_heads, args.head_dim, args.window];
    if given.iter().all(Option::is_none) {
        return Ok(if place.on_gpu() { usual_on_gpu(place.dtype) } else { usual_on_cpu(place.dtype) });
    }
    let (docs, length) = if place.on_gpu() { (16, 2048) } else { (8, 256) };
    let heads = args.heads.unwrap_or(16);
    let kv_heads = args.kv_heads.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        return Err(Box::new(Uneven { heads, kv_heads }));
    }
    Ok(vec![AttentionShape {
        dtype: place.dtype,
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

/// Those of the named sizes, short documents, and one that is long.
fn usual_on_gpu(dtype: DType) -> Vec<AttentionShape> {
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

fn usual_on_cpu(dtype: DType) -> Vec<AttentionShape> {
    vec![train(dtype, [8, 256], [6, 6, 48]), train(dtype, [2, 512], [12, 12, 64])]
}
