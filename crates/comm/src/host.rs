//! The identity of the host that a rank runs on.

/// A string that is equal for two processes if they can open each other's `/proc/<pid>` and reach each other over
/// loopback: the boot id together with the PID and network namespaces. Two containers on one machine differ unless
/// they share both namespaces.
pub fn host_identity() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = |name| std::fs::read_link(format!("/proc/self/ns/{name}")).unwrap_or_default();
    format!("{} {} {}", boot.trim(), namespace("pid").display(), namespace("net").display())
}
