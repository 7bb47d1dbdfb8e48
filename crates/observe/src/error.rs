//! Errors of writing logs and metrics.

use std::io;
use std::path::PathBuf;

use lockstep_core::{Fault, FaultClass};

/// Why a log or a metrics file cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObserveError {
    /// A folder or file cannot be created or opened.
    #[error("cannot open {}: {source}", .path.display())]
    Open { path: PathBuf, source: io::Error },
    /// An existing file cannot be read, so its contents cannot be kept.
    #[error("cannot read {}: {source}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    /// A line cannot be written.
    #[error("cannot write {}: {source}", .path.display())]
    Write { path: PathBuf, source: io::Error },
}

impl Fault for ObserveError {
    fn class(&self) -> FaultClass {
        FaultClass::CannotWrite
    }

    fn hint(&self) -> Option<String> {
        let (ObserveError::Open { source, .. }
        | ObserveError::Read { source, .. }
        | ObserveError::Write { source, .. }) = self;
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Some("free some space and resume; the last checkpoint is complete.".into())
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                Some("choose an `output_dir` that you may write to.".into())
            }
            io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
                Some("`output_dir` must be a folder; a file of that name is in the way.".into())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_has_a_hint() {
        let source = io::Error::from(io::ErrorKind::StorageFull);
        let error = ObserveError::Write { path: "out/metrics.jsonl".into(), source };
        assert_eq!(error.class(), FaultClass::CannotWrite);
        assert!(error.to_string().starts_with("cannot write out/metrics.jsonl: "));
        assert!(error.hint().unwrap().contains("space"));
    }
}
