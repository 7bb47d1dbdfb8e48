//! The output directory: `checkpoints/`, `model/`, `logs/`, `metrics.jsonl`, and a lock while a run has it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use lockstep_config::{OutputConfig, Resume};

use crate::error::TrainError;

/// The directory, held by this run until dropped.
pub(crate) struct OutputDir {
    path: PathBuf,
    _lock: File,
}

impl OutputDir {
    /// Takes the directory. Refuses one with another run's checkpoints, unless this run resumes or says
    /// that they may go.
    pub(crate) fn take(output: &OutputConfig) -> Result<OutputDir, TrainError> {
        let path = output.output_dir.clone();
        let failed = |path: &Path| {
            let path = path.to_path_buf();
            move |cause| TrainError::Output { path, cause }
        };
        fs::create_dir_all(&path).map_err(failed(&path))?;
        let lock_path = path.join(".lock");
        let lock = File::create(&lock_path).map_err(failed(&lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(TrainError::OutputLocked { dir: path }),
            Err(fs::TryLockError::Error(cause)) => return Err(TrainError::Output { path: lock_path, cause }),
        }
        let dir = OutputDir { path, _lock: lock };
        if output.resume_from_checkpoint == Resume::No
            && let Some(last) = lockstep_ckpt::latest(&dir.checkpoints())?.path
        {
            if !output.overwrite_output_dir {
                let last = last.file_name().unwrap_or_default().to_string_lossy().into_owned();
                return Err(TrainError::OutputInUse { dir: dir.path, last });
            }
            fs::remove_dir_all(dir.checkpoints()).map_err(failed(&dir.checkpoints()))?;
        }
        Ok(dir)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    pub(crate) fn model(&self) -> PathBuf {
        self.path.join("model")
    }
}
