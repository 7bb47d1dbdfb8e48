//! Files of a run, read with care: another program may have put anything into the folder. Links are not followed, or they
//! would show any file of this user, and a pipe would never end.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::SystemTime;

use rustix::fs::OFlags;

/// What changes if a file changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    len: u64,
    inode: u64,
    pub(crate) modified: Option<SystemTime>,
}

/// `None`: there is no such file, or it is a link.
pub(crate) fn stamp(path: &Path) -> Option<Stamp> {
    let metadata = std::fs::symlink_metadata(path).ok()?;
    let is_plain = metadata.is_file() || metadata.is_dir();
    is_plain.then(|| Stamp { len: metadata.len(), inode: metadata.ino(), modified: metadata.modified().ok() })
}

/// Opens a file that is neither a link nor something else than a file.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file")),
    }
}

/// The text of a file of at most `max_bytes`.
pub(crate) fn read_text(path: &Path, max_bytes: u64) -> io::Result<String> {
    let file = open(path)?;
    if file.metadata()?.len() > max_bytes {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is too large"));
    }
    let mut bytes = Vec::new();
    file.take(max_bytes).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The whole lines in about the last `bytes` of a file.
pub(crate) fn last_lines(path: &Path, bytes: u64) -> io::Result<Vec<String>> {
    let mut file = open(path)?;
    let len = file.metadata()?.len();
    let start = len.saturating_sub(bytes);
    file.seek(SeekFrom::Start(start))?;
    let mut read = Vec::new();
    file.take(bytes).read_to_end(&mut read)?;
    let text = String::from_utf8_lossy(&read);
    let whole = match (start, text.split_once('\n')) {
        (1.., Some((_, whole))) => whole,
        _ => &text,
    };
    Ok(whole.lines().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("secret"), "one\ntwo\nthree\n").unwrap();
        std::os::unix::fs::symlink(path("secret"), path("link")).unwrap();
        assert!(open(&path("link")).is_err() && stamp(&path("link")).is_none());
        assert!(open(dir.path()).is_err() && stamp(&path("secret")).is_some());
        assert_eq!(last_lines(&path("secret"), 8).unwrap(), ["three"]);
        assert_eq!(last_lines(&path("secret"), 100).unwrap(), ["one", "two", "three"]);
        assert!(read_text(&path("secret"), 5).is_err());
        assert_eq!(read_text(&path("secret"), 50).unwrap().len(), 14);
    }
}
