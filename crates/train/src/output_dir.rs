//! The output folder: `checkpoints/`, `model/`, `logs/`, `metrics.jsonl`, and a lock while a run uses it.
//!
//! A run that ends before its first step leaves the folder unchanged: empty folders that it created are
//! removed when it releases the lock.

use std::fmt;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use lockstep_ckpt::check_replaceable;
use lockstep_config::{OutputConfig, Resume};
use lockstep_data::LockFile;

use crate::error::TrainError;

/// The output folder, locked by this run until dropped.
#[derive(Debug)]
pub(crate) struct OutputDir {
    path: PathBuf,
    /// The folder has checkpoints of an earlier run, which may be deleted.
    replaces: bool,
    /// Releases the lock when it is dropped.
    _lock: Option<LockFile>,
}

impl OutputDir {
    /// Locks the folder. Fails if it has checkpoints of another run, unless this run resumes or may overwrite them.
    pub(crate) fn take(output: &OutputConfig) -> Result<OutputDir, TrainError> {
        let path = output.output_dir.clone();
        let lock = lock(&path)?;
        let mut dir = OutputDir { path, replaces: false, _lock: Some(lock) };
        // With `auto`, existing checkpoints are resumed from, never replaced.
        if output.resume_from_checkpoint == Resume::No {
            let latest = lockstep_ckpt::latest(&dir.checkpoints())?;
            let damaged = latest.skipped.first().map(|skipped| &skipped.path);
            if let Some(last) = latest.path.as_ref().or(damaged) {
                if !output.overwrite_output_dir {
                    let last = last.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    return Err(TrainError::OutputInUse { dir: dir.path.clone(), last });
                }
                dir.replaces = true;
            }
        }
        dir.check_model_folder()?;
        dir.check_checkpoints()?;
        Ok(dir)
    }

    /// The folder for ranks other than 0, which do not lock it.
    pub(crate) fn follow(output: &OutputConfig) -> OutputDir {
        OutputDir { path: output.output_dir.clone(), replaces: false, _lock: None }
    }

    /// Deletes checkpoints that are to be replaced, and incomplete files of killed runs. Called immediately before
    /// training starts. From here on the checkpoints belong to this launch, and a restart of it may resume from them;
    /// see [`belongs_to`].
    pub(crate) fn sweep(&self, launch_id: Option<&str>) -> Result<(), TrainError> {
        let checkpoints = self.checkpoints();
        if self.replaces {
            fs::remove_dir_all(&checkpoints).map_err(failed(&checkpoints))?;
        }
        let unfinished =
            [self.path.as_path(), &checkpoints].into_iter().filter_map(|dir| dir.read_dir().ok());
        for entry in unfinished.flatten().filter_map(Result::ok) {
            let name = entry.file_name().to_string_lossy().into_owned();
            let ours = name == "model.partial"
                || name.starts_with("step-") && (name.ends_with(".partial") || name.ends_with(".trash"));
            if ours {
                fs::remove_dir_all(entry.path()).map_err(failed(&entry.path()))?;
            }
        }
        match launch_id {
            Some(id) => {
                let path = self.path.join(LAUNCH);
                fs::write(&path, format!("{id}\n")).map_err(failed(&path))
            }
            None => Ok(()),
        }
    }

    /// Checks before training that the model folder can be written: another folder of that name must not be replaced.
    fn check_model_folder(&self) -> Result<(), TrainError> {
        check_replaceable(&self.model())?;
        Ok(())
    }

    /// Checks that checkpoints can be written, by writing and removing a file. The lock has shown this for the folder
    /// above.
    fn check_checkpoints(&self) -> Result<(), TrainError> {
        let folder = self.checkpoints();
        let probe = LockFile::try_take(&folder.join(PROBE));
        match probe.map_err(|(path, cause)| TrainError::Output { path, cause })? {
            Ok(probe) => {
                let mut file = probe.file();
                let written = file.write_all(b"probe").and_then(|()| file.sync_all());
                written.map_err(failed(&folder))
            }
            // Another process is writing there, so the folder is writable.
            Err(_) => Ok(()),
        }
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

const LOCK: &str = ".lock";
/// Written and removed at once, to test that the folder is writable.
const PROBE: &str = ".probe";
/// Contains the id of the launch that the checkpoints belong to. Restarts have the same id.
const LAUNCH: &str = ".launch";

/// Whether this launch has reached its first step in this output folder. Until then, its checkpoints belong to an
/// earlier run.
pub fn belongs_to(output_dir: &Path, launch_id: &str) -> bool {
    let mut text = String::new();
    let read =
        fs::File::open(output_dir.join(LAUNCH)).and_then(|file| file.take(1024).read_to_string(&mut text));
    read.is_ok() && text.trim_end() == launch_id
}

/// Creates the folder, takes its lock, and writes the holder into the lock file.
fn lock(dir: &Path) -> Result<LockFile, TrainError> {
    let path = dir.join(LOCK);
    match LockFile::try_take(&path).map_err(|(path, cause)| TrainError::Output { path, cause })? {
        Ok(lock) => {
            let (mut file, text) = (lock.file(), LockHolder::this().to_string());
            file.set_len(0).and_then(|()| file.write_all(text.as_bytes())).map_err(failed(&path))?;
            Ok(lock)
        }
        Err(held) => {
            let mut text = String::new();
            let _ = held.take(1024).read_to_string(&mut text);
            Err(TrainError::OutputLocked { dir: dir.into(), holder: LockHolder::parse(&text) })
        }
    }
}

/// The process that holds a lock, as written in the lock file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockHolder {
    pub pid: u32,
    pub host: String,
    /// Seconds since 1970.
    pub since: u64,
}

impl LockHolder {
    pub(crate) fn this() -> LockHolder {
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = host.trim();
        LockHolder {
            pid: std::process::id(),
            host: if host.is_empty() { "this host".into() } else { host.into() },
            since: now(),
        }
    }

    fn parse(text: &str) -> Option<LockHolder> {
        let mut words = text.split('\t');
        let (pid, host, since) = (words.next()?, words.next()?, words.next()?);
        let host = host.chars().filter(|c| !c.is_control()).collect();
        Some(LockHolder { pid: pid.parse().ok()?, host, since: since.trim().parse().ok()? })
    }

    /// Readable text: `pid 4121 on alpha, started 42 s ago`.
    pub(crate) fn described(&self) -> String {
        let ago = now().saturating_sub(self.since);
        format!("pid {} on {}, started {ago} s ago", self.pid, self.host)
    }
}

impl fmt::Display for LockHolder {
    /// The content of the lock file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\t{}\t{}", self.pid, self.host, self.since)
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> TrainError {
    let path = path.to_path_buf();
    move |cause| TrainError::Output { path, cause }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_round_trips_through_text() {
        let holder = LockHolder { pid: 7, host: "alpha".into(), since: 1_700_000_000 };
        assert_eq!(LockHolder::parse(&holder.to_string()), Some(holder));
        for incomplete in ["", "7", "7\talpha", "x\talpha\t1", "7\talpha\t"] {
            assert_eq!(LockHolder::parse(incomplete), None, "{incomplete:?}");
        }
    }
}
