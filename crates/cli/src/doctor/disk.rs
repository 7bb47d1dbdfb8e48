//! The disk of the current folder, where runs write unless they are told another.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lockstep_core::Bytes;
use lockstep_device::OffloadFile;

use super::Finding;

const LITTLE_SPACE: Bytes = Bytes(1 << 30);
/// What is written to measure, at most, and how long.
const MOST: usize = 16 << 20;
const LONGEST: Duration = Duration::from_millis(100);

pub(super) fn look() -> Vec<Finding> {
    let Ok(folder) = std::env::current_dir() else {
        let remedy = "Change to a folder that exists.";
        return vec![Finding::warn("disk", "the current folder is not there", remedy)];
    };
    vec![space(&folder), spilling(&folder)]
}

fn space(folder: &Path) -> Finding {
    let remedy = "Give runs an `output_dir` on a disk with room that you may write to.";
    let speed = match write_speed(folder) {
        Ok(speed) => speed,
        Err(cause) => return Finding::warn("disk", format!("{}: {cause}", folder.display()), remedy),
    };
    let Ok(stat) = rustix::fs::statvfs(folder) else { return Finding::ok("disk", speed) };
    let free = Bytes(stat.f_bavail.saturating_mul(stat.f_frsize));
    let found = format!("{free} free here; {speed}");
    if free < LITTLE_SPACE { Finding::warn("disk", found, remedy) } else { Finding::ok("disk", found) }
}

/// How fast a new file is written and on the disk, in words.
fn write_speed(folder: &Path) -> std::io::Result<String> {
    let path = Probe(folder.join(format!(".lockstep-doctor-{}", std::process::id())));
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).open(&path.0)?;
    let chunk = vec![0x5au8; 1 << 20];
    let start = Instant::now();
    let mut written = 0;
    while written < MOST && start.elapsed() < LONGEST {
        file.write_all(&chunk)?;
        written += chunk.len();
    }
    file.sync_data()?;
    let per_second = written as f64 / start.elapsed().as_secs_f64().max(1e-6);
    Ok(format!("{}/s written", Bytes(per_second as u64)))
}

/// A file that goes away again.
struct Probe(PathBuf);

impl Drop for Probe {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// How `nvme` offload would move bytes here.
fn spilling(folder: &Path) -> Finding {
    match OffloadFile::create(folder, Bytes(1 << 20)) {
        Ok(spill) => {
            let how = spill.described();
            if how.contains("io_uring") {
                return Finding::ok("nvme offload", how);
            }
            let remedy =
                "io_uring is not allowed here (containers often forbid it): offload to disk works, slower.";
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
        assert!(write_speed(dir.path()).unwrap().ends_with("/s written"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let finding = space(&dir.path().join("missing"));
        assert_eq!(finding.verdict, super::super::Verdict::Warn, "{finding:?}");
    }
}
