//! The CPU, memory, and limits of the system.

use std::path::{Path, PathBuf};

use lockstep_core::Bytes;
use lockstep_device::{Amx, InstructionSet, Isa};
use lockstep_launch::cores;
use rustix::process::{Resource, getrlimit};

use super::Finding;

/// With less memory, not even a small model fits.
const LEAST_MEMORY: Bytes = Bytes(128 << 20);
const LITTLE_MEMORY: Bytes = Bytes(2 << 30);
/// The shared memory that NCCL needs for a few GPUs of one host.
const LEAST_SHM: Bytes = Bytes(256 << 20);
const LEAST_FILES: u64 = 1024;

pub(super) fn check(num_gpus: usize) -> Vec<Finding> {
    let mut findings = vec![processor(num_gpus), memory()];
    findings.extend(shared_memory(num_gpus));
    findings.push(open_files());
    findings
}

fn processor(num_gpus: usize) -> Finding {
    let isa = Isa::detect();
    let allowed = cores::available().len().max(1);
    // A container may have a CPU quota below the number of its cores.
    let at_once = std::thread::available_parallelism().map_or(allowed, |n| n.get()).min(allowed);
    let tiles = if Amx::detect().is_some() { " and AMX" } else { "" };
    let mut found = format!("{isa}{tiles}, {at_once} {}", if at_once == 1 { "core" } else { "cores" });
    if let Some(name) = processor_name() {
        found = format!("{name}: {found}");
    }
    let per_rank = cores::threads(at_once, num_gpus as u32);
    if num_gpus > 1 {
        found.push_str(&format!("; {per_rank} for each rank on {num_gpus} GPUs"));
    }
    if isa.set() == InstructionSet::Baseline && cfg!(target_arch = "x86_64") {
        let remedy = "This CPU has no AVX2: training on it works, but is many times slower.";
        return Finding::warn("CPU", found, remedy);
    }
    if num_gpus > 1 && per_rank < 2 {
        let remedy = "Ranks on GPUs prepare batches on the CPU. Use at least two cores per GPU.";
        return Finding::warn("CPU", found, remedy);
    }
    Finding::ok("CPU", found)
}

fn processor_name() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

fn memory() -> Finding {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let Some((total, free)) = meminfo(&info, "MemTotal:").zip(meminfo(&info, "MemAvailable:")) else {
        return Finding::ok("memory", "unknown");
    };
    let (mut found, mut usable) = (format!("{free} free of {total}"), free);
    if let Some((limit, used)) = cgroup_limit().filter(|(limit, _)| *limit < total) {
        let left = Bytes(limit.0.saturating_sub(used.0));
        usable = Bytes(usable.0.min(left.0));
        found.push_str(&format!("; {left} free of this container's limit of {limit}"));
    }
    let remedy =
        "End other programs, or raise the container's limit. `lockstep plan` shows how much a run needs.";
    match usable {
        usable if usable < LEAST_MEMORY => Finding::fail("memory", found, remedy),
        usable if usable < LITTLE_MEMORY => Finding::warn("memory", found, remedy),
        _ => Finding::ok("memory", found),
    }
}

fn meminfo(text: &str, name: &str) -> Option<Bytes> {
    let kib = text.lines().find_map(|line| line.strip_prefix(name))?.trim().strip_suffix("kB")?;
    Some(Bytes(kib.trim().parse::<u64>().ok()?.checked_mul(1024)?))
}

/// The lowest memory limit of the control groups of this process, and the memory in use under it.
fn cgroup_limit() -> Option<(Bytes, Bytes)> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    limit_below(Path::new("/sys/fs/cgroup"), &groups)
}

/// Like [`cgroup_limit`], with the cgroup file system at `root` and the contents of `/proc/self/cgroup`. In a container
/// the named group may not exist; then the root's limit applies.
fn limit_below(root: &Path, groups: &str) -> Option<(Bytes, Bytes)> {
    let number = |path: PathBuf| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let mut lowest: Option<(Bytes, Bytes)> = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        // Version 2 has one tree for all controllers, version 1 has one for memory.
        let (tree, limit, usage) = match controllers {
            "" => (root.to_path_buf(), "memory.max", "memory.current"),
            "memory" => (root.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
            _ => continue,
        };
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let folder = tree.join(group);
            if let Some(limit) = number(folder.join(limit))
                && lowest.is_none_or(|(least, _)| limit < least.0)
            {
                lowest = Some((Bytes(limit), Bytes(number(folder.join(usage)).unwrap_or_default())));
            }
        }
    }
    lowest
}

/// Shared memory, which NCCL uses between GPUs of one host.
fn shared_memory(num_gpus: usize) -> Option<Finding> {
    let stat = rustix::fs::statvfs("/dev/shm").ok()?;
    let total = Bytes(stat.f_blocks.saturating_mul(stat.f_frsize));
    let free = Bytes(stat.f_bavail.saturating_mul(stat.f_frsize));
    let found = format!("{free} free of {total}");
    if num_gpus > 1 && free < LEAST_SHM {
        let remedy =
            "NCCL needs more for several GPUs. Start the container with --shm-size=1g or --ipc=host.";
        return Some(Finding::warn("/dev/shm", found, remedy));
    }
    Some(Finding::ok("/dev/shm", found))
}

fn open_files() -> Finding {
    let limit = getrlimit(Resource::Nofile);
    // `None` means no limit.
    let shown = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_string(), |n| n.to_string());
    let found = shown(limit.current);
    match limit.current {
        Some(n) if n < LEAST_FILES => {
            let remedy =
                format!("Run `ulimit -n {}` to raise the limit in this shell.", shown(limit.maximum));
            Finding::warn("open files", found, remedy)
        }
        _ => Finding::ok("open files", found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_of_all_parents_counts() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        assert_eq!(limit_below(dir.path(), "0::/a/b\n"), None);
        write("a/memory.max", "1000\n");
        write("a/memory.current", "300\n");
        write("a/b/memory.max", "max\n");
        assert_eq!(limit_below(dir.path(), "0::/a/b\n"), Some((Bytes(1000), Bytes(300))));
        write("memory.max", "500\n");
        assert_eq!(limit_below(dir.path(), "0::/elsewhere\n"), Some((Bytes(500), Bytes(0))));
        write("memory/c/memory.limit_in_bytes", "200\n");
        let groups = "4:cpu:/c\n3:memory:/c\n0::/\nnonsense\n";
        assert_eq!(limit_below(dir.path(), groups), Some((Bytes(200), Bytes(0))));
    }

    #[test]
    fn memory_is_read_in_kib() {
        let text = "MemTotal:       16 kB\nMemAvailable:   x kB\n";
        assert_eq!(meminfo(text, "MemTotal:"), Some(Bytes(16 << 10)));
        assert_eq!(meminfo(text, "MemAvailable:"), None);
        assert_eq!(meminfo("", "MemTotal:"), None);
    }
}
