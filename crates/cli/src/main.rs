//! The `lockstep` binary: flags, commands, printing, exit codes. Everything else is in libraries.

#![forbid(unsafe_code)]

mod args;
mod bench;
mod chat;
mod cluster;
mod collectives;
mod command_line;
mod completions;
mod config_file;
mod convert_config;
mod dashboard;
mod doctor;
mod download;
mod download_progress;
mod dry_run;
mod evaluate;
mod export;
mod flags;
mod foreign_launch;
mod generate;
mod gpu;
mod gpu_of_rank;
mod host;
mod hub;
mod init;
mod inputs;
mod launch;
mod logs;
mod man;
mod mpi;
mod output_file;
mod plan;
mod prepare;
mod quickstart;
mod ranks;
mod recipe;
mod report;
mod reporter;
mod run_report;
mod runs;
mod selftest;
mod selftest_ranks;
mod stop;
mod trackers;
mod train;
mod watch;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use clap::Parser;
use lockstep_core::{FaultClass, panics};
use lockstep_launch::ErrorNote;

use crate::args::{Cli, Command};
use crate::flags::UnknownFlag;
use crate::report::Bug;
use crate::reporter::Reporter;

/// The exit code of an invalid command line, which clap uses as well.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    if !ranks::launcher_is_alive() {
        return ExitCode::from(FaultClass::PeerFailed.exit_code());
    }
    panics::install_hook();
    let arguments = match flags::to_settings(arguments()) {
        Ok(arguments) => arguments,
        Err(UnknownFlag { message, hint }) => {
            let note = ErrorNote { error: message, hint: Some(hint), cause_code: None };
            Reporter::of_this_process().error(&note);
            return ExitCode::from(USAGE);
        }
    };
    let command = Cli::parse_from(arguments).command;
    match catch_unwind(AssertUnwindSafe(|| run(&command))) {
        Ok(Ok(code)) => code,
        Ok(Err(fault)) => report::failure(&*fault),
        Err(payload) => report::failure(&Bug(panics::from_payload(&*payload))),
    }
}

/// The arguments of the process. Bytes that are not text are replaced.
fn arguments() -> Vec<String> {
    std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect()
}

fn run(command: &Command) -> Result<ExitCode, report::Failure> {
    match command {
        Command::Quickstart(args) => quickstart::run(args),
        Command::Init(args) => init::run(args).map(|()| ExitCode::SUCCESS),
        Command::Recipe(args) => recipe::run(args).map(|()| ExitCode::SUCCESS),
        Command::Train(args) => train::run(args),
        Command::Plan(plan) => plan::run(plan).map(|()| ExitCode::SUCCESS),
        Command::Chat(args) => chat::run(args).map(|()| ExitCode::SUCCESS),
        Command::Eval(args) => evaluate::run(args).map(|()| ExitCode::SUCCESS),
        Command::Generate(args) => generate::run(args).map(|()| ExitCode::SUCCESS),
        Command::Export(args) => export::run(args).map(|()| ExitCode::SUCCESS),
        Command::Watch(args) => watch::run(args).map(|()| ExitCode::SUCCESS),
        Command::Runs(args) => runs::run(args).map(|()| ExitCode::SUCCESS),
        Command::Serve(args) => dashboard::serve(args).map(|()| ExitCode::SUCCESS),
        Command::Logs(args) => logs::run(args).map(|()| ExitCode::SUCCESS),
        Command::Prepare(args) => prepare::run(args).map(|()| ExitCode::SUCCESS),
        Command::Download(args) => download::run(args).map(|()| ExitCode::SUCCESS),
        Command::Selftest(args) => selftest::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::ConvertConfig(args) => convert_config::run(args).map(|()| ExitCode::SUCCESS),
        Command::Schema => report::print(&lockstep_config::schema()).map(|()| ExitCode::SUCCESS),
        Command::Completions(args) => completions::run(args).map(|()| ExitCode::SUCCESS),
        Command::Man(args) => man::run(args).map(|()| ExitCode::SUCCESS),
        Command::Keys => report::print(&lockstep_config::reference()).map(|()| ExitCode::SUCCESS),
    }
}
