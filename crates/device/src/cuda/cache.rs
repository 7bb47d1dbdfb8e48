//! The on-disk cache of compiled kernels, so that a run need not compile what an earlier run has compiled.
//!
//! Cached code runs on the GPU with the rights of the run. It is therefore loaded only from a folder that nobody else
//! can write to, and only if it is intact: every file starts with a hash of its name and content.

use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, fchmod, open, openat, renameat, unlinkat};

/// Why a folder cannot be the kernel cache.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelCacheError {
    #[error("{} cannot be created or opened: {cause}", folder.display())]
    Open { folder: PathBuf, cause: io::Error },
    #[error("{} belongs to user {owner}, not to this user ({user})", folder.display())]
    WrongOwner { folder: PathBuf, owner: u32, user: u32 },
    #[error("others can write to {} (its mode is {mode:03o})", folder.display())]
    WritableByOthers { folder: PathBuf, mode: u32 },
}

/// A folder of compiled kernels that only this user can write to.
#[derive(Debug)]
pub struct KernelCache {
    folder: PathBuf,
    /// The folder that was checked, even if its path leads elsewhere later.
    opened: File,
}

/// Larger files are truncated on reading, and so fail the hash check.
const MAX_BYTES: u64 = 64 << 20;

const HASH_BYTES: usize = blake3::OUT_LEN;

impl KernelCache {
    /// Creates the folder if it is missing, and checks that it belongs to this user alone.
    pub fn open(folder: &Path) -> Result<KernelCache, KernelCacheError> {
        let failed = |cause: io::Error| KernelCacheError::Open { folder: folder.to_path_buf(), cause };
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = File::from(open(folder, flags, Mode::empty()).map_err(|e| failed(e.into()))?);
        let found = opened.metadata().map_err(failed)?;
        let (user, owner, mode) = (this_user(), found.uid(), found.mode() & 0o777);
        if owner != user {
            return Err(KernelCacheError::WrongOwner { folder: folder.to_path_buf(), owner, user });
        }
        if mode & 0o022 != 0 {
            return Err(KernelCacheError::WritableByOthers { folder: folder.to_path_buf(), mode });
        }
        if mode != 0o700 {
            fchmod(&opened, Mode::RWXU).map_err(|e| failed(e.into()))?;
        }
        Ok(KernelCache { folder: folder.to_path_buf(), opened })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Loads the code that was stored under `name`. Files that are damaged or not ours count as missing.
    pub(crate) fn load(&self, name: &str) -> Option<Vec<u8>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(&self.opened, name, flags, Mode::empty()).ok()?);
        let found = file.metadata().ok()?;
        if found.uid() != this_user() || found.mode() & 0o022 != 0 || !found.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
        let (hash, code) = bytes.split_at_checked(HASH_BYTES)?;
        (hash == hash_of(name, code).as_bytes()).then(|| code.to_vec())
    }

    /// Stores code under `name`. Best effort: if it fails, the next run compiles again.
    pub(crate) fn store(&self, name: &str, code: &[u8]) {
        // Another thread or process may be writing the same file.
        let writer = (std::process::id(), std::thread::current().id());
        let partial = format!("{name}.{writer:?}.partial");
        let written = self
            .write(&partial, &[hash_of(name, code).as_bytes(), code])
            .and_then(|()| Ok(renameat(&self.opened, &partial, &self.opened, name)?));
        if written.is_err() {
            let _ = unlinkat(&self.opened, &partial, AtFlags::empty());
        }
    }

    fn write(&self, name: &str, parts: &[&[u8]]) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(openat(&self.opened, name, flags, Mode::RUSR | Mode::WUSR)?);
        parts.iter().try_for_each(|part| file.write_all(part))
    }
}

fn this_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The file name is a hash of everything the code was compiled from, so the name is verified too.
fn hash_of(name: &str, code: &[u8]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes()).update(code);
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn folder_and_files_belong_to_this_user_alone() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("made/lockstep/kernels");
        let cache = KernelCache::open(&folder).unwrap();
        cache.store("a.cubin", b"code");
        assert_eq!(cache.load("a.cubin").as_deref(), Some(&b"code"[..]));
        assert_eq!((mode(&folder), mode(&folder.join("a.cubin"))), (0o700, 0o600));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "no partial file is left");
        // Read permission for others is removed.
        set_mode(&folder, 0o755);
        KernelCache::open(&folder).unwrap();
        assert_eq!(mode(&folder), 0o700);
    }

    #[test]
    fn folders_that_others_can_write_to_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("kernels");
        std::fs::create_dir(&folder).unwrap();
        for shared in [0o775, 0o757, 0o1777] {
            set_mode(&folder, shared);
            let refused = KernelCache::open(&folder).unwrap_err();
            assert!(matches!(refused, KernelCacheError::WritableByOthers { .. }), "{shared:o}: {refused}");
        }
        set_mode(&folder, 0o700);
        let link = dir.path().join("link");
        symlink(&folder, &link).unwrap();
        assert!(matches!(KernelCache::open(&link), Err(KernelCacheError::Open { .. })));
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(matches!(KernelCache::open(&file), Err(KernelCacheError::Open { .. })));
        // Only root can change a folder's owner.
        match this_user() {
            0 => std::os::unix::fs::chown(&folder, Some(12345), None).unwrap(),
            _ => return,
        }
        assert!(matches!(KernelCache::open(&folder), Err(KernelCacheError::WrongOwner { owner: 12345, .. })));
    }

    #[test]
    fn damaged_or_foreign_files_are_not_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("kernels");
        let cache = KernelCache::open(&folder).unwrap();
        let (kept, path) = (|| cache.store("a", b"code"), folder.join("a"));
        let whole = {
            kept();
            std::fs::read(&path).unwrap()
        };
        let found = || cache.load("a");
        for i in [0, HASH_BYTES, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[i] ^= 1;
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(found(), None, "byte {i} differs");
        }
        for len in [0, 5, HASH_BYTES, whole.len() - 1] {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert_eq!(found(), None, "truncated to {len}");
        }
        cache.store("b", b"other");
        std::fs::copy(folder.join("b"), &path).unwrap();
        assert_eq!(found(), None, "stored under another name");
        std::fs::remove_file(&path).unwrap();
        symlink(folder.join("b"), &path).unwrap();
        assert_eq!(found(), None, "a symbolic link");
        kept();
        assert!(found().is_some(), "it is stored again");
        set_mode(&path, 0o666);
        assert_eq!(found(), None, "writable by others");
    }
}
