//! `report.html`: the page that a run leaves in its output folder, and that `lockstep runs report` writes for any run.

use std::path::{Path, PathBuf};

use lockstep_core::{Fault, FaultClass};
use lockstep_observe::{ObserveError, RunFiles, report_file};

use crate::report::{self, Failure};

const NAME: &str = "report.html";

#[derive(Debug)]
struct ReportError(ObserveError);

impl std::fmt::Display for ReportError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for ReportError {}

impl Fault for ReportError {
    fn class(&self) -> FaultClass {
        match self.0 {
            ObserveError::Read { .. } => FaultClass::BadData,
            _ => FaultClass::CannotWrite,
        }
    }

    fn hint(&self) -> Option<String> {
        Some("Give a file in a folder that can be written to with --output.".into())
    }
}

/// Writes the page about a run, and returns its path.
pub(crate) fn write(files: &RunFiles, output: Option<&Path>) -> Result<PathBuf, Failure> {
    let path = output.map_or_else(|| files.dir().join(NAME), Path::to_path_buf);
    report_file(files, &path).map_err(|cause| -> Failure { Box::new(ReportError(cause)) })?;
    Ok(path)
}

/// Writes the page at the end of a run. A run whose page cannot be written has trained all the same.
pub(crate) fn write_at_end(output_dir: &Path) {
    let Some(files) = RunFiles::open(output_dir) else { return };
    if let Err(fault) = write(&files, None) {
        report::print_aside(&format!("warning: the page about the run is missing: {fault}"));
    }
}
