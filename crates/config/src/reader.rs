//! Reads the value of a key as a number, a word or a path, and collects errors, origins and notes.
//!
//! Every method records the key's origin. It returns `None` if there is no usable value, after it has recorded an
//! error. Sections then continue with any value, so that all errors are reported at once: a `RunConfig` is only
//! returned if there are none.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::error::{ConfigError, Problem};
use crate::keys;
use crate::origin::Origin;
use crate::raw::{RawConfig, Setting};
use crate::sections::AlgorithmName;
use crate::settle::conflict;
use crate::value::{self, fold};
use crate::yaml::{self, At, Input, Node, Value};

pub(crate) struct Reader<'a> {
    raw: RawConfig<'a>,
    algorithm: AlgorithmName,
    pub(crate) origins: BTreeMap<&'static str, Origin>,
}

/// What a reader has collected.
pub(crate) struct Finished {
    pub(crate) errors: Vec<ConfigError>,
    pub(crate) notes: Vec<String>,
    pub(crate) origins: BTreeMap<&'static str, Origin>,
    /// The values that are given and in use, and where each came from.
    pub(crate) given: BTreeMap<&'static str, Setting>,
    pub(crate) given_origins: BTreeMap<&'static str, String>,
}

/// Values of other trainers that are not implemented yet, and what to use instead.
#[derive(Clone, Copy)]
pub(crate) struct Later(pub(crate) &'static [&'static str], pub(crate) &'static str);

impl Later {
    pub(crate) const NONE: Later = Later(&[], "");
}

impl<'a> Reader<'a> {
    /// `algorithm` determines the keys and their defaults.
    pub(crate) fn new(raw: RawConfig<'a>, algorithm: AlgorithmName) -> Self {
        Reader { raw, algorithm, origins: BTreeMap::new() }
    }

    pub(crate) fn algorithm(&self) -> AlgorithmName {
        self.algorithm
    }

    /// Everything that was collected; errors in the order of the texts.
    pub(crate) fn finish(self) -> Finished {
        let mut errors = self.raw.errors;
        let rank = |e: &ConfigError| match e.origin() {
            Some(Origin::File { line, column, .. }) => (0, e.places[0].file, *line, *column),
            Some(_) => (1, None, 0, 0),
            None => (2, None, 0, 0),
        };
        errors.sort_by_key(rank);
        // A key that is read twice reports its error twice.
        errors.dedup();
        let given = self.raw.given;
        let origin = |given: &Setting| self.raw.texts.origin(given.key_at).to_string();
        let given_origins = given.iter().map(|(key, given)| (*key, origin(given))).collect();
        Finished { errors, notes: self.raw.notes, origins: self.origins, given, given_origins }
    }

    pub(crate) fn note(&mut self, text: String) {
        self.raw.notes.push(text);
    }

    /// The given value of `key`. Null counts as not given if the default is null, and is an error otherwise. A key that
    /// the algorithm does not use counts as not given.
    pub(crate) fn given(&mut self, key: &'static str) -> Option<Setting> {
        if !keys::key(key).is_for(self.algorithm) {
            return None;
        }
        let given = self.raw.given.get(key).cloned();
        let auto = self.raw.autos.get(key).map_or(Origin::Default, |at| self.raw.texts.auto(*at));
        let origin = given.as_ref().map_or(auto, |g| self.raw.texts.origin(g.key_at));
        self.origins.insert(key, origin);
        let default = keys::key(key).default_for(self.algorithm);
        let given = given?;
        if !given.node.is_null() {
            return Some(given);
        }
        if default != "null" {
            self.fail(Problem::Empty { key: given.spelled, default }, given.key_at);
        }
        None
    }

    /// Whether a value is given for `key`. Does not record the origin.
    pub(crate) fn is_set(&self, key: &'static str) -> bool {
        self.raw.given.get(key).is_some_and(|given| !given.node.is_null())
    }

    /// The value of `key`, or its default.
    pub(crate) fn node(&mut self, key: &'static str) -> Option<Node> {
        match self.given(key) {
            Some(given) => Some(given.node),
            None => yaml::parse(keys::key(key).default_for(self.algorithm), Input::Default)
                .0
                .filter(|node| !node.is_null()),
        }
    }

    /// Reports the given keys that the algorithm does not use.
    pub(crate) fn refuse_keys_of_other_algorithms(&mut self) {
        let algorithm = self.algorithm;
        let given = self.raw.given.iter().filter(|(_, given)| !given.node.is_null());
        let others: Vec<_> = given
            .map(|(name, given)| (keys::key(name), given.clone()))
            .filter(|(key, _)| !key.is_for(algorithm))
            .collect();
        for (key, Setting { spelled, key_at, .. }) in others {
            let algorithms = key.algorithms();
            self.fail(Problem::OtherAlgorithm { key: spelled, algorithms, algorithm }, key_at);
        }
    }

    /// For keys that exclude each other: one on the command line replaces those in files.
    pub(crate) fn prefer_flags(&mut self, rivals: &[&'static str]) {
        let given = &mut self.raw.given;
        let level = |g: &Setting| match g.key_at.from {
            // DeepSpeed files must agree with the flags of a launch line, so files stay.
            Input::Line(_) => Input::File(0).level(),
            from => from.level(),
        };
        let highest = rivals.iter().filter_map(|key| given.get(key).map(level)).max();
        given.retain(|key, g| Some(level(g)) >= highest || !rivals.contains(key));
    }

    pub(crate) fn fail(&mut self, problem: Problem, at: At) {
        let place = self.raw.texts.place(at);
        self.raw.errors.push(ConfigError::new(problem, vec![place]));
    }

    /// Reports a problem at the first of `keys` that is set.
    pub(crate) fn fail_at_key(&mut self, problem: Problem, keys: &[&'static str]) {
        match keys.iter().find_map(|key| self.raw.given.get(key)).map(|given| given.key_at) {
            Some(at) => self.fail(problem, at),
            None => self.raw.errors.push(ConfigError::new(problem, Vec::new())),
        }
    }

    pub(crate) fn missing(&mut self, key: &'static str, what: &'static str) {
        self.raw.errors.push(ConfigError::new(Problem::Missing { key, what }, Vec::new()));
    }

    pub(crate) fn conflict(&mut self, a: &Setting, b: &Setting, why: &'static str) {
        // In the order of the files, then of the overrides.
        let place = |g: &Setting| (g.key_at.from.level(), g.key_at.from.file(), g.key_at.line);
        let (first, second) = if place(a) <= place(b) { (a, b) } else { (b, a) };
        let error = conflict(&self.raw.texts, first, second, why);
        self.raw.errors.push(error);
    }

    pub(crate) fn wrong_type(&mut self, key: &str, expected: &'static str, node: &Node) {
        let found = value::describe(&node.value);
        self.fail(Problem::WrongType { key: key.to_owned(), expected, found }, node.at);
    }

    pub(crate) fn out_of_range(&mut self, key: &str, rule: impl Into<Cow<'static, str>>, node: &Node) {
        self.out_of_range_with(key, rule, "", node);
    }

    /// Like [`Reader::out_of_range`], with a hint.
    pub(crate) fn out_of_range_with(
        &mut self,
        key: &str,
        rule: impl Into<Cow<'static, str>>,
        hint: impl Into<Cow<'static, str>>,
        node: &Node,
    ) {
        let (rule, hint) = (rule.into(), hint.into());
        let problem = Problem::OutOfRange { key: key.to_owned(), value: value::brief(node), rule, hint };
        self.fail(problem, node.at);
    }

    pub(crate) fn bool(&mut self, key: &'static str) -> Option<bool> {
        let node = self.node(key)?;
        let value = node.bool();
        if value.is_none() {
            self.wrong_type(key, "true or false", &node);
        }
        value
    }

    /// A whole number that fits `T` and is at least `min`.
    pub(crate) fn count<T: TryFrom<i128>>(&mut self, key: &'static str, min: i128) -> Option<T> {
        let node = self.node(key)?;
        self.count_of(key, min, &node)
    }

    pub(crate) fn count_of<T: TryFrom<i128>>(&mut self, key: &str, min: i128, node: &Node) -> Option<T> {
        let Some(integer) = node.integer() else {
            self.wrong_type(key, "a whole number", node);
            return None;
        };
        let value = T::try_from(integer).ok().filter(|_| integer >= min);
        if value.is_none() {
            let rule = match (integer >= min, min) {
                (true, _) => "a smaller number",
                (_, 0) => "at least 0",
                (_, 1) => "at least 1",
                _ => "at least 2",
            };
            self.out_of_range(key, rule, node);
        }
        value
    }

    /// A number for which `within` holds; `rule` is the condition in words.
    pub(crate) fn float(
        &mut self,
        key: &'static str,
        rule: &'static str,
        within: impl Fn(f64) -> bool,
    ) -> Option<f64> {
        let node = self.node(key)?;
        self.float_of(key, rule, within, &node)
    }

    pub(crate) fn float_of(
        &mut self,
        key: &str,
        rule: &'static str,
        within: impl Fn(f64) -> bool,
        node: &Node,
    ) -> Option<f64> {
        let Some(value) = node.float() else {
            self.wrong_type(key, "a number", node);
            return None;
        };
        if value.is_finite() && within(value) {
            return Some(value);
        }
        self.out_of_range(key, rule, node);
        None
    }

    /// One of a few words; case, dashes and underscores do not matter.
    pub(crate) fn word<T: Copy>(
        &mut self,
        key: &'static str,
        choices: &[(&'static str, T)],
        later: Later,
    ) -> Option<T> {
        let node = self.node(key)?;
        self.word_of(key, choices, later, &node)
    }

    pub(crate) fn word_of<T: Copy>(
        &mut self,
        key: &'static str,
        choices: &[(&'static str, T)],
        Later(words, instead): Later,
        node: &Node,
    ) -> Option<T> {
        let Some(text) = node.text() else {
            self.wrong_type(key, "a word", node);
            return None;
        };
        let folded = fold(text);
        if let Some((_, value)) = choices.iter().find(|(name, _)| fold(name) == folded) {
            return Some(*value);
        }
        let value = text.to_owned();
        let problem = if words.iter().any(|word| fold(word) == folded) {
            Problem::ValueNotImplemented { key, value, instead }
        } else {
            Problem::UnknownValue { key, value, allowed: choices.iter().map(|(name, _)| *name).collect() }
        };
        self.fail(problem, node.at);
        None
    }

    /// Text that is not empty.
    pub(crate) fn text(&mut self, key: &'static str, expected: &'static str) -> Option<String> {
        let node = self.node(key)?;
        self.text_of(key, expected, &node)
    }

    pub(crate) fn text_of(&mut self, key: &str, expected: &'static str, node: &Node) -> Option<String> {
        match node.text() {
            Some(text) if !text.trim().is_empty() && !text.contains('\0') => Some(text.to_owned()),
            _ => {
                self.wrong_type(key, expected, node);
                None
            }
        }
    }

    /// One path or a list of them.
    pub(crate) fn paths(&mut self, key: &'static str) -> Vec<PathBuf> {
        self.list(key, "a path or a list of paths").into_iter().map(PathBuf::from).collect()
    }

    pub(crate) fn list(&mut self, key: &'static str, expected: &'static str) -> Vec<String> {
        let Some(node) = self.node(key) else { return Vec::new() };
        self.list_of(key, expected, &node)
    }

    pub(crate) fn list_of(&mut self, key: &str, expected: &'static str, node: &Node) -> Vec<String> {
        match &node.value {
            Value::Seq(items) => items.iter().filter_map(|item| self.text_of(key, expected, item)).collect(),
            _ => self.text_of(key, expected, node).into_iter().collect(),
        }
    }

    /// The path of a model folder, or the name of a model on the Hub.
    pub(crate) fn model_path(&mut self, key: &'static str) -> Option<PathBuf> {
        self.text(key, "the path of a model folder or the name of a model on the Hub").map(PathBuf::from)
    }

    /// A list of finite numbers; a single number is a list of one.
    pub(crate) fn floats(&mut self, key: &'static str) -> Option<Vec<f64>> {
        let node = self.node(key)?;
        let items = match &node.value {
            Value::Seq(items) => items.clone(),
            _ => vec![node],
        };
        let numbers = items.iter().map(|item| self.float_of(key, "finite numbers", |_| true, item));
        // Every item is read, so that all errors are reported.
        numbers.collect::<Vec<_>>().into_iter().collect()
    }

    /// Notes that `key`, if it is set, has no effect.
    pub(crate) fn note_no_effect(&mut self, key: &'static str, why: &str) {
        if let Some(given) = self.given(key) {
            self.note(format!("`{}` has no effect: {why}", given.spelled));
        }
    }

    pub(crate) fn derived(&mut self, key: &'static str, from: &'static str) {
        self.origins.insert(key, Origin::Derived { from });
    }
}
