//! Our own files: keys that name another dialect inside them. These are the spellings of the Trainer, of TRL and of
//! guides for them: `deepspeed: ds.json`, `deepspeed: {zero_optimization: ...}`, `deepspeed: {config_path: ds.json}`,
//! `distributed_strategy: deepspeed`, `fsdp: "full_shard auto_wrap"`, `fsdp_config: {...}`, and blocks of DeepSpeed's
//! at the top level.

use super::{PeerEntry, deepspeed, fsdp};
use crate::raw::RawConfig;
use crate::references::path_of;
use crate::value;
use crate::yaml::{Entry, Input, Value};

/// Translates an entry of one of our own files if it belongs to another dialect, and returns it otherwise.
/// `name`: the normalized name; `spelled`: as the user spelled it.
pub(crate) fn absorb(raw: &mut RawConfig<'_>, name: &str, spelled: &str, entry: Entry) -> Option<Entry> {
    match name {
        "deepspeed" | "deepspeed_config" => {
            deepspeed_entry(raw, spelled, entry);
            None
        }
        // The file is a source of its own.
        "deepspeed.config_path" | "deepspeed.config_file" | "config_file" | "accelerate_config" => None,
        "strategy" | "distributed_strategy" if is_deepspeed(&entry) && has_deepspeed_file(raw) => None,
        "strategy" | "distributed_strategy" if is_deepspeed(&entry) => {
            let entry = PeerEntry { spelled: spelled.to_owned(), key_at: entry.key_at, node: entry.node };
            raw.refuse_value(
                &entry,
                "it names no stage: give the DeepSpeed file (`deepspeed: FILE`), or use `strategy: zero1`, `zero2` or \
                 `zero3`.",
            );
            None
        }
        "reduce_bucket_size" if entry.node.text() == Some("auto") => {
            raw.autos.insert("reduce_bucket_size", entry.node.at);
            None
        }
        "fsdp" | "use_fsdp" => (!fsdp::words(raw, spelled, &entry)).then_some(entry),
        "fsdp_config" => {
            match entry.node.value {
                Value::Map(entries) => fsdp::translate(raw, &format!("{spelled}."), entries),
                // The Trainer allows the name of a JSON file here.
                _ if entry.node.is_null() => {}
                _ => {
                    let entry =
                        PeerEntry { spelled: spelled.to_owned(), key_at: entry.key_at, node: entry.node };
                    raw.refuse_value(&entry, "write the map itself: `fsdp_config: {...}`.");
                }
            }
            None
        }
        "fsdp_transformer_layer_cls_to_wrap" | "fsdp_min_num_params" => {
            fsdp::translate(raw, "", vec![Entry { key: name.to_owned(), ..entry }]);
            None
        }
        _ if name.starts_with("fsdp_config.") => {
            let key = name["fsdp_config.".len()..].to_owned();
            fsdp::translate(raw, "fsdp_config.", vec![Entry { key, ..entry }]);
            None
        }
        _ if is_deepspeed_key(name, &entry) => {
            let (head, prefix) = match spelled.strip_suffix(&entry.key) {
                Some(prefix) => (entry.key.clone(), prefix.to_owned()),
                None => (name.to_owned(), String::new()),
            };
            deepspeed::translate(raw, &prefix, vec![Entry { key: head, ..entry }]);
            None
        }
        _ => Some(entry),
    }
}

/// Keys and blocks of DeepSpeed's that may stand at the top level of our own files.
const DEEPSPEED_KEYS: [&str; 9] = [
    "zero_optimization",
    "optimizer",
    "train_micro_batch_size_per_gpu",
    "steps_per_print",
    "flops_profiler",
    "activation_checkpointing",
    "comms_logger",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
];

/// Whether `name` is handled here, so that it is a known key.
pub(crate) fn is_known(name: &str) -> bool {
    let head = name.split('.').next().unwrap_or(name);
    DEEPSPEED_KEYS.contains(&head)
        || ["deepspeed", "deepspeed_config", "fsdp_config"].contains(&head)
        || ["fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"].contains(&name)
}

/// Whether an entry is one of [`DEEPSPEED_KEYS`]. `optimizer: adamw` is not: DeepSpeed's is a map.
fn is_deepspeed_key(name: &str, entry: &Entry) -> bool {
    let head = name.split('.').next().unwrap_or(name);
    let is_map = matches!(entry.node.value, Value::Map(_)) || name.contains('.');
    DEEPSPEED_KEYS.contains(&head) && (is_map || head != "optimizer")
}

/// `deepspeed` is a map of DeepSpeed's keys, a map that names a file, a file, or a switch.
fn deepspeed_entry(raw: &mut RawConfig<'_>, spelled: &str, entry: Entry) {
    match entry.node.value {
        Value::Map(entries) => {
            let is_path = |e: &Entry| matches!(e.key.as_str(), "config_path" | "config_file");
            let inner = entries.into_iter().filter(|e| !is_path(e)).collect();
            deepspeed::translate(raw, &format!("{spelled}."), inner);
        }
        _ if path_of(&entry.node).is_some() => {}
        _ if entry.node.is_null()
            || entry.node.bool() == Some(false)
            || matches!(entry.key_at.from, Input::Line(_)) => {}
        _ if entry.node.bool() == Some(true) && has_deepspeed_file(raw) => {}
        _ => {
            let entry = PeerEntry { spelled: spelled.to_owned(), key_at: entry.key_at, node: entry.node };
            raw.wrong_type(&entry, "the name of a DeepSpeed file, or its keys as a map");
        }
    }
}

fn is_deepspeed(entry: &Entry) -> bool {
    entry.node.text().is_some_and(|text| value::fold(text) == "deepspeed")
}

/// Whether there is a DeepSpeed configuration among the sources.
fn has_deepspeed_file(raw: &RawConfig<'_>) -> bool {
    raw.dialects.contains(&super::Dialect::DeepSpeed)
        || raw.references.iter().any(|r| r.role == crate::references::FileRole::DeepSpeed)
}
