//! Reads rows from data files of all supported kinds.
//!
//! A reader returns one row after the other and holds only the part of the file that it works on. It does not
//! interpret rows: JSON formats return the bytes of one object, which other threads parse later, and the other
//! formats return a record of named values. Compressed text is decompressed while it is read.
//!
//! Not supported: Parquet pages compressed with LZO, for which there is no maintained decoder.

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
use crate::{DataError, DataTask, RowFault};

pub(crate) use lines::LINE_CAP;
pub(crate) use text_file::{check, compression};

/// The columns of a row, by name.
pub(crate) type Record = Map<String, Value>;

/// A row before it is interpreted.
#[derive(Debug)]
pub(crate) struct RawRow {
    /// Counted from 1: the line number in line-based files, otherwise the record number.
    pub(crate) row: u64,
    pub(crate) body: Result<Body, RowFault>,
}

#[derive(Debug)]
pub(crate) enum Body {
    /// The text of one JSON object.
    Json(Vec<u8>),
    Known(Named),
    /// All columns, by the names that the file has for them.
    All(Record),
}

/// The known columns of a record by their known names, and the names of all columns of its file for error messages.
#[derive(Debug)]
pub(crate) struct Named {
    pub(crate) columns: Record,
    pub(crate) names: Arc<[String]>,
}

impl Body {
    /// A row of `columns` from a file with the columns `names`; `all`: whether all of them are there.
    fn new(columns: Record, names: &Arc<[String]>, all: bool) -> Body {
        if all { Body::All(columns) } else { Body::Known(Named { columns, names: Arc::clone(names) }) }
    }
}

impl RawRow {
    /// The approximate amount of text to tokenize.
    pub(crate) fn bytes(&self) -> usize {
        match &self.body {
            Ok(Body::Json(bytes)) => bytes.len(),
            Ok(Body::Known(record)) => record.columns.values().map(size).sum(),
            Ok(Body::All(columns)) => columns.values().map(size).sum(),
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

/// Which columns to read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) columns: &'a Columns,
    pub(crate) task: DataTask,
}

impl Wanted<'_> {
    /// The name under which to return the file's column `theirs`; `None` to skip it.
    fn name(&self, theirs: &str) -> Option<String> {
        if self.all() { Some(theirs.into()) } else { self.columns.used(theirs, self.task).map(Into::into) }
    }

    /// Whether to read all columns and keep the file's names: reward functions may use any column of a prompt's row.
    fn all(&self) -> bool {
        matches!(self.task, DataTask::Prompt { .. })
    }
}

/// Reads the rows of one file.
pub(crate) trait Rows: Send {
    fn next(&mut self) -> Result<Option<RawRow>, DataError>;
}

/// The kind of a file, by the extension of its name without the one for compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    Jsonl,
    Json,
    Text,
    Csv { delimiter: u8 },
    Parquet,
    Arrow,
}

/// The supported file name extensions.
pub(crate) const ENDINGS: [&str; 8] = ["jsonl", "json", "txt", "csv", "tsv", "parquet", "arrow", "ndjson"];

impl FileKind {
    pub(crate) fn of(path: &Path) -> Option<FileKind> {
        let name = path.file_name()?.to_str()?.to_ascii_lowercase();
        let plain = text_file::COMPRESSED.iter().find_map(|ending| name.strip_suffix(ending));
        let kind = match plain.unwrap_or(&name).rsplit_once('.')?.1 {
            "jsonl" | "ndjson" => FileKind::Jsonl,
            "json" => FileKind::Json,
            "txt" => FileKind::Text,
            "csv" => FileKind::Csv { delimiter: b',' },
            "tsv" => FileKind::Csv { delimiter: b'\t' },
            "parquet" => FileKind::Parquet,
            "arrow" => FileKind::Arrow,
            _ => return None,
        };
        // Parquet and Arrow files are compressed internally, not as a whole.
        (plain.is_none() || !matches!(kind, FileKind::Parquet | FileKind::Arrow)).then_some(kind)
    }
}

/// Opens a file.
pub(crate) fn open(path: &Path, wanted: Wanted<'_>) -> Result<Box<dyn Rows>, DataError> {
    check(path)?;
    Ok(match FileKind::of(path) {
        Some(FileKind::Jsonl) => Box::new(lines::JsonLines::open(path)?),
        Some(FileKind::Text) => Box::new(lines::TextLines::open(path, wanted)?),
        Some(FileKind::Json) => json_rows::open(path, wanted.columns)?,
        Some(FileKind::Csv { delimiter }) => Box::new(csv_rows::CsvRows::open(path, delimiter, wanted)?),
        Some(FileKind::Parquet) => Box::new(arrow_rows::parquet(path, wanted)?),
        Some(FileKind::Arrow) => Box::new(arrow_rows::ipc(path, wanted)?),
        None => return Err(DataError::UnknownKind { path: path.into() }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_follows_from_the_name() {
        let of = |name: &str| FileKind::of(Path::new(name));
        assert_eq!(of("a/b.JSONL"), Some(FileKind::Jsonl));
        assert_eq!(of("b.jsonl.gz"), Some(FileKind::Jsonl));
        assert_eq!(of("b.csv.zst"), Some(FileKind::Csv { delimiter: b',' }));
        assert_eq!(of("train-00000-of-00001.parquet"), Some(FileKind::Parquet));
        for none in ["b.parquet.gz", "b", "b.gz", "README.md", ".jsonl/b"] {
            assert_eq!(of(none), None, "{none}");
        }
        for ending in ENDINGS {
            assert!(of(&format!("x.{ending}")).is_some(), "{ending}");
        }
    }
}
