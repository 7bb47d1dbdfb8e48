//! Chooses the device of a rank, and finds CUDA's libraries and the kernel cache through the environment, which only
//! this crate reads.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use lockstep_comm::Nccl;
use lockstep_config::{DeviceConfig, DeviceKind};
use lockstep_core::Bytes;
use lockstep_device::cuda::{self, CublasLt, Gpu, KernelCache, LibrarySearch, Nvrtc};
use lockstep_device::{Device, Machine};
use lockstep_launch::names;
use lockstep_train::CudaVersions;

use crate::gpu_of_rank::ordinal;
use crate::host;
use crate::report::{self, Failure};

/// The folders to search for CUDA's libraries.
pub(crate) fn search() -> LibrarySearch {
    let roots = Roots::read(&|name| std::env::var_os(name).filter(|value| !value.is_empty()));
    LibrarySearch::around(&roots.toolkits, &roots.pythons)
}

/// The folder of compiled kernels. `None` if this user has no cache folder: machine code is never loaded from a folder
/// that others can write to, nor from a path relative to the current folder.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    let in_cache = || Some(host::cache()?.join("lockstep").join("kernels"));
    host::folder(names::KERNEL_CACHE).or_else(in_cache).filter(|folder| folder.is_absolute())
}

/// The kernel cache, if its folder can be trusted. If not, kernels are not cached, and one rank per host prints why.
fn cache(prints: bool) -> Option<KernelCache> {
    let opened = KernelCache::open(&cache_folder()?);
    if let (Err(cause), true) = (&opened, prints) {
        report::print_aside(&format!("note: compiled kernels are not cached: {cause}\nhint: {CACHE_REMEDY}"));
    }
    opened.ok()
}

pub(crate) const CACHE_REMEDY: &str = "Remove that folder so that lockstep can create it again, or set XDG_CACHE_HOME to a \
     folder of your own. Until then, every run compiles its kernels again.";

/// Chooses the device: the requested one, or a GPU if there is one. A GPU that does not work is an error, even for
/// `auto`.
pub(crate) fn choose(kind: DeviceKind) -> Result<Device, Failure> {
    choose_for_rank(DeviceConfig { kind, share_gpus: false, tf32: false }, 0, 1)
}

/// Like [`choose`], for one of the ranks of a host.
pub(crate) fn choose_for_rank(device: DeviceConfig, local_rank: u32, ranks: u32) -> Result<Device, Failure> {
    let visible = if device.kind == DeviceKind::Cpu { 0 } else { count() };
    let ordinal = match (device.kind, visible) {
        (DeviceKind::Cpu, _) | (DeviceKind::Auto, 0) => return Ok(Device::Cpu),
        // Opening GPU 0 returns the reason why there is none.
        (_, 0) => 0,
        (_, gpus) => {
            ordinal(local_rank, ranks, gpus, device.share_gpus).map_err(|e| -> Failure { Box::new(e) })?
        }
    };
    let gpu = Gpu::open(ordinal, &search(), cache(local_rank == 0));
    gpu.map(Device::Cuda).map_err(|cause| -> Failure { Box::new(cause) })
}

/// The number of GPUs that the driver shows, which CUDA_VISIBLE_DEVICES may limit.
pub(crate) fn count() -> u32 {
    cuda::find_driver(&search()).map_or(0, |found| found.gpus.len() as u32)
}

/// The name and memory of the first GPU that the driver shows.
pub(crate) fn first() -> Option<(String, Bytes)> {
    let found = cuda::find_driver(&search()).ok()?;
    found.gpus.into_iter().next().map(|(name, _, memory)| (name, memory))
}

/// The first GPU and the versions of its libraries, as far as they can be found without using the GPU.
pub(crate) fn versions() -> CudaVersions {
    let search = search();
    let installed = cuda::find_driver(&search).ok();
    CudaVersions {
        gpu: installed.as_ref().and_then(|found| found.gpus.first()).map(|(name, sm, _)| (name.clone(), *sm)),
        driver: installed.as_ref().map(|found| found.driver_version),
        nvrtc: Nvrtc::open(&search).ok().map(|nvrtc| nvrtc.version),
        cublas_lt: CublasLt::find_library(&search).ok().map(|(version, _)| version),
        nccl: Nccl::open(&search).ok().map(Nccl::version_text),
    }
}

/// Whether the driver shows a GPU.
pub(crate) fn is_available() -> bool {
    count() > 0
}

/// The device in words, for the first line of a run.
pub(crate) fn description(machine: &Machine) -> String {
    match machine.device {
        Device::Cpu => format!("{} threads", machine.num_threads),
        Device::Cuda(gpu) => gpu.name.clone(),
    }
}

/// Folders that the environment names.
#[derive(Debug, PartialEq, Eq)]
struct Roots {
    /// CUDA toolkits.
    toolkits: Vec<PathBuf>,
    /// Python environments, whose packages contain libraries.
    pythons: Vec<PathBuf>,
}

impl Roots {
    fn read(variable: &dyn Fn(&str) -> Option<OsString>) -> Roots {
        let folder = |name| variable(name).map(PathBuf::from);
        let mut toolkits: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(folder).collect();
        let mut pythons: Vec<PathBuf> =
            ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(folder).collect();
        // Conda installs CUDA into its environment, laid out like a toolkit.
        toolkits.extend(folder("CONDA_PREFIX"));
        pythons.extend(variable("PATH").map_or_else(Vec::new, |path| python_prefixes(&path)));
        // The target of `pip install --user`.
        pythons.extend(folder("HOME").map(|home| home.join(".local")));
        Roots { toolkits: unique(toolkits), pythons: unique(pythons) }
    }
}

/// The prefix of the first `python3` in PATH: `/opt/env` for `/opt/env/bin/python3`. If that is a link, also the prefix
/// of its target, for packages that an environment shares with its base.
fn python_prefixes(path: &OsString) -> Vec<PathBuf> {
    let Some(python) = std::env::split_paths(path)
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join("python3"))
        .find(|python| python.is_file())
    else {
        return Vec::new();
    };
    let prefix = |python: &Path| python.parent()?.parent().map(Path::to_path_buf);
    let resolved = python.canonicalize().ok();
    [prefix(&python), resolved.as_deref().and_then(prefix)].into_iter().flatten().collect()
}

/// Removes repeated paths and keeps the first of each.
fn unique(paths: Vec<PathBuf>) -> Vec<PathBuf> {
    let mut seen: Vec<PathBuf> = Vec::with_capacity(paths.len());
    for path in paths {
        if !seen.contains(&path) {
            seen.push(path);
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_names_roots() {
        let read = |pairs: &[(&str, &str)]| {
            let pairs: Vec<(String, OsString)> =
                pairs.iter().map(|(name, value)| (name.to_string(), value.into())).collect();
            Roots::read(&|name| pairs.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone()))
        };
        assert_eq!(read(&[]), Roots { toolkits: vec![], pythons: vec![] });
        let all = read(&[
            ("CUDA_HOME", "/opt/cuda"),
            ("CUDA_PATH", "/opt/cuda"),
            ("VIRTUAL_ENV", "/opt/env"),
            ("CONDA_PREFIX", "/opt/conda"),
            ("PATH", "relative:/nowhere/bin"),
            ("HOME", "/home/me"),
        ]);
        assert_eq!(all.toolkits, [PathBuf::from("/opt/cuda"), PathBuf::from("/opt/conda")]);
        assert_eq!(all.pythons, ["/opt/env", "/opt/conda", "/home/me/.local"].map(PathBuf::from));
    }

    #[test]
    fn a_python_on_the_path_has_a_prefix() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (base, env) = (root.join("base"), root.join("env"));
        for folder in [&base, &env] {
            std::fs::create_dir_all(folder.join("bin")).unwrap();
        }
        std::fs::write(base.join("bin/python3"), "").unwrap();
        std::os::unix::fs::symlink(base.join("bin/python3"), env.join("bin/python3")).unwrap();
        let path = std::env::join_paths([root.join("nothing"), env.join("bin"), base.join("bin")]).unwrap();
        assert_eq!(python_prefixes(&path), [env, base]);
    }
}
