//! Expands file names, folders and glob patterns to lists of data files.
//!
//! Symbolic links are followed, because Hugging Face's caches consist of them. A folder that is reachable by several
//! paths, or from inside itself, is visited once, and a file that one name reaches through several links is read once.

use std::collections::HashSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::DataError;
use crate::read::FileKind;

/// The deepest folder nesting that is followed: more than real data needs, and safe for the stack.
const MAX_DEPTH: usize = 64;

/// The files that `names` stand for, in their order; the files of a folder or a pattern are sorted by name. A folder
/// stands for all data files in it and below, without hidden ones. A file that is named twice is read twice; a file
/// that a single name reaches by two paths is read once.
pub(crate) fn expand(names: &[PathBuf]) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    for name in names {
        if name.is_dir() {
            let mut found = Vec::new();
            walk(name, &mut |path| found.push(path))?;
            if found.is_empty() {
                return Err(DataError::EmptyFolder { path: name.clone() });
            }
            files.extend(each_once(found));
        } else if is_pattern(name) && !name.exists() {
            let found = matches(name)?;
            if found.is_empty() {
                return Err(DataError::NoMatch { pattern: name.clone() });
            }
            files.extend(found);
        } else {
            files.push(name.clone());
        }
    }
    Ok(files)
}

/// Calls `found` with the data files in a folder and below, sorted.
pub(crate) fn walk(dir: &Path, found: &mut dyn FnMut(PathBuf)) -> Result<(), DataError> {
    walk_new(dir, &mut Visited::default(), 0, found)
}

fn walk_new(
    dir: &Path,
    visited: &mut Visited,
    depth: usize,
    found: &mut dyn FnMut(PathBuf),
) -> Result<(), DataError> {
    if !visited.enter(dir, depth)? {
        return Ok(());
    }
    for path in entries(dir)? {
        if path.is_dir() {
            walk_new(&path, visited, depth + 1, found)?;
        } else if FileKind::of(&path).is_some() && (path.is_file() || is_dangling_link(&path)) {
            found(path);
        }
    }
    Ok(())
}

/// Whether a path is a dangling symbolic link. Such a file is kept in the list, so that reading it fails: silently
/// missing rows would be worse.
fn is_dangling_link(path: &Path) -> bool {
    path.is_symlink() && path.metadata().is_err()
}

/// The folders that have been visited, by their canonical paths.
#[derive(Default)]
struct Visited(HashSet<PathBuf>);

impl Visited {
    /// Records a visit. Returns whether `dir` is new.
    fn enter(&mut self, dir: &Path, depth: usize) -> Result<bool, DataError> {
        if depth > MAX_DEPTH {
            return Err(DataError::TooDeep { path: dir.into(), max_depth: MAX_DEPTH });
        }
        let canonical = dir.canonicalize().map_err(|source| DataError::Read { path: dir.into(), source })?;
        Ok(self.0.insert(canonical))
    }
}

/// `files` without those that refer to the same file as an earlier one.
fn each_once(files: Vec<PathBuf>) -> impl Iterator<Item = PathBuf> {
    let mut known = HashSet::new();
    files.into_iter().filter(move |path| known.insert(path.canonicalize().unwrap_or_else(|_| path.clone())))
}

/// The entries of a folder, sorted by name, without hidden ones.
pub(crate) fn entries(dir: &Path) -> Result<Vec<PathBuf>, DataError> {
    let failed = |source| DataError::Read { path: dir.into(), source };
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !entry.file_name().to_string_lossy().starts_with('.') {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

fn is_pattern(path: &Path) -> bool {
    path.to_string_lossy().contains(['*', '?', '['])
}

/// The files that a glob pattern matches: `*` and `?` within a name, `[a-z]` for one character, `**` for any folders.
fn matches(pattern: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut found = vec![PathBuf::new()];
    for part in pattern.components() {
        let mut next = Vec::new();
        for base in &found {
            let Component::Normal(name) = part else {
                next.push(base.join(part));
                continue;
            };
            let name = name.to_string_lossy();
            if name == "**" {
                next.push(base.clone());
                folders_below(base, &mut Visited::default(), 0, &mut next)?;
            } else if is_pattern(Path::new(&*name)) {
                let dir = if base.as_os_str().is_empty() { Path::new(".") } else { base };
                if !dir.is_dir() {
                    continue;
                }
                for path in entries(dir)? {
                    let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    if wild(&name.chars().collect::<Vec<_>>(), &file.chars().collect::<Vec<_>>()) {
                        next.push(base.join(file));
                    }
                }
            } else if base.join(&*name).exists() {
                next.push(base.join(&*name));
            }
        }
        // Several `**` can find the same folder more than once.
        next.sort();
        next.dedup();
        found = next;
    }
    found.retain(|path| path.is_file() || is_dangling_link(path));
    Ok(each_once(found).collect())
}

fn folders_below(
    dir: &Path,
    visited: &mut Visited,
    depth: usize,
    found: &mut Vec<PathBuf>,
) -> Result<(), DataError> {
    let start = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    if !start.is_dir() || !visited.enter(start, depth)? {
        return Ok(());
    }
    for path in entries(start)?.into_iter().filter(|path| path.is_dir()) {
        let path = dir.join(path.file_name().unwrap_or_default());
        found.push(path.clone());
        folders_below(&path, visited, depth + 1, found)?;
    }
    Ok(())
}

/// Whether `pattern` matches all of `name`. On a mismatch only the last star backtracks, so the time is at most the
/// product of the two lengths.
pub(crate) fn wild(pattern: &[char], name: &[char]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        let step = match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
                continue;
            }
            Some('?') => Some(1),
            Some('[') => class(&pattern[p..], name[n]),
            Some(c) if *c == name[n] => Some(1),
            _ => None,
        };
        match (step, star) {
            (Some(width), _) => (p, n) = (p + width, n + 1),
            (None, Some((at, from))) => {
                star = Some((at, from + 1));
                (p, n) = (at + 1, from + 1);
            }
            (None, None) => return false,
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// The width of the `[...]` at the start of `pattern`, if it matches `c`. An unclosed `[` is a plain character.
fn class(pattern: &[char], c: char) -> Option<usize> {
    let negated = matches!(pattern.get(1), Some('!' | '^'));
    let first = if negated { 2 } else { 1 };
    let Some(length) = pattern.iter().skip(first + 1).position(|c| *c == ']') else {
        return (c == '[').then_some(1);
    };
    let end = first + 1 + length;
    let set = &pattern[first..end];
    let mut at = 0;
    let mut inside = false;
    while at < set.len() {
        if at + 2 < set.len() && set[at + 1] == '-' {
            inside |= (set[at]..=set[at + 2]).contains(&c);
            at += 3;
        } else {
            inside |= set[at] == c;
            at += 1;
        }
    }
    (inside != negated).then_some(end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        let wild = |p: &str, n: &str| wild(&p.chars().collect::<Vec<_>>(), &n.chars().collect::<Vec<_>>());
        for (pattern, name, expected) in [
            ("*.jsonl", "a.jsonl", true),
            ("*.jsonl", "a.jsonl.gz", false),
            ("train-*-of-*.parquet", "train-00000-of-00002.parquet", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("[ab]*", "bx", true),
            ("[!ab]*", "bx", false),
            ("[a-c0]x", "0x", true),
            ("[a-c]x", "dx", false),
            ("[", "[", true),
            ("*a*b*", "xxaxxbxx", true),
            ("**", "", true),
            ("", "a", false),
        ] {
            assert_eq!(wild(pattern, name), expected, "{pattern} on {name}");
        }
        let long = "a".repeat(200);
        assert!(!wild(&format!("{}b", "*a".repeat(100)), &long));
    }

    #[test]
    fn folders_and_patterns_expand_to_sorted_files() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            path
        };
        let [b, a, deep, odd] = ["b.jsonl", "a.csv.gz", "sub/deep/c.parquet", "sub/[x].txt"].map(file);
        let _ = ["README.md", ".hidden.jsonl", "sub/.git/d.jsonl", "e.safetensors"].map(file);
        let found = |name: &str| expand(&[dir.path().join(name)]);
        assert_eq!(found("").unwrap(), [a.clone(), b.clone(), odd.clone(), deep.clone()]);
        assert_eq!(found("*.jsonl").unwrap(), std::slice::from_ref(&b));
        assert_eq!(found("**/*.parquet").unwrap(), std::slice::from_ref(&deep));
        assert_eq!(found("**/*.[ct]*").unwrap(), [a.clone(), odd.clone()]);
        assert_eq!(found("s?b/*/c*").unwrap(), std::slice::from_ref(&deep));
        assert_eq!(found("sub/[x].txt").unwrap(), [odd]);
        assert!(matches!(found("*.nothing"), Err(DataError::NoMatch { .. })));
        assert!(matches!(found("sub/.git"), Ok(files) if files.len() == 1));
        fs::create_dir(dir.path().join("empty")).unwrap();
        assert!(matches!(found("empty"), Err(DataError::EmptyFolder { .. })));
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_but_no_file_is_read_twice() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        fs::create_dir_all(data.join("sub/deep")).unwrap();
        fs::create_dir_all(dir.path().join("elsewhere")).unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            fs::write(&path, "").unwrap();
            path
        };
        let (a, c, far, blob) =
            (file("data/a.jsonl"), file("data/sub/deep/c.jsonl"), file("elsewhere/far.jsonl"), file("blob"));
        // Links to the folder itself, to a parent, to each other, and two links to one folder.
        symlink(&data, data.join("self")).unwrap();
        symlink("..", data.join("sub/up")).unwrap();
        symlink(data.join("sub"), data.join("sub/deep/around")).unwrap();
        symlink(dir.path().join("elsewhere"), data.join("link1")).unwrap();
        symlink(dir.path().join("elsewhere"), data.join("link2")).unwrap();
        // A file as in Hugging Face's cache, and a second name for a file that is already listed.
        symlink(&blob, data.join("cached.jsonl")).unwrap();
        symlink(&a, data.join("b.jsonl")).unwrap();
        let names = ["a.jsonl", "cached.jsonl", "link1/far.jsonl", "sub/deep/c.jsonl"];
        let expected = names.map(|name| data.join(name));
        assert_eq!(expand(std::slice::from_ref(&data)).unwrap(), expected);
        let canonical_paths = |files: Vec<PathBuf>| {
            let mut paths: Vec<PathBuf> = files.iter().map(|path| path.canonicalize().unwrap()).collect();
            paths.sort();
            paths
        };
        let mut all: Vec<PathBuf> = [&a, &c, &far, &blob].map(|path| path.canonicalize().unwrap()).into();
        all.sort();
        for pattern in ["**/*.jsonl", "**/**/**/*.jsonl"] {
            assert_eq!(canonical_paths(expand(&[data.join(pattern)]).unwrap()), all, "{pattern}");
        }
        // A file that is named twice is read twice.
        assert_eq!(expand(&[a.clone(), a.clone()]).unwrap().len(), 2);
    }

    #[cfg(unix)]
    #[test]
    fn many_paths_to_one_folder_cost_no_more_than_one() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        // Two links from each folder to the next: 2^30 paths to the last.
        for level in 0..30 {
            let folder = dir.path().join(format!("{level}"));
            fs::create_dir(&folder).unwrap();
            for name in ["x", "y"] {
                symlink(dir.path().join(format!("{}", level + 1)), folder.join(name)).unwrap();
            }
        }
        fs::create_dir(dir.path().join("30")).unwrap();
        fs::write(dir.path().join("30/a.jsonl"), "").unwrap();
        assert_eq!(expand(&[dir.path().join("0")]).unwrap().len(), 1);
        assert_eq!(expand(&[dir.path().join("0/**/*.jsonl")]).unwrap().len(), 1);
    }

    #[cfg(unix)]
    #[test]
    fn dangling_links_are_listed() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.jsonl"), "").unwrap();
        std::os::unix::fs::symlink("gone", dir.path().join("b.jsonl")).unwrap();
        std::os::unix::fs::symlink("c.jsonl", dir.path().join("c.jsonl")).unwrap();
        assert_eq!(expand(&[dir.path().into()]).unwrap().len(), 3);
        assert_eq!(expand(&[dir.path().join("*.jsonl")]).unwrap().len(), 3);
    }

    #[test]
    fn the_folder_depth_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join(["d"; MAX_DEPTH + 1].join("/"));
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join("a.jsonl"), "").unwrap();
        for name in ["", "**/*.jsonl"] {
            let failed = expand(&[dir.path().join(name)]);
            assert!(matches!(failed, Err(DataError::TooDeep { .. })), "{failed:?}");
        }
    }
}
