//! The memory of the host: how much there is, and how much of it is free.

use std::fs;
use std::path::{Path, PathBuf};

use lockstep_core::Bytes;

/// The memory of the host, as the operating system reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    pub total: Bytes,
    pub free: Bytes,
    /// The limit of the container this process runs in, if it is below the total, and how much of it is left.
    pub container: Option<(Bytes, Bytes)>,
}

impl HostMemory {
    pub fn read() -> Option<HostMemory> {
        let info = fs::read_to_string("/proc/meminfo").ok()?;
        let (total, free) = (meminfo(&info, "MemTotal:")?, meminfo(&info, "MemAvailable:")?);
        let limit = cgroup_limit().filter(|(limit, _)| *limit < total);
        let container = limit.map(|(limit, used)| (limit, Bytes(limit.0.saturating_sub(used.0))));
        Some(HostMemory { total, free, container })
    }

    /// What this process can still use.
    pub fn usable(&self) -> Bytes {
        self.container.map_or(self.free, |(_, left)| self.free.min(left))
    }

    /// What all processes could use on an otherwise idle host. It does not change while the host runs.
    pub fn capacity(&self) -> Bytes {
        self.container.map_or(self.total, |(limit, _)| limit)
    }
}

fn meminfo(text: &str, name: &str) -> Option<Bytes> {
    let kib = text.lines().find_map(|line| line.strip_prefix(name))?.trim().strip_suffix("kB")?;
    Some(Bytes(kib.trim().parse::<u64>().ok()?.checked_mul(1024)?))
}

/// The lowest memory limit of the control groups of this process, and the memory in use under it.
fn cgroup_limit() -> Option<(Bytes, Bytes)> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    limit_below(Path::new("/sys/fs/cgroup"), &groups)
}

/// Like [`cgroup_limit`], with the cgroup file system at `root` and the contents of `/proc/self/cgroup`. In a container
/// the named group may not exist; then the root's limit applies.
fn limit_below(root: &Path, groups: &str) -> Option<(Bytes, Bytes)> {
    let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_of_all_parents_counts() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
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
