//! The cache of one repository, as `huggingface_hub` lays it out:
//!
//! - `models--org--name/blobs/ETAG`: the content of files.
//! - `models--org--name/snapshots/COMMIT/FILE`: relative links to blobs.
//! - `models--org--name/refs/REVISION`: the commit that a branch or tag pointed to last.
//! - `.locks/models--org--name/ETAG.lock`: held while a blob is downloaded.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::HubError;
use crate::progress::DownloadProgress;
use crate::repo::{Repo, below, is_commit};

const LOCK_POLL: Duration = Duration::from_millis(100);
const MAX_REF_BYTES: u64 = 1024;

pub(crate) struct RepoCache {
    dir: PathBuf,
    locks: PathBuf,
}

impl RepoCache {
    pub(crate) fn new(hub: &Path, repo: &Repo) -> RepoCache {
        RepoCache { dir: hub.join(repo.folder()), locks: hub.join(".locks").join(repo.folder()) }
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.dir.join("snapshots").join(commit)
    }

    pub(crate) fn blob(&self, etag: &str) -> PathBuf {
        self.dir.join("blobs").join(etag)
    }

    /// The part of a blob that has been downloaded so far.
    pub(crate) fn incomplete(&self, etag: &str) -> PathBuf {
        self.dir.join("blobs").join(format!("{etag}.incomplete"))
    }

    /// Whether the snapshot has a file, with its content.
    pub(crate) fn has(&self, commit: &str, file: &str) -> bool {
        below(&self.snapshot(commit), file).is_file()
    }

    /// The commit of a revision, if the cache knows it and has a snapshot of it.
    pub(crate) fn commit_of(&self, revision: &str) -> Option<String> {
        let commit = if is_commit(revision) {
            revision.to_owned()
        } else {
            let mut text = String::new();
            let file = File::open(below(&self.dir.join("refs"), revision)).ok()?;
            file.take(MAX_REF_BYTES).read_to_string(&mut text).ok()?;
            text.trim().to_owned()
        };
        (is_commit(&commit) && self.snapshot(&commit).is_dir()).then_some(commit)
    }

    /// The files of a snapshot, sorted.
    pub(crate) fn files(&self, commit: &str) -> Result<Vec<String>, HubError> {
        let mut found = Vec::new();
        list(&self.snapshot(commit), "", &mut found)?;
        found.sort();
        Ok(found)
    }

    pub(crate) fn make_folders(&self, commit: &str) -> Result<(), HubError> {
        for dir in [self.dir.join("blobs"), self.snapshot(commit)] {
            fs::create_dir_all(&dir).map_err(writing(&dir))?;
        }
        Ok(())
    }

    /// Makes a blob a file of a snapshot.
    pub(crate) fn link(&self, commit: &str, file: &str, etag: &str) -> Result<(), HubError> {
        let path = below(&self.snapshot(commit), file);
        let dir = path.parent().unwrap_or(&self.dir);
        fs::create_dir_all(dir).map_err(writing(dir))?;
        if path.is_file() {
            return Ok(());
        }
        // From `snapshots/COMMIT/a/b.json` three folders up.
        let up = "../".repeat(2 + file.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{etag}"));
        // Created under another name first, so that a link that dangles is replaced atomically.
        let new = dir.join(format!(".{etag}.{}.new", std::process::id()));
        let _ = fs::remove_file(&new);
        make_link(&target, &self.blob(etag), &new).map_err(writing(&path))?;
        fs::rename(&new, &path).map_err(writing(&path))
    }

    /// Records which commit a revision points to. Written last: a revision in `refs` has been downloaded.
    pub(crate) fn write_ref(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if is_commit(revision) {
            return Ok(());
        }
        let path = below(&self.dir.join("refs"), revision);
        let dir = path.parent().unwrap_or(&self.dir);
        fs::create_dir_all(dir).map_err(writing(dir))?;
        let new = dir.join(format!(".ref.{}.new", std::process::id()));
        let written = File::create(&new).and_then(|mut file| {
            file.write_all(commit.as_bytes())?;
            file.sync_all()
        });
        written.and_then(|()| fs::rename(&new, &path)).map_err(writing(&path))
    }

    /// Waits until no other process downloads the blob. There is no deadline, because a large file takes hours: the
    /// system releases the lock when its holder ends, even by a crash.
    pub(crate) fn lock(&self, etag: &str, progress: &mut dyn DownloadProgress) -> Result<File, HubError> {
        fs::create_dir_all(&self.locks).map_err(writing(&self.locks))?;
        let path = self.locks.join(format!("{etag}.lock"));
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(writing(&path))?;
        let mut noted = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) if !noted => {
                    noted = true;
                    progress.note("another process is downloading this file; waiting for it");
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_POLL),
                Err(TryLockError::Error(source)) => return Err(HubError::Write { path, source }),
            }
        }
    }
}

fn list(dir: &Path, prefix: &str, found: &mut Vec<String>) -> Result<(), HubError> {
    let failed = |source| HubError::Read { path: dir.into(), source };
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        // The entry itself, not what it links to: folders in a snapshot are real.
        if entry.file_type().map_err(failed)?.is_dir() {
            list(&entry.path(), &format!("{prefix}{name}/"), found)?;
        } else if entry.path().is_file() {
            found.push(format!("{prefix}{name}"));
        }
    }
    Ok(())
}

#[cfg(unix)]
fn make_link(target: &Path, blob: &Path, new: &Path) -> io::Result<()> {
    // Some file systems have no links.
    std::os::unix::fs::symlink(target, new).or_else(|_| fs::copy(blob, new).map(drop))
}

#[cfg(not(unix))]
fn make_link(_: &Path, blob: &Path, new: &Path) -> io::Result<()> {
    fs::copy(blob, new).map(drop)
}

pub(crate) fn writing(path: &Path) -> impl FnOnce(io::Error) -> HubError + use<> {
    let path = path.to_path_buf();
    move |source| HubError::Write { path, source }
}
