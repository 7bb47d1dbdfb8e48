//! The disk of the current folder, where runs write by default.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lockstep_core::Bytes;
use lockstep_device::OffloadFile;

use super::Finding;

const LITTLE_SPACE: Bytes = Bytes(1 << 30);
/// Limits of the speed measurement.
const MAX_BYTES: usize = 16 << 20;
const MAX_TIME: Duration = Duration::from_millis(100);

pub(super) fn check() -> Vec<Finding> {
    let Ok(folder) = std::env::current_dir() else {
        let remedy = "Change to a folder that exists.";
        return vec![Finding::warn("disk", "the current folder does not exist", remedy)];
    };
    vec![space(&folder), offload(&folder)]
}

fn space(folder: &Path) -> Finding {
    let remedy = "Set `output_dir` to a folder on a disk with free space that you can write to.";
    let speed = match write_speed(folder) {
        Ok(speed) => speed,
        Err(cause) => return Finding::warn("disk", format!("{}: {cause}", folder.display()), remedy),
    };
    let Ok(stat) = rustix::fs::statvfs(folder) else { return Finding::ok("disk", speed) };
    let free = Bytes(stat.f_bavail.saturating_mul(stat.f_frsize));
    let found = format!("{free} free; {speed}");
    if free < LITTLE_SPACE { Finding::warn("disk", found, remedy) } else { Finding::ok("disk", found) }
}

/// The speed of writing a new file to the disk, in words.
fn write_speed(folder: &Path) -> std::io::Result<String> {
    let path = Probe(folder.join(format!(".lockstep-doctor-{}", std::process::id())));
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).open(&path.0)?;
    let chunk = vec![0x5au8; 1 << 20];
    let start = Instant::now();
    let mut written = 0;
    while written < MAX_BYTES && start.elapsed() < MAX_TIME {
        file.write_all(&chunk)?;
        written += chunk.len();
    }
    file.sync_data()?;
    let per_second = written as f64 / start.elapsed().as_secs_f64().max(1e-6);
    Ok(format!("writes {}/s", Bytes(per_second as u64)))
}

/// A file that is removed when it is dropped.
struct Probe(PathBuf);

impl Drop for Probe {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// How `nvme` offload would access this disk.
fn offload(folder: &Path) -> Finding {
    match OffloadFile::create(folder, Bytes(1 << 20)) {
        Ok(file) => {
            let how = file.described();
            if how.contains("io_uring") {
                return Finding::ok("nvme offload", how);
            }
            let remedy =
                "io_uring is not allowed, as in many containers. Offload to this disk works, but is slower.";
            Finding::warn("nvme offload", how, remedy)
        }
        Err(cause) => Finding::none("nvme offload", cause.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        assert!(write_speed(dir.path()).unwrap().starts_with("writes "));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let finding = space(&dir.path().join("missing"));
        assert_eq!(finding.status, super::super::Status::Warn, "{finding:?}");
    }
}
