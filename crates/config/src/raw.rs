//! The raw stage: trees and overrides become one value per key, still untyped.
//!
//! Here keys are recognised in all their spellings (dashes, `training.`, dotted, aliases), two spellings
//! of one key are held against each other, and an override takes the place of the file's value. What a
//! value means is left to the sections.

use std::collections::BTreeMap;

use lockstep_core::closest;

use crate::error::{ConfigError, Excerpt, Place, Problem};
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

/// The texts, for telling places in them.
pub(crate) struct Texts<'a> {
    pub(crate) file: Option<Source<'a>>,
    pub(crate) overrides: &'a [String],
    /// The file's text without secrets, line by line as the file has it.
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

    pub(crate) fn place(&self, at: At) -> Place {
        let excerpt = match (at.from, self.file) {
            (Input::File, Some(file)) => self.excerpt(at, file.text),
            _ => None,
        };
        Place { origin: self.origin(at), excerpt }
    }

    fn excerpt(&self, at: At, text: &str) -> Option<Excerpt> {
        let line = |text: &'_ str| text.lines().nth(at.line as usize - 1).map(str::to_owned);
        let (written, shown) = (line(text)?, line(&self.shown)?);
        let same = written.chars().zip(shown.chars()).take_while(|(a, b)| a == b).count();
        let column = at.column as usize;
        // Behind something hidden the line is shifted; from the end it is not.
        let column = if column <= same + 1 {
            column
        } else {
            let from_end = (written.chars().count() + 1).saturating_sub(column);
            (shown.chars().count() + 1).saturating_sub(from_end).max(same + 1)
        };
        Some(Excerpt::new(at.line, &shown, column as u32, at.width))
    }
}

/// The value of a key as it was given.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    /// The key as it was spelled, such as `training.use-fsdp`.
    pub(crate) spelled: String,
    pub(crate) key_at: At,
    pub(crate) node: Node,
    /// Given in parts, `model.hidden_size: 64`: joins the map it belongs to.
    partial: bool,
}

/// What was given, by canonical key.
pub(crate) struct RawConfig<'a> {
    pub(crate) texts: Texts<'a>,
    pub(crate) given: BTreeMap<&'static str, Given>,
    pub(crate) notes: Vec<String>,
    pub(crate) errors: Vec<ConfigError>,
    /// The file is no list of keys: what is missing from it cannot be told.
    pub(crate) unreadable: bool,
    /// Everything that was given for a key, before it is brought down to one.
    all: Vec<(&'static Key, Given)>,
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
        self.absorb("", Entry { key: key.trim().to_owned(), key_at: at, node });
    }

    fn flaws(&mut self, flaws: Vec<(Flaw, At)>) {
        for (flaw, at) in flaws {
            let mut places = vec![self.texts.place(at)];
            let problem = match flaw {
                Flaw::Syntax(message) => Problem::Syntax { message },
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

    /// Takes one entry of a map that stands under `prefix` (empty, or ending with a dot).
    fn absorb(&mut self, prefix: &str, entry: Entry) {
        let Entry { key, key_at, node } = entry;
        let spelled = format!("{prefix}{key}");
        let name = spelled.replace('-', "_");
        let name = name.strip_prefix("training.").unwrap_or(&name);
        if let Some(key) = keys::find(name) {
            self.all.push((key, Given { spelled, key_at, node, partial: false }));
        } else if let Some((key, part)) = part_of_map(name, &spelled) {
            let node = wrap(part, key_at, node);
            self.all.push((key, Given { spelled, key_at, node, partial: true }));
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
            // Guessing costs; a text with this many errors is not a typo away from a configuration.
            let guess = self.errors.len() < 50 && !secret::is_secret(name);
            let closest = if guess { closest_name(name) } else { None };
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
            let problem = Problem::ValueNotImplemented { key: inert.names[0], value, instead: "" };
            self.fail(problem, node.at);
        }
    }

    /// Brings everything given for `key` down to one value: overrides before the file, the last of equal
    /// spellings on the command line, and no contradictions between spellings.
    fn settle(&mut self, key: &'static Key) {
        let of_key = self.all.iter().filter(|(k, _)| k.name == key.name).map(|(_, given)| given.clone());
        let (file, flags): (Vec<_>, Vec<_>) = of_key.partition(|g| g.key_at.from == Input::File);
        let flags = flags.into_iter().fold(Vec::new(), |mut kept: Vec<Given>, flag| {
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
                    // Parts of a map cannot be laid on a word such as `15m`.
                    _ => {
                        let why = "a part can only be set in a map; give the whole map, or remove one.";
                        self.errors.push(conflict(&self.texts, &file, &flag, why));
                    }
                }
                Some(Given { node: file.node, ..flag })
            }
            (file, flag) => flag.or(file),
        };
        if let Some(given) = result {
            self.given.insert(key.name, given);
        }
    }

    /// One of several that must say the same; parts of a map are joined.
    fn agree(&mut self, key: &'static Key, several: Vec<Given>) -> Option<Given> {
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
pub(crate) fn conflict(texts: &Texts<'_>, a: &Given, b: &Given, why: &'static str) -> ConfigError {
    let say = |g: &Given| match (printable(&g.spelled), g.partial) {
        (spelled, true) => format!("`{spelled}`"),
        (spelled, false) => format!("`{spelled}: {}`", value::brief(&g.node)),
    };
    let problem = Problem::Conflict { first: say(a), second: say(b), at: texts.origin(b.key_at), why };
    ConfigError::new(problem, vec![texts.place(a.key_at), texts.place(b.key_at)])
}

/// For `model.hidden_size` the key `model` and its part, as spelled after the dot.
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

/// Lays `over` on `base`, by key, maps within maps too.
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

/// Whether two maps set nothing twice.
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

fn closest_name(name: &str) -> Option<&'static str> {
    // The length bound keeps the distance cheap on hostile text.
    (name.len() <= 80).then(|| closest(&name.to_lowercase(), all_names())).flatten()
}

fn all_names() -> impl Iterator<Item = &'static str> {
    let ours = KEYS.iter().flat_map(|k| k.aliases.iter().copied().chain([k.name]));
    let inert = foreign::INERT.iter().flat_map(|i| i.names.iter().copied());
    ours.chain(inert).chain(foreign::REFUSED.iter().map(|(name, _)| *name))
}
