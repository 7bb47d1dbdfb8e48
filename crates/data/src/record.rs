//! Parses one JSON object into a record: known columns are kept under their known names, the others are skipped
//! without being built.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use crate::RowFault;
use crate::columns::Columns;
use crate::read::Record;
use crate::value::{excerpt, kind};

/// The names of all columns of an object, for messages.
pub(crate) fn names(line: &[u8]) -> Vec<String> {
    match serde_json::from_slice(line) {
        Ok(Value::Object(columns)) => columns.into_iter().map(|(name, _)| name).collect(),
        _ => Vec::new(),
    }
}

/// The known columns of an object.
pub(crate) fn parse(line: &[u8], columns: &Columns) -> Result<Record, RowFault> {
    let text = str::from_utf8(line).map_err(|e| RowFault::NotUtf8 { byte: e.valid_up_to() })?;
    let mut json = serde_json::Deserializer::from_str(text);
    match KnownColumns(columns).deserialize(&mut json).and_then(|record| json.end().map(|()| record)) {
        Ok(record) => Ok(record),
        Err(e) => Err(match serde_json::from_str::<Value>(text) {
            Ok(value) => RowFault::NotAnObject { found: kind(&value), excerpt: excerpt(text) },
            Err(_) => RowFault::Json { column: e.column(), why: cause(&e), excerpt: excerpt(text) },
        }),
    }
}

/// Deserializes an object and keeps its known columns.
struct KnownColumns<'a>(&'a Columns);

impl<'de> DeserializeSeed<'de> for KnownColumns<'_> {
    type Value = Record;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Record, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for KnownColumns<'_> {
    type Value = Record;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Record, A::Error> {
        let mut record = Record::new();
        while let Some(name) = map.next_key::<String>()? {
            match self.0.known(&name) {
                Some(known) => drop(record.insert(known.into(), map.next_value()?)),
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(record)
    }
}

/// serde_json's message without its line and column, which the message gives separately.
fn cause(e: &serde_json::Error) -> String {
    let text = e.to_string();
    match text.rfind(" at line ") {
        Some(at) => text[..at].to_string(),
        None => text,
    }
}
