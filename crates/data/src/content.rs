//! The content hash of a data file, by which prepared data is found: a moved or copied file has the same hash, and a
//! changed one has another.
//!
//! Reading a large file takes seconds on every start and on every rank. So the hash of a large file is stored in the
//! cache folder, under the file's path, size, inode and modification time. One process computes it while the others
//! wait. If the cache folder cannot be written to, every process computes it.

use std::fs::{self, File, Metadata};
use std::io;
use std::path::Path;
use std::time::UNIX_EPOCH;

use crate::LockFile;

/// Smaller files are read every time.
const STORED_BYTES: u64 = 1 << 20;

/// The folder of stored hashes in the cache folder.
const FOLDER: &str = "hashes";

/// The BLAKE3 hash of a file's content, in hex.
pub(crate) fn hash(file: &Path, cache_dir: &Path) -> io::Result<String> {
    let found = file.metadata()?;
    if found.len() <= STORED_BYTES {
        return read_and_hash(file);
    }
    let stored = cache_dir.join(FOLDER).join(identity(file, &found)?);
    if let Some(hash) = read_stored(&stored) {
        return Ok(hash);
    }
    let Ok(mut lock) = LockFile::take(&stored.with_extension("lock")) else { return read_and_hash(file) };
    if let Some(hash) = read_stored(&stored) {
        return Ok(hash);
    }
    let hash = read_and_hash(file)?;
    let partial = stored.with_extension("partial");
    match fs::write(&partial, &hash).and_then(|()| fs::rename(&partial, &stored)) {
        Ok(()) => lock.keep_folders(),
        // The hash is right, whether it is stored or not.
        Err(_) => drop(fs::remove_file(&partial)),
    }
    Ok(hash)
}

/// Identifies a version of a file without reading it.
fn identity(file: &Path, found: &Metadata) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let changed = found.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    hasher.update(file.canonicalize()?.as_os_str().as_encoded_bytes());
    hasher.update(&[0]);
    hasher.update(&found.len().to_le_bytes());
    hasher.update(&changed.to_le_bytes());
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        hasher.update(&found.ino().to_le_bytes());
    }
    Ok(hasher.finalize().to_hex()[..32].to_string())
}

fn read_and_hash(file: &Path) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(file)?)?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// A stored hash. A file with anything else in it counts as missing.
fn read_stored(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    (text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit())).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_file_is_read_once_and_known_by_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let [file, copy, cache] = ["a.txt", "copy.txt", "cache"].map(|name| dir.path().join(name));
        let mut content = vec![b'x'; STORED_BYTES as usize + 1];
        fs::write(&file, &content).unwrap();
        fs::copy(&file, &copy).unwrap();
        let expected = blake3::hash(&content).to_hex().to_string();
        assert_eq!(hash(&file, &cache).unwrap(), expected);
        assert_eq!(hash(&copy, &cache).unwrap(), expected);
        let stored: Vec<_> = fs::read_dir(cache.join(FOLDER)).unwrap().map(|f| f.unwrap().path()).collect();
        assert_eq!(stored.len(), 2, "no lock or partial file is left: {stored:?}");
        // Stored hashes are used, unless they are damaged.
        let of_file = cache.join(FOLDER).join(identity(&file, &file.metadata().unwrap()).unwrap());
        fs::write(&of_file, "0".repeat(64)).unwrap();
        assert_eq!(hash(&file, &cache).unwrap(), "0".repeat(64));
        fs::write(&of_file, "0").unwrap();
        assert_eq!(hash(&file, &cache).unwrap(), expected);
        content[0] = b'y';
        content.push(b'y');
        fs::write(&file, &content).unwrap();
        assert_ne!(hash(&file, &cache).unwrap(), expected);
    }

    #[test]
    fn a_cache_that_cannot_be_written_to_is_not_needed() {
        let dir = tempfile::tempdir().unwrap();
        let (file, cache) = (dir.path().join("a.txt"), dir.path().join("cache"));
        let content = vec![b'x'; STORED_BYTES as usize + 1];
        fs::write(&file, &content).unwrap();
        // A file in its place, because root may write to any folder.
        fs::write(&cache, "").unwrap();
        assert_eq!(hash(&file, &cache).unwrap(), blake3::hash(&content).to_hex().to_string());
    }
}
