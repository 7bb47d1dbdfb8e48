//! Every environment variable that the sources name is in docs/environment.md.

use std::collections::BTreeSet;
use std::fs;

use crate::tidy;

/// The beginnings of names that are environment variables and nothing else.
const BEGINNINGS: [&str; 5] = ["LOCKSTEP_", "HF_", "HUGGING_FACE_", "HUGGINGFACE_", "TORCHELASTIC_"];

/// The names in a text that begin like environment variables.
fn names(text: &str) -> impl Iterator<Item = &str> {
    let is_part = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let words = text.split(move |c: char| !is_part(c));
    words.filter(|word| {
        // A bare beginning is a pattern, such as that of a test.
        BEGINNINGS.iter().any(|begin| word.strip_prefix(begin).is_some_and(|rest| !rest.is_empty()))
    })
}

fn documented() -> BTreeSet<String> {
    let page = fs::read_to_string(tidy::root().join("docs/environment.md")).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let cells = rows.map(|row| row.split('|').nth(1).unwrap());
    cells.flat_map(|cell| cell.split(", ")).map(|name| name.trim().trim_matches('`').to_owned()).collect()
}

#[test]
fn every_variable_is_documented() {
    let documented = documented();
    assert!(documented.len() > 40 && documented.contains("HF_HOME"), "{documented:?}");
    let mut seen = BTreeSet::new();
    for path in tidy::sources() {
        let text = fs::read_to_string(&path).unwrap();
        for name in names(&text) {
            let shown = path.display();
            assert!(
                documented.contains(name),
                "{shown} names {name}, which docs/environment.md does not have"
            );
            seen.insert(name.to_owned());
        }
    }
    // The launcher's own names, and those of the configuration's list that have an effect.
    let list = fs::read_to_string(tidy::root().join("crates/launch/src/names.rs")).unwrap();
    let values =
        list.lines().filter(|line| line.starts_with("pub const")).filter_map(|line| line.split('"').nth(1));
    let mut launch: Vec<&str> = values.collect();
    let effective = |variable: &&lockstep_config::Variable| {
        !matches!(variable.effect, lockstep_config::VariableEffect::None(_))
    };
    launch.extend(lockstep_config::VARIABLES.iter().filter(effective).map(|variable| variable.name));
    assert!(launch.len() > 30, "{launch:?}");
    for name in launch {
        assert!(documented.contains(name), "docs/environment.md does not have {name}");
    }
    let own = documented.iter().filter(|name| BEGINNINGS.iter().any(|begin| name.starts_with(begin)));
    let gone: Vec<&String> = own.filter(|name| !seen.contains(*name)).collect();
    assert!(gone.is_empty(), "docs/environment.md has {gone:?}, which no source names");
}
