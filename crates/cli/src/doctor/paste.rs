//! `lockstep doctor --report`: the findings as text that can be pasted into a public report.

use std::fs;

use super::Finding;
use crate::host;

/// The parts whose findings name machines or addresses. Only their status is shown.
const PRIVATE: [&str; 2] = ["network", "HF Hub"];

/// Who and where this is. None of these words is in a report.
struct Identity {
    /// What to replace, with its replacement, the longest first.
    words: Vec<(String, &'static str)>,
}

impl Identity {
    fn of_this_process() -> Identity {
        let variable = |name: &str| std::env::var(name).unwrap_or_default();
        let home = host::folder("HOME").map(|home| home.display().to_string()).unwrap_or_default();
        Identity::of(&home, &[variable("USER"), variable("LOGNAME")], &lockstep_launch::host_name())
    }

    fn of(home: &str, users: &[String], host: &str) -> Identity {
        let home_owner = home.rsplit('/').next().unwrap_or_default().to_owned();
        let mut words = vec![(home.to_owned(), "~"), (host.to_owned(), "[host]")];
        words.extend(users.iter().cloned().chain([home_owner]).map(|user| (user, "[user]")));
        // A word of two letters or a system account says nothing, and would be found inside other words.
        words.retain(|(word, _)| word.len() > 2 && word != "root" && word != "/root");
        words.sort_by_key(|(word, _)| std::cmp::Reverse(word.len()));
        Identity { words }
    }

    fn removed_from(&self, text: &str) -> String {
        let text = self.words.iter().fold(text.to_owned(), |text, (word, shown)| text.replace(word, shown));
        without_homes(&text)
    }
}

/// Replaces the folders of other users, such as `/home/name`.
fn without_homes(text: &str) -> String {
    let mut parts = text.split("/home/");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| !c.is_alphanumeric() && !"._-@".contains(c)).unwrap_or(part.len());
        out.push_str("/home/[user]");
        out.push_str(&part[end..]);
    }
    out
}

/// The report: version, system, the variables that are set, and the findings.
pub(super) fn report(findings: &[Finding], table: &dyn Fn(&[Finding]) -> String) -> String {
    let shown: Vec<Finding> = findings
        .iter()
        .map(|finding| Finding {
            part: finding.part.clone(),
            status: finding.status,
            found: match PRIVATE.contains(&finding.part.as_str()) {
                true => "(left out of the report)".into(),
                false => finding.found.clone(),
            },
            remedy: finding.remedy.clone(),
        })
        .collect();
    let text = format!("{}system: {}\nvariables: {}\n", table(&shown), system(), variables());
    Identity::of_this_process().removed_from(&text)
}

/// The distribution and the kernel.
fn system() -> String {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let name = name.unwrap_or("unknown").trim_matches('"');
    format!("{name}, Linux {}, {}", kernel.trim(), std::env::consts::ARCH)
}

/// The names of variables that change what Lockstep does. Their values may be secrets.
fn variables() -> String {
    const BEGINNINGS: [&str; 5] = ["LOCKSTEP_", "HF_", "NCCL_", "CUDA_", "HUGGING_FACE_"];
    const NAMES: [&str; 6] =
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LD_LIBRARY_PATH"];
    let mut set: Vec<String> = std::env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| {
            NAMES.contains(&name.as_str()) || BEGINNINGS.iter().any(|begin| name.starts_with(begin))
        })
        .collect();
    set.sort();
    if set.is_empty() { "none set".into() } else { format!("{} (values not shown)", set.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_removed() {
        let identity = Identity::of("/home/alice", &["alice".into(), String::new()], "gpu-node-7");
        let text = "cache /home/alice/.cache, /home/bob.x/y, on gpu-node-7 by alice";
        assert_eq!(identity.removed_from(text), "cache ~/.cache, /home/[user]/y, on [host] by [user]");
        let root = Identity::of("/root", &["root".into()], "c");
        assert_eq!(root.removed_from("cargo in /root"), "cargo in /root");
    }
}
