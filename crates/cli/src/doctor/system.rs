//! The CPU, memory, and limits of the system.

use lockstep_core::Bytes;
use lockstep_device::{Amx, HostMemory, InstructionSet, Isa};
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
    let Some(memory) = HostMemory::read() else { return Finding::ok("memory", "unknown") };
    let mut found = format!("{} free of {}", memory.free, memory.total);
    if let Some((limit, left)) = memory.container {
        found.push_str(&format!("; {left} free of this container's limit of {limit}"));
    }
    let usable = memory.usable();
    let remedy =
        "End other programs, or raise the container's limit. `lockstep plan` shows how much a run needs.";
    match usable {
        usable if usable < LEAST_MEMORY => Finding::fail("memory", found, remedy),
        usable if usable < LITTLE_MEMORY => Finding::warn("memory", found, remedy),
        _ => Finding::ok("memory", found),
    }
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
