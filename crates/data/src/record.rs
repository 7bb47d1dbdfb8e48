//! The columns of a row that the task uses, under their known names. From JSON text, the other columns are skipped
//! without being built.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use crate::columns::Columns;
use crate::read::Record;
use crate::value::{excerpt, kind};
use crate::{DataTask, RowFault};

/// The names of all columns of an object, for messages.
pub(crate) fn names(line: &[u8]) -> Vec<String> {
    match serde_json::from_slice(line) {
        Ok(Value::Object(columns)) => columns.into_iter().map(|(name, _)| name).collect(),
        _ => Vec::new(),
    }
}

/// The columns of an object that the task uses.
pub(crate) fn parse(line: &[u8], columns: &Columns, task: DataTask) -> Result<Record, RowFault> {
    let text = str::from_utf8(line).map_err(|e| RowFault::NotUtf8 { byte: e.valid_up_to() })?;
    let mut json = serde_json::Deserializer::from_str(text);
    let record = UsedColumns { columns, task }.deserialize(&mut json);
    match record.and_then(|record| json.end().map(|()| record)) {
        Ok(record) => Ok(record),
        Err(e) => Err(match serde_json::from_str::<Value>(text) {
            Ok(value) => RowFault::NotAnObject { found: kind(&value), excerpt: excerpt(text) },
            Err(_) => RowFault::Json { column: e.column(), why: cause(&e), excerpt: excerpt(text) },
        }),
    }
}

/// The columns that the task uses, of a record that has all columns by the file's names.
pub(crate) fn used(all: Record, columns: &Columns, task: DataTask) -> Record {
    all.into_iter()
        .filter_map(|(name, value)| Some((columns.used(&name, task)?.to_string(), value)))
        .collect()
}

/// Deserializes an object and keeps the columns that the task uses.
struct UsedColumns<'a> {
    columns: &'a Columns,
    task: DataTask,
}

impl<'de> DeserializeSeed<'de> for UsedColumns<'_> {
    type Value = Record;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Record, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for UsedColumns<'_> {
    type Value = Record;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Record, A::Error> {
        let mut record = Record::new();
        while let Some(name) = map.next_key::<String>()? {
            match self.columns.used(&name, self.task) {
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
