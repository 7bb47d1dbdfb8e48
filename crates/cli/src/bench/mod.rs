//! `lockstep bench`: how fast this machine computes what training is made of.

mod step;

use crate::args::{Bench, BenchWhat};
use crate::report::Failure;

pub(crate) fn run(args: &Bench) -> Result<(), Failure> {
    match &args.what {
        BenchWhat::Step(args) => step::run(args),
    }
}
