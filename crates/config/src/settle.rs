//! Reduces all values of a key to one, and reports sources that contradict each other.
//!
//! Sources of one level (all files, all overrides) must agree; a higher level replaces a lower one. Two rules differ:
//! a file of another kind replaces the `learning_rate` of a DeepSpeed file, and the flags of a launch line must agree
//! with a DeepSpeed file, as in transformers.

use crate::dialects::Dialect;
use crate::error::{ConfigError, Problem};
use crate::keys::{KEYS, Key, Kind};
use crate::origin::printable;
use crate::raw::{COMMAND_KEY, RawConfig, Setting};
use crate::texts::Texts;
use crate::value;
use crate::yaml::{Entry, Input, Value};

/// Number of levels; see [`Input::level`].
const LEVELS: usize = 6;

/// Maps that may also be given as the value of one of their members: `fp16: true` is `fp16: {enabled: true}`.
const SHORT_FORMS: [(&str, &str); 4] =
    [("fp16", "enabled"), ("bf16", "enabled"), ("offload_optimizer", "device"), ("offload_param", "device")];

impl RawConfig<'_> {
    pub(crate) fn settle_all(&mut self) {
        for key in KEYS {
            self.settle(key);
        }
    }

    fn settle(&mut self, key: &'static Key) {
        if key.name == "algorithm" {
            self.settle_command();
        }
        let mut levels: [Vec<Setting>; LEVELS] = Default::default();
        for (_, given) in self.all.iter().filter(|(k, _)| k.name == key.name) {
            levels[given.key_at.from.level()].push(given.clone());
        }
        self.drop_weak(&mut levels);
        let [_, peer, variables, files, line, flags] = levels;
        let from_deepspeed = files.iter().find(|given| self.is_deepspeed(given)).cloned();
        let files = self.prefer_other_files(key, files);
        let lower = self.agree(key, peer).into_iter().chain(self.agree(key, variables)).last();
        let files = self.agree(key, files).or(lower);
        let mut line = self.agree(key, last_of_each_spelling(line));
        self.check_line(key, from_deepspeed.as_ref(), line.as_ref());
        // `--fp16` sets one member of a file's map and keeps the others, such as those for loss scaling.
        if let (Some(Value::Map(_)), Some(line)) = (files.as_ref().map(|given| &given.node.value), &mut line)
        {
            expand_short_form(key, line);
        }
        let replaced = self.replace(key, files, line);
        let flags = self.agree(key, last_of_each_spelling(flags));
        if let Some(given) = self.replace(key, replaced, flags) {
            self.given.insert(key.name, given);
        }
    }

    fn is_deepspeed(&self, given: &Setting) -> bool {
        given.key_at.from.file().is_some_and(|idx| self.dialects[idx] == Dialect::DeepSpeed)
            || given.spelled.trim_start_matches("training.").starts_with("deepspeed.")
    }

    /// Removes weak values if there are others.
    fn drop_weak(&mut self, levels: &mut [Vec<Setting>; LEVELS]) {
        if !levels.iter().flatten().any(|given| !given.weak) {
            return;
        }
        let weak: Vec<Setting> = levels.iter().flatten().filter(|given| given.weak).cloned().collect();
        for given in weak {
            self.no_effect(&given.spelled, given.key_at, "another source sets it");
        }
        levels.iter_mut().for_each(|level| level.retain(|given| !given.weak));
    }

    /// Lets `learning_rate` of other files replace that of a DeepSpeed file, and notes it.
    fn prefer_other_files(&mut self, key: &'static Key, files: Vec<Setting>) -> Vec<Setting> {
        let (theirs, others): (Vec<_>, Vec<_>) =
            files.into_iter().partition(|given| self.is_deepspeed(given));
        let (Some(replaced), Some(by)) = (theirs.first(), others.first()) else {
            return others.into_iter().chain(theirs).collect();
        };
        if key.name != "learning_rate" || value::same(&replaced.node, &by.node, false) {
            return others.into_iter().chain(theirs).collect();
        }
        self.note_replaced(by, replaced);
        others
    }

    fn note_replaced(&mut self, by: &Setting, replaced: &Setting) {
        let shown = |given: &Setting| {
            let value = given.written.clone().unwrap_or_else(|| value::brief(&given.node));
            format!("`{}: {value}` ({})", printable(&given.spelled), self.texts.origin(given.key_at))
        };
        self.notes.push(format!("{} replaces {} of the DeepSpeed file", shown(by), shown(replaced)));
    }

    /// As in transformers, flags of the launch line must agree with a DeepSpeed file, except for `learning_rate`.
    fn check_line(&mut self, key: &'static Key, file: Option<&Setting>, line: Option<&Setting>) {
        let (Some(file), Some(line)) = (file, line) else { return };
        let mut both = file.clone();
        if merge(key, &mut both, line) {
            return;
        }
        if key.name == "learning_rate" {
            return self.note_replaced(line, file);
        }
        let why = "the flag and the DeepSpeed file disagree; make them equal, or write \"auto\" in the file.";
        self.errors.push(conflict(&self.texts, file, line, why));
    }

    /// The value of the higher level, or the lower one if there is none. A part of a map is merged into the map.
    fn replace(
        &mut self,
        key: &'static Key,
        lower: Option<Setting>,
        higher: Option<Setting>,
    ) -> Option<Setting> {
        match (lower, higher) {
            (Some(mut lower), Some(higher)) if higher.partial => {
                expand_short_form(key, &mut lower);
                match (&mut lower.node.value, &higher.node.value) {
                    (Value::Map(base), Value::Map(over)) => overlay(base, over),
                    // A part of a map cannot be merged into a word such as `15m`.
                    _ => {
                        let why = "a part can only be set in a map; give the whole map, or remove one.";
                        self.errors.push(conflict(&self.texts, &lower, &higher, why));
                    }
                }
                Some(Setting { node: lower.node, ..higher })
            }
            (lower, higher) => higher.or(lower),
        }
    }

    /// Reports values of `algorithm` that contradict the command, and removes them.
    fn settle_command(&mut self) {
        let is_command = |given: &Setting| given.spelled == COMMAND_KEY;
        let of_key = || self.all.iter().filter(|(key, _)| key.name == "algorithm").map(|(_, given)| given);
        let Some(command) = of_key().find(|given| is_command(given)).cloned() else { return };
        let others: Vec<Setting> = of_key().filter(|given| !is_command(given)).cloned().collect();
        for other in others.iter().filter(|other| !other.node.is_null()) {
            if !value::same(&other.node, &command.node, true) {
                let (algorithm, command) = (value::brief(&other.node), value::brief(&command.node));
                self.fail(Problem::OtherCommand { algorithm, command }, other.node.at);
            }
        }
        self.all.retain(|(key, given)| key.name != "algorithm" || is_command(given));
    }

    /// Checks that several values are equal and returns one of them. Parts of a map are merged.
    fn agree(&mut self, key: &'static Key, several: Vec<Setting>) -> Option<Setting> {
        let mut several = several.into_iter();
        let mut first = several.next()?;
        for next in several {
            if !merge(key, &mut first, &next) {
                let why = match (first.key_at.from, next.key_at.from) {
                    (Input::File(a), Input::File(b)) if a != b => {
                        "the two files disagree; keep one of the two."
                    }
                    _ => "they are two spellings of one setting; keep one.",
                };
                self.errors.push(conflict(&self.texts, &first, &next, why));
            }
        }
        Some(first)
    }
}

/// Of several flags with the same spelling, the last one counts.
fn last_of_each_spelling(flags: Vec<Setting>) -> Vec<Setting> {
    flags.into_iter().fold(Vec::new(), |mut kept: Vec<Setting>, flag| {
        kept.retain(|k| k.spelled != flag.spelled);
        kept.push(flag);
        kept
    })
}

/// Merges `next` into `first` if they do not contradict each other.
fn merge(key: &'static Key, first: &mut Setting, next: &Setting) -> bool {
    let mut next = next.clone();
    let is_map = |given: &Setting| matches!(given.node.value, Value::Map(_));
    if is_map(first) != is_map(&next) {
        expand_short_form(key, first);
        expand_short_form(key, &mut next);
    }
    let partial = first.partial || next.partial;
    if let (Value::Map(a), Value::Map(b)) = (&mut first.node.value, &next.node.value)
        && partial
        && compatible(a, b)
    {
        overlay(a, b);
        first.partial &= next.partial;
        return true;
    }
    value::same(&first.node, &next.node, key.kind == Kind::Word)
}

/// Turns `fp16: true` into `fp16: {enabled: true}`, so that it can be compared with a map. Its other members are not
/// set, so another source may set them.
fn expand_short_form(key: &Key, given: &mut Setting) {
    let Some((_, member)) = SHORT_FORMS.iter().find(|(name, _)| *name == key.name) else { return };
    if !matches!(given.node.value, Value::Scalar { .. }) || given.node.is_null() {
        return;
    }
    given.written = given.written.take().or_else(|| Some(value::brief(&given.node)));
    given.node = crate::raw::wrap(member, given.key_at, given.node.clone());
    given.partial = true;
}

/// The error that two values contradict each other.
pub(crate) fn conflict(texts: &Texts<'_>, a: &Setting, b: &Setting, why: &'static str) -> ConfigError {
    let describe = |g: &Setting| match (printable(&g.spelled), &g.written) {
        (spelled, Some(written)) => format!("`{spelled}: {}`", printable(written)),
        (spelled, None) if g.partial => format!("`{spelled}`"),
        (spelled, None) => format!("`{spelled}: {}`", value::brief(&g.node)),
    };
    let problem =
        Problem::Conflict { first: describe(a), second: describe(b), at: texts.origin(b.key_at), why };
    ConfigError::new(problem, vec![texts.place(a.key_at), texts.place(b.key_at)])
}

/// Merges `over` into `base`, including nested maps.
pub(crate) fn overlay(base: &mut Vec<Entry>, over: &[Entry]) {
    for entry in over {
        match base.iter_mut().find(|b| b.key == entry.key) {
            None => base.push(entry.clone()),
            Some(below) => match (&mut below.node.value, &entry.node.value) {
                (Value::Map(a), Value::Map(b)) => overlay(a, b),
                _ => *below = entry.clone(),
            },
        }
    }
}

/// Whether no key has different values in the two maps.
fn compatible(a: &[Entry], b: &[Entry]) -> bool {
    a.iter().all(|x| {
        b.iter().filter(|y| y.key == x.key).all(|y| match (&x.node.value, &y.node.value) {
            (Value::Map(a), Value::Map(b)) => compatible(a, b),
            _ => value::same(&x.node, &y.node, false),
        })
    })
}
