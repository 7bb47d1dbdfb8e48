//! The limits of the control group of this process, such as a container's.

use std::fs;
use std::path::{Path, PathBuf};

use lockstep_device::HostMemory;

use super::Finding;

pub(super) fn check() -> Finding {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let memory = HostMemory::read().and_then(|memory| memory.container);
    let memory = memory.map(|(limit, left)| format!("memory {limit}, of which {left} is free"));
    let cpus = cpu_limit(Path::new("/sys/fs/cgroup"), &groups);
    let cpus = cpus.map(|cores| format!("CPU time of {cores:.1} cores"));
    let limits: Vec<String> = memory.into_iter().chain(cpus).collect();
    match limits.is_empty() {
        true => Finding::none("cgroup limits", "none: memory and CPU time are not limited"),
        false => Finding::ok("cgroup limits", limits.join("; ")),
    }
}

/// The lowest CPU quota of the control groups of this process in cores, with the cgroup file system at `root` and the
/// contents of `/proc/self/cgroup`.
fn cpu_limit(root: &Path, groups: &str) -> Option<f64> {
    let numbers = |path: PathBuf| -> Option<Vec<f64>> {
        let text = fs::read_to_string(path).ok()?;
        text.split_whitespace().map(|word| word.parse().ok()).collect()
    };
    let mut lowest: Option<f64> = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            // Version 2 has the quota and the period in one file, version 1 in two.
            let values = match controllers {
                "" => numbers(root.join(group).join("cpu.max")),
                _ if controllers.split(',').any(|name| name == "cpu") => {
                    let file = |name| numbers(root.join("cpu").join(group).join(name));
                    file("cpu.cfs_quota_us")
                        .zip(file("cpu.cfs_period_us"))
                        .map(|(quota, period)| [quota, period].concat())
                }
                _ => None,
            };
            if let Some(&[quota, period]) = values.as_deref()
                && quota > 0.0
                && period > 0.0
            {
                lowest = Some(lowest.map_or(quota / period, |least| least.min(quota / period)));
            }
        }
    }
    lowest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_quota_of_all_parents_counts() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(cpu_limit(dir.path(), "0::/a/b\n"), None);
        write("a/b/cpu.max", "max 100000\n");
        assert_eq!(cpu_limit(dir.path(), "0::/a/b\n"), None);
        write("a/cpu.max", "150000 100000\n");
        assert_eq!(cpu_limit(dir.path(), "0::/a/b\n"), Some(1.5));
        write("cpu/c/cpu.cfs_quota_us", "-1\n");
        write("cpu/c/cpu.cfs_period_us", "100000\n");
        assert_eq!(cpu_limit(dir.path(), "4:cpu,cpuacct:/c\nnonsense\n"), None);
        write("cpu/c/cpu.cfs_quota_us", "50000\n");
        assert_eq!(cpu_limit(dir.path(), "4:cpu,cpuacct:/c\n"), Some(0.5));
    }
}
