//! The rules of the workspace that no compiler checks.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// What each crate may depend on, directly or through these. Everything else is an arrow that the
/// design does not have.
const ARROWS: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("config", &["core"]),
    ("hub", &["core"]),
    ("shape", &["core"]),
    ("plan", &["config", "shape"]),
    ("device", &["core"]),
    ("ops", &["device"]),
    ("comm", &["device"]),
    ("model", &["ops", "shape"]),
    ("engine", &["plan", "comm", "model"]),
    ("data", &["core"]),
    ("ckpt", &["core"]),
    ("launch", &["core"]),
    ("observe", &["core"]),
    ("rewards", &["core"]),
    ("dashboard", &["observe"]),
    ("watch", &["observe"]),
    ("train", &["engine", "data", "ckpt", "observe", "rewards"]),
    ("cli", &["train", "launch", "hub", "dashboard", "watch"]),
];

/// Help for tests: may depend on anything, and nothing but tests on it.
const TEST_HELP: &str = "testkit";

/// The only crates with `unsafe`.
const MAY_BE_UNSAFE: &[&str] = &["device", "ops", "comm"];

const MAX_LINES: usize = 800;

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Name and folder of every crate.
fn crates() -> Vec<(String, PathBuf)> {
    let mut crates: Vec<(String, PathBuf)> = fs::read_dir(root().join("crates"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("Cargo.toml").exists())
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_string(), path))
        .collect();
    crates.sort();
    assert!(crates.len() > 10, "the crates are where this test looks for them");
    crates
}

/// The workspace crates that a manifest names in sections that `wanted` picks.
fn dependencies(manifest: &Path, wanted: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let text = fs::read_to_string(manifest).unwrap();
    let mut section = "";
    let mut found = BTreeSet::new();
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']');
            // `[dependencies.lockstep-core]`
            if let Some((before, name)) = section.rsplit_once(".lockstep-")
                && wanted(before)
            {
                found.insert(name.to_string());
            }
        } else if let Some(rest) = line.strip_prefix("lockstep-")
            && wanted(section)
        {
            let end =
                rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '_').unwrap_or(rest.len());
            found.insert(rest[..end].to_string());
        }
    }
    found
}

fn is_built_in(section: &str) -> bool {
    section.ends_with("dependencies") && !section.ends_with("dev-dependencies")
}

/// Everything a crate may reach.
fn reachable<'a>(name: &str, arrows: &BTreeMap<&str, &'a [&'a str]>) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open: Vec<&str> = arrows.get(name).map(|direct| direct.to_vec()).unwrap_or_default();
    while let Some(next) = open.pop() {
        if reached.insert(next) {
            open.extend(arrows[next].iter().copied());
        }
    }
    reached
}

/// Every Rust source below the crates.
pub(crate) fn sources() -> Vec<PathBuf> {
    fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
                walk(&path, found);
            } else if path.extension().is_some_and(|ext| ext == "rs") {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(&root().join("crates"), &mut found);
    found.sort();
    found
}

#[test]
fn arrows() {
    let arrows: BTreeMap<&str, &[&str]> = ARROWS.iter().copied().collect();
    for (name, path) in crates() {
        let manifest = path.join("Cargo.toml");
        let named = dependencies(&manifest, is_built_in);
        assert!(!named.contains(TEST_HELP), "{name} depends on {TEST_HELP} outside its tests");
        if name == TEST_HELP {
            continue;
        }
        assert!(arrows.contains_key(name.as_str()), "{name} is not on the map of crates in tidy.rs");
        let allowed = reachable(&name, &arrows);
        for dependency in &named {
            assert!(allowed.contains(dependency.as_str()), "{name} -> {dependency} is not an allowed arrow");
        }
    }
}

#[test]
fn the_map_has_no_cycles() {
    let arrows: BTreeMap<&str, &[&str]> = ARROWS.iter().copied().collect();
    for name in arrows.keys() {
        assert!(!reachable(name, &arrows).contains(name), "{name} reaches itself");
    }
    assert!(reachable("cli", &arrows).contains("core"));
    let launch = reachable("launch", &arrows);
    assert!(!launch.contains("device"), "the launcher links no device code");
}

#[test]
fn manifests_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = dir.path().join("Cargo.toml");
    let text = "[dependencies]\nlockstep-core.workspace = true\nlockstep-plan = { path = \"x\" }\nserde = \"1\"\n\
                [dev-dependencies]\nlockstep-testkit.workspace = true\n[dependencies.lockstep-data]\npath = \"y\"\n";
    fs::write(&manifest, text).unwrap();
    let found: Vec<String> = dependencies(&manifest, is_built_in).into_iter().collect();
    assert_eq!(found, ["core", "data", "plan"]);
}

#[test]
fn unsafe_code_is_forbidden() {
    for (name, path) in crates() {
        let lib = path.join("src/lib.rs");
        let roots = [lib.clone(), path.join("src/main.rs")];
        for root in roots.iter().filter(|root| root.exists()) {
            let forbids = fs::read_to_string(root).unwrap().contains("\n#![forbid(unsafe_code)]\n");
            let may = MAY_BE_UNSAFE.contains(&name.as_str());
            assert!(may || forbids, "{} does not forbid unsafe code", root.display());
        }
    }
}

#[test]
fn files_are_not_too_long() {
    for path in sources() {
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= MAX_LINES, "{} has {lines} lines; {MAX_LINES} is the limit", path.display());
    }
}

/// Clippy counts the lines of functions; this test makes sure that it is asked to, everywhere.
#[test]
fn functions_are_not_too_long() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    assert!(manifest.contains("\ntoo_many_lines = \"deny\"\n"));
    let clippy = fs::read_to_string(root().join("clippy.toml")).unwrap();
    assert!(clippy.contains("\ntoo-many-lines-threshold = 80\n"));
    for (name, path) in crates() {
        let manifest = fs::read_to_string(path.join("Cargo.toml")).unwrap();
        // `cli` prints and exits, so it has lints of its own.
        let asked = ["[lints]\nworkspace = true", "\ntoo_many_lines = \"deny\""].iter();
        assert!(asked.clone().any(|text| manifest.contains(text)), "{name} does not limit its functions");
    }
    // Put together here, so that this file is not found.
    let allowed = ["clippy::", "too_many_lines"].concat();
    for path in sources() {
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains(&allowed), "{} allows long functions", path.display());
    }
}

#[test]
fn no_test_is_ignored() {
    // Put together here, so that this file is not found.
    let (bare, reasoned) = (["#[", "ignore]"].concat(), ["#[", "ignore ="].concat());
    for path in sources() {
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains(&bare) && !text.contains(&reasoned), "{} ignores a test", path.display());
    }
}

#[test]
fn the_architecture_names_every_crate() {
    let Ok(text) = fs::read_to_string(root().join("ARCHITECTURE.md")) else {
        return println!("skipped: there is no ARCHITECTURE.md yet");
    };
    for (name, _) in crates() {
        let named = [format!("`{name}`"), format!("crates/{name}")].iter().any(|n| text.contains(n));
        assert!(named, "ARCHITECTURE.md does not name `{name}`");
    }
}
