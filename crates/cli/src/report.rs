//! Loading configurations, printing, and telling people what went wrong.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use lockstep_config::{RunConfig, Source};
use lockstep_core::panics::Panic;
use lockstep_core::{Fault, FaultClass};
use lockstep_launch::ErrorNote;

use crate::host;
use crate::voice::Voice;

pub(crate) type Failure = Box<dyn Fault>;

/// A configuration file that cannot be read, or output that cannot be written.
#[derive(Debug)]
enum FileError {
    Missing { path: PathBuf },
    Unreadable { path: PathBuf, cause: std::io::Error },
    NotText { path: PathBuf },
    TwoFiles { first: String, second: String },
    Stdout { cause: std::io::Error },
}

impl std::fmt::Display for FileError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FileError::Missing { path } => {
                write!(f, "configuration file {} does not exist", path.display())
            }
            FileError::Unreadable { path, cause } => {
                write!(f, "cannot read configuration file {}: {cause}", path.display())
            }
            FileError::NotText { path } => {
                write!(f, "configuration file {} is not UTF-8 text", path.display())
            }
            FileError::TwoFiles { first, second } => {
                write!(f, "two configuration files were given: {first} and {second}")
            }
            FileError::Stdout { cause } => write!(f, "cannot write to standard output: {cause}"),
        }
    }
}

impl std::error::Error for FileError {}

impl Fault for FileError {
    fn class(&self) -> FaultClass {
        match self {
            FileError::Missing { .. } | FileError::Unreadable { .. } => FaultClass::InputMissing,
            FileError::NotText { .. } | FileError::TwoFiles { .. } => FaultClass::BadConfig,
            FileError::Stdout { .. } => FaultClass::CannotWrite,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            FileError::Stdout { .. } => None,
            FileError::TwoFiles { .. } => {
                Some("Give one file; settings that override it are written key=value.".into())
            }
            _ => Some("Give the path of a YAML or JSON file, or settings as key=value.".into()),
        }
    }
}

/// Reads the configuration from what was typed; also returns its text.
pub(crate) fn load(settings: &[String], extra: &[String]) -> Result<(RunConfig, String), Failure> {
    let (mut overrides, files): (Vec<String>, Vec<String>) =
        settings.iter().cloned().partition(|s| is_setting(s));
    overrides.extend_from_slice(extra);
    if let [first, second, ..] = &files[..] {
        return Err(Box::new(FileError::TwoFiles { first: first.clone(), second: second.clone() }));
    }
    let text = match files.first() {
        None => None,
        Some(path) => Some(read(Path::new(path)).map_err(|e| -> Failure { Box::new(e) })?),
    };
    let source = files.first().zip(text.as_ref()).map(|(name, text)| Source { name, text });
    let mut config = lockstep_config::load(source, &overrides).map_err(|e| -> Failure { Box::new(e) })?;
    config.data.hub = host::hub_folders();
    let mut whole = text.unwrap_or_default();
    for line in &overrides {
        whole.push_str(&format!("# {line}\n"));
    }
    Ok((config, whole))
}

/// A key has no separators, so `runs/lr=1e-4.yaml` is a file.
fn is_setting(text: &str) -> bool {
    text.split_once('=').is_some_and(|(key, _)| !key.contains(['/', '\\'])) && !Path::new(text).is_file()
}

fn read(path: &Path) -> Result<String, FileError> {
    std::fs::read_to_string(path).map_err(|cause| match cause.kind() {
        ErrorKind::NotFound => FileError::Missing { path: path.into() },
        ErrorKind::InvalidData => FileError::NotText { path: path.into() },
        _ => FileError::Unreadable { path: path.into(), cause },
    })
}

/// Prints what was asked for. A reader that has seen enough (`| head`) is no error.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(cause) if cause.kind() != ErrorKind::BrokenPipe => Err(Box::new(FileError::Stdout { cause })),
        _ => Ok(()),
    }
}

/// Prints a line beside the work: where it cannot be shown, the work goes on.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Prints a line on the error stream, beside output that others read.
pub(crate) fn aside(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Tells an error with its remedy and gives its exit code.
pub(crate) fn failure(fault: &dyn Fault) -> ExitCode {
    let note = ErrorNote { error: fault.to_string(), hint: fault.hint(), cause_code: None };
    Voice::of_this_process().error(&note);
    ExitCode::from(fault.class().exit_code())
}

/// A panic that nothing has caught.
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
        let hint = "This is a bug: please report it with the configuration. Checkpoints are intact: a run can go on \
                    with resume_from_checkpoint: true.";
        Some(hint.into())
    }
}
