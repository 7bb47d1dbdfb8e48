//! `lockstep bench`: how fast this machine computes what training is made of.

mod attention;
mod collectives;
mod kernels;
mod place;
mod products;
mod step;
mod table;

use std::process::ExitCode;

use crate::args::{Bench, BenchWhat};
use crate::report::Failure;

pub(crate) fn run(args: &Bench) -> Result<ExitCode, Failure> {
    match &args.what {
        BenchWhat::Step(args) => step::run(args)?,
        BenchWhat::Kernels(args) => kernels::run(args)?,
        BenchWhat::Products(args) => products::run(args)?,
        BenchWhat::Attention(args) => attention::run(args)?,
        BenchWhat::Collectives(args) => return collectives::run(args),
    }
    Ok(ExitCode::SUCCESS)
}
