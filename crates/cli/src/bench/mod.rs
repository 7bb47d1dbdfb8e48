//! `lockstep bench`: measures the speed of this machine.

mod attention;
mod collectives;
mod kernels;
mod machine;
mod matmul;
mod step;
mod table;

use std::process::ExitCode;

use crate::args::{Bench, BenchCommand};
use crate::report::Failure;

pub(crate) use machine::failed;
pub(crate) use table::per_second;

pub(crate) fn run(args: &Bench) -> Result<ExitCode, Failure> {
    match &args.command {
        BenchCommand::Step(args) => step::run(args)?,
        BenchCommand::Kernels(args) => kernels::run(args)?,
        BenchCommand::Matmul(args) => matmul::run(args)?,
        BenchCommand::Attention(args) => attention::run(args)?,
        BenchCommand::Collectives(args) => return collectives::run(args),
    }
    Ok(ExitCode::SUCCESS)
}
