//! The `lockstep` binary: flags, commands, printing, exit codes. Everything else is in libraries.

#![forbid(unsafe_code)]

mod args;
mod plan;
mod report;
mod train;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Train(run) => train::run(&run),
        Command::Plan(plan) => plan::run(&plan),
        Command::Keys => {
            print!("{}", lockstep_config::reference());
            Ok(())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => report::failure(&*fault),
    }
}
