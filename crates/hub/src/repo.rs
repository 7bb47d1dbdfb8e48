//! Names of repositories, revisions and files. Names from the user and from the server are checked here, before they
//! become parts of URLs and paths.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::error::HubError;

const MAX_NAME_CHARS: usize = 96;
const MAX_REVISION_CHARS: usize = 200;
const MAX_PATH_BYTES: usize = 1024;
const MAX_PATH_DEPTH: usize = 32;
/// The longest name of one file or folder that common file systems allow.
const MAX_SEGMENT_BYTES: usize = 255;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepoKind {
    Model,
    Dataset,
}

impl RepoKind {
    /// The name in URLs and in the cache: `models` or `datasets`.
    pub(crate) fn plural(self) -> &'static str {
        match self {
            RepoKind::Model => "models",
            RepoKind::Dataset => "datasets",
        }
    }
}

impl fmt::Display for RepoKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RepoKind::Model => "model",
            RepoKind::Dataset => "dataset",
        })
    }
}

/// A repository: `org/name`, or `name` for some old ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repo {
    kind: RepoKind,
    name: String,
}

impl Repo {
    pub fn new(kind: RepoKind, name: &str) -> Result<Repo, HubError> {
        match name_problem(name) {
            None => Ok(Repo { kind, name: name.into() }),
            Some(why) => Err(HubError::BadName { name: name.into(), why }),
        }
    }

    pub fn kind(&self) -> RepoKind {
        self.kind
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The folder in the cache: `models--org--name`.
    pub fn folder(&self) -> String {
        format!("{}--{}", self.kind.plural(), self.name.replace('/', "--"))
    }

    /// The page for people, below the endpoint.
    pub(crate) fn page(&self, endpoint: &str) -> String {
        match self.kind {
            RepoKind::Model => format!("{endpoint}/{}", self.name),
            RepoKind::Dataset => format!("{endpoint}/datasets/{}", self.name),
        }
    }
}

impl fmt::Display for Repo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

/// Whether a text that is not a path on this machine can be the name of a repository. `./x`, `/x`, `~/x` and names with
/// more than one slash cannot.
pub fn looks_like_repo(text: &str) -> bool {
    name_problem(text).is_none()
}

fn name_problem(name: &str) -> Option<&'static str> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let parts: Vec<&str> = name.split('/').collect();
    if parts.len() > 2 {
        return Some("it has more than one slash");
    }
    if parts.iter().any(|part| part.is_empty()) {
        return Some("a part of it is empty");
    }
    if name.len() > MAX_NAME_CHARS {
        return Some("it has more than 96 characters");
    }
    if !name.chars().all(|c| allowed(c) || c == '/') {
        return Some("only letters, digits, `-`, `_` and `.` are allowed");
    }
    if parts.iter().any(|part| part.starts_with(['-', '.']) || part.ends_with(['-', '.'])) {
        return Some("its parts must not begin or end with `-` or `.`");
    }
    if name.contains("--") || name.contains("..") {
        return Some("`--` and `..` are not allowed");
    }
    None
}

/// Checks a branch, tag or commit, which becomes a path below `refs`.
pub(crate) fn check_revision(revision: &str) -> Result<(), HubError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/' | '+');
    let is_plain = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.ends_with(".lock");
    let is_valid = revision.len() <= MAX_REVISION_CHARS
        && revision.chars().all(allowed)
        && revision.split('/').all(is_plain)
        && !revision.contains("..");
    is_valid.then_some(()).ok_or_else(|| HubError::BadRevision { revision: revision.into() })
}

/// Whether `text` is the full hash of a commit.
pub(crate) fn is_commit(text: &str) -> bool {
    is_hex(text, 40)
}

pub(crate) fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Why a file name from the server cannot become a path below the snapshot folder. `None` if it can.
pub(crate) fn file_name_problem(name: &str) -> Option<&'static str> {
    if name.is_empty() || name.len() > MAX_PATH_BYTES {
        return Some("it is empty or too long");
    }
    if name.starts_with('/') {
        return Some("it is an absolute path");
    }
    if name.contains('\\') {
        return Some("it contains a backslash");
    }
    if name.chars().any(char::is_control) {
        return Some("it contains a control character");
    }
    let mut depth = 0;
    for segment in name.split('/') {
        depth += 1;
        if segment.is_empty() {
            return Some("it contains an empty folder name");
        }
        if segment == "." || segment == ".." {
            return Some("it contains `.` or `..`");
        }
        if segment.len() > MAX_SEGMENT_BYTES {
            return Some("a part of it is too long");
        }
    }
    (depth > MAX_PATH_DEPTH).then_some("it is nested too deeply")
}

/// The path of a checked file name below `root`.
pub(crate) fn below(root: &Path, name: &str) -> PathBuf {
    debug_assert!(file_name_problem(name).is_none(), "{name}");
    name.split('/').fold(root.to_path_buf(), |path, segment| path.join(segment))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_repositories() {
        for name in ["gpt2", "org/name", "Qwen/Qwen2.5-0.5B", "a_b/c.d-e"] {
            assert!(looks_like_repo(name), "{name}");
        }
        for name in [
            "", ".", "..", "./x", "../x", "/x", "~/x", "a/b/c", "a/", "/b", "a//b", "a b/c", "a/b\\c",
            "a/..", "a/b:c", "a/-b", "a/b.", "a--b/c", "a/b..c", "a/b%2f", "a/é",
        ] {
            assert!(!looks_like_repo(name), "{name}");
        }
        let repo = Repo::new(RepoKind::Dataset, "org/name").unwrap();
        assert_eq!(repo.folder(), "datasets--org--name");
    }

    #[test]
    fn names_of_revisions() {
        for revision in ["main", "v1.0", "refs/pr/3", "feature/x_y", &"a".repeat(40)] {
            assert!(check_revision(revision).is_ok(), "{revision}");
        }
        for revision in
            ["", "..", "a/../b", "/a", "a/", "a b", "a\nb", ".git", "a/.b", "x.lock", &"a".repeat(201)]
        {
            assert!(check_revision(revision).is_err(), "{revision}");
        }
    }

    #[test]
    fn names_of_files() {
        for name in ["config.json", "data/train-00000-of-00001.parquet", "a/b c/é.txt", ".gitattributes"] {
            assert_eq!(file_name_problem(name), None, "{name}");
        }
        let deep = ["d"; 33].join("/");
        let long = "x".repeat(256);
        for name in [
            "",
            "/etc/passwd",
            "../x",
            "a/../../x",
            "a/./b",
            "a//b",
            "a/",
            "a\\b",
            "a\0b",
            "a\nb",
            &deep,
            &long,
        ] {
            assert!(file_name_problem(name).is_some(), "{name}");
        }
    }
}
