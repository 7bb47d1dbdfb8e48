//! DeepSpeed's JSON. `auto` leaves a value to the rest of the configuration, as in transformers.

use super::deepspeed_keys::{ROWS, SWITCHED};
use super::{PeerEntry, Table, deepspeed_schedule};
use crate::error::Problem;
use crate::raw::RawConfig;
use crate::settle::overlay;
use crate::value;
use crate::yaml::{Entry, Node, Value};

const TABLE: Table = Table { rows: ROWS, special, has_auto: true };

/// Translates the entries of a DeepSpeed configuration. `spelled`: what precedes their names, such as `deepspeed.`.
pub(crate) fn translate(raw: &mut RawConfig<'_>, spelled: &str, entries: Vec<Entry>) {
    let mut entries = nest(raw, entries);
    deepspeed_schedule::settle_rates(raw, spelled, &mut entries);
    raw.translate(&TABLE, "", spelled, entries);
}

/// Moves `zero_optimization.stage: 2` into the map `zero_optimization`, where it replaces the value.
fn nest(raw: &mut RawConfig<'_>, entries: Vec<Entry>) -> Vec<Entry> {
    let (dotted, mut nested): (Vec<Entry>, Vec<Entry>) =
        entries.into_iter().partition(|entry| entry.key.contains('.') && is_path(&entry.key));
    for entry in dotted {
        if let Some(replaced) = find(&nested, &entry.key)
            && !value::same(replaced, &entry.node, false)
        {
            let (by, at) = (raw.texts.origin(entry.key_at), raw.texts.origin(replaced.at));
            raw.notes.push(format!("`{}` ({by}) replaces the value at {at}", entry.key));
        }
        let (head, tail) = entry.key.split_once('.').unwrap_or((&entry.key, ""));
        let node = crate::raw::wrap(tail, entry.key_at, entry.node);
        overlay(&mut nested, &[Entry { key: head.to_owned(), key_at: entry.key_at, node }]);
    }
    nested
}

/// Whether every part of a dotted name is a word, and there are few.
fn is_path(key: &str) -> bool {
    key.split('.').all(|part| !part.is_empty()) && key.matches('.').count() <= 4
}

/// The value at a dotted path.
pub(super) fn find<'e>(entries: &'e [Entry], path: &str) -> Option<&'e Node> {
    let (head, tail) = path.split_once('.').map_or((path, None), |(head, tail)| (head, Some(tail)));
    let node = &entries.iter().find(|entry| entry.key == head)?.node;
    match (tail, &node.value) {
        (None, _) => Some(node),
        (Some(tail), Value::Map(entries)) => find(entries, tail),
        _ => None,
    }
}

fn special(raw: &mut RawConfig<'_>, path: &str, entry: PeerEntry) {
    match path {
        "optimizer.type" => optimizer_type(raw, &entry),
        "optimizer.params.lr" => match entry.is_auto() {
            true => raw.auto("learning_rate", &entry),
            false => raw.set("learning_rate", &entry, entry.node.clone()),
        },
        "optimizer.params.betas" => betas(raw, entry),
        "scheduler" => deepspeed_schedule::translate(raw, entry),
        "zero_optimization.stage" => stage(raw, &entry),
        "zero_optimization.reduce_bucket_size" => match entry.is_auto() {
            true => raw.auto("reduce_bucket_size", &entry),
            false => raw.set("reduce_bucket_size", &entry, entry.node.clone()),
        },
        "zero_optimization.offload_optimizer" => offload(raw, "offload_optimizer", entry),
        "zero_optimization.offload_param" => offload(raw, "offload_param", entry),
        "zero_optimization.cpu_offload" => legacy_offload(raw, "offload_optimizer", &entry),
        "zero_optimization.cpu_offload_params" | "zero_optimization.cpu_offload_param" => {
            legacy_offload(raw, "offload_param", &entry);
        }
        "tensorboard.enabled" => tracker(raw, &entry, "tensorboard"),
        "csv_monitor.enabled" => tracker(raw, &entry, "csv"),
        "wandb.enabled" => tracker(raw, &entry, "wandb"),
        "flops_profiler.enabled" => match entry.node.bool() {
            Some(true) => {
                raw.set_word("wall_clock_breakdown", &entry, "true");
                // DeepSpeed's key of that name says it outright.
                raw.weaken_last();
            }
            Some(false) => {}
            None => raw.wrong_type(&entry, "true or false"),
        },
        "bf16.bf16_master_weights_and_grads" => {
            if is_on(raw, &entry) {
                raw.set_word("master_weights", &entry, "none");
                raw.set_word("gradient_dtype", &entry, "bf16");
            }
        }
        "bf16.bf16_optimizer_states" => {
            if is_on(raw, &entry) {
                raw.set_word("optimizer_state_dtype", &entry, "bf16");
            }
        }
        "data_types.grad_accum_dtype" => match entry.node.text() {
            Some("bf16") => raw.set_word("gradient_dtype", &entry, "bf16"),
            Some("fp32" | "auto") => {}
            _ => raw.refuse_value(&entry, "use `fp32`, or `bf16` with one micro-batch per step."),
        },
        "tensorboard.output_path" => raw.set("logging_dir", &entry, entry.node.clone()),
        _ => switched(raw, path, &entry),
    }
}

/// Whether a switch is on.
fn is_on(raw: &mut RawConfig<'_>, entry: &PeerEntry) -> bool {
    let on = entry.node.bool();
    if on.is_none() {
        raw.wrong_type(entry, "true or false");
    }
    on == Some(true)
}

/// DeepSpeed's name of an optimizer. Its `Adam` decouples weight decay unless `adam_w_mode` is false.
fn optimizer_type(raw: &mut RawConfig<'_>, entry: &PeerEntry) {
    let Some(name) = entry.node.text() else { return raw.wrong_type(entry, "the name of an optimizer") };
    match value::fold(name).as_str() {
        "adam" => {
            let at = raw.texts.origin(entry.key_at);
            raw.notes.push(format!("`{}: {name}` ({at}) is AdamW, as in DeepSpeed", entry.spelled));
            raw.set_word("optim", entry, "adamw");
        }
        "adamw" => raw.set_word("optim", entry, "adamw"),
        "lion" => raw.set_word("optim", entry, "lion"),
        "sgd" => raw.set_word("optim", entry, "sgd"),
        "lamb" | "onebitadam" | "zerooneadam" | "onebitlamb" | "muon" | "adagrad" | "mupadam"
        | "mupadamw" | "mupsgd" => raw.refuse_value(entry, "use AdamW, Lion or SGD."),
        _ => {
            let key = "optimizer.type";
            let allowed = vec!["AdamW", "Adam", "Lion", "SGD"];
            raw.fail(Problem::UnknownValue { key, value: name.to_owned(), allowed }, entry.node.at);
        }
    }
}

fn betas(raw: &mut RawConfig<'_>, entry: PeerEntry) {
    if entry.is_auto() {
        raw.auto("adam_beta1", &entry);
        return raw.auto("adam_beta2", &entry);
    }
    match &entry.node.value {
        Value::Seq(items) if items.len() == 2 => {
            for (key, item) in ["adam_beta1", "adam_beta2"].into_iter().zip(items) {
                if item.text().is_some_and(|text| text.eq_ignore_ascii_case("auto")) {
                    raw.auto(key, &entry);
                } else {
                    let one = PeerEntry { node: item.clone(), ..entry.clone() };
                    raw.set(key, &one, item.clone());
                }
            }
        }
        _ => raw.wrong_type(&entry, "a list of two numbers"),
    }
}

pub(super) fn stage(raw: &mut RawConfig<'_>, entry: &PeerEntry) {
    match entry.node.integer() {
        Some(0) => raw.set_word("strategy", entry, "ddp"),
        Some(1) => raw.set_word("strategy", entry, "zero1"),
        Some(2) => raw.set_word("strategy", entry, "zero2"),
        Some(3) => raw.set_word("strategy", entry, "zero3"),
        _ => raw.wrong_type(entry, "0, 1, 2 or 3"),
    }
}

/// `{device: cpu, pin_memory: true}`; without a device, DeepSpeed does not offload.
fn offload(raw: &mut RawConfig<'_>, key: &'static str, entry: PeerEntry) {
    let Value::Map(entries) = &entry.node.value else {
        if !entry.node.is_null() {
            raw.wrong_type(&entry, "a map with `device`");
        }
        return;
    };
    let mut kept = Vec::new();
    for inner in entries.clone() {
        let is_auto = inner.node.text().is_some_and(|text| text.eq_ignore_ascii_case("auto"));
        if OFFLOAD_DETAILS.contains(&inner.key.as_str()) {
            let spelled = format!("{}.{}", entry.spelled, inner.key);
            raw.no_effect(&spelled, inner.key_at, "the plan determines it");
        } else if !inner.node.is_null() && !is_auto {
            kept.push(inner);
        }
    }
    if kept.iter().any(|inner| inner.key != "nvme_path" || is_nvme(&kept)) {
        let node = Node { value: Value::Map(kept), at: entry.node.at };
        raw.set(key, &entry, node);
        if let Some((_, given)) = raw.all.last_mut() {
            given.written = Some(crate::settings::inline(&given.node));
            given.partial = true;
        }
    }
}

fn is_nvme(entries: &[Entry]) -> bool {
    let device = entries.iter().find(|entry| entry.key == "device");
    device.and_then(|entry| entry.node.text()).is_some_and(|text| text.eq_ignore_ascii_case("nvme"))
}

/// How copies are made, which the plan determines here.
const OFFLOAD_DETAILS: [&str; 10] = [
    "pin_memory",
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "pipeline",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
    "super_offload",
    "cpuadam_cores_perc",
];

/// `cpu_offload: true` of DeepSpeed before 0.4.
fn legacy_offload(raw: &mut RawConfig<'_>, key: &'static str, entry: &PeerEntry) {
    match (&entry.node.value, entry.node.bool()) {
        (_, Some(true)) => raw.set_word(key, entry, "cpu"),
        (_, Some(false)) => {}
        _ => raw.wrong_type(entry, "true or false"),
    }
}

/// The switch of a tracker's block.
fn tracker(raw: &mut RawConfig<'_>, entry: &PeerEntry, name: &str) {
    match entry.node.bool() {
        Some(true) => raw.add_word("report_to", entry, name),
        Some(false) => {}
        None => raw.wrong_type(entry, "true or false"),
    }
}

/// A block that is accepted if its `enabled` is false or absent.
fn switched(raw: &mut RawConfig<'_>, path: &str, entry: &PeerEntry) {
    let instead = SWITCHED.iter().find(|(name, _)| *name == path).map_or("", |(_, instead)| instead);
    let is_off = match &entry.node.value {
        Value::Map(entries) if path == "tensor_parallel" => entries
            .iter()
            .filter(|e| matches!(e.key.as_str(), "autotp_size" | "tp_size"))
            .all(|e| matches!(e.node.integer(), Some(0 | 1))),
        Value::Map(entries) => {
            let switch = entries.iter().find(|e| matches!(e.key.as_str(), "enabled" | "curriculum_enabled"));
            // The parts of `compression_training` have switches of their own.
            let has_own_switches = path == "compression_training" && !entries.is_empty();
            !has_own_switches && switch.is_none_or(|e| e.node.bool() == Some(false))
        }
        _ => entry.node.is_null() || entry.node.bool() == Some(false),
    };
    match is_off {
        true => raw.no_effect(&entry.spelled, entry.key_at, "it is off"),
        false => raw.refuse(entry, instead),
    }
}
