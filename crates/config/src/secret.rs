//! Recognizes secrets in configurations and redacts them.
//!
//! No key of Lockstep is a secret, but configurations are shared with other programs, and flags are mistyped. The
//! values of secret keys are never printed, logged or stored in a checkpoint. Redaction works on the text as it was
//! typed, because errors also quote text that cannot be parsed; it hides too much rather than too little. If the text
//! can be parsed, the words of every secret value are also redacted wherever else they occur.

use std::collections::BTreeSet;

use crate::yaml::{self, Input, Node, Value};
use crate::{foreign, keys};

/// Replaces a secret.
const HIDDEN: &str = "[hidden]";

/// Strings that make a key secret anywhere in its name.
const PARTS: [&str; 9] = [
    "token",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "credential",
    "bearer",
    "webhook",
    "authorization",
];

/// Words that make a key secret if they stand between underscores.
const WORDS: [&str; 6] = ["auth", "oauth", "pass", "pwd", "cookie", "pat"];

/// Shorter words of a secret are not redacted elsewhere: they would match everywhere.
const MIN_WORD_CHARS: usize = 6;

/// Whether the value of `key` may be a secret, such as `hub_token` or `wandb.api_key`. Known keys are not secret.
pub fn is_secret(key: &str) -> bool {
    let name = key.to_lowercase().replace('-', "_");
    let name = name.strip_prefix("training.").unwrap_or(&name);
    let known = keys::find(name).is_some()
        || foreign::inert(name).is_some()
        || foreign::REFUSED.iter().any(|(refused, _)| *refused == name);
    !known && name.split('.').any(is_secret_part)
}

fn is_secret_part(name: &str) -> bool {
    // Tokens of a tokenizer, and counts of tokens.
    let special =
        ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
    let counted = ["max_", "min_", "num_"].iter().any(|start| name.starts_with(start));
    if special.contains(&name)
        || name.ends_with("token_id")
        || name.ends_with("token_ids")
        // The name of an environment variable.
        || name.ends_with("_env")
        || (counted && name.ends_with("tokens"))
    {
        return false;
    }
    let name = name.replace("tokeniz", "");
    PARTS.iter().any(|part| name.contains(part))
        || name.split('_').any(|word| WORDS.contains(&word))
        || name.ends_with("key")
}

/// A `key=value` setting with secrets redacted: `hub_token=[hidden]`.
pub fn redact_setting(text: &str) -> String {
    match text.split_once('=') {
        Some((key, _)) if is_secret(key.trim()) => format!("{key}={HIDDEN}"),
        Some((key, value)) => format!("{}={}", redact(key), redact(value)),
        None => redact(text),
    }
}

/// The text of a configuration with secrets redacted. The number of lines stays the same, and so does the text before
/// a secret on its line.
pub fn redact(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut redaction = Redaction::Nothing;
    for line in text.split_inclusive('\n') {
        let (content, end) = line.split_at(line.trim_end_matches(['\n', '\r']).len());
        redaction.line(content, &mut shown);
        shown.push_str(end);
    }
    for word in secret_words(text) {
        shown = shown.replace(&word, HIDDEN);
    }
    without_credentials(&shown)
}

/// Replaces the user name and the password in URLs such as `http://user:password@host`.
fn without_credentials(text: &str) -> String {
    let mut parts = text.split("://");
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        shown.push_str("://");
        let authority = part.find(|c: char| c.is_whitespace() || matches!(c, '/' | '"' | '\'' | ','));
        let at = part[..authority.unwrap_or(part.len())].rfind('@');
        match at {
            Some(at) => shown.push_str(&format!("{HIDDEN}{}", &part[at..])),
            None => shown.push_str(part),
        }
    }
    shown
}

/// Which part of the following lines belongs to a secret.
#[derive(Clone, Copy)]
enum Redaction {
    Nothing,
    /// Lines that are indented deeper than `indent`, and list items at `indent`. `empty`: no part of the value has been
    /// found yet.
    Below {
        indent: usize,
        empty: bool,
    },
    /// Up to the end of a quoted string.
    Quoted {
        quote: char,
        indent: usize,
    },
    /// Up to the end of a list or map in brackets.
    Bracketed {
        depth: usize,
        indent: usize,
    },
}

impl Redaction {
    fn line(&mut self, line: &str, shown: &mut String) {
        let trimmed = line.trim_start();
        let indent = line.chars().count() - trimmed.chars().count();
        let hidden = match *self {
            Redaction::Nothing => false,
            Redaction::Quoted { .. } | Redaction::Bracketed { .. } => true,
            Redaction::Below { .. } if trimmed.is_empty() => false,
            Redaction::Below { indent: above, empty } => {
                let item = indent == above && trimmed.starts_with('-');
                let stray = empty && key_of(trimmed).is_none() && !trimmed.starts_with('#');
                indent > above || item || stray
            }
        };
        if !hidden {
            if !trimmed.is_empty() {
                *self = Redaction::Nothing;
                self.keys(line, indent, shown);
            } else {
                shown.push_str(line);
            }
            return;
        }
        shown.extend(std::iter::repeat_n(' ', indent));
        shown.push_str(HIDDEN);
        *self = match *self {
            Redaction::Quoted { quote, indent } => match after_quote(trimmed, quote) {
                Some(_) => Redaction::Below { indent, empty: false },
                None => Redaction::Quoted { quote, indent },
            },
            Redaction::Bracketed { depth, indent } => match after_brackets(trimmed, depth) {
                Ok(_) => Redaction::Below { indent, empty: false },
                Err(depth) => Redaction::Bracketed { depth, indent },
            },
            Redaction::Below { indent, .. } => value_of(trimmed, indent).1,
            Redaction::Nothing => Redaction::Nothing,
        };
    }

    /// Processes a line that begins outside of a secret.
    fn keys(&mut self, line: &str, indent: usize, shown: &mut String) {
        let mut rest = line;
        let mut open_brackets = 0isize;
        while let Some(value_at) = secret_value(rest) {
            let (before, value) = rest.split_at(value_at);
            shown.push_str(before);
            let (spaced, value) = (value.starts_with(char::is_whitespace), value.trim_start());
            if !value.is_empty() {
                shown.push_str(if spaced || before.ends_with(':') { " " } else { "" });
                shown.push_str(HIDDEN);
            }
            let (end, next) = value_of(value, indent);
            let count = |brackets: [char; 2]| before.matches(brackets).count() as isize;
            open_brackets += count(['{', '[']) - count(['}', ']']);
            // Inside brackets that this line has opened, a comma ends the value; elsewhere it may be part of it.
            let after = end.map(|end| &value[end..]).filter(|_| open_brackets > 0);
            match after.filter(|after| after.trim_start().starts_with([',', '}', ']'])) {
                Some(after) => rest = after,
                None => {
                    *self = next;
                    return;
                }
            }
        }
        shown.push_str(rest);
    }
}

/// Where the value of the first secret key of `line` begins: after its colon or equals sign.
fn secret_value(line: &str) -> Option<usize> {
    let separators = line.char_indices().filter(|(_, c)| matches!(c, ':' | '='));
    // `? key` has its value on the next line.
    let explicit_key = line.trim_start().strip_prefix('?').is_some_and(|key| is_secret(unquoted(key.trim())));
    let found = separators.map(|(at, _)| at).find(|at| is_secret(key_before(&line[..*at])));
    found.map(|at| at + 1).or(explicit_key.then_some(line.len()))
}

/// The key that `text` ends with.
fn key_before(text: &str) -> &str {
    let text = unquoted(text.trim_end());
    let is_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
    let start = text.char_indices().rev().take_while(|(_, c)| is_name(*c)).last();
    start.map_or("", |(at, _)| &text[at..]).trim_start_matches('-')
}

/// The key of a map that a line begins with, if there is one.
fn key_of(line: &str) -> Option<&str> {
    let quote = line.chars().next().filter(|c| matches!(c, '"' | '\''));
    let end = match quote {
        Some(quote) => 1 + after_quote(&line[1..], quote)?,
        None => line.find(':')?,
    };
    let (key, rest) = line.split_at(end);
    let rest = rest.trim_start().strip_prefix(':')?;
    let ends = rest.is_empty() || rest.starts_with([' ', '\t']) || quote.is_some();
    (ends && !key.is_empty()).then_some(key)
}

fn unquoted(text: &str) -> &str {
    text.trim_matches(['"', '\''])
}

/// Where the value at the start of `text` ends, if it ends on this line, and what to redact in the following lines.
fn value_of(text: &str, indent: usize) -> (Option<usize>, Redaction) {
    let below = Redaction::Below { indent, empty: text.is_empty() || text.starts_with(['#', '&', '!']) };
    match text.chars().next() {
        Some(quote @ ('"' | '\'')) => match after_quote(&text[1..], quote) {
            Some(end) => (Some(1 + end), below),
            None => (None, Redaction::Quoted { quote, indent }),
        },
        Some('{' | '[') => match after_brackets(text, 0) {
            Ok(end) => (Some(end), below),
            Err(depth) => (None, Redaction::Bracketed { depth, indent }),
        },
        _ => (text.find([',', '}', ']']), below),
    }
}

/// The position after the closing `quote` in `text`.
fn after_quote(text: &str, quote: char) -> Option<usize> {
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' if quote == '"' => _ = chars.next(),
            c if c == quote && quote == '\'' && chars.peek().is_some_and(|(_, c)| *c == '\'') => {
                _ = chars.next();
            }
            c if c == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// The position after the bracket that closes `depth` open ones. `Err`: the number still open at the end of `text`.
fn after_brackets(text: &str, mut depth: usize) -> Result<usize, usize> {
    let mut rest = text;
    while let Some(at) = rest.find(['{', '[', '}', ']', '"', '\'']) {
        let (c, tail) = (rest.as_bytes()[at], &rest[at + 1..]);
        rest = match c {
            b'"' | b'\'' => &tail[after_quote(tail, c.into()).unwrap_or(tail.len())..],
            b'{' | b'[' => {
                depth += 1;
                tail
            }
            _ => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return Ok(text.len() - tail.len());
                }
                tail
            }
        };
    }
    Err(depth)
}

/// The words of all secret values, longest first. Empty if the text cannot be parsed.
fn secret_words(text: &str) -> Vec<String> {
    let mut words = BTreeSet::new();
    if let Some(root) = yaml::parse(text, Input::File(0)).0 {
        collect(&root, false, &mut words);
    }
    let mut words: Vec<String> = words.into_iter().collect();
    words.sort_by_key(|word| std::cmp::Reverse(word.len()));
    words
}

fn collect(node: &Node, secret: bool, words: &mut BTreeSet<String>) {
    match &node.value {
        Value::Scalar { text, .. } if secret => {
            let long = text.split_whitespace().filter(|word| word.chars().count() >= MIN_WORD_CHARS);
            words.extend(long.map(str::to_owned));
        }
        Value::Scalar { .. } => {}
        Value::Seq(items) => items.iter().for_each(|item| collect(item, secret, words)),
        Value::Map(entries) => {
            entries.iter().for_each(|e| collect(&e.node, secret || is_secret(&e.key), words));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn secret_keys_are_recognized() {
        for name in [
            "hub_token",
            "hub-token",
            "HF_TOKEN",
            "hubToken",
            "training.push_token",
            "token",
            "api_key",
            "wandb.api_key",
            "aws_secret_access_key",
            "password",
            "db_pwd",
            "auth",
            "basic_auth.user",
            "credentials",
            "client-secret",
            "key",
        ] {
            assert!(is_secret(name), "{name}");
        }
        for name in [
            "learning_rate",
            "tokenizer",
            "tokenizer_name_or_path",
            "head_chunk_tokens",
            "average_tokens_across_devices",
            "eos_token",
            "pad_token_id",
            "max_new_tokens",
            "token_env",
            "author",
            "keys",
            "model",
            "",
        ] {
            assert!(!is_secret(name), "{name}");
        }
    }

    #[test]
    fn values_are_redacted_in_every_yaml_style() {
        for (text, expected) in [
            ("hub_token: x1", "hub_token: [hidden]"),
            ("hub_token : x1 # note", "hub_token : [hidden]"),
            ("a: 1\n  \"api-key\" : 'x''1'\nb: 2\n", "a: 1\n  \"api-key\" : [hidden]\nb: 2\n"),
            ("{hub_token: x1, seed: 3}", "{hub_token: [hidden], seed: 3}"),
            ("{seed: 3, hub_token: \"x,}1\"}", "{seed: 3, hub_token: [hidden]}"),
            ("{token: {a: [x1]}, seed: 3}", "{token: [hidden], seed: 3}"),
            ("{token: x1, key: x1}", "{token: [hidden], key: [hidden]}"),
            ("# hub_token: x1\n# api_key=x1", "# hub_token: [hidden]\n# api_key=[hidden]"),
            ("api_key: x0, x1\ntoken: x0, x1", "api_key: [hidden]\ntoken: [hidden]"),
            ("# [a] token: x0, x1", "# [a] token: [hidden]"),
            ("token: |\n  x1\n\n  x1\nseed: 3", "token: [hidden]\n  [hidden]\n\n  [hidden]\nseed: 3"),
            ("token:\n  a: x1\n  b: [x1]\nseed: 3", "token:\n  [hidden]\n  [hidden]\nseed: 3"),
            ("tokens:\n- x1\n- x1\nseed: 3", "tokens:\n[hidden]\n[hidden]\nseed: 3"),
            ("token: \"x1\nx1\"\nseed: 3", "token: [hidden]\n[hidden]\nseed: 3"),
            ("token: [x1,\nx1]\nseed: 3", "token: [hidden]\n[hidden]\nseed: 3"),
            ("{\n\"token\":\n\"x1\",\n\"seed\": 3}", "{\n\"token\":\n[hidden]\n\"seed\": 3}"),
            ("? hub_token\n: x1\nseed: 3", "? hub_token\n[hidden]\nseed: 3"),
            ("token:\nseed: 3", "token:\nseed: 3"),
            ("a:\n  token: x1\n  b: 2\n", "a:\n  token: [hidden]\n  b: 2\n"),
            ("token: \"x1", "token: [hidden]"),
            ("a: [1\nhub_token: x1\n", "a: [1\nhub_token: [hidden]\n"),
            // Secrets that occur again, by an alias and inside another value.
            ("a: &t secret-word\nhub_token: *t\n", "a: &t [hidden]\nhub_token: [hidden]\n"),
            ("api_key: secret-word\nb: my secret-word\n", "api_key: [hidden]\nb: my [hidden]\n"),
            ("url: http://me:x1@host/a@b\nc: a@b", "url: http://[hidden]@host/a@b\nc: a@b"),
            ("seed: 3 # nothing to hide\r\nlr: 1", "seed: 3 # nothing to hide\r\nlr: 1"),
        ] {
            let shown = redact(text);
            assert_eq!(shown, expected);
            assert!(!shown.contains("x1") && shown.lines().count() == text.lines().count(), "{shown}");
        }
        assert_eq!(redact_setting("hub_token=x1"), "hub_token=[hidden]");
        assert_eq!(redact_setting("model={hub_token: x1, a: 2}"), "model={hub_token: [hidden], a: 2}");
        assert_eq!(redact_setting("seed=3"), "seed=3");
    }

    proptest! {
        /// Redaction keeps the lines of any text, and never shows a secret that is on its own line.
        #[test]
        fn any_text_is_redacted(
            before in r#"([a-z]: |[{}\[\]"'#&*|>,:=-]|é|\n| ){0,30}"#,
            after in r#"([{}\[\]"',:#-]|\n| |b: 1\n){0,12}"#,
        ) {
            let text = format!("{before}\nhub_token: s3cr3tw0rd{after}\n");
            let shown = redact(&text);
            prop_assert_eq!(shown.matches('\n').count(), text.matches('\n').count());
            prop_assert!(!shown.contains("s3cr3tw0rd"), "{}", shown);
        }
    }
}
