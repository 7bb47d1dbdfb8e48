//! Where prepared data lies, and who may write it.
//!
//! A file is named by a hash of all that decides its content: the data files, the tokenizer, the template,
//! the settings and the version of the format. So it never goes stale, and it need not be removed when
//! something changes. Whoever comes first holds a lock file while the data is made; others wait for the
//! lock and then find the file. A process that is killed gives the lock back, and what it left unfinished
//! is written over.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use crate::{DataError, DataSpec, Dataset, EncodeChat, LockFile, Tokenizer, store};

/// Files up to this size are known by their content, larger ones by size and time of change.
const HASHED_BYTES: u64 = 1 << 20;

/// The name of what `spec` comes to over `files`.
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
    let DataSpec { max_length, packing, truncation, on_long_row, completion_only_loss, on_bad_row, .. } =
        spec;
    let settings = (max_length, packing, truncation, on_long_row, completion_only_loss, on_bad_row);
    part(format!("{settings:?} {:?} {:?}", spec.columns.renamed(), spec.part).as_bytes());
    for file in files {
        part(file.as_os_str().as_encoded_bytes());
        identity(file, &mut part).map_err(|source| DataError::Read { path: file.clone(), source })?;
    }
    Ok(hasher.finalize().to_hex()[..32].to_string())
}

fn identity(file: &Path, part: &mut dyn FnMut(&[u8])) -> io::Result<()> {
    let found = file.metadata()?;
    part(&found.len().to_le_bytes());
    if found.len() <= HASHED_BYTES {
        let mut content = Vec::new();
        fs::File::open(file)?.take(HASHED_BYTES).read_to_end(&mut content)?;
        part(&content);
        return Ok(());
    }
    part(file.canonicalize()?.as_os_str().as_encoded_bytes());
    let changed = found.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
    part(&changed.as_nanos().to_le_bytes());
    Ok(())
}

/// What a cache has under a key.
pub(crate) enum Looked {
    Found(Box<Dataset>),
    Absent,
    /// There is a file, and it cannot be used.
    Damaged(String),
}

pub(crate) fn look(path: &Path) -> Result<Looked, DataError> {
    match Dataset::open(path) {
        Ok(dataset) => Ok(Looked::Found(Box::new(dataset))),
        Err(e) => match e.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(Looked::Absent),
            io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => Ok(Looked::Damaged(e.to_string())),
            _ => Err(DataError::Read { path: path.into(), source: e }),
        },
    }
}

/// The right to make one prepared file. What was made and not kept goes when it is dropped.
pub(crate) struct Place {
    path: PathBuf,
    partial: PathBuf,
    lock: LockFile,
}

impl Place {
    pub(crate) fn path_of(dir: &Path, key: &str) -> PathBuf {
        dir.join(format!("{key}.tokens"))
    }

    /// Waits until nobody else makes this file.
    pub(crate) fn take(dir: &Path, key: &str) -> Result<Place, DataError> {
        let lock = LockFile::take(&dir.join(format!("{key}.lock")));
        let lock = lock.map_err(|(path, source)| DataError::Write { path, source })?;
        Ok(Place { path: Place::path_of(dir, key), partial: dir.join(format!("{key}.partial")), lock })
    }

    /// The file to write, and what it is called meanwhile.
    pub(crate) fn create(&self) -> Result<(File, &Path), DataError> {
        let file = File::create(&self.partial).map_err(cannot_write(&self.partial))?;
        Ok((file, &self.partial))
    }

    /// Gives the file that was written its name.
    pub(crate) fn keep(mut self) -> Result<PathBuf, DataError> {
        fs::rename(&self.partial, &self.path).map_err(cannot_write(&self.path))?;
        self.lock.keep_folders();
        if let Some(dir) = self.path.parent().filter(|_| cfg!(unix)) {
            File::open(dir).and_then(|dir| dir.sync_all()).map_err(cannot_write(dir))?;
        }
        Ok(self.path.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Before the lock goes, and the folders with it.
        let _ = fs::remove_file(&self.partial);
    }
}

fn cannot_write(path: &Path) -> impl FnOnce(io::Error) -> DataError {
    let path = path.to_path_buf();
    move |source| DataError::Write { path, source }
}
