//! Prints output and reports errors.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use lockstep_core::panics::Panic;
use lockstep_core::{Fault, FaultClass};
use lockstep_launch::ErrorNote;

use crate::reporter::Reporter;

pub(crate) type Failure = Box<dyn Fault>;

/// Output that cannot be written.
#[derive(Debug)]
struct OutputError {
    cause: std::io::Error,
}

impl std::fmt::Display for OutputError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot write to standard output: {}", self.cause)
    }
}

impl std::error::Error for OutputError {}

impl Fault for OutputError {
    fn class(&self) -> FaultClass {
        FaultClass::CannotWrite
    }
}

/// Prints the result of a command. A reader that closes the pipe early (`| head`) is not an error.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(cause) if cause.kind() != ErrorKind::BrokenPipe => Err(Box::new(OutputError { cause })),
        _ => Ok(()),
    }
}

/// Prints a line about the work. If it cannot be printed, the work continues.
pub(crate) fn print_line(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Prints a line to standard error, so that it does not mix with output that other programs read.
pub(crate) fn print_aside(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Reports an error with its hint, and returns its exit code.
pub(crate) fn failure(fault: &dyn Fault) -> ExitCode {
    let note = ErrorNote { error: fault.to_string(), hint: fault.hint(), cause_code: None };
    Reporter::of_this_process().error(&note);
    ExitCode::from(fault.class().exit_code())
}

/// A panic: a bug in this program.
#[derive(Debug)]
pub(crate) struct Bug(pub(crate) Panic);

impl std::fmt::Display for Bug {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "lockstep {} {}", env!("CARGO_PKG_VERSION"), self.0)
    }
}

impl std::error::Error for Bug {}

impl Fault for Bug {
    fn class(&self) -> FaultClass {
        FaultClass::Internal
    }

    fn hint(&self) -> Option<String> {
        let hint = "This is a bug in Lockstep: please report it with your configuration. Checkpoints are intact: \
                    resume with resume_from_checkpoint: true.";
        Some(hint.into())
    }
}
