//! Loading configurations, and telling people what went wrong.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use lockstep_config::{RunConfig, Source};
use lockstep_core::{Fault, FaultClass};

pub(crate) type Failure = Box<dyn Fault>;

/// A configuration file that cannot be read.
#[derive(Debug)]
enum FileError {
    Unreadable { path: PathBuf, cause: std::io::Error },
    TwoFiles { first: String, second: String },
}

impl std::fmt::Display for FileError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FileError::Unreadable { path, cause } => write!(f, "{}: {cause}", path.display()),
            FileError::TwoFiles { first, second } => {
                write!(f, "two configuration files were given: {first} and {second}")
            }
        }
    }
}

impl std::error::Error for FileError {}

impl Fault for FileError {
    fn class(&self) -> FaultClass {
        match self {
            FileError::Unreadable { .. } => FaultClass::InputMissing,
            FileError::TwoFiles { .. } => FaultClass::BadConfig,
        }
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            FileError::Unreadable { .. } => {
                "Give the path of a YAML or JSON file, or settings as key=value.".into()
            }
            FileError::TwoFiles { .. } => {
                "Give one file; settings that override it are written key=value.".into()
            }
        })
    }
}

/// Reads the configuration from what was typed; also returns its text.
pub(crate) fn load(settings: &[String], extra: &[String]) -> Result<(RunConfig, String), Failure> {
    let (mut overrides, files): (Vec<String>, Vec<String>) =
        settings.iter().cloned().partition(|s| s.contains('='));
    overrides.extend_from_slice(extra);
    if let [first, second, ..] = &files[..] {
        return Err(Box::new(FileError::TwoFiles { first: first.clone(), second: second.clone() }));
    }
    let text = match files.first() {
        None => None,
        Some(path) => Some(std::fs::read_to_string(path).map_err(|cause| -> Failure {
            Box::new(FileError::Unreadable { path: Path::new(path).into(), cause })
        })?),
    };
    let source = files.first().zip(text.as_ref()).map(|(name, text)| Source { name, text });
    let config = lockstep_config::load(source, &overrides).map_err(|e| -> Failure { Box::new(e) })?;
    let mut whole = text.unwrap_or_default();
    for line in &overrides {
        whole.push_str(&format!("# {line}\n"));
    }
    Ok((config, whole))
}

/// Prints an error with its remedy and gives its exit code.
pub(crate) fn failure(fault: &dyn Fault) -> ExitCode {
    eprintln!("error: {fault}");
    if let Some(hint) = fault.hint() {
        eprintln!("hint: {hint}");
    }
    ExitCode::from(fault.class().exit_code())
}
