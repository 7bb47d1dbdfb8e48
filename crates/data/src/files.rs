//! Names as people write them to the files they mean: a file, a folder, a pattern.

use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::DataError;
use crate::read::Kind;

/// The files that `names` mean, in their order; those of a folder or a pattern sorted by name. A folder
/// stands for all files of a known kind in it and below, hidden ones left out.
pub(crate) fn expand(names: &[PathBuf]) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    for name in names {
        if name.is_dir() {
            let found = files.len();
            walk(name, &mut |path| files.push(path))?;
            if files.len() == found {
                return Err(DataError::EmptyFolder { path: name.clone() });
            }
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

/// The files of a known kind in a folder and below, sorted.
pub(crate) fn walk(dir: &Path, found: &mut dyn FnMut(PathBuf)) -> Result<(), DataError> {
    for path in entries(dir)? {
        if path.is_dir() {
            walk(&path, found)?;
        } else if Kind::of(&path).is_some() && path.is_file() {
            found(path);
        }
    }
    Ok(())
}

/// What is in a folder, sorted by name, hidden entries left out.
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

/// The files that a pattern matches: `*` and `?` within a name, `[a-z]` one character, `**` any folders.
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
                folders_below(base, &mut next)?;
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
        found = next;
    }
    found.retain(|path| path.is_file());
    found.sort();
    found.dedup();
    Ok(found)
}

fn folders_below(dir: &Path, found: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let start = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    if !start.is_dir() {
        return Ok(());
    }
    for path in entries(start)?.into_iter().filter(|path| path.is_dir()) {
        let path = dir.join(path.file_name().unwrap_or_default());
        found.push(path.clone());
        folders_below(&path, found)?;
    }
    Ok(())
}

/// Whether `pattern` matches all of `name`. The last star takes up what does not match, so the time is at
/// most the product of the lengths.
fn wild(pattern: &[char], name: &[char]) -> bool {
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

/// The width of the `[...]` at the start of `pattern`, if it has `c`. Without an end it is a bracket.
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
    fn folders_and_patterns_name_files_in_order() {
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
}
