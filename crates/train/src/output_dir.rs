//! The output directory: `checkpoints/`, `model/`, `logs/`, `metrics.jsonl`, and a lock while a run has it.
//!
//! A run that ends before its first step leaves the directory as it found it: what it made and did not
//! fill goes when the run lets go.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use lockstep_ckpt::CkptError;
use lockstep_config::{OutputConfig, Resume};

use crate::error::TrainError;

/// The directory, held by this run until dropped.
#[derive(Debug)]
pub(crate) struct OutputDir {
    path: PathBuf,
    /// Checkpoints of an earlier run are here, and may go.
    replaces: bool,
    lock: Option<File>,
    /// Folders this run made, the innermost first.
    made: Vec<PathBuf>,
}

impl OutputDir {
    /// Takes the directory. Refuses one with another run's checkpoints, unless this run resumes or says
    /// that they may go.
    pub(crate) fn take(output: &OutputConfig) -> Result<OutputDir, TrainError> {
        let path = output.output_dir.clone();
        let made: Vec<PathBuf> =
            path.ancestors().take_while(|dir| !dir.exists()).map(Path::to_path_buf).collect();
        let mut dir = OutputDir { path, replaces: false, lock: None, made };
        dir.lock = Some(lock(&dir.path)?);
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
        Ok(dir)
    }

    /// The directory as a rank sees it that leaves it to another.
    pub(crate) fn follow(output: &OutputConfig) -> OutputDir {
        OutputDir { path: output.output_dir.clone(), replaces: false, lock: None, made: Vec::new() }
    }

    /// Removes what must not stay beside a new run: checkpoints that are to be replaced, and what killed
    /// runs left unfinished. Called when nothing but training is left to do.
    pub(crate) fn sweep(&self) -> Result<(), TrainError> {
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
        Ok(())
    }

    /// What is in the way of the model folder is told now, not when the training is done.
    fn check_model_folder(&self) -> Result<(), TrainError> {
        let folder = self.model();
        let empty = || folder.read_dir().is_ok_and(|mut entries| entries.next().is_none());
        if folder.symlink_metadata().is_ok() && !folder.join("config.json").is_file() && !empty() {
            return Err(CkptError::WouldReplace { folder }.into());
        }
        Ok(())
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

impl Drop for OutputDir {
    fn drop(&mut self) {
        if self.lock.is_some() {
            // While the lock is held: whoever comes next makes a new file.
            let _ = fs::remove_file(self.path.join(LOCK));
        }
        for dir in &self.made {
            // Fails where something is inside, which is then there to stay.
            if fs::remove_dir(dir).is_err() {
                break;
            }
        }
    }
}

const LOCK: &str = ".lock";

/// Makes the directory, takes its lock and writes into that who has it.
fn lock(dir: &Path) -> Result<File, TrainError> {
    let path = dir.join(LOCK);
    let mut vanished = 0;
    loop {
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).read(true).write(true);
        let made = fs::create_dir_all(dir).map_err(|e| (dir, e));
        let opened = made.and_then(|()| options.open(&path).map_err(|e| (path.as_path(), e)));
        let mut file = match opened {
            Ok(file) => file,
            // Another rank made the directory for its data, failed, and has just removed it again. Not for
            // ever: a link that leads nowhere and a file in the directory's place look the same.
            Err((_, e))
                if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists)
                    && vanished < 1000 =>
            {
                vanished += 1;
                continue;
            }
            Err((path, e)) => return Err(failed(path)(e)),
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => {
                let mut text = String::new();
                let _ = file.take(1024).read_to_string(&mut text);
                return Err(TrainError::OutputLocked { dir: dir.into(), holder: Holder::parse(&text) });
            }
            Err(fs::TryLockError::Error(cause)) => return Err(TrainError::Output { path, cause }),
        }
        // The file may have been removed by the run that held it, between opening and locking.
        if !is_at(&file, &path).map_err(failed(&path))? {
            continue;
        }
        let text = Holder::this().to_string();
        file.set_len(0).and_then(|()| file.write_all(text.as_bytes())).map_err(failed(&path))?;
        return Ok(file);
    }
}

#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let held = file.metadata()?;
    match fs::metadata(path) {
        Ok(there) => Ok((held.dev(), held.ino()) == (there.dev(), there.ino())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(not(unix))]
fn is_at(_: &File, path: &Path) -> io::Result<bool> {
    path.try_exists()
}

/// Who holds a lock, as its file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub pid: u32,
    pub host: String,
    /// Seconds since 1970.
    pub since: u64,
}

impl Holder {
    fn this() -> Holder {
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = host.trim();
        Holder {
            pid: std::process::id(),
            host: if host.is_empty() { "this host".into() } else { host.into() },
            since: now(),
        }
    }

    fn parse(text: &str) -> Option<Holder> {
        let mut words = text.split('\t');
        let (pid, host, since) = (words.next()?, words.next()?, words.next()?);
        let host = host.chars().filter(|c| !c.is_control()).collect();
        Some(Holder { pid: pid.parse().ok()?, host, since: since.trim().parse().ok()? })
    }

    /// For people: `pid 4121 on alpha, started 42 s ago`.
    pub(crate) fn described(&self) -> String {
        let ago = now().saturating_sub(self.since);
        format!("pid {} on {}, started {ago} s ago", self.pid, self.host)
    }
}

impl fmt::Display for Holder {
    /// The line of the lock file.
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

    /// Another rank makes the directory for its data, fails, and removes it, while this one takes it.
    #[test]
    fn a_directory_that_comes_and_goes() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("runs/out");
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = fs::create_dir_all(&dir);
                    let _ = fs::remove_dir(&dir);
                    let _ = fs::remove_dir(dir.parent().unwrap());
                }
            });
            let taken = (0..200).try_for_each(|_| {
                let held = lock(&dir)?;
                fs::remove_file(dir.join(LOCK)).map_err(failed(&dir))?;
                drop(held);
                Ok::<(), TrainError>(())
            });
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            taken.unwrap();
        });
    }

    #[cfg(unix)]
    #[test]
    fn a_lock_that_leads_nowhere() {
        let root = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("nowhere/at/all", root.path().join(LOCK)).unwrap();
        let e = lock(root.path()).unwrap_err();
        assert!(matches!(&e, TrainError::Output { path, .. } if path.ends_with(LOCK)), "{e}");
    }

    #[test]
    fn a_holder_reads_back() {
        let holder = Holder { pid: 7, host: "alpha".into(), since: 1_700_000_000 };
        assert_eq!(Holder::parse(&holder.to_string()), Some(holder));
        for torn in ["", "7", "7\talpha", "x\talpha\t1", "7\talpha\t"] {
            assert_eq!(Holder::parse(torn), None, "{torn:?}");
        }
    }
}
