//! The `lockstep` binary: flags, commands, printing, exit codes. Everything else is in libraries.

#![forbid(unsafe_code)]

mod args;
mod host;
mod plan;
mod report;
mod train;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    let command = Cli::parse().command;
    // The panic itself has been told by then, with its place.
    match catch_unwind(AssertUnwindSafe(|| run(&command))) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(fault)) => report::failure(&*fault),
        Err(_) => report::bug(),
    }
}

fn run(command: &Command) -> Result<(), report::Failure> {
    match command {
        Command::Train(run) => train::run(run),
        Command::Plan(plan) => plan::run(plan),
        Command::Keys => report::print(&lockstep_config::reference()),
    }
}
