//! What the workspace may depend on: licences, sources, one version of each crate, no unused declaration.
//!
//! These are the checks of `cargo deny check bans licenses sources` that need no other tool: this test runs
//! `cargo metadata` and reads the same `deny.toml`. Advisories are left out, because their database is on the network.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn cargo(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(args)
        .args(["--offline", "--locked"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The packages that this host builds, tests included.
fn packages() -> Vec<Value> {
    // Metadata also lists what other platforms enable; the tree, in lines like `half v2.7.1`, does not.
    let tree = cargo(&["tree", "--workspace", "--edges", "normal,build,dev", "--prefix", "none"]);
    let built: BTreeSet<String> = tree
        .lines()
        .filter_map(|line| line.split_once(" v"))
        .map(|(name, rest)| format!("{name}@{}", rest.split(' ').next().unwrap()))
        .collect();
    let version = Command::new("rustc").arg("-vV").output().unwrap();
    let version = String::from_utf8(version.stdout).unwrap();
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    let metadata = cargo(&["metadata", "--format-version", "1", "--filter-platform", host]);
    let metadata: Value = serde_json::from_str(&metadata).unwrap();
    let packages = metadata["packages"].as_array().unwrap().iter();
    let packages: Vec<Value> = packages.filter(|package| built.contains(&label(package))).cloned().collect();
    assert!(packages.len() > 100 && packages.len() == built.len(), "{} of {}", packages.len(), built.len());
    packages
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is not a string"))
}

fn label(package: &Value) -> String {
    format!("{}@{}", text(&package["name"]), text(&package["version"]))
}

/// The lines of the list `key` in `deny.toml`, without comments.
fn deny_list(key: &str) -> Vec<String> {
    let deny = fs::read_to_string(root().join("deny.toml")).unwrap();
    let start = format!("{key} = [");
    let mut lines = deny.lines().map(str::trim).skip_while(|line| **line != start);
    assert!(lines.next().is_some(), "deny.toml has no list `{key}` that begins on a line of its own");
    lines
        .take_while(|line| *line != "]")
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_string)
        .collect()
}

/// The value of `key = "…"` in an inline table.
fn quoted<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.split_once(&format!("{key} = \""))?.1.split_once('"').map(|(value, _)| value)
}

/// Whether `allowed` satisfies a licence expression: `OR` (or the older `/`) needs one side, `AND` both.
fn permits(expression: &str, allowed: &BTreeSet<String>) -> Result<bool, String> {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = &words[..];
    let permitted = either(&mut rest, allowed)?;
    if rest.is_empty() { Ok(permitted) } else { Err(format!("unexpected {rest:?} in {expression}")) }
}

fn either(words: &mut &[&str], allowed: &BTreeSet<String>) -> Result<bool, String> {
    let mut permitted = both(words, allowed)?;
    while let ["OR", rest @ ..] = *words {
        *words = rest;
        permitted |= both(words, allowed)?;
    }
    Ok(permitted)
}

fn both(words: &mut &[&str], allowed: &BTreeSet<String>) -> Result<bool, String> {
    let mut permitted = one(words, allowed)?;
    while let ["AND", rest @ ..] = *words {
        *words = rest;
        permitted &= one(words, allowed)?;
    }
    Ok(permitted)
}

fn one(words: &mut &[&str], allowed: &BTreeSet<String>) -> Result<bool, String> {
    match *words {
        ["(", rest @ ..] => {
            *words = rest;
            let permitted = either(words, allowed)?;
            let [")", rest @ ..] = *words else { return Err("`)` expected".into()) };
            *words = rest;
            Ok(permitted)
        }
        // An exception is a name of its own: `Apache-2.0 WITH LLVM-exception`.
        [licence, "WITH", exception, rest @ ..] => {
            *words = rest;
            Ok(allowed.contains(&format!("{licence} WITH {exception}")))
        }
        [licence, rest @ ..] if !["AND", "OR", ")"].contains(licence) => {
            *words = rest;
            Ok(allowed.contains(*licence))
        }
        _ => Err(format!("a licence expected at {words:?}")),
    }
}

#[test]
fn licences() {
    let allowed: BTreeSet<String> =
        deny_list("allow").iter().map(|line| line.trim_matches(['"', ',']).to_string()).collect();
    let packages = packages();
    let refused_under = |allowed: &BTreeSet<String>| -> Vec<String> {
        let refused = packages.iter().filter(|p| !permits(text(&p["license"]), allowed).unwrap());
        refused.map(|p| format!("{}: {}", label(p), text(&p["license"]))).collect()
    };
    assert_eq!(refused_under(&allowed), [""; 0], "licences that deny.toml does not allow");
    for licence in &allowed {
        let mut fewer = allowed.clone();
        fewer.remove(licence);
        assert!(!refused_under(&fewer).is_empty(), "deny.toml allows {licence}, which no package needs");
    }
}

#[test]
fn licence_expressions() {
    let allowed: BTreeSet<String> = ["MIT", "ISC", "GPL-2.0 WITH x"].map(String::from).into();
    let permits = |expression| permits(expression, &allowed);
    assert_eq!(permits("MIT"), Ok(true));
    assert_eq!(permits("MIT/Apache-2.0"), Ok(true));
    assert_eq!(permits("Apache-2.0 OR MIT AND ISC"), Ok(true));
    assert_eq!(permits("(Apache-2.0 OR MIT) AND Zlib"), Ok(false));
    assert_eq!(permits("Apache-2.0 AND (MIT OR ISC)"), Ok(false));
    assert_eq!(permits("GPL-2.0 WITH x"), Ok(true));
    assert_eq!(permits("GPL-2.0"), Ok(false));
    for bad in ["", "MIT ISC", "(MIT", "MIT OR", "AND MIT"] {
        assert!(permits(bad).is_err(), "{bad:?} was read");
    }
}

#[test]
fn sources() {
    for package in packages() {
        // Without a source: a crate of this workspace.
        let Some(source) = package["source"].as_str() else { continue };
        let is_default = source.starts_with("registry+") && source.ends_with("/crates.io-index");
        assert!(is_default, "{} comes from {source}, not from the default registry", label(&package));
    }
}

#[test]
fn one_version_of_each_crate() {
    let skip = deny_list("skip");
    let skipped: BTreeSet<&str> = skip
        .iter()
        .map(|line| {
            assert!(quoted(line, "reason").is_some_and(|reason| reason.len() > 10), "no reason: {line}");
            quoted(line, "crate").unwrap_or_else(|| panic!("no crate: {line}"))
        })
        .collect();
    let packages = packages();
    let labels: BTreeSet<String> = packages.iter().map(label).collect();
    let mut versions: BTreeMap<&str, usize> = BTreeMap::new();
    for label in &labels {
        *versions.entry(label.split('@').next().unwrap()).or_default() += 1;
    }
    for entry in &skipped {
        let name = entry.split('@').next().unwrap();
        assert!(labels.contains(*entry), "deny.toml skips {entry}, which is not in the graph");
        assert!(versions[name] > 1, "deny.toml skips {entry}, the only version of {name}");
    }
    let twice: Vec<(&str, usize)> = versions
        .into_iter()
        .map(|(name, count)| {
            let prefix = format!("{name}@");
            (name, count - skipped.iter().filter(|entry| entry.starts_with(&prefix)).count())
        })
        .filter(|(_, count)| *count != 1)
        .collect();
    assert_eq!(twice, [("", 0); 0], "unite the versions, or skip all but one in deny.toml with a reason");
}

/// Rust sources below `folders` of a crate, joined.
fn joined_sources(crate_dir: &Path, folders: &[&str]) -> String {
    fn walk(dir: &Path, joined: &mut String) {
        let Ok(entries) = fs::read_dir(dir) else { return };
        for path in entries.map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                walk(&path, joined);
            } else if path.extension().is_some_and(|ext| ext == "rs") {
                joined.push_str(&fs::read_to_string(&path).unwrap());
            }
        }
    }
    let mut joined = String::new();
    folders.iter().for_each(|folder| walk(&crate_dir.join(folder), &mut joined));
    joined
}

/// Whether a path or a `use` in `source` begins with the crate.
fn names_crate(source: &str, package: &str) -> bool {
    let name = package.replace('-', "_");
    source.match_indices(&name).any(|(at, _)| {
        let before = source[..at].chars().next_back();
        let after = &source[at + name.len()..];
        !before.is_some_and(|c| c.is_alphanumeric() || c == '_')
            && ["::", ";", " as "].iter().any(|next| after.starts_with(next))
    })
}

#[test]
fn every_declared_dependency_is_used() {
    let mut declared = BTreeSet::new();
    for package in packages().iter().filter(|package| package["source"].is_null()) {
        let crate_dir = Path::new(text(&package["manifest_path"])).parent().unwrap();
        for dependency in package["dependencies"].as_array().unwrap() {
            let name = text(&dependency["name"]);
            declared.insert(name.to_string());
            let folders: &[&str] = match dependency["kind"].as_str() {
                None => &["src"],
                Some("dev") => &["src", "tests", "examples", "benches"],
                Some(kind) => panic!("{}: a {kind} dependency, {name}, is new here", label(package)),
            };
            let used = names_crate(&joined_sources(crate_dir, folders), name);
            assert!(used, "{} does not use {name} below {folders:?}", label(package));
        }
    }
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let (_, section) = manifest.split_once("[workspace.dependencies]\n").unwrap();
    let lines = section.lines().take_while(|line| !line.starts_with('['));
    let offered: BTreeSet<String> =
        lines.filter_map(|line| line.split_once(" = ")).map(|(name, _)| name.to_string()).collect();
    assert!(offered.len() > 30, "the workspace's dependencies are where this test looks for them");
    let unused: Vec<&String> = offered.difference(&declared).collect();
    assert!(unused.is_empty(), "no crate uses {unused:?} of the workspace's dependencies");
}

#[test]
fn uses_of_a_crate_are_found() {
    assert!(names_crate("use arrow_ipc::reader;", "arrow-ipc"));
    assert!(names_crate("let x = blake3::hash(b);", "blake3"));
    assert!(!names_crate("use my_arrow_ipc::reader;", "arrow-ipc"));
    assert!(!names_crate("arrow_ipc_two::x", "arrow-ipc"));
    assert!(!names_crate("the word csv alone", "csv"));
}
