//! The memory that this process uses, as the operating system reports it.

use std::fs;

use lockstep_core::Bytes;

/// Resident memory of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    pub resident: Bytes,
    pub peak: Bytes,
}

impl ProcessMemory {
    /// `None` where `/proc` does not report it.
    pub fn read() -> Option<ProcessMemory> {
        ProcessMemory::parse(&fs::read_to_string("/proc/self/status").ok()?)
    }

    fn parse(status: &str) -> Option<ProcessMemory> {
        let field = |name: &str| {
            let kib = status.lines().find_map(|line| line.strip_prefix(name))?.trim().strip_suffix("kB")?;
            Some(Bytes(kib.trim().parse::<u64>().ok()?.checked_mul(1024)?))
        };
        Some(ProcessMemory { resident: field("VmRSS:")?, peak: field("VmHWM:")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_is_parsed() {
        let text = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n";
        let expected = ProcessMemory { resident: Bytes(1 << 20), peak: Bytes(2 << 20) };
        assert_eq!(ProcessMemory::parse(text), Some(expected));
        assert_eq!(ProcessMemory::parse("VmRSS: 1 kB\n"), None);
        let own = ProcessMemory::read().expect("Linux reports it");
        assert!(own.peak >= own.resident && own.resident > Bytes(1 << 16));
    }
}
