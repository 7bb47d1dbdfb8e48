//! Which host a rank is on.

/// Equal for two processes that can open each other's `/proc/<pid>` and reach each other over the loopback: the
/// system's boot and the process's namespaces of process ids and of the network. Containers on one machine differ
/// unless they share both.
pub fn host_identity() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = |name| std::fs::read_link(format!("/proc/self/ns/{name}")).unwrap_or_default();
    format!("{} {} {}", boot.trim(), namespace("pid").display(), namespace("net").display())
}
