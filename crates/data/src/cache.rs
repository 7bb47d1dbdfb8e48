//! The cache of prepared data, which all runs of a user may share.
//!
//! The name of a file is a hash of everything that determines its content: the content of the data files (not their
//! paths), the tokenizer, the template, the settings and the version of the format. So a file is never stale, and
//! another run with the same data finds it. The first process holds a lock file while it prepares the data; others wait
//! for the lock and then find the file. A process that is killed releases the lock, and the next one overwrites its
//! unfinished file.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::read::{FileKind, compression};
use crate::{DataError, DataSpec, Dataset, EncodeChat, LockFile, Tokenizer, content, store};

/// The name of the prepared data of `files`.
pub(crate) fn key(
    spec: &DataSpec,
    files: &[PathBuf],
    tokenizer: &Tokenizer,
    chat: Option<&dyn EncodeChat>,
) -> Result<String, DataError> {
    let mut hasher = blake3::Hasher::new();
    let mut part = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    part(&store::VERSION.to_le_bytes());
    part(tokenizer.fingerprint().as_bytes());
    part(chat.map(EncodeChat::fingerprint).unwrap_or_default().as_bytes());
    let DataSpec {
        task, max_length, packing, truncation, on_long_row, completion_only_loss, on_bad_row, ..
    } = spec;
    let settings = (task, max_length, packing, truncation, on_long_row, completion_only_loss, on_bad_row);
    part(format!("{settings:?} {:?} {:?}", spec.columns.renamed(), spec.part).as_bytes());
    for file in files {
        // The name determines the format.
        part(format!("{:?} {:?}", FileKind::of(file), compression(file)).as_bytes());
        let hash = content::hash(file, &spec.cache_dir);
        part(hash.map_err(|source| DataError::Read { path: file.clone(), source })?.as_bytes());
    }
    Ok(hasher.finalize().to_hex()[..32].to_string())
}

/// The result of looking for prepared data.
pub(crate) enum Lookup {
    Found(Box<Dataset>),
    Absent,
    /// The file is truncated or corrupt.
    Damaged(String),
}

pub(crate) fn lookup(path: &Path) -> Result<Lookup, DataError> {
    match Dataset::open(path) {
        Ok(dataset) => Ok(Lookup::Found(Box::new(dataset))),
        Err(e) => match e.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(Lookup::Absent),
            io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => Ok(Lookup::Damaged(e.to_string())),
            _ => Err(DataError::Read { path: path.into(), source: e }),
        },
    }
}

/// A cache entry that this process prepares. Holds the entry's lock; an unfinished file is removed on drop.
pub(crate) struct CacheEntry {
    path: PathBuf,
    partial: PathBuf,
    lock: LockFile,
}

impl CacheEntry {
    pub(crate) fn path_of(dir: &Path, key: &str) -> PathBuf {
        dir.join(format!("{key}.tokens"))
    }

    /// Waits until no other process prepares this entry.
    pub(crate) fn take(dir: &Path, key: &str) -> Result<CacheEntry, DataError> {
        let lock = LockFile::take(&dir.join(format!("{key}.lock")));
        let lock = lock.map_err(|(path, source)| DataError::Write { path, source })?;
        Ok(CacheEntry {
            path: CacheEntry::path_of(dir, key),
            partial: dir.join(format!("{key}.partial")),
            lock,
        })
    }

    /// Creates the file to write, and returns its temporary path.
    pub(crate) fn create(&self) -> Result<(File, &Path), DataError> {
        let file = File::create(&self.partial).map_err(cannot_write(&self.partial))?;
        Ok((file, &self.partial))
    }

    /// Renames the finished file to its final path.
    pub(crate) fn keep(mut self) -> Result<PathBuf, DataError> {
        fs::rename(&self.partial, &self.path).map_err(cannot_write(&self.path))?;
        self.lock.keep_folders();
        if let Some(dir) = self.path.parent().filter(|_| cfg!(unix)) {
            File::open(dir).and_then(|dir| dir.sync_all()).map_err(cannot_write(dir))?;
        }
        Ok(self.path.clone())
    }
}

impl Drop for CacheEntry {
    fn drop(&mut self) {
        // Remove the file before the lock is released, which removes empty folders.
        let _ = fs::remove_file(&self.partial);
    }
}

fn cannot_write(path: &Path) -> impl FnOnce(io::Error) -> DataError {
    let path = path.to_path_buf();
    move |source| DataError::Write { path, source }
}
