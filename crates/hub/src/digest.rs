//! The hashes by which the Hub names files: SHA-256 for files in large-file storage, git's blob SHA-1 for the others.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use sha1::{Digest, Sha1};
use sha2::Sha256;

use crate::repo::is_hex;

/// The hash that a file must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ContentHash {
    /// Of `blob LENGTH\0` and the content.
    GitSha1(String),
    Sha256(String),
}

impl ContentHash {
    /// The hash that an ETag is, if it is one.
    pub(crate) fn from_etag(etag: &str) -> Option<ContentHash> {
        if is_hex(etag, 40) {
            Some(ContentHash::GitSha1(etag.into()))
        } else if is_hex(etag, 64) {
            Some(ContentHash::Sha256(etag.into()))
        } else {
            None
        }
    }

    pub(crate) fn hex(&self) -> &str {
        let (ContentHash::GitSha1(hex) | ContentHash::Sha256(hex)) = self;
        hex
    }

    pub(crate) fn kind(&self) -> &'static str {
        match self {
            ContentHash::GitSha1(_) => "git hash",
            ContentHash::Sha256(_) => "SHA-256",
        }
    }

    /// The hash of the same kind that a file has.
    pub(crate) fn of_file(&self, path: &Path) -> io::Result<String> {
        let mut file = File::open(path)?;
        match self {
            ContentHash::GitSha1(_) => {
                let length = file.metadata()?.len();
                hash(&mut file, Sha1::new().chain_update(format!("blob {length}\0")))
            }
            ContentHash::Sha256(_) => hash(&mut file, Sha256::new()),
        }
    }
}

fn hash(file: &mut dyn Read, mut hasher: impl Digest) -> io::Result<String> {
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            Ok(length) => hasher.update(&buffer[..length]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// An ETag without its quotes and the mark of a weak one.
pub(crate) fn clean_etag(text: &str) -> &str {
    text.trim().trim_start_matches("W/").trim_matches('"')
}

/// Whether an ETag can be the name of a file in the cache.
pub(crate) fn is_safe_etag(etag: &str) -> bool {
    (1..=128).contains(&etag.len())
        && etag.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_git_and_sha256sum() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, "hello\n").unwrap();
        let of = |etag: &str| ContentHash::from_etag(etag).unwrap().of_file(&path).unwrap();
        assert_eq!(of(&"0".repeat(40)), "ce013625030ba8dba906f756967f9e9ca394464a");
        assert_eq!(of(&"0".repeat(64)), "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03");
    }

    #[test]
    fn etags() {
        assert_eq!(clean_etag("W/\"abc\""), "abc");
        assert_eq!(clean_etag("\"abc\""), "abc");
        assert_eq!(ContentHash::from_etag("abc-3"), None);
        assert_eq!(ContentHash::from_etag(&"G".repeat(40)), None);
        assert!(is_safe_etag("abc-3") && !is_safe_etag("../x") && !is_safe_etag("") && !is_safe_etag("a/b"));
    }
}
