//! A JSON Schema of our configuration files, with which editors complete and check them.
//!
//! Names, descriptions and defaults come from the table of keys. The types and words that a key accepts come from the
//! parser itself: the schema asks it what it refuses, so the two cannot differ.

use serde_json::{Map, Value as Json, json};

use crate::error::Problem;
use crate::foreign::INERT;
use crate::keys::{KEYS, Key, Kind};
use crate::load;
use crate::sections::AlgorithmName;
use crate::yaml::{self, Input};

/// A word that no key accepts as one of its choices.
const NO_WORD: &str = "no_such_word_";

/// The JSON Schema (draft 2020-12) of a configuration file.
pub fn schema() -> String {
    let mut properties = Map::new();
    for key in KEYS {
        properties.insert(key.name.to_owned(), property(key));
    }
    for key in KEYS {
        for alias in key.aliases.iter().filter(|alias| !alias.contains('.')) {
            let same = json!({
                "$ref": format!("#/properties/{}", key.name),
                "description": format!("Another name of `{}`.", key.name),
            });
            properties.insert((*alias).to_owned(), same);
        }
    }
    for inert in INERT {
        for name in inert.names.iter().filter(|name| !name.contains('.')) {
            let text = format!("Has no effect: {}.", inert.why);
            properties.insert((*name).to_owned(), json!({ "description": text }));
        }
    }
    for (name, text) in [
        ("deepspeed", "A DeepSpeed file, or its keys as a map."),
        ("deepspeed_config", "A DeepSpeed file, or its keys as a map."),
        ("zero_optimization", "DeepSpeed's map of the same name."),
        ("optimizer", "DeepSpeed's map of the same name."),
        ("fsdp_config", "The Trainer's map of the same name."),
        ("dataloader", "A map with `batch_size`, `num_workers`, `prefetch_factor` and `drop_last`."),
    ] {
        properties.entry(name.to_owned()).or_insert_with(|| json!({ "description": text }));
    }
    properties.insert(
        "training".into(),
        json!({ "$ref": "#", "description": "A group that may hold any of the keys." }),
    );
    let schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of Lockstep",
        "type": ["object", "null"],
        "properties": properties,
        // `model.hidden_size: 64`, and names with dashes.
        "patternProperties": { "[.-]": {} },
        "additionalProperties": false,
    });
    let mut text = serde_json::to_string_pretty(&schema).unwrap_or_default();
    text.push('\n');
    text
}

fn property(key: &Key) -> Json {
    let mut property = Map::new();
    let mut description = key.doc.to_owned();
    if key.algorithms() != AlgorithmName::ALL {
        let names: Vec<&str> = key.algorithms().iter().map(|algorithm| algorithm.name()).collect();
        description.push_str(&format!(" Used by {}.", names.join(", ")));
    }
    property.insert("description".into(), description.into());
    property.insert("anyOf".into(), Json::Array(types(key)));
    let mut defaults: Vec<&str> = key.algorithms().iter().map(|a| key.default_for(*a)).collect();
    defaults.dedup();
    if let [default] = defaults[..]
        && let Some(node) = yaml::parse(default, Input::Default).0.filter(|node| !node.is_null())
    {
        property.insert("default".into(), node.json());
    }
    property.into()
}

/// The types that a key accepts.
fn types(key: &Key) -> Vec<Json> {
    let mut types = Vec::new();
    let words: Vec<&str> = words(key);
    let accepts = |value: &str| some_algorithms(key).any(|algorithm| accepts(key, algorithm, value));
    if !words.is_empty() {
        // Case does not matter: `FULL_SHARD` is as good as `full_shard`.
        types.push(json!({ "enum": words }));
        types.push(json!({ "type": "string", "pattern": "^[A-Z0-9_-]+$" }));
    } else if accepts(NO_WORD) {
        types.push(json!({ "type": "string" }));
    }
    let is_text = words.is_empty() && !types.is_empty();
    let is_switch = matches!(key.default_for(key.algorithms()[0]), "true" | "false");
    if accepts("true") && (!is_text || is_switch) {
        types.push(json!({ "type": "boolean" }));
    }
    match (accepts("0.5"), accepts("1")) {
        (true, _) if !is_text => types.push(json!({ "type": "number" })),
        (false, true) if !is_text => types.push(json!({ "type": "integer" })),
        _ => {}
    }
    if !is_text && words.is_empty() && accepts("auto") {
        types.push(json!({ "const": "auto" }));
    }
    if accepts("[]") || accepts("[1]") {
        types.push(json!({ "type": "array" }));
    }
    if key.kind == Kind::Map || accepts("{a: b}") {
        types.push(json!({ "type": "object" }));
    }
    types.push(json!({ "type": "null" }));
    types
}

/// The first and the last algorithm that use a key: the types of a key differ at most between supervised training and
/// training on completions.
fn some_algorithms(key: &Key) -> impl Iterator<Item = AlgorithmName> {
    let algorithms = key.algorithms();
    let last = algorithms.last().filter(|_| algorithms.len() > 1);
    algorithms.first().into_iter().chain(last).copied()
}

/// The words that a key accepts, if it only accepts some.
fn words(key: &Key) -> Vec<&'static str> {
    let mut found: Vec<&'static str> = Vec::new();
    for algorithm in some_algorithms(key) {
        for problem in problems(key, algorithm, NO_WORD) {
            if let Problem::UnknownValue { key: name, allowed, .. } = problem
                && name == key.name
            {
                found.extend(allowed.into_iter().filter(|word| !found.contains(word)).collect::<Vec<_>>());
            }
        }
    }
    found
}

/// Whether the parser reports no error about the type of a value.
fn accepts(key: &Key, algorithm: AlgorithmName, value: &str) -> bool {
    problems(key, algorithm, value).iter().all(|problem| match problem {
        Problem::WrongType { key: name, .. } => !is_of(key, name),
        Problem::UnknownValue { key: name, .. } => *name != key.name,
        Problem::UnknownKey { key: name, .. } => !is_of(key, name),
        _ => true,
    })
}

fn is_of(key: &Key, name: &str) -> bool {
    name == key.name || name.strip_prefix(key.name).is_some_and(|rest| rest.starts_with(['.', '[']))
}

fn problems(key: &Key, algorithm: AlgorithmName, value: &str) -> Vec<Problem> {
    let mut overrides = vec![format!("{}={value}", key.name)];
    if key.name != "algorithm" {
        overrides.push(format!("algorithm={algorithm}"));
    }
    match load(None, &overrides) {
        Ok(_) => Vec::new(),
        Err(errors) => errors.0.into_iter().map(|error| error.problem).collect(),
    }
}
