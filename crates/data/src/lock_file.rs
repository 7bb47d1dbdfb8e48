//! A lock file that one process at a time holds. Folders that are created for it are removed with it, if they are
//! still empty then.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// How often to retry when the folder disappears between its creation and the opening of the file. Another process
/// removes it when it releases its own lock. The limit is for dangling links and for files in place of the folder,
/// which look the same but never go away.
const MAX_RETRIES: u32 = 1000;

/// A lock that is held until it is dropped.
#[derive(Debug)]
pub struct LockFile {
    path: PathBuf,
    file: Option<File>,
    /// The folders that were created for the file, innermost first.
    made: Vec<PathBuf>,
}

/// The path that could not be opened or locked, and why.
pub type LockError = (PathBuf, io::Error);

impl LockFile {
    /// Takes the lock. If another process holds it, returns the open file, as its holder has written it.
    pub fn try_take(path: &Path) -> Result<Result<LockFile, File>, LockError> {
        let mut lock = LockFile::new(path);
        loop {
            let file = lock.open()?;
            match file.try_lock() {
                Ok(()) if is_at(&file, path).map_err(at(path))? => {
                    lock.file = Some(file);
                    return Ok(Ok(lock));
                }
                // The last holder removed the file after we opened it: open it again.
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(Err(file)),
                Err(TryLockError::Error(cause)) => return Err((path.into(), cause)),
            }
        }
    }

    /// Waits for the lock. There is no deadline: the system releases the lock when its holder exits, even by a crash.
    pub fn take(path: &Path) -> Result<LockFile, LockError> {
        let mut lock = LockFile::new(path);
        loop {
            let file = lock.open()?;
            file.lock().map_err(at(path))?;
            if is_at(&file, path).map_err(at(path))? {
                lock.file = Some(file);
                return Ok(lock);
            }
        }
    }

    /// The locked file, into which the holder can write who it is.
    pub fn file(&self) -> &File {
        self.file.as_ref().expect("a held lock has its file")
    }

    /// Keeps the folders that were created for the lock, because they now contain other files.
    pub fn keep_folders(&mut self) {
        self.made.clear();
    }

    fn new(path: &Path) -> LockFile {
        let folders = path.ancestors().skip(1);
        let made = folders.take_while(|dir| !dir.as_os_str().is_empty() && !dir.exists());
        LockFile { path: path.into(), file: None, made: made.map(Path::to_path_buf).collect() }
    }

    /// Opens the file, and creates its folder again whenever another process removes it.
    fn open(&self) -> Result<File, LockError> {
        let dir = self.path.parent().unwrap_or(Path::new("."));
        let mut retries = 0;
        loop {
            let mut options = OpenOptions::new();
            options.create(true).truncate(false).read(true).write(true);
            let made = if dir.as_os_str().is_empty() { Ok(()) } else { fs::create_dir_all(dir) };
            match made.map_err(at(dir)).and_then(|()| options.open(&self.path).map_err(at(&self.path))) {
                Err((_, e))
                    if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists)
                        && retries < MAX_RETRIES =>
                {
                    retries += 1;
                }
                opened => return opened,
            }
        }
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        if self.file.is_some() {
            // Remove the file while the lock is held: a waiting process then sees that it is gone and creates a new
            // one.
            let _ = fs::remove_file(&self.path);
        }
        for dir in &self.made {
            // Fails if the folder is not empty, and then it stays.
            if fs::remove_dir(dir).is_err() {
                break;
            }
        }
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> LockError {
    let path = path.to_path_buf();
    move |cause| (path, cause)
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// Another process creates and removes the folder while this one takes the lock.
    #[test]
    fn locking_succeeds_while_another_process_removes_the_folder() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("runs/out");
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let _ = fs::create_dir_all(&dir);
                    let _ = fs::remove_dir(&dir);
                    let _ = fs::remove_dir(dir.parent().unwrap());
                }
            });
            let taken = (0..200).try_for_each(|_| match LockFile::try_take(&dir.join("lock"))? {
                Ok(_) => Ok::<(), LockError>(()),
                Err(_) => unreachable!("nobody else takes it"),
            });
            done.store(true, Ordering::Relaxed);
            taken.unwrap();
        });
    }

    #[cfg(unix)]
    #[test]
    fn a_dangling_link_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("lock");
        std::os::unix::fs::symlink("nowhere/at/all", &path).unwrap();
        assert_eq!(LockFile::try_take(&path).unwrap_err().0, path);
        assert_eq!(LockFile::take(&path).unwrap_err().0, path);
    }

    #[test]
    fn the_lock_is_exclusive_and_leaves_no_files() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b/lock");
        let held = LockFile::try_take(&path).unwrap().unwrap();
        assert!(LockFile::try_take(&path).unwrap().is_err());
        drop(held);
        assert_eq!(root.path().read_dir().unwrap().count(), 0);
        let mut kept = LockFile::take(&path).unwrap();
        kept.keep_folders();
        drop(kept);
        assert!(path.parent().unwrap().exists() && !path.exists());
    }
}
