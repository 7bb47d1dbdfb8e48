//! Processes that hold a GPU open, such as those left over from an earlier run.
//!
//! They are found by their open files (`/dev/nvidia0` and so on), so that no further library is needed. Processes of other
//! users and of other containers cannot be seen.

use std::fs;
use std::path::Path;

use super::Finding;

/// Names are listed up to this number.
const SHOWN: usize = 8;

pub(super) fn check(num_gpus: usize) -> Finding {
    const PART: &str = "GPU processes";
    if num_gpus == 0 {
        return Finding::none(PART, "not checked: there is no GPU");
    }
    let found = holders(Path::new("/proc"), std::process::id());
    if found.is_empty() {
        return Finding::ok(PART, "none that this user can see");
    }
    let shown: Vec<String> = found.iter().take(SHOWN).map(|(pid, name)| format!("{pid} ({name})")).collect();
    let more = if found.len() > SHOWN { ", and more" } else { "" };
    let remedy =
        "They may occupy GPU memory: `nvidia-smi` shows how much. End those that an earlier run left behind.";
    Finding::warn(PART, format!("{}{more}", shown.join(", ")), remedy)
}

/// The processes below `proc` that have a GPU open, except for `own`, with their names.
fn holders(proc: &Path, own: u32) -> Vec<(u32, String)> {
    let Ok(entries) = fs::read_dir(proc) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let files = fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten();
        let mut targets = files.filter_map(|file| fs::read_link(file.path()).ok());
        if pid != own && targets.any(|target| is_gpu(&target)) {
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            found.push((pid, name.trim().chars().filter(|c| !c.is_control()).collect()));
        }
    }
    found.sort();
    found
}

/// Whether a path is the device file of a GPU: `/dev/nvidia` with a number.
fn is_gpu(path: &Path) -> bool {
    let number = path.to_str().and_then(|path| path.strip_prefix("/dev/nvidia"));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn holders_are_found_by_their_open_files() {
        let dir = tempfile::tempdir().unwrap();
        let process = |pid: &str, target: &str| {
            let folder = dir.path().join(pid).join("fd");
            fs::create_dir_all(&folder).unwrap();
            symlink(target, folder.join("3")).unwrap();
            fs::write(dir.path().join(pid).join("comm"), "python\n").unwrap();
        };
        process("20", "/dev/nvidia0");
        process("9", "/dev/nvidia12");
        process("30", "/dev/nvidiactl");
        process("40", "/dev/nvidia1");
        process("self", "/dev/nvidia0");
        let expected = [(9, "python".to_owned()), (20, "python".to_owned())];
        assert_eq!(holders(dir.path(), 40), expected);
        assert_eq!(check(0).status, super::super::Status::None);
    }
}
