//! The flags of training scripts: those of the Trainer and of TRL are settings of the run; a few have other names.

use crate::references::FileRole;
use crate::{foreign, keys};

/// A flag that is not simply a setting.
#[derive(Clone, Copy)]
pub(super) enum Special {
    /// A setting under another name.
    Rename(&'static str),
    File(FileRole),
    /// A file of accelerate, or the name of one of TRL's profiles.
    Profile,
    /// What the script does.
    Mode,
    Inert(&'static str),
}

const SPECIAL: &[(&str, Special)] = &[
    ("config", Special::File(FileRole::Config)),
    ("config_path", Special::File(FileRole::Config)),
    ("deepspeed", Special::File(FileRole::DeepSpeed)),
    ("deepspeed_config", Special::File(FileRole::DeepSpeed)),
    ("deepspeed_config_file", Special::File(FileRole::DeepSpeed)),
    ("accelerate_config", Special::Profile),
    ("epochs", Special::Rename("num_train_epochs")),
    ("num_epochs", Special::Rename("num_train_epochs")),
    ("mode", Special::Mode),
    ("distributed", Special::Inert("it follows from the number of ranks")),
    ("use_torchrun", Special::Inert("this program starts the ranks")),
    ("local_rank", Special::Inert("the launcher tells each rank its number")),
];

/// Flags whose value is a list of words.
const LISTS: [&str; 11] = [
    "report_to",
    "train_files",
    "eval_files",
    "train_file",
    "eval_file",
    "loss_type",
    "loss_weights",
    "reward_funcs",
    "reward_weights",
    "freeze",
    "lora_target_modules",
];

/// Switches whose default is not `true` or `false`.
const SWITCHES: [&str; 8] = [
    "bf16",
    "fp16",
    "gradient_checkpointing",
    "use_cpu",
    "no_cuda",
    "use_fsdp",
    "completion_only_loss",
    "greater_is_better",
];

/// TRL's profiles for `--accelerate_config`, and the strategy of each.
const PROFILES: [(&str, &str); 7] = [
    ("single_gpu", "ddp"),
    ("multi_gpu", "ddp"),
    ("zero1", "zero1"),
    ("zero2", "zero2"),
    ("zero3", "zero3"),
    ("fsdp1", "full_shard"),
    ("fsdp2", "full_shard"),
];

pub(super) fn special(key: &str) -> Option<Special> {
    SPECIAL.iter().find(|(name, _)| *name == key).map(|(_, special)| *special)
}

pub(super) fn names() -> impl Iterator<Item = &'static str> {
    SPECIAL.iter().map(|(name, _)| *name)
}

/// Whether a flag is a key of the configuration, ours or another trainer's.
pub(super) fn is_setting(key: &str) -> bool {
    // A part of a map, such as `--model.hidden_size`.
    let head = key.split('.').next().unwrap_or(key);
    crate::is_known_key(key)
        || matches!(key, "fsdp_config" | "fsdp_transformer_layer_cls_to_wrap" | "fsdp_min_num_params")
        || keys::find(head).is_some_and(|known| known.kind == keys::Kind::Map)
        || crate::is_secret(key)
}

pub(super) fn is_list(key: &str) -> bool {
    LISTS.contains(&key)
}

pub(super) fn is_switch(key: &str) -> bool {
    let is_bool = |text: &str| matches!(text, "true" | "false");
    // `resume_from_checkpoint` is `false` by default, but may be a path.
    let is_switch = |key: &keys::Key| {
        is_bool(key.default_for(crate::AlgorithmName::Sft)) && key.name != "resume_from_checkpoint"
    };
    SWITCHES.contains(&key)
        || keys::find(key).is_some_and(is_switch)
        || foreign::inert(key).is_some_and(|inert| inert.only.iter().any(|value| is_bool(value)))
}

pub(super) fn profile(name: &str) -> Option<&'static str> {
    PROFILES.iter().find(|(profile, _)| *profile == name).map(|(_, strategy)| *strategy)
}
