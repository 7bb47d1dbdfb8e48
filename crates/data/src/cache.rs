//! Where prepared data lies, and who may write it.
//!
//! A file is named by a hash of all that decides its content: the data files, the tokenizer, the template,
//! the settings and the version of the format. So it never goes stale, and it need not be removed when
//! something changes. Whoever comes first holds a lock file while the data is made; others wait for the
//! lock and then find the file. A process that is killed gives the lock back, and what it left unfinished
//! is written over.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use crate::{DataError, DataSpec, Dataset, EncodeChat, Tokenizer, store};

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
        part(&fs::read(file)?);
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
    lock_path: PathBuf,
    lock: Option<File>,
    /// Folders made for it, the innermost first.
    made: Vec<PathBuf>,
}

impl Place {
    pub(crate) fn path_of(dir: &Path, key: &str) -> PathBuf {
        dir.join(format!("{key}.tokens"))
    }

    /// Waits until nobody else makes this file.
    pub(crate) fn take(dir: &Path, key: &str) -> Result<Place, DataError> {
        let made = dir.ancestors().take_while(|dir| !dir.as_os_str().is_empty() && !dir.exists());
        let mut place = Place {
            path: Place::path_of(dir, key),
            partial: dir.join(format!("{key}.partial")),
            lock_path: dir.join(format!("{key}.lock")),
            lock: None,
            made: made.map(Path::to_path_buf).collect(),
        };
        let mut vanished = 0;
        loop {
            let mut options = OpenOptions::new();
            options.create(true).truncate(false).write(true);
            let made = fs::create_dir_all(dir).map_err(|e| (dir, e));
            let opened =
                made.and_then(|()| options.open(&place.lock_path).map_err(|e| (&*place.lock_path, e)));
            let file = match opened {
                Ok(file) => file,
                // Another process has just removed the folder it had made. Not for ever: a link that leads
                // nowhere and a file in the folder's place look the same.
                Err((_, e))
                    if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists)
                        && vanished < 1000 =>
                {
                    vanished += 1;
                    continue;
                }
                Err((path, e)) => return Err(cannot_write(path)(e)),
            };
            // No deadline: the system gives the lock back when its holder ends, however it ends.
            file.lock().map_err(cannot_write(&place.lock_path))?;
            // Its last holder may have removed it between opening and locking.
            if same_file(&file, &place.lock_path).map_err(cannot_write(&place.lock_path))? {
                place.lock = Some(file);
                return Ok(place);
            }
        }
    }

    /// The file to write, and what it is called meanwhile.
    pub(crate) fn create(&self) -> Result<(File, &Path), DataError> {
        let file = File::create(&self.partial).map_err(cannot_write(&self.partial))?;
        Ok((file, &self.partial))
    }

    /// Gives the file that was written its name.
    pub(crate) fn keep(mut self) -> Result<PathBuf, DataError> {
        fs::rename(&self.partial, &self.path).map_err(cannot_write(&self.path))?;
        self.made.clear();
        if let Some(dir) = self.path.parent().filter(|_| cfg!(unix)) {
            File::open(dir).and_then(|dir| dir.sync_all()).map_err(cannot_write(dir))?;
        }
        Ok(self.path.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.lock.is_some() {
            let _ = fs::remove_file(&self.partial);
            // While the lock is held: whoever waits for it sees that the file is gone, and makes a new one.
            let _ = fs::remove_file(&self.lock_path);
        }
        for dir in &self.made {
            // Fails where something is inside, which is then there to stay.
            if fs::remove_dir(dir).is_err() {
                break;
            }
        }
    }
}

#[cfg(unix)]
fn same_file(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let held = file.metadata()?;
    match fs::metadata(path) {
        Ok(there) => Ok((held.dev(), held.ino()) == (there.dev(), there.ino())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(not(unix))]
fn same_file(_: &File, path: &Path) -> io::Result<bool> {
    path.try_exists()
}

fn cannot_write(path: &Path) -> impl FnOnce(io::Error) -> DataError {
    let path = path.to_path_buf();
    move |source| DataError::Write { path, source }
}
