//! `lockstep bench matmul`: measures matrix multiplications.

use lockstep_ops::bench as ops_bench;
use serde_json::json;

use super::machine::{BenchTarget, failed};
use super::table::Table;
use crate::args::BenchMatmul;
use crate::report::Failure;

/// Default sizes of m, n and k.
const ON_GPU: &[usize] = &[1024, 2048, 4096, 8192];
const ON_CPU: &[usize] = &[128, 256, 512, 1024];

pub(crate) fn run(args: &BenchMatmul) -> Result<(), Failure> {
    let target = BenchTarget::open(&args.machine)?;
    let shapes: Vec<[usize; 3]> = match (args.m, args.n, args.k) {
        (Some(m), Some(n), Some(k)) => vec![[m, n, k]],
        _ => {
            let sizes = if target.on_gpu() { ON_GPU } else { ON_CPU };
            sizes.iter().map(|size| [*size; 3]).collect()
        }
    };
    let mut table = Table::begin(&target, false)?;
    for shape in shapes {
        ops_bench::matmul(&target.queue, target.dtype, shape, &mut |rate| table.add(rate)).map_err(failed)?;
    }
    table.end(&target, json!({}), 0)
}
