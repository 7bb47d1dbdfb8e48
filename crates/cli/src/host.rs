//! Facts about this process and this user's folders, from the system and the environment.

use std::path::{Path, PathBuf};

use lockstep_config::HubFolders;
use lockstep_core::Bytes;
use lockstep_hub::HubHome;
use rustix::fs::{Access, access};

/// The peak resident memory of this process, if `/proc` reports it.
pub(crate) fn peak_memory() -> Option<Bytes> {
    lockstep_device::ProcessMemory::read().map(|memory| memory.peak)
}

/// The caches of the Hugging Face libraries on this machine, from the environment variables that they read.
pub(crate) fn hub_folders() -> HubFolders {
    let home = HubHome::from_env(&|name| std::env::var_os(name));
    HubFolders { hub: home.hub, datasets: home.datasets }
}

/// The value of CUDA_VISIBLE_DEVICES, if it is set.
pub(crate) fn visible_gpus() -> Option<String> {
    std::env::var_os(lockstep_launch::names::CUDA_VISIBLE_DEVICES)
        .map(|list| list.to_string_lossy().into_owned())
}

/// The folder of prepared data that all runs of this user share, or why it cannot be used. Writes nothing.
pub(crate) fn data_cache() -> Result<PathBuf, String> {
    let cache = cache().filter(|cache| cache.is_absolute());
    let folder = cache.ok_or("neither XDG_CACHE_HOME nor HOME is an absolute path")?.join("lockstep/data");
    let existing = folder.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    if !existing.is_dir() {
        return Err(format!("{} is not a folder", existing.display()));
    }
    match access(existing, Access::WRITE_OK | Access::EXEC_OK) {
        Ok(()) => Ok(folder),
        Err(cause) => Err(format!("cannot write to {}: {}", existing.display(), std::io::Error::from(cause))),
    }
}

/// A private temporary folder, removed when it is dropped.
pub(crate) struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    pub(crate) fn create() -> std::io::Result<TemporaryFolder> {
        let seed =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let path = std::env::temp_dir().join(format!("lockstep-{}-{seed}", std::process::id()));
        // Fails if the name is taken, so that nobody else can prepare the folder.
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&path)?;
        Ok(TemporaryFolder(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// This user's cache folder.
pub(crate) fn cache() -> Option<PathBuf> {
    folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))
}

/// The path in an environment variable, if it is set and not empty.
pub(crate) fn folder(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from)
}
