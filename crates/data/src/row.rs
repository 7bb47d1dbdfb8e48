//! One line of jsonl to one row: what its columns say it is.
//!
//! Columns that are not needed are ignored, as people keep ids and sources beside the text. A row with
//! `prompt` and `completion` is read as such even if it also has `text`.

use std::fmt;

use serde_json::{Map, Value};

use crate::RowFault;

/// The columns that mean something here.
pub(crate) const COLUMNS: [&str; 3] = ["text", "prompt", "completion"];

/// How much of a bad row a message shows, in characters.
const EXCERPT_CHARS: usize = 80;

/// What kind of row a file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Text,
    PromptCompletion,
}

/// A row before it is tokenised.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Row {
    Text(String),
    PromptCompletion { prompt: String, completion: String },
}

impl Row {
    pub(crate) fn format(&self) -> Format {
        match self {
            Row::Text(_) => Format::Text,
            Row::PromptCompletion { .. } => Format::PromptCompletion,
        }
    }

    pub(crate) fn parse(line: &[u8]) -> Result<Row, RowFault> {
        let text = std::str::from_utf8(line).map_err(|e| RowFault::NotUtf8 { byte: e.valid_up_to() })?;
        let value: Value = serde_json::from_str(text).map_err(|e| RowFault::Json {
            column: e.column(),
            why: cause(&e),
            excerpt: excerpt(text),
        })?;
        let mut columns = match value {
            Value::Object(columns) => columns,
            other => return Err(RowFault::NotAnObject { found: kind(&other), excerpt: excerpt(text) }),
        };
        if let Some(column) = conversational(&columns) {
            return Err(RowFault::Conversational { column });
        }
        let has = |name: &str| columns.contains_key(name);
        let names = || {
            let mut names: Vec<String> = columns.keys().cloned().collect();
            names.sort_unstable();
            names
        };
        if has("prompt") && has("completion") {
            let prompt = string(&mut columns, "prompt")?;
            let completion = string(&mut columns, "completion")?;
            Ok(Row::PromptCompletion { prompt, completion })
        } else if has("text") {
            Ok(Row::Text(string(&mut columns, "text")?))
        } else if has("prompt") {
            Err(RowFault::MissingColumn { present: "prompt", missing: "completion", columns: names() })
        } else if has("completion") {
            Err(RowFault::MissingColumn { present: "completion", missing: "prompt", columns: names() })
        } else {
            Err(RowFault::UnknownColumns { columns: names() })
        }
    }
}

/// The column that makes a row a conversation: a list whose first element has a role.
fn conversational(columns: &Map<String, Value>) -> Option<String> {
    ["messages", "conversations", "prompt", "completion"].into_iter().find_map(|name| {
        let first = columns.get(name)?.as_array()?.first()?;
        (first.get("role").is_some() || first.get("from").is_some()).then(|| name.to_string())
    })
}

fn string(columns: &mut Map<String, Value>, field: &'static str) -> Result<String, RowFault> {
    match columns.remove(field) {
        Some(Value::String(text)) => Ok(text),
        other => {
            let value = other.unwrap_or(Value::Null);
            Err(RowFault::WrongType { field, found: kind(&value), excerpt: excerpt(&value.to_string()) })
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The first characters of `text`, on one line, control characters made visible.
pub(crate) fn excerpt(text: &str) -> String {
    let mut out: String = text
        .chars()
        .take(EXCERPT_CHARS)
        .map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c })
        .collect();
    if text.chars().nth(EXCERPT_CHARS).is_some() {
        out.push('…');
    }
    out
}

/// serde_json's message without the place, which is given separately.
fn cause(e: &serde_json::Error) -> String {
    let text = e.to_string();
    match text.rfind(" at line ") {
        Some(at) => text[..at].to_string(),
        None => text,
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Text => "`text`",
            Format::PromptCompletion => "`prompt` and `completion`",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn columns_decide_the_format() {
        let parse = |text: &str| Row::parse(text.as_bytes());
        assert_eq!(parse(r#"{"id": 3, "text": "a"}"#), Ok(Row::Text("a".into())));
        let pair = Row::PromptCompletion { prompt: "p".into(), completion: "c".into() };
        assert_eq!(parse(r#"{"prompt": "p", "completion": "c", "text": "t"}"#), Ok(pair));
        assert_eq!(parse(r#"{"prompt": "p", "text": "t"}"#), Ok(Row::Text("t".into())));
        let chat = parse(r#"{"prompt": [{"role": "user", "content": "x"}], "completion": "y"}"#);
        assert_eq!(chat, Err(RowFault::Conversational { column: "prompt".into() }));
    }

    #[test]
    fn deep_nesting_is_refused_not_followed() {
        let text = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(matches!(Row::parse(text.as_bytes()), Err(RowFault::Json { .. })));
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Row::parse(&bytes);
        }

        #[test]
        fn any_text_survives(text in any::<String>()) {
            let line = serde_json::json!({ "text": text }).to_string();
            prop_assert_eq!(Row::parse(line.as_bytes()), Ok(Row::Text(text)));
        }
    }
}
