//! The driver, its GPUs, and the libraries that training on them needs.

use std::path::{Path, PathBuf};

use lockstep_comm::Nccl;
use lockstep_core::{Bytes, Fault};
use lockstep_device::cuda::{
    CublasLt, DriverInfo, GpuError, KernelCache, LibrarySearch, Nvrtc, find_driver, library,
};

use super::{Finding, Status};
use crate::{gpu, host};

/// The GPUs of this machine.
pub(super) struct Gpus {
    pub(super) findings: Vec<Finding>,
    /// GPUs that are new enough.
    pub(super) num_usable: usize,
    /// Whether one rank on one GPU can train.
    pub(super) works: bool,
}

/// The oldest generation that works: 80 is 8.0.
const OLDEST: u32 = 80;

pub(super) fn check() -> Gpus {
    let search = gpu::search();
    let driver = find_driver(&search);
    let gpus = driver.as_ref().map_or(&[][..], |installed| &installed.gpus);
    let num_usable = gpus.iter().filter(|(_, sm, _)| *sm >= OLDEST).count();
    let mut findings = vec![driver_finding(&driver)];
    findings.extend(gpus.iter().enumerate().map(gpu_finding));
    let libraries = [
        library_finding("NVRTC", nvrtc(&search), num_usable > 0),
        library_finding("cuBLASLt", cublas(&search), num_usable > 0),
    ];
    let works = num_usable > 0 && libraries.iter().all(|finding| finding.status == Status::Ok);
    findings.extend(libraries);
    findings.push(library_finding("NCCL", nccl(&search), num_usable > 1));
    findings.push(library_finding("cuDNN", cudnn(&search), false));
    if num_usable > 0 {
        findings.push(kernels(gpu::cache_folder()));
    }
    Gpus { findings, num_usable, works }
}

fn driver_finding(driver: &Result<DriverInfo, GpuError>) -> Finding {
    const PART: &str = "NVIDIA driver";
    let module = std::fs::read_to_string("/proc/driver/nvidia/version").ok();
    match driver {
        Ok(DriverInfo { driver_version: version, driver_path: path, gpus }) => {
            let release = module.as_deref().and_then(release).map_or_else(String::new, |r| format!("{r}, "));
            let found =
                format!("{release}CUDA {}.{}, {}", version / 1000, version % 1000 / 10, path.display());
            match gpus.is_empty() {
                true => Finding::warn(PART, format!("{found}; it shows no GPU"), visible()),
                false => Finding::ok(PART, found),
            }
        }
        // A machine without a GPU needs no driver.
        Err(GpuError::LibraryMissing { .. }) if module.is_none() && !Path::new("/dev/nvidiactl").exists() => {
            Finding::none(PART, "not found: there is no NVIDIA GPU, or its driver is not installed")
        }
        Err(cause @ GpuError::LibraryMissing { .. }) => {
            let remedy = "The kernel module is loaded, but libcuda.so.1 is missing. Start the container with --gpus \
                          all and NVIDIA's container toolkit, or add its folder to LD_LIBRARY_PATH.";
            Finding::warn(PART, cause.to_string(), remedy)
        }
        Err(cause @ GpuError::Call { .. }) => {
            Finding::warn(PART, cause.to_string(), format!("{} Run `nvidia-smi` for details.", visible()))
        }
        Err(cause) => Finding::warn(PART, cause.to_string(), cause.hint().unwrap_or_default()),
    }
}

/// Why the driver may show no GPU.
fn visible() -> String {
    match host::visible_gpus() {
        Some(list) => format!("CUDA_VISIBLE_DEVICES is \"{list}\", which limits the visible GPUs."),
        None => "The driver works, but finds no GPU that it can use.".into(),
    }
}

/// The version of the kernel module: the first word of digits and dots.
fn release(text: &str) -> Option<String> {
    let is_release = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    Some(text.lines().next()?.split_whitespace().find(is_release)?.to_string())
}

fn gpu_finding((ordinal, (name, sm, memory)): (usize, &(String, u32, Bytes))) -> Finding {
    let part = format!("GPU {ordinal}");
    let found = format!("{name}, compute capability {}.{}, {memory}", sm / 10, sm % 10);
    if *sm < OLDEST {
        return Finding::warn(
            part,
            found,
            "GPUs below compute capability 8.0 are not supported. Use CUDA_VISIBLE_DEVICES to leave it out.",
        );
    }
    Finding::ok(part, found)
}

fn library_finding(part: &str, found: Result<String, GpuError>, needed: bool) -> Finding {
    match found {
        Ok(found) => Finding::ok(part, found),
        Err(GpuError::LibraryMissing { .. }) if !needed => {
            Finding::none(part, "not found, and not needed here")
        }
        Err(cause) if !needed => Finding::none(part, cause.to_string()),
        Err(cause) => Finding::warn(part, cause.to_string(), remedy(part)),
    }
}

fn remedy(part: &str) -> String {
    let package = match part {
        "NVRTC" => "nvidia-cuda-nvrtc",
        "cuBLASLt" => "nvidia-cublas",
        _ => "nvidia-nccl-cu13 (or -cu12)",
    };
    format!(
        "Install the CUDA toolkit and set CUDA_HOME, or run `pip install {package}` in an active Python environment. \
         Without it, training cannot use {}.",
        if part == "NCCL" { "several GPUs" } else { "a GPU" }
    )
}

fn nvrtc(search: &LibrarySearch) -> Result<String, GpuError> {
    let nvrtc = Nvrtc::open(search)?;
    let (major, minor) = nvrtc.version;
    Ok(format!("{major}.{minor}, {}", nvrtc.path().display()))
}

fn cublas(search: &LibrarySearch) -> Result<String, GpuError> {
    let (version, path) = CublasLt::find_library(search)?;
    Ok(format!("{}.{}.{}, {}", version / 10_000, version / 100 % 100, version % 100, path.display()))
}

fn nccl(search: &LibrarySearch) -> Result<String, GpuError> {
    let nccl = Nccl::open(search)?;
    Ok(format!("{}, {}", nccl.version_text(), nccl.path().display()))
}

/// Not used. Listed to help compare with other programs.
fn cudnn(search: &LibrarySearch) -> Result<String, GpuError> {
    Ok(library::open("cuDNN", &["libcudnn.so.9"], search)?.path.display().to_string())
}

/// The cache of compiled kernels.
fn kernels(folder: Option<PathBuf>) -> Finding {
    match folder {
        // It is created on first use.
        Some(folder) if !folder.exists() => Finding::ok("kernel cache", folder.display().to_string()),
        Some(folder) => match KernelCache::open(&folder) {
            Ok(cache) => Finding::ok("kernel cache", cache.folder().display().to_string()),
            Err(cause) => Finding::warn("kernel cache", cause.to_string(), gpu::CACHE_REMEDY),
        },
        None => {
            let remedy = "Set HOME or XDG_CACHE_HOME. Without a cache, every run compiles its kernels again.";
            Finding::warn("kernel cache", "there is no cache folder", remedy)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_kernel_cache_that_is_not_used_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("kernels");
        assert_eq!(kernels(Some(folder.clone())).status, Status::Ok);
        assert!(!folder.exists(), "the check creates nothing");
        std::fs::create_dir(&folder).unwrap();
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o777)).unwrap();
        let found = kernels(Some(folder));
        assert!(found.status == Status::Warn && found.found.contains("others can write"), "{}", found.found);
        assert_eq!(kernels(None).status, Status::Warn);
    }

    #[test]
    fn releases_are_found_in_the_line_of_the_module() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@a)\nGCC 13.2";
        assert_eq!(release(open).as_deref(), Some("580.65.06"));
        assert_eq!(
            release("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat").as_deref(),
            Some("535.104.05")
        );
        assert_eq!(release(""), None);
    }

    #[test]
    fn a_missing_library_is_a_warning_if_it_is_needed() {
        let missing =
            || GpuError::LibraryMissing { what: "NCCL", names: "libnccl.so.2".into(), why: "no".into() };
        assert_eq!(library_finding("NCCL", Err(missing()), false).status, Status::None);
        let warned = library_finding("NCCL", Err(missing()), true);
        assert_eq!(warned.status, Status::Warn);
        insta::assert_snapshot!(warned.remedy.unwrap(), @"Install the CUDA toolkit and set CUDA_HOME, or run `pip install nvidia-nccl-cu13 (or -cu12)` in an active Python environment. Without it, training cannot use several GPUs.");
        assert_eq!(library_finding("NVRTC", Ok("13.0".into()), true).status, Status::Ok);
        let old = gpu_finding((1, &("Tesla T4".into(), 75, Bytes(16 << 30))));
        assert_eq!(
            (old.status, old.found.as_str()),
            (Status::Warn, "Tesla T4, compute capability 7.5, 16.0 GiB")
        );
    }

    #[test]
    fn a_driver_without_a_gpu_is_reported() {
        let driver =
            DriverInfo { driver_version: 13000, driver_path: "/lib/libcuda.so.1".into(), gpus: vec![] };
        let finding = driver_finding(&Ok(driver));
        assert_eq!(finding.status, Status::Warn);
        assert!(finding.found.contains("CUDA 13.0, /lib/libcuda.so.1; it shows no GPU"), "{}", finding.found);
    }
}
