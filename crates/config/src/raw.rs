//! The raw stage: combines files, the launch line and overrides into one untyped value per key.
//!
//! Each file is recognized by its content, and the keys of other trainers are translated to ours ([`crate::dialects`]).
//! This stage knows all spellings of a key (dashes, `training.`, dots, aliases). [`crate::settle`] then reduces all
//! values of a key to one, and the sections interpret them.

use std::collections::BTreeMap;

use lockstep_core::closest;

use crate::dialects::{self, Dialect};
use crate::error::{ConfigError, Problem};
use crate::foreign;
use crate::keys::{self, KEYS, Key, Kind};
use crate::launch_settings::LaunchKey;
use crate::origin::{Origin, printable};
use crate::references::{self, Reference};
use crate::secret;
use crate::texts::{Inputs, Texts};
use crate::value;
use crate::yaml::{self, At, Entry, Flaw, Input, Node, Value};

/// The override that a command such as `lockstep dpo` stands for: `command=dpo`. It sets `algorithm`, and unlike other
/// overrides it does not replace another value but contradicts it.
pub const COMMAND_KEY: &str = "command";

/// The value of a key as the user gave it.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// The key as it was spelled, such as `training.use-fsdp`.
    pub(crate) spelled: String,
    pub(crate) key_at: At,
    pub(crate) node: Node,
    /// A part of a map, such as `model.hidden_size: 64`. It is merged into the map.
    pub(crate) partial: bool,
    /// Any other source replaces it: DeepSpeed's `steps_per_print` is not the Trainer's `logging_steps`.
    pub(crate) weak: bool,
    /// The value in the words of the other trainer, if it was translated.
    pub(crate) written: Option<String>,
}

impl Setting {
    pub(crate) fn new(spelled: String, key_at: At, node: Node) -> Self {
        Setting { spelled, key_at, node, partial: false, weak: false, written: None }
    }
}

/// The given values, by canonical key.
pub(crate) struct RawConfig<'a> {
    pub(crate) texts: Texts<'a>,
    pub(crate) given: BTreeMap<&'static str, Setting>,
    /// Keys that a file leaves to the rest of the configuration with `auto`, and where.
    pub(crate) autos: BTreeMap<&'static str, At>,
    pub(crate) notes: Vec<String>,
    pub(crate) errors: Vec<ConfigError>,
    /// A file is not a map of keys, so that missing keys cannot be reported.
    pub(crate) unreadable: bool,
    /// The dialect of each file.
    pub(crate) dialects: Vec<Dialect>,
    /// Files that files and the launch line refer to.
    pub(crate) references: Vec<Reference>,
    /// What the launcher needs to know, before it is reduced to one value each.
    pub(crate) launch: Vec<(LaunchKey, Setting)>,
    /// All values of each key, before they are reduced to one.
    pub(crate) all: Vec<(&'static Key, Setting)>,
}

impl<'a> RawConfig<'a> {
    pub(crate) fn read(inputs: &Inputs<'a>) -> Self {
        let mut raw = RawConfig {
            texts: Texts::new(inputs),
            given: BTreeMap::new(),
            autos: BTreeMap::new(),
            notes: Vec::new(),
            errors: Vec::new(),
            unreadable: false,
            dialects: Vec::new(),
            references: Vec::new(),
            launch: Vec::new(),
            all: Vec::new(),
        };
        let roots = raw.parse_files();
        raw.references = references::collect(inputs.launch_line, &roots);
        raw.dialects = references::dialects(&raw.texts.files, &raw.references, &roots);
        raw.require_references();
        for (idx, entries) in roots.into_iter().enumerate() {
            match raw.dialects[idx] {
                Dialect::Lockstep => entries.into_iter().for_each(|e| raw.absorb("", e)),
                Dialect::DeepSpeed => dialects::deepspeed::translate(&mut raw, "", entries),
                Dialect::Accelerate => dialects::accelerate::translate(&mut raw, entries),
            }
        }
        raw.read_launch_line();
        crate::variables::read_all(&mut raw);
        for (idx, text) in inputs.overrides.iter().enumerate() {
            raw.read_override(text, idx);
        }
        raw.settle_all();
        raw
    }

    /// The entries of each file; none for a file without a map.
    fn parse_files(&mut self) -> Vec<Vec<Entry>> {
        let texts: Vec<&str> = self.texts.files.iter().map(|f| f.text).collect();
        texts.into_iter().enumerate().map(|(idx, text)| self.parse_file(text, idx)).collect()
    }

    fn parse_file(&mut self, text: &str, idx: usize) -> Vec<Entry> {
        let (root, flaws) = yaml::parse(text, Input::File(idx));
        self.unreadable |= root.is_none() && !flaws.is_empty();
        self.flaws(flaws);
        match root.map(|node| (node.at, node.value)) {
            None => Vec::new(),
            Some((_, Value::Map(entries))) => entries,
            Some((_, Value::Scalar { text, plain: true })) if value::is_null(&text) => Vec::new(),
            Some((at, other)) => {
                let found = value::describe(&other);
                let key = "the file".to_owned();
                self.unreadable = true;
                self.fail(Problem::WrongType { key, expected: "lines of `key: value`", found }, at);
                Vec::new()
            }
        }
    }

    /// Reports files whose text was not given.
    fn require_references(&mut self) {
        let missing: Vec<Reference> = self
            .references
            .iter()
            .filter(|reference| !references::is_given(&self.texts.files, &reference.path))
            .cloned()
            .collect();
        for Reference { path, role, at, .. } in missing {
            self.fail(Problem::FileNotGiven { path, role }, at);
        }
    }

    pub(crate) fn fail(&mut self, problem: Problem, at: At) {
        self.errors.push(ConfigError::new(problem, vec![self.texts.place(at)]));
    }

    fn read_launch_line(&mut self) {
        let Some(line) = self.texts.launch_line else { return };
        for (idx, flag) in line.flags.iter().enumerate() {
            let at = At { from: Input::Line(idx), line: 1, column: 1, width: 1 };
            let node = flag.node(at);
            match flag.target {
                crate::launch_line::Target::Launch(key) => {
                    self.launch.push((key, Setting::new(flag.name.clone(), at, node)));
                }
                crate::launch_line::Target::Key => {
                    self.absorb("", Entry { key: flag.key.clone(), key_at: at, node });
                }
                // It is a source of its own.
                crate::launch_line::Target::File(_) => {}
                crate::launch_line::Target::Inert(why) => self.no_effect(&flag.name, at, why),
            }
        }
        for (key, text) in line.program.defaults() {
            let at = At { from: Input::PeerDefault(line.program.name()), line: 1, column: 1, width: 1 };
            let node = Node { value: Value::Scalar { text: (*text).to_owned(), plain: true }, at };
            self.all.push((keys::key(key), Setting::new((*key).to_owned(), at, node)));
        }
    }

    fn read_override(&mut self, text: &str, idx: usize) {
        let at = At { from: Input::Flag(idx), line: 1, column: 1, width: 1 };
        let Some((key, value)) = text.split_once('=').filter(|(key, _)| !key.trim().is_empty()) else {
            return self.fail(Problem::NotAnOverride { text: secret::redact_setting(text) }, at);
        };
        let (node, flaws) = yaml::parse(value, Input::Flag(idx));
        if !flaws.is_empty() {
            return self.flaws(flaws);
        }
        let empty = Node { value: Value::Scalar { text: String::new(), plain: true }, at };
        let node = node.unwrap_or(empty);
        if key == COMMAND_KEY {
            self.all.push((keys::key("algorithm"), Setting::new(key.to_owned(), at, node)));
            return;
        }
        self.absorb("", Entry { key: key.trim().to_owned(), key_at: at, node });
    }

    fn flaws(&mut self, flaws: Vec<(Flaw, At)>) {
        for (flaw, at) in flaws {
            let mut places = vec![self.texts.place(at)];
            let problem = match flaw {
                Flaw::Syntax(message) => Problem::Syntax { message },
                Flaw::Mistake(message) => Problem::Mistake { message },
                Flaw::TooLarge(what) => Problem::TooLarge { what },
                Flaw::Unsupported(what) => Problem::UnsupportedYaml { what },
                Flaw::Repeated { key, first } => {
                    places.push(self.texts.place(first));
                    Problem::Repeated { key, first: self.texts.origin(first) }
                }
            };
            self.errors.push(ConfigError::new(problem, places));
        }
    }

    /// Takes one entry of a map below `prefix`, which is empty or ends with a dot.
    pub(crate) fn absorb(&mut self, prefix: &str, entry: Entry) {
        let spelled = format!("{prefix}{}", entry.key);
        let name = spelled.replace('-', "_");
        let name = name.strip_prefix("training.").unwrap_or(&name);
        let Some(entry) = dialects::guides::absorb(self, name, &spelled, entry) else { return };
        let Entry { key_at, node, .. } = entry;
        if let Some(key) = keys::find(name) {
            self.all.push((key, Setting::new(spelled, key_at, node)));
        } else if let Some((key, part)) = part_of_map(name, &spelled) {
            let node = wrap(part, key_at, node);
            self.all.push((key, Setting { partial: true, ..Setting::new(spelled, key_at, node) }));
        } else if let Some(inert) = foreign::inert(name) {
            self.inert(inert, spelled, key_at, &node);
        } else if let Some((_, instead)) = foreign::refused(name) {
            self.fail(Problem::KeyNotImplemented { key: printable(&spelled), instead }, key_at);
        } else if is_group(name) {
            match node.value {
                Value::Map(entries) => {
                    let prefix = format!("{spelled}.");
                    entries.into_iter().for_each(|e| self.absorb(&prefix, e));
                }
                other => {
                    let found = value::describe(&other);
                    self.fail(
                        Problem::WrongType { key: printable(&spelled), expected: "a map of keys", found },
                        node.at,
                    );
                }
            }
        } else {
            // Suggestions take time, and a text with this many errors needs more than a suggestion.
            let guess = self.errors.len() < 50 && !secret::is_secret(name);
            let closest = if guess { suggestion(name) } else { None };
            self.fail(Problem::UnknownKey { key: spelled.clone(), closest }, key_at);
        }
    }

    fn inert(&mut self, inert: &'static foreign::Inert, spelled: String, key_at: At, node: &Node) {
        if is_harmless(inert.only, node) {
            self.no_effect(&spelled, key_at, inert.why);
        } else {
            let value = value::brief(node);
            let problem = Problem::ValueNotImplemented { key: inert.names[0], value, instead: inert.instead };
            self.fail(problem, node.at);
        }
    }

    /// Notes that a key has no effect.
    pub(crate) fn no_effect(&mut self, spelled: &str, key_at: At, why: &str) {
        let note = match self.texts.origin(key_at) {
            // The flag itself is the origin.
            Origin::Flag { text } if text.starts_with('-') => {
                format!("`{}` has no effect here: {why}", printable(&text))
            }
            origin => format!("`{}` ({origin}) has no effect here: {why}", printable(spelled)),
        };
        self.notes.push(note);
    }
}

/// Whether a key with this value has no effect. `only`: the values without effect; empty if there are no others.
pub(crate) fn is_harmless(only: &[&str], node: &Node) -> bool {
    match &node.value {
        _ if only.is_empty() => true,
        Value::Scalar { text, plain } => {
            (*plain && value::is_null(text)) || only.contains(&text.to_lowercase().as_str())
        }
        Value::Seq(items) => items.is_empty(),
        Value::Map(_) => false,
    }
}

/// For `model.hidden_size`: the key `model`, and the part as it is spelled after the dot.
fn part_of_map<'s>(name: &str, spelled: &'s str) -> Option<(&'static Key, &'s str)> {
    let (head, tail) = name.split_once('.')?;
    let key = keys::find(head).filter(|k| k.kind == Kind::Map)?;
    Some((key, &spelled[spelled.len() - tail.len()..]))
}

/// A map with `node` under the path `part`.
pub(crate) fn wrap(part: &str, key_at: At, node: Node) -> Node {
    part.rsplit('.').fold(node, |node, key| Node {
        value: Value::Map(vec![Entry { key: key.to_owned(), key_at, node }]),
        at: key_at,
    })
}

fn is_group(name: &str) -> bool {
    name == "training" || all_names().any(|n| n.strip_prefix(name).is_some_and(|rest| rest.starts_with('.')))
}

/// The key that a user who wrote `name` probably means: a common name of it, or the closest spelling.
pub(crate) fn suggestion(name: &str) -> Option<&'static str> {
    // The length bound limits the time on hostile text.
    if name.len() > 80 {
        return None;
    }
    let name = name.to_lowercase().replace('-', "_");
    foreign::common_name(&name).or_else(|| closest(&name, all_names()))
}

fn all_names() -> impl Iterator<Item = &'static str> {
    let ours = KEYS.iter().flat_map(|k| k.aliases.iter().copied().chain([k.name]));
    let inert = foreign::INERT.iter().flat_map(|i| i.names.iter().copied());
    let refused = foreign::REFUSED.iter().map(|(name, _)| *name).filter(|name| !name.ends_with('*'));
    ours.chain(inert).chain(refused)
}
