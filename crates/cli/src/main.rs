//! The `lockstep` binary: flags, commands, printing, exit codes. Everything else is in libraries.

#![forbid(unsafe_code)]

mod args;
mod bench;
mod chat;
mod doctor;
mod evaluate;
mod export;
mod flags;
mod generate;
mod gpu;
mod gpu_of_rank;
mod host;
mod launch;
mod plan;
mod prepare;
mod quickstart;
mod ranks;
mod report;
mod selftest;
mod stop;
mod train;
mod voice;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use clap::Parser;
use lockstep_core::{FaultClass, panics};

use crate::args::{Cli, Command};
use crate::report::Bug;

fn main() -> ExitCode {
    if !ranks::launcher_is_there() {
        return ExitCode::from(FaultClass::PeerFailed.exit_code());
    }
    panics::install_hook();
    let command = Cli::parse_from(flags::to_settings(typed())).command;
    match catch_unwind(AssertUnwindSafe(|| run(&command))) {
        Ok(Ok(code)) => code,
        Ok(Err(fault)) => report::failure(&*fault),
        Err(payload) => report::failure(&Bug(panics::from_payload(&*payload))),
    }
}

/// What was typed. A path that is not text is shown as well as it can be.
fn typed() -> Vec<String> {
    std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect()
}

fn run(command: &Command) -> Result<ExitCode, report::Failure> {
    match command {
        Command::Quickstart(args) => quickstart::run(args),
        Command::Train(args) => train::run(args),
        Command::Launch(args) => launch::run(args),
        Command::Plan(plan) => plan::run(plan).map(|()| ExitCode::SUCCESS),
        Command::Chat(args) => chat::run(args).map(|()| ExitCode::SUCCESS),
        Command::Eval(args) => evaluate::run(args).map(|()| ExitCode::SUCCESS),
        Command::Generate(args) => generate::run(args).map(|()| ExitCode::SUCCESS),
        Command::Export(args) => export::run(args).map(|()| ExitCode::SUCCESS),
        Command::Prepare(args) => prepare::run(args).map(|()| ExitCode::SUCCESS),
        Command::Selftest(args) => selftest::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Keys => report::print(&lockstep_config::reference()).map(|()| ExitCode::SUCCESS),
    }
}
