//! Writes files that the user asked for.

use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use lockstep_core::{Fault, FaultClass};

use crate::report::Failure;

/// A file that cannot be written.
#[derive(Debug)]
enum WriteError {
    Exists { path: PathBuf },
    Failed { path: PathBuf, cause: std::io::Error },
}

impl std::fmt::Display for WriteError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            WriteError::Exists { path } => write!(f, "{} already exists", path.display()),
            WriteError::Failed { path, cause } => write!(f, "cannot write {}: {cause}", path.display()),
        }
    }
}

impl std::error::Error for WriteError {}

impl Fault for WriteError {
    fn class(&self) -> FaultClass {
        FaultClass::CannotWrite
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            WriteError::Exists { .. } => "Give another file name, or replace it with --force.".into(),
            WriteError::Failed { .. } => "Give a file in a folder that exists and can be written to.".into(),
        })
    }
}

/// Writes a file, and replaces one of the same name.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).map_err(|cause| failed(path, cause))
}

/// Writes a file. One of the same name is an error, unless `force` is set.
pub(crate) fn write_new(path: &Path, text: &str, force: bool) -> Result<(), Failure> {
    if force {
        return write(path, text);
    }
    let opened = std::fs::OpenOptions::new().write(true).create_new(true).open(path);
    opened.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|cause| failed(path, cause))
}

/// Fails if [`write_new`] would, as far as that is known before writing.
pub(crate) fn check_new(path: &Path, force: bool) -> Result<(), Failure> {
    match !force && path.symlink_metadata().is_ok() {
        true => Err(Box::new(WriteError::Exists { path: path.into() })),
        false => Ok(()),
    }
}

fn failed(path: &Path, cause: std::io::Error) -> Failure {
    Box::new(match cause.kind() {
        ErrorKind::AlreadyExists => WriteError::Exists { path: path.into() },
        _ => WriteError::Failed { path: path.into(), cause },
    })
}
