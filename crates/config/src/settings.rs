//! The settings of a run as text, by key. A checkpoint stores them, so that a resumed run can report changes.

use std::collections::BTreeMap;

use crate::keys::{self, KEYS, Kind};
use crate::raw::RawConfig;
use crate::secret;
use crate::sections::AlgorithmName;
use crate::value;
use crate::yaml::{self, Entry, Input, Node, Value};

/// Settings that concern a single start of a run. They change whenever a run is resumed.
pub(crate) const PER_START: [&str; 5] =
    ["resume_from_checkpoint", "overwrite_output_dir", "wall_clock_breakdown", "profile_steps", "dashboard"];

/// Shown for a part of a map that has no value.
const NOT_SET: &str = "not set";

/// A setting that has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedSetting {
    pub key: String,
    pub then: String,
    pub now: String,
}

impl std::fmt::Display for ChangedSetting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let short = crate::origin::printable;
        write!(f, "{}: {} -> {}", short(&self.key), short(&self.then), short(&self.now))
    }
}

/// The settings that differ between two runs. Two spellings of the same value (`1e-3`, `0.001`) do not differ. Keys
/// that the earlier version did not have are left out.
pub fn changed_settings(
    then: &BTreeMap<String, String>,
    now: &BTreeMap<String, String>,
) -> Vec<ChangedSetting> {
    let known_then = |key: &str| {
        let inside = |other: &String| other.strip_prefix(key).is_some_and(|rest| rest.starts_with('.'));
        key.contains('.') || then.keys().any(inside)
    };
    let new = now.keys().filter(|key| !then.contains_key(*key) && known_then(key));
    let mut changed = Vec::new();
    for key in then.keys().chain(new) {
        let [before, after] = [then, now].map(|settings| settings.get(key).map_or(NOT_SET, String::as_str));
        if !same(key, before, after) {
            changed.push(ChangedSetting { key: key.clone(), then: before.into(), now: after.into() });
        }
    }
    changed
}

fn same(key: &str, a: &str, b: &str) -> bool {
    let words = keys::find(key).is_some_and(|key| key.kind == Kind::Word);
    let node = |text: &str| yaml::parse(text, Input::Default).0;
    a == b || matches!((node(a), node(b)), (Some(a), Some(b)) if value::same(&a, &b, words))
}

/// Every key of the algorithm with its value or default, without secrets. Each part of a map is a separate setting, such as
/// `model.hidden_size`.
pub(crate) fn of(raw: &RawConfig<'_>, algorithm: AlgorithmName) -> BTreeMap<String, String> {
    let mut settings = BTreeMap::new();
    for key in KEYS.iter().filter(|key| key.is_for(algorithm) && !PER_START.contains(&key.name)) {
        match raw.given.get(key.name) {
            Some(given) => add(&mut settings, key.name.to_string(), &given.node),
            None => drop(settings.insert(key.name.to_string(), key.default_for(algorithm).to_string())),
        }
    }
    settings
}

/// The keys whose values differ from their defaults, each with the YAML that sets it. Secrets are hidden.
pub(crate) fn changed(raw: &RawConfig<'_>, algorithm: AlgorithmName) -> Vec<(&'static str, String)> {
    let mut changed = Vec::new();
    for key in KEYS.iter().filter(|key| key.is_for(algorithm)) {
        let Some(given) = raw.given.get(key.name).filter(|given| !given.node.is_null()) else { continue };
        let default = yaml::parse(key.default_for(algorithm), Input::Default).0;
        if !default.is_some_and(|default| value::same(&given.node, &default, key.kind == Kind::Word)) {
            let mut text = String::new();
            write_yaml(&mut text, 0, key.name, &given.node);
            changed.push((key.name, text));
        }
    }
    changed
}

/// Writes `key: value`, with maps over several lines.
pub(crate) fn write_yaml(out: &mut String, depth: usize, key: &str, node: &Node) {
    out.push_str(&format!("{}{}:", "  ".repeat(depth), scalar(key, true)));
    match &node.value {
        Value::Map(entries) if !entries.is_empty() => {
            out.push('\n');
            for Entry { key, node, .. } in entries {
                match secret::is_secret(key) {
                    true => out.push_str(&format!("{}{key}: hidden\n", "  ".repeat(depth + 1))),
                    false => write_yaml(out, depth + 1, key, node),
                }
            }
        }
        _ => out.push_str(&format!(" {}\n", inline(node))),
    }
}

/// A value on one line of YAML.
pub(crate) fn inline(node: &Node) -> String {
    match &node.value {
        Value::Scalar { .. } if node.is_null() => "null".into(),
        Value::Scalar { text, plain } => scalar(text, *plain),
        Value::Seq(items) => format!("[{}]", items.iter().map(inline).collect::<Vec<_>>().join(", ")),
        Value::Map(entries) => {
            let entry = |e: &Entry| format!("{}: {}", scalar(&e.key, true), inline(&e.node));
            format!("{{{}}}", entries.iter().map(entry).collect::<Vec<_>>().join(", "))
        }
    }
}

/// A scalar, in quotes if it had them or could mean something else without.
fn scalar(text: &str, plain: bool) -> String {
    let is_word = text.chars().all(|c| c.is_alphanumeric() || "_./+-".contains(c));
    match plain && is_word && !text.is_empty() && text != "-" && !text.starts_with("---") {
        true => text.to_owned(),
        false => serde_json::Value::from(text).to_string(),
    }
}

fn add(settings: &mut BTreeMap<String, String>, key: String, node: &Node) {
    let text = match &node.value {
        Value::Map(entries) => {
            return entries.iter().for_each(|e| add(settings, format!("{key}.{}", e.key), &e.node));
        }
        Value::Scalar { text, plain: true } if value::is_null(text) => "null".into(),
        Value::Scalar { text, .. } => text.clone(),
        Value::Seq(_) => node.json().to_string(),
    };
    let shown = secret::redact_setting(&format!("{key}={text}"));
    let text = shown.split_once('=').map_or(text, |(_, text)| text.to_string());
    settings.insert(key, text);
}

#[cfg(test)]
mod tests {
    use crate::{Source, changed_settings, load};

    fn changes(then: &str, now: &str) -> Vec<String> {
        let [then, now] = [then, now].map(|text| {
            let text = format!("{text}\noutput_dir: out\n");
            load(Some(Source { name: "run.yaml", text: &text }), &[]).unwrap().settings
        });
        changed_settings(&then, &now).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn changes_are_compared_by_value() {
        assert!(changes("model: tiny\nlearning_rate: 1e-3", "model: tiny\nlearning_rate: 0.001").is_empty());
        assert!(changes("model: tiny\nstrategy: full-shard", "model: tiny\nstrategy: FULL_SHARD").is_empty());
        assert!(changes("model: tiny\nseed: 42", "model: tiny").is_empty(), "42 is the default");
        assert_eq!(
            changes("model: tiny\nmax_steps: 4\nsave_steps: 2", "model: tiny\nmax_steps: 6"),
            ["max_steps: 4 -> 6", "save_steps: 2 -> 500"]
        );
        assert_eq!(
            changes("model: tiny\ntrain_files: a", "model: tiny\ntrain_files: [a, b]"),
            [r#"train_files: a -> ["a","b"]"#]
        );
    }

    #[test]
    fn parts_of_a_map_are_separate_settings() {
        let map = |size: &str| {
            format!("model: {{architectures: [LlamaForCausalLM], hidden_size: {size}, num_hidden_layers: 2}}")
        };
        assert_eq!(changes(&map("32"), &map("64")), ["model.hidden_size: 32 -> 64"]);
        let all = changes("model: tiny", &map("64"));
        assert_eq!(all[0], "model: tiny -> not set");
        assert!(all.contains(&"model.hidden_size: not set -> 64".to_string()), "{all:?}");
    }

    #[test]
    fn changed_keys_load_as_yaml() {
        let text = "model: {architectures: [LlamaForCausalLM], hidden_size: 32, rope_scaling: {factor: 2}}\n\
                    chat_template: \"{% for m in messages %}\\n{% endfor %}\"\nsave_strategy: \"no\"\nseed: 42\n\
                    learning_rate: 1e-3\ntrain_files: ['a b.jsonl', data/*.jsonl]\nmax_steps: -1\n\
                    lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1, min_lr: ~}\n";
        let load = |text: &str| load(Some(Source { name: "run.yaml", text }), &[]).unwrap();
        let first = load(text);
        let yaml: String = first.changed.iter().map(|(_, yaml)| yaml.as_str()).collect();
        insta::assert_snapshot!(yaml, @r#"
        model:
          architectures: [LlamaForCausalLM]
          hidden_size: 32
          rope_scaling:
            factor: 2
        train_files: ["a b.jsonl", "data/*.jsonl"]
        chat_template: "{% for m in messages %}\n{% endfor %}"
        learning_rate: 1e-3
        lr_scheduler_type: cosine_with_min_lr
        lr_scheduler_kwargs:
          min_lr_rate: 0.1
          min_lr: null
        save_strategy: "no"
        "#);
        let reparsed = load(&yaml);
        assert_eq!((&reparsed.changed, &reparsed.settings), (&first.changed, &first.settings));
    }

    #[test]
    fn settings_of_a_single_start_are_not_compared() {
        assert!(changes("model: tiny", "model: tiny\nresume_from_checkpoint: true").is_empty());
        let mut then = load(None, &["model=tiny".into(), "output_dir=out".into()]).unwrap().settings;
        let now = then.clone();
        then.remove("seed");
        assert!(changed_settings(&then, &now).is_empty(), "the earlier version did not have this key");
    }
}
