//! FSDP settings: accelerate's `fsdp_config`, the Trainer's map of the same name, and the Trainer's words
//! (`fsdp: "full_shard auto_wrap"`).

use super::{PeerEntry, Rule, Table};
use crate::error::Problem;
use crate::raw::{RawConfig, Setting};
use crate::value;
use crate::yaml::{At, Entry, Value};

use Rule::{Inert, Key, Only, Special};

const ONE_UNIT_PER_BLOCK: &str = "every transformer block is one unit";
const PLANNED: &str = "the plan determines it";

/// Names without the prefix `fsdp_`.
pub(super) const TABLE: Table = Table {
    rows: &[
        ("sharding_strategy", Special),
        ("reshard_after_forward", Special),
        ("offload_params", Special),
        ("cpu_offload", Special),
        ("activation_checkpointing", Key("gradient_checkpointing")),
        ("version", Inert("there is one implementation of sharding")),
        ("auto_wrap_policy", Inert(ONE_UNIT_PER_BLOCK)),
        ("transformer_layer_cls_to_wrap", Inert(ONE_UNIT_PER_BLOCK)),
        ("min_num_params", Inert(ONE_UNIT_PER_BLOCK)),
        ("backward_prefetch", Inert("`prefetch` sets how many units are gathered ahead")),
        ("backward_prefetch_policy", Inert("`prefetch` sets how many units are gathered ahead")),
        ("forward_prefetch", Inert("`prefetch` sets how many units are gathered ahead")),
        ("limit_all_gathers", Inert("the plan bounds the memory of gathered weights")),
        ("state_dict_type", Inert("checkpoints are sharded and load on any number of ranks")),
        ("use_orig_params", Inert("frozen and trained parameters are sharded separately")),
        ("cpu_ram_efficient_loading", Inert("weights are always loaded in pieces")),
        ("sync_module_states", Inert("all ranks load the same weights")),
        ("enable_memory_balancing", Inert(PLANNED)),
        ("mixed_precision_policy", Inert("`mixed_precision` sets it")),
        ("save_policy", Inert("the exported model folder is always complete")),
        (
            "ignored_modules",
            Only(
                &["none"],
                "no module is ignored",
                "remove it; use `freeze` for modules that are not trained.",
            ),
        ),
        ("ignored_parameters", Inert("use `freeze` for parameters that are not trained")),
        ("xla", Only(&["false"], "it is off", "use `device: cuda` or `cpu`.")),
        ("xla_fsdp_v2", Only(&["false"], "it is off", "use `device: cuda` or `cpu`.")),
        ("xla_fsdp_settings", Inert("XLA is not used")),
        ("xla_fsdp_grad_ckpt", Inert("XLA is not used")),
    ],
    special,
    has_auto: false,
};

/// Translates an FSDP map. `spelled`: the name of the map with a dot.
pub(super) fn translate(raw: &mut RawConfig<'_>, spelled: &str, entries: Vec<Entry>) {
    // The place of `sharding_strategy` counts in FSDP 1, that of `reshard_after_forward` in FSDP 2.
    for entry in entries {
        let prefix = if entry.key.starts_with("fsdp_") { "fsdp_" } else { "" };
        let key = entry.key.trim_start_matches("fsdp_").to_owned();
        raw.translate(&TABLE, "", &format!("{spelled}{prefix}"), vec![Entry { key, ..entry }]);
    }
}

fn special(raw: &mut RawConfig<'_>, path: &str, entry: PeerEntry) {
    match path {
        "sharding_strategy" => sharding_strategy(raw, &entry),
        // In FSDP 1 files, accelerate writes the strategy's name here.
        "reshard_after_forward" => match entry.node.bool() {
            Some(true) => raw.set_word("strategy", &entry, "full_shard"),
            Some(false) => raw.set_word("strategy", &entry, "shard_grad_op"),
            None => sharding_strategy(raw, &entry),
        },
        _ => match entry.node.bool() {
            // The optimizer steps where the parameters are.
            Some(true) => {
                raw.set_word("offload_param", &entry, "cpu");
                raw.set_word("offload_optimizer", &entry, "cpu");
            }
            Some(false) => {}
            None => raw.wrong_type(&entry, "true or false"),
        },
    }
}

/// The name of a strategy, or PyTorch's number of it.
fn sharding_strategy(raw: &mut RawConfig<'_>, entry: &PeerEntry) {
    let Some(text) = entry.node.text() else { return raw.wrong_type(entry, "the name of a strategy") };
    match value::fold(text).as_str() {
        "fullshard" | "1" => raw.set_word("strategy", entry, "full_shard"),
        "shardgradop" | "2" => raw.set_word("strategy", entry, "shard_grad_op"),
        "noshard" | "3" => raw.set_word("strategy", entry, "no_shard"),
        "hybridshard" | "4" => raw.set_word("strategy", entry, "hybrid_shard"),
        "hybridshardzero2" | "5" => raw.refuse_value(entry, "use HYBRID_SHARD or SHARD_GRAD_OP."),
        _ => {
            let allowed = vec!["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"];
            let problem =
                Problem::UnknownValue { key: "fsdp_sharding_strategy", value: text.to_owned(), allowed };
            raw.fail(problem, entry.node.at);
        }
    }
}

/// The Trainer's `fsdp`: words in a text or a list. Returns whether they are such words; `true` and `false` are ours.
pub(super) fn words(raw: &mut RawConfig<'_>, spelled: &str, entry: &Entry) -> bool {
    let words: Vec<(String, At)> = match &entry.node.value {
        Value::Seq(items) => {
            items.iter().filter_map(|item| Some((item.text()?.to_owned(), item.at))).collect()
        }
        Value::Scalar { text, .. } if entry.node.bool().is_none() && !entry.node.is_null() => {
            text.split([' ', ',']).map(|word| (word.to_owned(), entry.node.at)).collect()
        }
        _ => return false,
    };
    let peer = PeerEntry { spelled: spelled.to_owned(), key_at: entry.key_at, node: entry.node.clone() };
    for (word, at) in words.into_iter().filter(|(word, _)| !word.is_empty()) {
        match value::fold(&word).as_str() {
            "fullshard" => raw.set_word("strategy", &peer, "full_shard"),
            "shardgradop" => raw.set_word("strategy", &peer, "shard_grad_op"),
            "noshard" => raw.set_word("strategy", &peer, "no_shard"),
            "hybridshard" => raw.set_word("strategy", &peer, "hybrid_shard"),
            "offload" => {
                raw.set_word("offload_param", &peer, "cpu");
                raw.set_word("offload_optimizer", &peer, "cpu");
            }
            "autowrap" => raw.no_effect(&format!("{spelled}: auto_wrap"), entry.key_at, ONE_UNIT_PER_BLOCK),
            "hybridshardzero2" => raw.refuse_value(&peer, "use hybrid_shard or shard_grad_op."),
            _ => {
                let allowed =
                    vec!["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "offload", "auto_wrap"];
                raw.fail(Problem::UnknownValue { key: "fsdp", value: word, allowed }, at);
            }
        }
    }
    true
}

/// The setting of a switch that selects FSDP, unless a sharding strategy is given.
pub(super) fn switch(raw: &mut RawConfig<'_>, entry: &PeerEntry) {
    let node =
        crate::yaml::Node { value: Value::Scalar { text: "true".into(), plain: true }, at: entry.node.at };
    let setting = Setting::new(entry.spelled.clone(), entry.key_at, node);
    let written = Some(value::brief(&entry.node));
    raw.all.push((crate::keys::key("fsdp"), Setting { written, ..setting }));
}
