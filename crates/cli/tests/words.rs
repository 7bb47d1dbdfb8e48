//! Words that are retired from identifiers and file names, because another word means the same everywhere else
//! (the glossary in ARCHITECTURE.md). Comments and texts may use them.

use std::fs;
use std::path::Path;

use crate::tidy;

/// A word of an identifier, and what to write instead.
const WORDS: &[(&str, &str)] = &[
    ("again", "recompute, second, resumed (`Errno::AGAIN` is the system's own name)"),
    ("finder", "search"),
    ("giver", "producer"),
    ("grower", "decode"),
    ("heard", "seen, received"),
    ("judge", "policy, filter"),
    ("judged", "decision"),
    ("lent", "exported, shared"),
    ("looked", "lookup, searched"),
    ("meanwhile", "overlapped"),
    ("said", "reported, message"),
    ("say", "print, report"),
    ("speak", "report"),
    ("spill", "offload"),
    ("spilled", "offloaded"),
    ("taker", "consumer"),
    ("tell", "report"),
    ("together", "reduce, both, joint"),
    ("told", "reported, printed"),
    ("verdict", "decision, outcome"),
    ("voice", "reporter"),
    ("whereabouts", "address"),
];

/// A whole type name, and what to write instead.
const TYPES: &[(&str, &str)] = &[
    ("Drawn", "what was drawn: Sample"),
    ("Given", "what was given: Setting"),
    ("Home", "Placement, Address"),
    ("Place", "Placement, Address, Position"),
    ("Spot", "Address"),
    ("Turn", "what takes turns"),
    ("What", "the kind of thing"),
    ("Which", "the choice that is made"),
];

#[test]
fn identifiers_and_file_names_have_no_retired_words() {
    let mut found = Vec::new();
    for path in tidy::sources() {
        let shown = path.strip_prefix(tidy::root()).unwrap().display().to_string();
        let stem = path.file_stem().unwrap().to_str().unwrap();
        found.extend(retired(stem).map(|better| format!("{shown}: the file's name; write {better}")));
        // This file names the words, and so would be its own first finding, if its lists were identifiers.
        for (line, name) in identifiers(&fs::read_to_string(&path).unwrap()) {
            found.extend(retired(&name).map(|better| format!("{shown}:{line}: `{name}`; write {better}")));
        }
    }
    assert!(found.is_empty(), "{} retired words:\n{}", found.len(), found.join("\n"));
}

#[test]
fn retired_words_are_found() {
    for name in ["told", "StepTold", "last_told", "TOLD_AT", "Place", "Which"] {
        assert!(retired(name).is_some(), "{name}");
    }
    for name in ["stoldt", "place", "in_place", "InPlace", "which", "essay", "Placement", "HomeFolder"] {
        assert!(retired(name).is_none(), "{name}");
    }
    let code = "let told = 'x'; // said\nfn f<'again>(s: &'again str) {}\n/* say */ \"voice\\\" tell\" r#\"taker\"# b'\\''";
    let names: Vec<String> = identifiers(code).map(|(line, name)| format!("{line} {name}")).collect();
    assert_eq!(names.join(", "), "1 let, 1 told, 2 fn, 2 f, 2 again, 2 s, 2 again, 2 str");
}

/// What to write instead of this identifier's retired word, if it has one.
fn retired(name: &str) -> Option<&'static str> {
    let find = |list: &[(&str, &'static str)], word: &str| {
        list.iter().find(|(retired, _)| *retired == word).map(|(_, better)| *better)
    };
    if name == "AGAIN" {
        return None;
    }
    find(TYPES, name).or_else(|| words(name).iter().find_map(|word| find(WORDS, word)))
}

/// The words of `snake_case`, `CamelCase` and `UPPER_CASE`, in lower case.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut last = '_';
    for c in name.chars() {
        if c == '_' || (c.is_uppercase() && last.is_lowercase()) {
            words.push(String::new());
        }
        if c != '_' {
            words.last_mut().expect("there is a first word").extend(c.to_lowercase());
        }
        last = c;
    }
    words
}

/// The identifiers and lifetimes of Rust code with their lines; not its comments, texts and characters.
fn identifiers(code: &str) -> impl Iterator<Item = (usize, String)> {
    let mut names = Vec::new();
    let mut rest = code;
    let line_of = |rest: &str| code[..code.len() - rest.len()].matches('\n').count() + 1;
    while let Some(first) = rest.chars().next() {
        let name_len = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let text_len = text_len(rest);
        if text_len > 0 {
            rest = &rest[text_len..];
        } else if name_len > 0 {
            if !first.is_numeric() {
                names.push((line_of(rest), rest[..name_len].to_string()));
            }
            rest = &rest[name_len..];
        } else {
            rest = &rest[first.len_utf8()..];
        }
    }
    names.into_iter()
}

/// The length of the comment, text or character with which code begins, or 0.
fn text_len(code: &str) -> usize {
    let until =
        |from: usize, end: &str| code[from..].find(end).map_or(code.len(), |at| from + at + end.len());
    let prefix = code.find(|c: char| !matches!(c, 'b' | 'c' | 'r')).unwrap_or(0).min(2);
    let hashes = code[prefix..].len() - code[prefix..].trim_start_matches('#').len();
    if code.starts_with("//") {
        until(0, "\n")
    } else if code.starts_with("/*") {
        until(2, "*/")
    } else if code[..prefix].contains('r') && code[prefix + hashes..].starts_with('"') {
        until(prefix + hashes + 1, &format!("\"{}", "#".repeat(hashes)))
    } else if code[prefix..].starts_with('"') {
        quoted_len(code, prefix, '"').unwrap_or(code.len())
    } else if code[prefix..].starts_with('\'') {
        // A lifetime has no closing quote after its first character.
        let is_char = code[prefix + 1..].starts_with('\\') || code[prefix + 1..].chars().nth(1) == Some('\'');
        if is_char { quoted_len(code, prefix, '\'').unwrap_or(code.len()) } else { 0 }
    } else {
        0
    }
}

/// The length up to the closing quote of a text that opens at `start`.
fn quoted_len(code: &str, start: usize, quote: char) -> Option<usize> {
    let mut escaped = false;
    for (at, c) in code[start + 1..].char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return Some(start + 1 + at + quote.len_utf8()),
            _ => {}
        }
    }
    None
}

#[test]
fn documents_link_to_files_that_exist() {
    let root = tidy::root();
    for path in documents(&root) {
        let text = fs::read_to_string(&path).unwrap();
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = target.split('#').next().unwrap();
            if file.is_empty() || file.contains("://") {
                continue;
            }
            let there = path.parent().unwrap().join(file);
            assert!(there.exists(), "{} links to {target}, which does not exist", path.display());
        }
    }
}

/// The Markdown files of the repository's root, `docs` and `bench`.
fn documents(root: &Path) -> Vec<std::path::PathBuf> {
    let folders = [root.to_path_buf(), root.join("docs"), root.join("docs/screens"), root.join("bench")];
    let files = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap());
    let found: Vec<_> = files
        .map(|entry| entry.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "md"))
        .collect();
    assert!(found.len() > 10);
    found
}

#[test]
fn the_glossary_names_what_exists() {
    let text = fs::read_to_string(tidy::root().join("ARCHITECTURE.md")).unwrap();
    let (_, glossary) = text.split_once("\n# Glossary\n").expect("a glossary");
    let mut known = std::collections::HashSet::new();
    for path in tidy::sources() {
        known.extend(identifiers(&fs::read_to_string(&path).unwrap()).map(|(_, name)| name));
    }
    let mut checked = 0;
    for row in glossary.lines().filter(|line| line.starts_with("| ")) {
        let in_code = row.trim_end_matches(" |").rsplit(" | ").next().expect("a last column");
        for name in in_code.split('`').skip(1).step_by(2) {
            assert!(known.contains(name), "the glossary names `{name}`, which does not exist: {row}");
            checked += 1;
        }
    }
    assert!(checked > 40, "{checked} names");
}
