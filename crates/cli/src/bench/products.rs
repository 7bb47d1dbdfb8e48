//! `lockstep bench products`: matrix products.

use lockstep_ops::bench as ops_bench;
use serde_json::json;

use super::place::{Place, failed};
use super::table::Table;
use crate::args::BenchProducts;
use crate::report::Failure;

/// Cubes, where no shape is given.
const ON_GPU: &[usize] = &[1024, 2048, 4096, 8192];
const ON_CPU: &[usize] = &[128, 256, 512, 1024];

pub(crate) fn run(args: &BenchProducts) -> Result<(), Failure> {
    let place = Place::of(&args.on)?;
    let shapes: Vec<[usize; 3]> = match (args.m, args.n, args.k) {
        (Some(m), Some(n), Some(k)) => vec![[m, n, k]],
        _ => {
            let cubes = if place.on_gpu() { ON_GPU } else { ON_CPU };
            cubes.iter().map(|size| [*size; 3]).collect()
        }
    };
    let mut table = Table::begin(&place, false)?;
    for shape in shapes {
        ops_bench::matmul(&place.queue, place.dtype, shape, &mut |rate| table.add(rate)).map_err(failed)?;
    }
    table.end(&place, json!({}), 0)
}
