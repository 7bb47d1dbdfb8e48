//! Rows out of files of any known kind.
//!
//! A reader gives one row after the other and holds no more of a file than it is working on. What a row
//! means is not decided here: text formats hand over the bytes of one JSON object, which threads parse
//! later, the others a record of named values. Compressed text is decompressed on the way.
//!
//! Left out: parquet pages compressed with LZO, for which there is no decoder that is kept.

mod arrow_rows;
mod arrow_value;
mod csv_rows;
mod json_rows;
mod lines;
mod text_file;

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::columns::Columns;
use crate::{DataError, RowFault};

pub(crate) use lines::LINE_CAP;
pub(crate) use text_file::check;

/// A row's columns by the names that mean something here.
pub(crate) type Record = Map<String, Value>;

/// A row as a reader found it.
#[derive(Debug)]
pub(crate) struct RawRow {
    /// Its number, from 1: of the line in files of lines, of the record elsewhere.
    pub(crate) row: u64,
    pub(crate) body: Result<Body, RowFault>,
}

#[derive(Debug)]
pub(crate) enum Body {
    /// The text of one JSON object.
    Json(Vec<u8>),
    Record(Named),
}

/// A record, and for messages the names of all columns that its file has.
#[derive(Debug)]
pub(crate) struct Named {
    pub(crate) columns: Record,
    pub(crate) names: Arc<[String]>,
}

impl RawRow {
    /// About how much there is to tokenise.
    pub(crate) fn bytes(&self) -> usize {
        match &self.body {
            Ok(Body::Json(bytes)) => bytes.len(),
            Ok(Body::Record(record)) => record.columns.values().map(size).sum(),
            Err(_) => 0,
        }
    }
}

fn size(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(size).sum(),
        Value::Object(map) => map.values().map(size).sum(),
        _ => 8,
    }
}

/// The rows of one file.
pub(crate) trait Rows: Send {
    fn next(&mut self) -> Result<Option<RawRow>, DataError>;
}

/// What a file is, by its name without the ending of a compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Jsonl,
    Json,
    Text,
    Csv { delimiter: u8 },
    Parquet,
    Arrow,
}

/// Endings of file names that are read.
pub(crate) const ENDINGS: [&str; 8] = ["jsonl", "json", "txt", "csv", "tsv", "parquet", "arrow", "ndjson"];

impl Kind {
    pub(crate) fn of(path: &Path) -> Option<Kind> {
        let name = path.file_name()?.to_str()?.to_ascii_lowercase();
        let plain = text_file::COMPRESSED.iter().find_map(|ending| name.strip_suffix(ending));
        let kind = match plain.unwrap_or(&name).rsplit_once('.')?.1 {
            "jsonl" | "ndjson" => Kind::Jsonl,
            "json" => Kind::Json,
            "txt" => Kind::Text,
            "csv" => Kind::Csv { delimiter: b',' },
            "tsv" => Kind::Csv { delimiter: b'\t' },
            "parquet" => Kind::Parquet,
            "arrow" => Kind::Arrow,
            _ => return None,
        };
        // These compress inside.
        (plain.is_none() || !matches!(kind, Kind::Parquet | Kind::Arrow)).then_some(kind)
    }
}

/// Opens a file. `columns` says which ones are worth reading.
pub(crate) fn open(path: &Path, columns: &Columns) -> Result<Box<dyn Rows>, DataError> {
    check(path)?;
    Ok(match Kind::of(path) {
        Some(Kind::Jsonl) => Box::new(lines::JsonLines::open(path)?),
        Some(Kind::Text) => Box::new(lines::TextLines::open(path)?),
        Some(Kind::Json) => json_rows::open(path, columns)?,
        Some(Kind::Csv { delimiter }) => Box::new(csv_rows::CsvRows::open(path, delimiter, columns)?),
        Some(Kind::Parquet) => Box::new(arrow_rows::parquet(path, columns)?),
        Some(Kind::Arrow) => Box::new(arrow_rows::ipc(path, columns)?),
        None => return Err(DataError::UnknownKind { path: path.into() }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_the_kind() {
        let of = |name: &str| Kind::of(Path::new(name));
        assert_eq!(of("a/b.JSONL"), Some(Kind::Jsonl));
        assert_eq!(of("b.jsonl.gz"), Some(Kind::Jsonl));
        assert_eq!(of("b.csv.zst"), Some(Kind::Csv { delimiter: b',' }));
        assert_eq!(of("train-00000-of-00001.parquet"), Some(Kind::Parquet));
        for none in ["b.parquet.gz", "b", "b.gz", "README.md", ".jsonl/b"] {
            assert_eq!(of(none), None, "{none}");
        }
        for ending in ENDINGS {
            assert!(of(&format!("x.{ending}")).is_some(), "{ending}");
        }
    }
}
