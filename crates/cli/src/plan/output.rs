//! Writes files that a plan is saved to.

use std::path::{Path, PathBuf};

use lockstep_core::{Fault, FaultClass};

use crate::report::Failure;

/// A file that cannot be written.
#[derive(Debug)]
struct WriteError {
    path: PathBuf,
    cause: std::io::Error,
}

impl std::fmt::Display for WriteError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot write {}: {}", self.path.display(), self.cause)
    }
}

impl std::error::Error for WriteError {}

impl Fault for WriteError {
    fn class(&self) -> FaultClass {
        FaultClass::CannotWrite
    }

    fn hint(&self) -> Option<String> {
        Some("Give a file in a folder that exists and can be written to.".into())
    }
}

pub(super) fn write(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text)
        .map_err(|cause| -> Failure { Box::new(WriteError { path: path.into(), cause }) })
}
