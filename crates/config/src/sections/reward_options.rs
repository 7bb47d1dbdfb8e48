//! The options of a reward function.

use crate::error::Problem;
use crate::reader::Reader;
use crate::sections::reward_function::{KINDS, Kind};
use crate::sections::{
    HttpReward, Lengths, NumberSource, ProgramReward, RewardFunctionConfig, RewardFunctionKind,
};
use crate::value::fold;
use crate::yaml::{Entry, Node, Value};

/// The options of a function. Those that the function does not read are reported as unknown.
pub(crate) struct Options {
    kind: Kind,
    /// For messages: `reward_funcs.regex`.
    under: String,
    entries: Vec<Entry>,
    known: Vec<&'static str>,
    /// A value instead of a map: the command, the URL or the pattern.
    short: Option<Node>,
}

impl Options {
    pub(crate) fn new(kind: Kind, node: Option<&Node>) -> Options {
        let name = KINDS[kind as usize].0;
        let mut options = Options {
            kind,
            under: format!("reward_funcs.{name}"),
            entries: Vec::new(),
            known: Vec::new(),
            short: None,
        };
        match node.map(|node| &node.value) {
            Some(Value::Map(entries)) => options.entries = entries.clone(),
            Some(_) => options.short = node.filter(|node| !node.is_null()).cloned(),
            None => {}
        }
        options
    }

    /// Reads all options. `node` is the place to report one that is missing.
    pub(crate) fn function(mut self, r: &mut Reader<'_>, node: &Node) -> Option<RewardFunctionConfig> {
        let name = self.name(r);
        let kind = match self.kind {
            Kind::ExactMatch => Some(RewardFunctionKind::ExactMatch {
                column: self.column(r),
                extract: self.pattern(r, "extract"),
                ignore_case: self.bool(r, "ignore_case"),
            }),
            Kind::NumericMatch => Some(RewardFunctionKind::NumericMatch {
                column: self.column(r),
                tolerance: self.float(r, "tolerance", "at least 0", |x| x >= 0.0).unwrap_or(0.0),
                source: self.number_source(r),
            }),
            Kind::Format => Some(RewardFunctionKind::Format { pattern: self.pattern(r, "pattern") }),
            Kind::Regex => self.regex(r, node),
            Kind::LengthPenalty => Some(self.length_penalty(r, node)),
            Kind::RepetitionPenalty => Some(RewardFunctionKind::RepetitionPenalty {
                ngram_size: self.count(r, "ngram_size").unwrap_or(3),
                max_penalty: self.float(r, "max_penalty", "at most 0", |x| x <= 0.0).unwrap_or(-1.0),
            }),
            Kind::Program => self.program(r, node),
            Kind::Http => self.http(r, node),
        };
        if let Some(short) = self.short.take() {
            r.wrong_type(&self.under, "a map of options", &short);
        }
        for entry in &self.entries {
            let closest = match entry.key.as_str() {
                "token" => self.known.iter().copied().find(|option| *option == "token_env"),
                key => lockstep_core::closest(key, self.known.iter().copied()),
            };
            r.fail(
                Problem::UnknownKey { key: format!("{}.{}", self.under, entry.key), closest },
                entry.key_at,
            );
        }
        Some(RewardFunctionConfig { name: name?, kind: kind?, weight: 1.0 })
    }

    /// Takes the value of an option.
    fn take(&mut self, option: &'static str) -> Option<Node> {
        self.known.push(option);
        let at = self.entries.iter().position(|entry| fold(&entry.key) == fold(option))?;
        Some(self.entries.remove(at).node).filter(|node| !node.is_null())
    }

    fn key(&self, option: &str) -> String {
        format!("{}.{option}", self.under)
    }

    fn name(&mut self, r: &mut Reader<'_>) -> Option<String> {
        let Some(node) = self.take("name") else { return Some(KINDS[self.kind as usize].0.to_owned()) };
        let name = r.text_of(&self.key("name"), "a name", &node)?;
        if name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')) {
            return Some(name);
        }
        r.out_of_range(&self.key("name"), "letters, digits, dots, dashes and underscores", &node);
        None
    }

    fn column(&mut self, r: &mut Reader<'_>) -> String {
        let node = self.take("column");
        let read = node.and_then(|node| r.text_of(&self.key("column"), "the name of a column", &node));
        read.unwrap_or_else(|| "answer".to_owned())
    }

    fn pattern(&mut self, r: &mut Reader<'_>, option: &'static str) -> Option<String> {
        let node = self.take(option)?;
        r.text_of(&self.key(option), "a regular expression", &node)
    }

    /// Reads `source: last` or `boxed`, or `marker: '####'`.
    fn number_source(&mut self, r: &mut Reader<'_>) -> NumberSource {
        let (source, marker) = (self.take("source"), self.take("marker"));
        if let Some(node) = marker {
            if let Some(source) = source {
                r.out_of_range(&self.key("source"), "left out with `marker`", &source);
            }
            let text = r.text_of(&self.key("marker"), "the text before the number, such as `'####'`", &node);
            return text.map_or(NumberSource::Last, NumberSource::After);
        }
        let Some(node) = source else { return NumberSource::Last };
        match node.text() {
            Some("boxed") => return NumberSource::Boxed,
            Some("last") => {}
            _ => r.out_of_range(&self.key("source"), "last or boxed", &node),
        }
        NumberSource::Last
    }

    /// Reads the lengths in tokens: `max_completion_length` and a fifth of it by default.
    fn length_penalty(&mut self, r: &mut Reader<'_>, node: &Node) -> RewardFunctionKind {
        let max_length = self.count(r, "max_length").unwrap_or_else(|| Lengths::read(r).completion);
        let buffer = self.count(r, "buffer").unwrap_or(max_length / 5);
        if buffer > max_length {
            let (key, value) = (self.key("buffer"), buffer.to_string());
            let rule = format!("at most `max_length` ({max_length})").into();
            r.fail(Problem::OutOfRange { key, value, rule, hint: "".into() }, node.at);
        }
        RewardFunctionKind::LengthPenalty { max_length, buffer }
    }

    fn bool(&mut self, r: &mut Reader<'_>, option: &'static str) -> bool {
        let Some(node) = self.take(option) else { return false };
        node.bool().unwrap_or_else(|| {
            r.wrong_type(&self.key(option), "true or false", &node);
            false
        })
    }

    fn count(&mut self, r: &mut Reader<'_>, option: &'static str) -> Option<u32> {
        let node = self.take(option)?;
        r.count_of(&self.key(option), 1, &node)
    }

    fn float(
        &mut self,
        r: &mut Reader<'_>,
        option: &'static str,
        rule: &'static str,
        within: impl Fn(f64) -> bool,
    ) -> Option<f64> {
        let node = self.take(option)?;
        r.float_of(&self.key(option), rule, within, &node)
    }

    fn timeout(&mut self, r: &mut Reader<'_>) -> f64 {
        self.float(r, "timeout", "above 0 seconds", |x| x > 0.0).unwrap_or(60.0)
    }

    /// The value of an option that must be set, also as the only value.
    fn required(
        &mut self,
        r: &mut Reader<'_>,
        option: &'static str,
        example: &'static str,
        node: &Node,
    ) -> Option<Node> {
        let (short, named) = (self.short.take(), self.take(option));
        let found = named.or(short);
        if found.is_none() {
            let problem = Problem::OptionMissing { key: self.under.clone(), option, example };
            r.fail(problem, node.at);
        }
        found
    }

    fn regex(&mut self, r: &mut Reader<'_>, node: &Node) -> Option<RewardFunctionKind> {
        let pattern = self.required(r, "pattern", "{regex: {pattern: '^[0-9]+$'}}", node)?;
        let pattern = r.text_of(&self.key("pattern"), "a regular expression", &pattern)?;
        Some(RewardFunctionKind::Regex { pattern })
    }

    fn program(&mut self, r: &mut Reader<'_>, node: &Node) -> Option<RewardFunctionKind> {
        let command = self.required(r, "command", "{program: {command: [python3, reward.py]}}", node);
        let env = match self.take("env") {
            Some(node) => self.variables(r, &node),
            None => Vec::new(),
        };
        let (timeout_s, workers) = (self.timeout(r), self.count(r, "workers").unwrap_or(1));
        let restarts = self.take("max_restarts");
        let max_restarts =
            restarts.and_then(|node| r.count_of(&self.key("max_restarts"), 0, &node)).unwrap_or(3);
        let command = self.command(r, &command?)?;
        Some(RewardFunctionKind::Program(ProgramReward { command, timeout_s, workers, env, max_restarts }))
    }

    /// A list of words, or text that is split at spaces.
    fn command(&mut self, r: &mut Reader<'_>, node: &Node) -> Option<Vec<String>> {
        let key = self.key("command");
        let expected = "a program and its arguments, such as `[python3, reward.py]`";
        let words = r.list_of(&key, expected, node);
        match (&node.value, &words[..]) {
            (Value::Seq(items), _) if items.is_empty() => {
                r.wrong_type(&key, expected, node);
                None
            }
            (Value::Seq(items), words) => (items.len() == words.len()).then(|| words.to_vec()),
            (_, [text]) if text.contains(['"', '\'', '|', '>', '<', ';', '&', '$', '`']) => {
                let hint = "there is no shell; write `[sh, -c, '…']` to use one.";
                r.out_of_range_with(
                    &key,
                    "a list of words if it has quotes or special characters",
                    hint,
                    node,
                );
                None
            }
            (_, [text]) => Some(text.split_whitespace().map(String::from).collect()),
            _ => None,
        }
    }

    /// Environment variables: `NAME` or `NAME=value`.
    fn variables(&self, r: &mut Reader<'_>, node: &Node) -> Vec<String> {
        let key = self.key("env");
        let variables = r.list_of(&key, "a list of environment variables", node);
        let name = |text: &str| text.split('=').next().unwrap_or_default().to_owned();
        if variables.iter().any(|text| !is_variable(&name(text))) {
            r.out_of_range(&key, "names of environment variables, or `NAME=value`", node);
        } else if variables.iter().any(|text| crate::is_secret(&name(text))) {
            let (value, rule) = ("[hidden]".to_owned(), "variables that are not secrets".into());
            let hint = "the program can read a secret from a file.".into();
            r.fail(Problem::OutOfRange { key, value, rule, hint }, node.at);
        }
        variables
    }

    /// The name of the environment variable with the token.
    fn token_env(&mut self, r: &mut Reader<'_>) -> Option<String> {
        let node = self.take("token_env")?;
        let name = r.text_of(&self.key("token_env"), "the name of an environment variable", &node)?;
        // Tokens have lower-case letters.
        if !is_variable(&name) || name.chars().any(|c| c.is_ascii_lowercase()) {
            let (key, value) = (self.key("token_env"), "[hidden]".to_owned());
            let rule = "the name of an environment variable, in upper case".into();
            r.fail(Problem::OutOfRange { key, value, rule, hint: "".into() }, node.at);
        }
        Some(name)
    }

    fn http(&mut self, r: &mut Reader<'_>, node: &Node) -> Option<RewardFunctionKind> {
        let example = "{http: {url: 'http://127.0.0.1:8000/reward'}}";
        let url = self.required(r, "url", example, node);
        let timeout_s = self.timeout(r);
        let token_env = self.token_env(r);
        let node = url?;
        let url = r.text_of(&self.key("url"), "a URL", &node)?;
        let rest = ["http://", "https://"].iter().find_map(|scheme| url.strip_prefix(scheme));
        let Some(rest) = rest.filter(|rest| !rest.is_empty()) else {
            r.out_of_range(&self.key("url"), "a URL that starts with http:// or https://", &node);
            return None;
        };
        if rest.split('/').next().is_some_and(|authority| authority.contains('@')) {
            let (key, value) = (self.key("url"), crate::secret::redact(&url));
            let rule = "without user name and password".into();
            let hint = "`token_env` names the environment variable with a bearer token.".into();
            r.fail(Problem::OutOfRange { key, value, rule, hint }, node.at);
            return None;
        }
        Some(RewardFunctionKind::Http(HttpReward { url, timeout_s, token_env }))
    }
}

fn is_variable(name: &str) -> bool {
    !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}
