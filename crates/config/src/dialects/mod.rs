//! Dialects: the files of other trainers, translated to our keys. Every value keeps its file and line.
//!
//! A dialect is a table with one row per key of the other trainer: it sets a key of ours, has no effect (with the
//! reason), or is refused (with what to do). What depends on several keys is code beside the table. Keys that are not
//! in the table are errors with the closest name.

pub(crate) mod accelerate;
pub(crate) mod deepspeed;
mod deepspeed_keys;
mod deepspeed_schedule;
pub(crate) mod fsdp;
pub(crate) mod guides;

use lockstep_core::closest;

use crate::error::Problem;
use crate::keys::{self, Key};
use crate::launch_settings::LaunchKey;
use crate::origin::printable;
use crate::raw::{RawConfig, Setting, is_harmless, wrap};
use crate::value;
use crate::yaml::{At, Entry, Node, Value};

/// How a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// Our own keys, which include those of TRL and of the Trainer.
    Lockstep,
    DeepSpeed,
    Accelerate,
}

/// What a key of another trainer means here.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    /// Our key with the same values.
    Key(&'static str),
    /// A part of our key, which is a map.
    Part(&'static str, &'static str),
    /// Our key, unless another source sets it.
    Weak(&'static str),
    /// For the launcher.
    Launch(LaunchKey),
    /// It has no effect; completes "has no effect here: ...".
    Inert(&'static str),
    /// It has no effect with these values, in lower case. Others are refused, with what to do.
    Only(&'static [&'static str], &'static str, &'static str),
    /// It is refused, with what to do.
    Refused(&'static str),
    /// Code beside the table.
    Special,
}

/// The keys of another trainer.
pub(crate) struct Table {
    pub(crate) rows: &'static [(&'static str, Rule)],
    /// Translates a key whose rule is `Special`.
    pub(crate) special: fn(&mut RawConfig<'_>, &str, PeerEntry),
    /// Whether `auto` leaves a value to the rest of the configuration.
    pub(crate) has_auto: bool,
}

/// An entry of another trainer's file.
#[derive(Clone, Debug)]
pub(crate) struct PeerEntry {
    /// The key with all maps around it, as it was spelled.
    pub(crate) spelled: String,
    pub(crate) key_at: At,
    pub(crate) node: Node,
}

impl PeerEntry {
    pub(crate) fn is_auto(&self) -> bool {
        self.node.text().is_some_and(|text| text.eq_ignore_ascii_case("auto"))
    }
}

/// Keys that only DeepSpeed has.
const DEEPSPEED_MARKS: [&str; 12] = [
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "optimizer",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "flops_profiler",
    "activation_checkpointing",
    "comms_logger",
    "prescale_gradients",
    "aio",
];

/// Keys that our files share with DeepSpeed's.
const SHARED_WITH_DEEPSPEED: [&str; 9] = [
    "gradient_accumulation_steps",
    "gradient_clipping",
    "gradient_checkpointing",
    "train_batch_size",
    "dataloader_drop_last",
    "fp16",
    "bf16",
    "scheduler",
    "wall_clock_breakdown",
];

/// Keys that only accelerate has.
const ACCELERATE_MARKS: [&str; 11] = [
    "compute_environment",
    "distributed_type",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "downcast_bf16",
    "same_network",
    "rdzv_backend",
    "megatron_lm_config",
];

/// The dialect of a file, by its keys. A file with keys of ours and of DeepSpeed is ours.
pub(crate) fn recognize(entries: &[Entry]) -> Dialect {
    let head = |entry: &Entry| entry.key.split('.').next().unwrap_or_default().to_owned();
    let names: Vec<String> = entries.iter().map(head).collect();
    // `optimizer: adamw` is not DeepSpeed's, which is a map.
    let is_word = |entry: &Entry| matches!(entry.node.value, Value::Scalar { .. });
    let has = |marks: &[&str]| {
        let is_mark = |(name, entry): (&String, &Entry)| {
            marks.contains(&name.as_str()) && !(name == "optimizer" && entry.key == *name && is_word(entry))
        };
        names.iter().zip(entries).any(is_mark)
    };
    let is_ours = |name: &String| {
        name == "training" || (keys::find(name).is_some() && !SHARED_WITH_DEEPSPEED.contains(&name.as_str()))
    };
    if has(&ACCELERATE_MARKS) {
        Dialect::Accelerate
    } else if has(&DEEPSPEED_MARKS) && !names.iter().any(is_ours) {
        Dialect::DeepSpeed
    } else {
        Dialect::Lockstep
    }
}

impl RawConfig<'_> {
    /// Translates the entries of a map. `path` is the path of the map in the table and `spelled` what the user sees;
    /// both are empty or end with a dot.
    pub(crate) fn translate(
        &mut self,
        table: &'static Table,
        path: &str,
        spelled: &str,
        entries: Vec<Entry>,
    ) {
        for Entry { key, key_at, node } in entries {
            let path = format!("{path}{key}");
            let entry = PeerEntry { spelled: format!("{spelled}{key}"), key_at, node };
            let inner = format!("{path}.");
            match table.rows.iter().find(|(name, _)| *name == path) {
                Some((_, rule)) => self.apply(table, *rule, &path, entry),
                None if table.rows.iter().any(|(name, _)| name.starts_with(&inner)) => match entry.node.value
                {
                    Value::Map(entries) => {
                        let spelled = format!("{}.", entry.spelled);
                        self.translate(table, &inner, &spelled, entries);
                    }
                    _ if entry.node.is_null() => {}
                    _ => self.wrong_type(&entry, "a map"),
                },
                None => {
                    let names = table.rows.iter().map(|(name, _)| *name);
                    self.unknown(&path, &entry, names);
                }
            }
        }
    }

    fn apply(&mut self, table: &'static Table, rule: Rule, path: &str, entry: PeerEntry) {
        let is_auto = table.has_auto && entry.is_auto();
        match rule {
            Rule::Key(key) | Rule::Weak(key) if is_auto => self.auto(key, &entry),
            Rule::Part("fp16" | "bf16", "enabled") if is_auto => self.auto("mixed_precision", &entry),
            Rule::Part(..) if is_auto => {}
            Rule::Key(key) => self.set(key, &entry, entry.node.clone()),
            Rule::Weak(key) => {
                self.set(key, &entry, entry.node.clone());
                if let Some((_, given)) = self.all.last_mut() {
                    given.weak = true;
                }
            }
            Rule::Part(key, part) => self.set_part(key, part, &entry, entry.node.clone()),
            Rule::Launch(key) => {
                if !entry.node.is_null() {
                    self.launch.push((key, Setting::new(entry.spelled, entry.key_at, entry.node)));
                }
            }
            Rule::Inert(why) => self.no_effect(&entry.spelled, entry.key_at, why),
            Rule::Only(only, why, instead) => match is_harmless(only, &entry.node) {
                true => self.no_effect(&entry.spelled, entry.key_at, why),
                false => self.refuse_value(&entry, instead),
            },
            Rule::Refused(instead) => self.refuse(&entry, instead),
            Rule::Special => (table.special)(self, path, entry),
        }
    }

    /// Sets one of our keys to `node`. Null is not a value.
    pub(crate) fn set(&mut self, key: &'static str, entry: &PeerEntry, node: Node) {
        if node.is_null() {
            return;
        }
        let written = Some(value::brief(&entry.node));
        let setting = Setting::new(entry.spelled.clone(), entry.key_at, node);
        self.all.push((keys::key(key), Setting { written, ..setting }));
    }

    /// Sets one of our keys to a word.
    pub(crate) fn set_word(&mut self, key: &'static str, entry: &PeerEntry, word: &str) {
        let node = Node { value: Value::Scalar { text: word.to_owned(), plain: true }, at: entry.node.at };
        self.set(key, entry, node);
    }

    /// Lets any other source of the value that was set last replace it.
    pub(crate) fn weaken_last(&mut self) {
        if let Some((_, given)) = self.all.last_mut() {
            given.weak = true;
        }
    }

    /// Adds a word to one of our keys that is a list, if the block is switched on.
    pub(crate) fn add_word(&mut self, key: &'static str, entry: &PeerEntry, word: &str) {
        let node = Node { value: Value::Scalar { text: word.to_owned(), plain: true }, at: entry.node.at };
        let same = |(found, given): &&mut (&'static Key, Setting)| {
            found.name == key && given.written.is_some() && given.key_at.from == entry.key_at.from
        };
        let Some((_, given)) = self.all.iter_mut().find(same) else { return self.set(key, entry, node) };
        let first = given.node.clone();
        match &mut given.node.value {
            Value::Seq(items) => items.push(node),
            other => *other = Value::Seq(vec![first, node]),
        }
    }

    /// Sets a part of one of our keys.
    pub(crate) fn set_part(&mut self, key: &'static str, part: &str, entry: &PeerEntry, node: Node) {
        if node.is_null() {
            return;
        }
        self.set(key, entry, wrap(part, entry.key_at, node));
        if let Some((_, given)) = self.all.last_mut() {
            given.partial = true;
        }
    }

    /// Leaves a key to the rest of the configuration.
    pub(crate) fn auto(&mut self, key: &'static str, entry: &PeerEntry) {
        self.autos.insert(key, entry.node.at);
    }

    pub(crate) fn refuse(&mut self, entry: &PeerEntry, instead: &'static str) {
        let key = printable(&entry.spelled);
        self.fail(Problem::KeyNotImplemented { key, instead }, entry.key_at);
    }

    pub(crate) fn refuse_value(&mut self, entry: &PeerEntry, instead: &'static str) {
        let (key, value) = (printable(&entry.spelled), value::brief(&entry.node));
        self.fail(Problem::PeerValueNotImplemented { key, value, instead }, entry.node.at);
    }

    pub(crate) fn wrong_type(&mut self, entry: &PeerEntry, expected: &'static str) {
        let (key, found) = (printable(&entry.spelled), value::describe(&entry.node.value));
        self.fail(Problem::WrongType { key, expected, found }, entry.node.at);
    }

    /// Reports an unknown key with the closest of `names`, which are full paths.
    pub(crate) fn unknown(
        &mut self,
        path: &str,
        entry: &PeerEntry,
        names: impl Iterator<Item = &'static str> + Clone,
    ) {
        // The bounds limit the time on hostile text.
        let guess = self.errors.len() < 50 && path.len() <= 80;
        // A mistyped key in the right block, or a key in the wrong block.
        let last = |path: &'static str| path.rsplit('.').next().unwrap_or(path);
        let own = path.rsplit('.').next().unwrap_or(path);
        let found = guess.then(|| {
            closest(path, names.clone())
                .or_else(|| names.clone().find(|name| last(name) == own))
                .or_else(|| crate::foreign::common_name(own))
        });
        self.fail(Problem::UnknownKey { key: entry.spelled.clone(), closest: found.flatten() }, entry.key_at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_name_keys_that_exist_once() {
        for rows in [deepspeed_keys::ROWS, accelerate::TABLE.rows, accelerate::PLUGIN.rows, fsdp::TABLE.rows]
        {
            let mut names: Vec<&str> = rows.iter().map(|(name, _)| *name).collect();
            names.sort_unstable();
            let twice: Vec<_> = names.windows(2).filter(|pair| pair[0] == pair[1]).collect();
            assert!(twice.is_empty(), "{twice:?}");
            for (name, rule) in rows {
                if let Rule::Key(key) | Rule::Weak(key) | Rule::Part(key, _) = rule {
                    assert!(keys::KEYS.iter().any(|known| known.name == *key), "{name}: {key}");
                }
                if let Rule::Only(values, ..) = rule {
                    assert!(values.iter().all(|value| value.to_lowercase() == **value), "{name}");
                }
            }
        }
        for (name, _) in deepspeed_keys::SWITCHED {
            assert!(deepspeed_keys::ROWS.iter().any(|(row, _)| row == name), "{name}");
        }
    }
}
