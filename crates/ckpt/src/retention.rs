//! Finds the latest checkpoint in a folder, and deletes old ones.
//!
//! The latest checkpoint is determined from the folders that exist and are valid. There is no pointer file that could
//! be out of date.

use std::io;
use std::path::{Path, PathBuf};

use lockstep_core::Step;

use crate::durable::{read_error, remove_dir, rename, sync_dir, with_suffix};
use crate::verify::check_without_reading;
use crate::{Checkpoint, CkptError};

/// The result of [`latest`].
#[derive(Debug)]
pub struct LatestCheckpoint {
    /// The complete checkpoint with the highest step.
    pub path: Option<PathBuf>,
    /// Higher steps that are not usable, highest first. Worth a warning.
    pub skipped: Vec<SkippedCheckpoint>,
    /// Lower steps, highest first. They have not been checked.
    pub earlier: Vec<PathBuf>,
}

/// A checkpoint that was skipped because it is not usable.
#[derive(Debug)]
pub struct SkippedCheckpoint {
    pub path: PathBuf,
    pub why: CkptError,
}

/// Finds the highest step in `root` whose manifest is valid and whose files have the right lengths. Does not read
/// weights. If `root` does not exist, there is none.
pub fn latest(root: &Path) -> Result<LatestCheckpoint, CkptError> {
    let mut skipped = Vec::new();
    let mut steps = steps(root)?;
    while let Some(path) = steps.pop() {
        match check_without_reading(&path) {
            Ok(_) => {
                steps.reverse();
                return Ok(LatestCheckpoint { path: Some(path), skipped, earlier: steps });
            }
            Err(why) => skipped.push(SkippedCheckpoint { path, why }),
        }
    }
    Ok(LatestCheckpoint { path: None, skipped, earlier: Vec::new() })
}

/// Opens the highest step in `root` in which every byte verifies. Also returns the checkpoints that were skipped. If
/// there is none to open but some were skipped, the caller must decide what to do: starting from scratch is rarely
/// intended.
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

/// Deletes the oldest complete checkpoints beyond `keep`, and checkpoints that an earlier call left half deleted.
/// Always keeps the newest complete checkpoint and that of step `best`, whatever `keep` is. Returns the deleted
/// paths.
///
/// Partial and damaged folders are neither counted nor deleted.
pub fn retain(root: &Path, keep: usize, best: Option<Step>) -> Result<Vec<PathBuf>, CkptError> {
    for path in entries(root)? {
        let of_step = path.file_stem().is_some_and(|stem| step_of(Path::new(stem)).is_some());
        if of_step && path.extension().is_some_and(|ext| ext == "trash") {
            remove_dir(&path)?;
        }
    }
    let mut complete: Vec<PathBuf> = steps(root)?;
    complete.retain(|path| check_without_reading(path).is_ok());
    let is_best = |path: &PathBuf| best.is_some() && step_of(path) == best;
    let best_is_old = complete.iter().rev().skip(1).any(is_best);
    let keep = keep.max(if best_is_old { 2 } else { 1 });
    let too_many = complete.len().saturating_sub(keep);
    complete.retain(|path| !is_best(path));
    complete.truncate(too_many);
    for path in &complete {
        let trash = with_suffix(path, ".trash");
        rename(path, &trash)?;
        // Sync the rename before deleting, so that a crash cannot leave an incomplete checkpoint under its name.
        sync_dir(root)?;
        remove_dir(&trash)?;
    }
    Ok(complete)
}

/// The step in a folder's name, if the name is exactly `step-N`.
pub(crate) fn step_of(path: &Path) -> Option<Step> {
    let digits = path.file_name()?.to_str()?.strip_prefix("step-")?;
    let step: u64 = digits.parse().ok()?;
    // Reject `step-007` and `step-+7`, which we never write.
    (step.to_string() == digits).then_some(Step(step))
}

/// The folders named `step-N`, lowest step first.
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
