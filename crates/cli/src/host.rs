//! What the system says of this process.

use lockstep_core::Bytes;

/// The most memory that was resident at any time. `None` where `/proc` does not say.
pub(crate) fn peak_memory() -> Option<Bytes> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?.trim().strip_suffix("kB")?;
    Some(Bytes(kib.trim().parse::<u64>().ok()? << 10))
}
