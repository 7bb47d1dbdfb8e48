//! Which host a rank is on.

/// Equal for two processes that can open each other's `/proc/<pid>`: the system's boot and the process's
/// namespace of process ids. Containers on one machine differ unless they share that namespace.
pub fn host_identity() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}
