//! What the system says of this process.

use std::path::{Path, PathBuf};

use lockstep_config::HubFolders;
use lockstep_core::Bytes;

/// The most memory that was resident at any time. `None` where `/proc` does not say.
pub(crate) fn peak_memory() -> Option<Bytes> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?.trim().strip_suffix("kB")?;
    Some(Bytes(kib.trim().parse::<u64>().ok()? << 10))
}

/// Where Hugging Face libraries keep data sets on this machine, by the environment variables they read.
pub(crate) fn hub_folders() -> HubFolders {
    let home = folder("HF_HOME").or_else(|| Some(cache()?.join("huggingface"))).unwrap_or_default();
    HubFolders {
        hub: folder("HF_HUB_CACHE")
            .or_else(|| folder("HUGGINGFACE_HUB_CACHE"))
            .unwrap_or_else(|| home.join("hub")),
        datasets: folder("HF_DATASETS_CACHE").unwrap_or_else(|| home.join("datasets")),
    }
}

/// Whether Hugging Face libraries would find a token; where they look.
pub(crate) fn has_hub_token() -> bool {
    let in_environment = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"].iter().any(|name| folder(name).is_some());
    let home = folder("HF_HOME").or_else(|| Some(cache()?.join("huggingface")));
    let file = folder("HF_TOKEN_PATH").or_else(|| Some(home?.join("token")));
    in_environment || file.is_some_and(|file| file.metadata().is_ok_and(|file| file.len() > 0))
}

/// The GPUs that a process is shown, where somebody has said.
pub(crate) fn visible_gpus() -> Option<String> {
    std::env::var_os(lockstep_launch::names::CUDA_VISIBLE_DEVICES)
        .map(|list| list.to_string_lossy().into_owned())
}

/// A folder for data that can be prepared again: the user's cache folder or, if there is none, a private temporary folder
/// that is removed when the process ends.
pub(crate) enum CacheFolder {
    Kept(PathBuf),
    Temporary(PathBuf),
}

impl CacheFolder {
    pub(crate) fn open() -> std::io::Result<CacheFolder> {
        if let Some(cache) = cache() {
            return Ok(CacheFolder::Kept(cache.join("lockstep")));
        }
        let seed =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let path = std::env::temp_dir().join(format!("lockstep-{}-{seed}", std::process::id()));
        // Fails if somebody has made one of this name.
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&path)?;
        Ok(CacheFolder::Temporary(path))
    }

    pub(crate) fn path(&self) -> &Path {
        let (CacheFolder::Kept(path) | CacheFolder::Temporary(path)) = self;
        path
    }
}

impl Drop for CacheFolder {
    fn drop(&mut self) {
        if let CacheFolder::Temporary(path) = self {
            let _ = std::fs::remove_dir_all(path);
        }
    }
}

/// Where programs keep what they can make again.
pub(crate) fn cache() -> Option<PathBuf> {
    folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))
}

/// A folder that an environment variable names.
fn folder(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from)
}
