//! The JSON Schema names every key and accepts configurations that load.

use std::sync::OnceLock;

use serde_json::Value as Json;

use crate::keys::KEYS;
use crate::yaml::{Input, parse};
use crate::{Source, load, schema};

fn parsed() -> &'static Json {
    static SCHEMA: OnceLock<Json> = OnceLock::new();
    SCHEMA.get_or_init(|| serde_json::from_str(&schema()).expect("the schema is JSON"))
}

/// Checks a value against the parts of JSON Schema that ours uses. The errors are paths.
fn check(root: &Json, schema: &Json, value: &Json, path: &str, errors: &mut Vec<String>) {
    if let Some(target) = schema.get("$ref").and_then(Json::as_str) {
        let target = root.pointer(target.trim_start_matches('#')).expect("a part of the schema");
        return check(root, target, value, path, errors);
    }
    if let Some(choices) = schema.get("anyOf").and_then(Json::as_array) {
        let fits = |choice: &Json| {
            let mut inner = Vec::new();
            check(root, choice, value, path, &mut inner);
            inner.is_empty()
        };
        if !choices.iter().any(fits) {
            errors.push(path.to_owned());
        }
    }
    if schema.get("const").is_some_and(|only| only != value) {
        errors.push(path.to_owned());
    }
    if let Some(words) = schema.get("enum").and_then(Json::as_array)
        && !words.contains(value)
    {
        errors.push(path.to_owned());
    }
    let types: Vec<&str> = match schema.get("type") {
        Some(Json::String(name)) => vec![name],
        Some(Json::Array(names)) => names.iter().filter_map(Json::as_str).collect(),
        _ => Vec::new(),
    };
    let is = |name: &&str| match *name {
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|x| x.fract() == 0.0),
        "number" => value.is_number(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "null" => value.is_null(),
        other => panic!("unknown type {other}"),
    };
    if !types.is_empty() && !types.iter().any(is) {
        errors.push(path.to_owned());
    }
    if schema.get("pattern").is_some()
        && value.as_str().is_none_or(|text| text.contains(|c: char| c.is_lowercase()))
    {
        errors.push(path.to_owned());
    }
    if let (Some(properties), Some(map)) = (schema.get("properties"), value.as_object()) {
        for (key, value) in map {
            match properties.get(key) {
                Some(property) => check(root, property, value, &format!("{path}.{key}"), errors),
                None if key.contains(['.', '-']) => {}
                None => errors.push(format!("{path}.{key}")),
            }
        }
    }
}

fn errors_of(text: &str) -> Vec<String> {
    let root = parsed();
    let value = parse(text, Input::File(0)).0.expect("YAML").json();
    let mut errors = Vec::new();
    check(root, root, &value, "", &mut errors);
    errors
}

#[test]
fn every_key_is_a_property_with_a_type() {
    let schema = parsed();
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    for key in KEYS {
        let property = &schema["properties"][key.name];
        assert!(
            property["description"].as_str().is_some_and(|text| text.starts_with(key.doc)),
            "{}",
            key.name
        );
        let types = property["anyOf"].as_array().expect("types");
        assert!(types.len() > 1, "{} accepts nothing but null", key.name);
    }
    let of = |key: &str| schema["properties"][key]["anyOf"].to_string();
    assert_eq!(of("shuffle"), r#"[{"type":"boolean"},{"type":"null"}]"#);
    assert_eq!(of("seed"), r#"[{"type":"integer"},{"type":"null"}]"#);
    assert_eq!(of("learning_rate"), r#"[{"type":"number"},{"type":"null"}]"#);
    assert_eq!(of("output_dir"), r#"[{"type":"string"},{"type":"null"}]"#);
    assert_eq!(of("train_files"), r#"[{"type":"string"},{"type":"array"},{"type":"null"}]"#);
    assert!(of("strategy").contains(r#""ddp","zero1","zero2""#), "{}", of("strategy"));
    assert!(of("loss_type").contains(r#""sigmoid""#) && of("loss_type").contains(r#""dapo""#));
    assert_eq!(of("reduce_bucket_size"), r#"[{"type":"integer"},{"const":"auto"},{"type":"null"}]"#);
    assert_eq!(schema["properties"]["seed"]["default"], 42);
}

#[test]
fn defaults_fit_their_types() {
    let schema = parsed();
    for key in KEYS {
        let property = &schema["properties"][key.name];
        if let Some(default) = property.get("default") {
            let mut errors = Vec::new();
            check(schema, property, default, key.name, &mut errors);
            assert!(errors.is_empty(), "{errors:?}: {default}");
        }
    }
}

#[test]
fn configurations_that_load_are_valid() {
    for text in [
        "model: 15m\noutput_dir: out\nlearning_rate: 1e-4\nstrategy: FULL_SHARD\nbf16: true\npacking: true\n",
        "model: {hidden_size: 64}\ntraining:\n  seed: 3\n  report_to: [tensorboard]\n  eval_strategy: steps\n",
        "algorithm: dpo\nmodel_name_or_path: m\nloss_type: [sigmoid, sft]\nloss_weights: [1, 0.1]\n",
        "algorithm: grpo\nmodel_name_or_path: m\nreward_funcs: [exact_match]\nscale_rewards: group\n",
        "model: tiny\noffload_optimizer: {device: cpu, ratio: 0.5}\nfp16: {enabled: true}\nmax_steps: 10\n",
        "model: tiny\ndeepspeed: {zero_optimization: {stage: 2}}\ndataloader: {batch_size: 2}\nsave_strategy: 'no'\n",
        "model: tiny\ndataloader_pin_memory: true\nnnodes: 2\nmodel-revision: null\n",
    ] {
        load(Some(Source { name: "run.yaml", text }), &[])
            .unwrap_or_else(|errors| panic!("{text}: {errors}"));
        assert!(errors_of(text).is_empty(), "{text}: {:?}", errors_of(text));
    }
}

#[test]
fn mistakes_are_found() {
    assert_eq!(errors_of("lerning_rate: 1\nseed: x\nstrategy: zero9\nshuffle: 3\n").len(), 4);
    assert_eq!(errors_of("training:\n  sed: 1\n"), [".training.sed"]);
}
