//! A file that one process at a time holds, in folders that are made for it and go with it if nothing else came in.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// How often the folder may vanish between its making and the opening of the file. Others who made it and have
/// nothing to keep remove it; but a link that leads nowhere and a file in the folder's place look the same, for ever.
const MOST_VANISHINGS: u32 = 1000;

/// A lock, held until dropped.
#[derive(Debug)]
pub struct LockFile {
    path: PathBuf,
    file: Option<File>,
    /// Folders made for it, the innermost first.
    made: Vec<PathBuf>,
}

/// What could not be done, and where.
pub type LockError = (PathBuf, io::Error);

impl LockFile {
    /// Takes the lock, or gives the file as whoever holds it has written it.
    pub fn try_take(path: &Path) -> Result<Result<LockFile, File>, LockError> {
        let mut lock = LockFile::new(path);
        loop {
            let file = lock.open()?;
            match file.try_lock() {
                Ok(()) if is_at(&file, path).map_err(at(path))? => {
                    lock.file = Some(file);
                    return Ok(Ok(lock));
                }
                // Its last holder has removed it between opening and locking.
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(Err(file)),
                Err(TryLockError::Error(cause)) => return Err((path.into(), cause)),
            }
        }
    }

    /// Waits until nobody else holds it. No deadline: the system gives it back when its holder ends, however it ends.
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

    /// The file, to write into it who holds it.
    pub fn file(&self) -> &File {
        self.file.as_ref().expect("a lock that was taken has its file")
    }

    /// Something else is in the folders: they stay.
    pub fn keep_folders(&mut self) {
        self.made.clear();
    }

    fn new(path: &Path) -> LockFile {
        let folders = path.ancestors().skip(1);
        let made = folders.take_while(|dir| !dir.as_os_str().is_empty() && !dir.exists());
        LockFile { path: path.into(), file: None, made: made.map(Path::to_path_buf).collect() }
    }

    /// Opens the file, in a folder that is made again as often as others remove it.
    fn open(&self) -> Result<File, LockError> {
        let dir = self.path.parent().unwrap_or(Path::new("."));
        let mut vanishings = 0;
        loop {
            let mut options = OpenOptions::new();
            options.create(true).truncate(false).read(true).write(true);
            let made = if dir.as_os_str().is_empty() { Ok(()) } else { fs::create_dir_all(dir) };
            match made.map_err(at(dir)).and_then(|()| options.open(&self.path).map_err(at(&self.path))) {
                Err((_, e))
                    if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists)
                        && vanishings < MOST_VANISHINGS =>
                {
                    vanishings += 1;
                }
                opened => return opened,
            }
        }
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        if self.file.is_some() {
            // While the lock is held: whoever waits for it sees that the file is gone, and makes a new one.
            let _ = fs::remove_file(&self.path);
        }
        for dir in &self.made {
            // Fails where something is inside, which is then there to stay.
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

    /// Another process makes the folder, fails, and removes it, while this one takes the lock.
    #[test]
    fn a_folder_that_comes_and_goes() {
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
    fn a_lock_that_leads_nowhere() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("lock");
        std::os::unix::fs::symlink("nowhere/at/all", &path).unwrap();
        assert_eq!(LockFile::try_take(&path).unwrap_err().0, path);
        assert_eq!(LockFile::take(&path).unwrap_err().0, path);
    }

    #[test]
    fn one_at_a_time_and_nothing_stays() {
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
