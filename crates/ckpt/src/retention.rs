//! The folder that checkpoints lie in: which is the latest, and which may go.
//!
//! The latest is computed from what is there and valid; there is no pointer file that could be wrong.

use std::io;
use std::path::{Path, PathBuf};

use lockstep_core::Step;

use crate::durable::{read_error, remove_dir, rename, sync_dir, with_suffix};
use crate::verify::check_cheaply;
use crate::{Checkpoint, CkptError};

/// The answer of [`latest`].
#[derive(Debug)]
pub struct Latest {
    /// The highest step that is complete.
    pub path: Option<PathBuf>,
    /// Higher ones that are not usable, highest first. Worth a warning.
    pub skipped: Vec<SkippedCheckpoint>,
    /// Lower ones, highest first. Nobody has looked at them.
    pub earlier: Vec<PathBuf>,
}

/// A checkpoint passed over.
#[derive(Debug)]
pub struct SkippedCheckpoint {
    pub path: PathBuf,
    pub why: CkptError,
}

/// The highest step in `root` whose manifest is valid and whose files have their lengths. Reads no
/// weights. A folder that is not there has none.
pub fn latest(root: &Path) -> Result<Latest, CkptError> {
    let mut skipped = Vec::new();
    let mut steps = steps(root)?;
    while let Some(path) = steps.pop() {
        match check_cheaply(&path) {
            Ok(_) => {
                steps.reverse();
                return Ok(Latest { path: Some(path), skipped, earlier: steps });
            }
            Err(why) => skipped.push(SkippedCheckpoint { path, why }),
        }
    }
    Ok(Latest { path: None, skipped, earlier: Vec::new() })
}

/// Opens the highest step in `root` that verifies to the last byte, and tells what was passed over.
/// `None` with something passed over is for the caller to judge: starting afresh is rarely what is meant.
pub fn open_latest(root: &Path) -> Result<(Option<Checkpoint>, Vec<SkippedCheckpoint>), CkptError> {
    let mut skipped = Vec::new();
    for path in steps(root)?.into_iter().rev() {
        match Checkpoint::open_verified(&path) {
            Ok(checkpoint) => return Ok((Some(checkpoint), skipped)),
            Err(why) => skipped.push(SkippedCheckpoint { path, why }),
        }
    }
    Ok((None, skipped))
}

/// Deletes the oldest complete checkpoints beyond `keep`, and what an earlier call left half deleted.
/// At least one complete checkpoint stays, whatever `keep` says, and so does the one of step `best`, beside
/// the newest. Returns what was deleted.
///
/// Partial and damaged folders are left alone: they are not counted and not ours to judge here.
pub fn retain(root: &Path, keep: usize, best: Option<Step>) -> Result<Vec<PathBuf>, CkptError> {
    for path in entries(root)? {
        let of_step = path.file_stem().is_some_and(|stem| step_of(Path::new(stem)).is_some());
        if of_step && path.extension().is_some_and(|ext| ext == "trash") {
            remove_dir(&path)?;
        }
    }
    let mut complete: Vec<PathBuf> = steps(root)?;
    complete.retain(|path| check_cheaply(path).is_ok());
    let is_best = |path: &PathBuf| best.is_some() && step_of(path) == best;
    let best_is_old = complete.iter().rev().skip(1).any(is_best);
    let keep = keep.max(if best_is_old { 2 } else { 1 });
    let too_many = complete.len().saturating_sub(keep);
    complete.retain(|path| !is_best(path));
    complete.truncate(too_many);
    for path in &complete {
        let trash = with_suffix(path, ".trash");
        rename(path, &trash)?;
        // Gone by name before a byte of it goes, also after a crash.
        sync_dir(root)?;
        remove_dir(&trash)?;
    }
    Ok(complete)
}

/// The step that a folder's name says, if it is exactly `step-N`.
pub(crate) fn step_of(path: &Path) -> Option<Step> {
    let digits = path.file_name()?.to_str()?.strip_prefix("step-")?;
    let step: u64 = digits.parse().ok()?;
    // `step-007` and `step-+7` are not ours.
    (step.to_string() == digits).then_some(Step(step))
}

/// The folders of steps, lowest first.
fn steps(root: &Path) -> Result<Vec<PathBuf>, CkptError> {
    let mut steps: Vec<(Step, PathBuf)> =
        entries(root)?.into_iter().filter_map(|path| Some((step_of(&path)?, path))).collect();
    steps.sort();
    Ok(steps.into_iter().map(|(_, path)| path).collect())
}

fn entries(root: &Path) -> Result<Vec<PathBuf>, CkptError> {
    let entries = match root.read_dir() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(read_error(root))?,
    };
    entries.map(|entry| entry.map(|entry| entry.path()).map_err(read_error(root))).collect()
}
