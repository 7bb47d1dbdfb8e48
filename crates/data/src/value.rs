//! Helpers for JSON values: reading columns of a type, and showing values in messages.

use serde_json::Value;

use crate::RowFault;
use crate::read::Record;

/// How many characters of a bad row a message shows.
const EXCERPT_CHARS: usize = 80;

pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The first characters of `text` on one line, with control characters replaced.
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

pub(crate) fn wrong_type(field: &'static str, expected: &'static str, value: &Value) -> RowFault {
    RowFault::WrongType { field, expected, found: kind(value), excerpt: excerpt(&value.to_string()) }
}

/// Takes a column out of the record; it must be a string.
pub(crate) fn string(columns: &mut Record, field: &'static str) -> Result<String, RowFault> {
    match columns.remove(field).unwrap_or(Value::Null) {
        Value::String(text) => Ok(text),
        other => Err(wrong_type(field, "a string", &other)),
    }
}

/// Takes a column that may be missing or null; both mean `None`.
pub(crate) fn optional(columns: &mut Record, field: &'static str) -> Option<Value> {
    columns.remove(field).filter(|value| !value.is_null())
}

/// Takes a string that may be missing, null or empty; all three mean `None`.
pub(crate) fn optional_string(columns: &mut Record, field: &'static str) -> Result<Option<String>, RowFault> {
    match optional(columns, field) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text).filter(|text| !text.is_empty())),
        Some(other) => Err(wrong_type(field, "a string", &other)),
    }
}

/// Takes a list. A string that contains a JSON list is accepted, because tables without list columns store it so.
pub(crate) fn list(columns: &mut Record, field: &'static str) -> Result<Vec<Value>, RowFault> {
    match columns.remove(field).unwrap_or(Value::Null) {
        Value::Array(items) => Ok(items),
        Value::String(text) => match serde_json::from_str(&text) {
            Ok(Value::Array(items)) => Ok(items),
            _ => Err(wrong_type(field, "a list", &Value::String(text))),
        },
        other => Err(wrong_type(field, "a list", &other)),
    }
}
