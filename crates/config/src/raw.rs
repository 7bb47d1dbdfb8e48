//! The raw stage: combines the file and the overrides into one untyped value per key.
//!
//! It recognizes keys in all their spellings (dashes, `training.`, dots, aliases), reports two spellings of a key that
//! contradict each other, and replaces the file's values by overrides. The sections interpret the values.

use std::collections::BTreeMap;

use lockstep_core::closest;

use crate::error::{ConfigError, Excerpt, Position, Problem};
use crate::foreign;
use crate::keys::{self, KEYS, Key, Kind};
use crate::origin::{Origin, printable};
use crate::secret;
use crate::value;
use crate::yaml::{self, At, Entry, Flaw, Input, Node, Value};

/// A text to read.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The file's name as the user typed it.
    pub name: &'a str,
    pub text: &'a str,
}

/// The override that a command such as `lockstep dpo` stands for: `command=dpo`. It sets `algorithm`, and unlike other
/// overrides it does not replace another value but contradicts it.
pub const COMMAND_KEY: &str = "command";

/// The texts, to describe positions in them.
pub(crate) struct Texts<'a> {
    pub(crate) file: Option<Source<'a>>,
    pub(crate) overrides: &'a [String],
    /// The file's text with secrets hidden. It has the same lines.
    shown: String,
}

impl Texts<'_> {
    pub(crate) fn origin(&self, at: At) -> Origin {
        match (at.from, self.file) {
            (Input::File, Some(file)) => {
                Origin::File { name: file.name.to_owned(), line: at.line, column: at.column }
            }
            (Input::Flag(idx), _) => Origin::Flag { text: secret::redact_setting(&self.overrides[idx]) },
            _ => Origin::Default,
        }
    }

    pub(crate) fn place(&self, at: At) -> Position {
        let excerpt = match (at.from, self.file) {
            (Input::File, Some(file)) => self.excerpt(at, file.text),
            _ => None,
        };
        Position { origin: self.origin(at), excerpt }
    }

    fn excerpt(&self, at: At, text: &str) -> Option<Excerpt> {
        let line = |text: &'_ str| text.lines().nth(at.line as usize - 1).map(str::to_owned);
        let (written, shown) = (line(text)?, line(&self.shown)?);
        let same = written.chars().zip(shown.chars()).take_while(|(a, b)| a == b).count();
        let column = at.column as usize;
        // A hidden secret shifts the text after it, so count from the end there.
        let column = if column <= same + 1 {
            column
        } else {
            let from_end = (written.chars().count() + 1).saturating_sub(column);
            (shown.chars().count() + 1).saturating_sub(from_end).max(same + 1)
        };
        Some(Excerpt::new(at.line, &shown, column as u32, at.width))
    }
}

/// The value of a key as the user gave it.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// The key as it was spelled, such as `training.use-fsdp`.
    pub(crate) spelled: String,
    pub(crate) key_at: At,
    pub(crate) node: Node,
    /// A part of a map, such as `model.hidden_size: 64`. It is merged into the map.
    partial: bool,
}

/// The given values, by canonical key.
pub(crate) struct RawConfig<'a> {
    pub(crate) texts: Texts<'a>,
    pub(crate) given: BTreeMap<&'static str, Setting>,
    pub(crate) notes: Vec<String>,
    pub(crate) errors: Vec<ConfigError>,
    /// The file is not a map of keys, so that missing keys cannot be reported.
    pub(crate) unreadable: bool,
    /// All values of each key, before they are reduced to one.
    all: Vec<(&'static Key, Setting)>,
}

impl<'a> RawConfig<'a> {
    pub(crate) fn read(file: Option<Source<'a>>, overrides: &'a [String]) -> Self {
        // A byte order mark is not part of the first line.
        let file = file.map(|f| Source { text: f.text.strip_prefix('\u{feff}').unwrap_or(f.text), ..f });
        let shown = file.map(|f| secret::redact(f.text)).unwrap_or_default();
        let texts = Texts { file, overrides, shown };
        let mut raw = RawConfig {
            texts,
            given: BTreeMap::new(),
            notes: Vec::new(),
            errors: Vec::new(),
            unreadable: false,
            all: Vec::new(),
        };
        if let Some(file) = file {
            raw.read_file(file.text);
        }
        for (idx, text) in overrides.iter().enumerate() {
            raw.read_override(text, idx);
        }
        for key in KEYS {
            raw.settle(key);
        }
        raw
    }

    fn fail(&mut self, problem: Problem, at: At) {
        self.errors.push(ConfigError::new(problem, vec![self.texts.place(at)]));
    }

    fn read_file(&mut self, text: &str) {
        let (root, flaws) = yaml::parse(text, Input::File);
        self.unreadable = root.is_none() && !flaws.is_empty();
        self.flaws(flaws);
        match root.map(|node| (node.at, node.value)) {
            None => {}
            Some((_, Value::Map(entries))) => entries.into_iter().for_each(|e| self.absorb("", e)),
            Some((_, Value::Scalar { text, plain: true })) if value::is_null(&text) => {}
            Some((at, other)) => {
                let found = value::describe(&other);
                let key = "the file".to_owned();
                self.unreadable = true;
                self.fail(Problem::WrongType { key, expected: "lines of `key: value`", found }, at);
            }
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
            let spelled = key.to_owned();
            self.all.push((keys::key("algorithm"), Setting { spelled, key_at: at, node, partial: false }));
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
    fn absorb(&mut self, prefix: &str, entry: Entry) {
        let Entry { key, key_at, node } = entry;
        let spelled = format!("{prefix}{key}");
        let name = spelled.replace('-', "_");
        let name = name.strip_prefix("training.").unwrap_or(&name);
        if let Some(key) = keys::find(name) {
            self.all.push((key, Setting { spelled, key_at, node, partial: false }));
        } else if let Some((key, part)) = part_of_map(name, &spelled) {
            let node = wrap(part, key_at, node);
            self.all.push((key, Setting { spelled, key_at, node, partial: true }));
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
        let harmless = match &node.value {
            _ if inert.only.is_empty() => true,
            Value::Scalar { text, plain } => {
                (*plain && value::is_null(text)) || inert.only.contains(&text.to_lowercase().as_str())
            }
            Value::Seq(items) => items.is_empty(),
            Value::Map(_) => false,
        };
        if harmless {
            let origin = self.texts.origin(key_at);
            let why = inert.why;
            self.notes.push(format!("`{}` ({origin}) has no effect here: {why}", printable(&spelled)));
        } else {
            let value = value::brief(node);
            let problem = Problem::ValueNotImplemented { key: inert.names[0], value, instead: inert.instead };
            self.fail(problem, node.at);
        }
    }

    /// Reduces all values of `key` to one. Overrides take precedence over the file, and the last of several overrides
    /// with the same spelling counts. Different spellings must agree.
    fn settle(&mut self, key: &'static Key) {
        if key.name == "algorithm" {
            self.settle_command();
        }
        let of_key = self.all.iter().filter(|(k, _)| k.name == key.name).map(|(_, given)| given.clone());
        let (file, flags): (Vec<_>, Vec<_>) = of_key.partition(|g| g.key_at.from == Input::File);
        let flags = flags.into_iter().fold(Vec::new(), |mut kept: Vec<Setting>, flag| {
            kept.retain(|k| k.spelled != flag.spelled);
            kept.push(flag);
            kept
        });
        let file = self.agree(key, file);
        let flags_joined = self.agree(key, flags);
        let result = match (file, flags_joined) {
            (Some(mut file), Some(flag)) if flag.partial => {
                match (&mut file.node.value, &flag.node.value) {
                    (Value::Map(base), Value::Map(over)) => overlay(base, over),
                    // A part of a map cannot be merged into a word such as `15m`.
                    _ => {
                        let why = "a part can only be set in a map; give the whole map, or remove one.";
                        self.errors.push(conflict(&self.texts, &file, &flag, why));
                    }
                }
                Some(Setting { node: file.node, ..flag })
            }
            (file, flag) => flag.or(file),
        };
        if let Some(given) = result {
            self.given.insert(key.name, given);
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
            let partial = first.partial || next.partial;
            if let (Value::Map(a), Value::Map(b)) = (&mut first.node.value, &next.node.value)
                && partial
                && disjoint(a, b)
            {
                overlay(a, b);
                first.partial &= next.partial;
            } else if !value::same(&first.node, &next.node, key.kind == Kind::Word) {
                let why = "they are two spellings of one setting; keep one.";
                self.errors.push(conflict(&self.texts, &first, &next, why));
            }
        }
        Some(first)
    }
}

/// The error that two values contradict each other.
pub(crate) fn conflict(texts: &Texts<'_>, a: &Setting, b: &Setting, why: &'static str) -> ConfigError {
    let describe = |g: &Setting| match (printable(&g.spelled), g.partial) {
        (spelled, true) => format!("`{spelled}`"),
        (spelled, false) => format!("`{spelled}: {}`", value::brief(&g.node)),
    };
    let problem =
        Problem::Conflict { first: describe(a), second: describe(b), at: texts.origin(b.key_at), why };
    ConfigError::new(problem, vec![texts.place(a.key_at), texts.place(b.key_at)])
}

/// For `model.hidden_size`: the key `model`, and the part as it is spelled after the dot.
fn part_of_map<'s>(name: &str, spelled: &'s str) -> Option<(&'static Key, &'s str)> {
    let (head, tail) = name.split_once('.')?;
    let key = keys::find(head).filter(|k| k.kind == Kind::Map)?;
    Some((key, &spelled[spelled.len() - tail.len()..]))
}

fn wrap(part: &str, key_at: At, node: Node) -> Node {
    part.rsplit('.').fold(node, |node, key| Node {
        value: Value::Map(vec![Entry { key: key.to_owned(), key_at, node }]),
        at: key_at,
    })
}

/// Merges `over` into `base`, including nested maps.
fn overlay(base: &mut Vec<Entry>, over: &[Entry]) {
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

/// Whether no key is set in both maps.
fn disjoint(a: &[Entry], b: &[Entry]) -> bool {
    a.iter().all(|x| {
        b.iter().filter(|y| y.key == x.key).all(|y| match (&x.node.value, &y.node.value) {
            (Value::Map(a), Value::Map(b)) => disjoint(a, b),
            _ => false,
        })
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
