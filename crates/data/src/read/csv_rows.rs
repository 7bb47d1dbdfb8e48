//! CSV and TSV files with a header.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use csv::{ByteRecord, Reader, ReaderBuilder};
use serde_json::Value;

use super::text_file::{self, TextFile};
use super::{Body, LINE_CAP, RawRow, Record, Rows, Wanted};
use crate::{DataError, RowFault};

pub(super) struct CsvRows {
    reader: Reader<Metered>,
    path: PathBuf,
    /// The name under which every field is returned, if it is.
    keys: Vec<Option<String>>,
    names: Arc<[String]>,
    all: bool,
    /// The bytes that the current record may still read.
    left: Arc<AtomicU64>,
    record: ByteRecord,
}

impl CsvRows {
    pub(super) fn open(path: &Path, delimiter: u8, wanted: Wanted<'_>) -> Result<Self, DataError> {
        let left = Arc::new(AtomicU64::new(LINE_CAP.0));
        let metered = Metered { inner: text_file::open(path)?, left: Arc::clone(&left) };
        let mut reader = ReaderBuilder::new().delimiter(delimiter).from_reader(metered);
        let header = reader.byte_headers().map_err(|e| read_error(path, e))?;
        let names: Arc<[String]> = header
            .iter()
            .map(|name| String::from_utf8_lossy(name).trim_start_matches('\u{FEFF}').into())
            .collect();
        let keys = names.iter().map(|name| wanted.name(name)).collect();
        let record = ByteRecord::new();
        Ok(CsvRows { reader, path: path.into(), keys, names, all: wanted.all(), left, record })
    }
}

impl Rows for CsvRows {
    fn next(&mut self) -> Result<Option<RawRow>, DataError> {
        // Bytes that were buffered with the last record are not counted again: the limit is approximate.
        self.left.store(LINE_CAP.0, Ordering::Relaxed);
        let body = match self.reader.read_byte_record(&mut self.record) {
            Ok(false) => return Ok(None),
            Ok(true) => {
                fields(&self.keys, &self.record).map(|columns| Body::new(columns, &self.names, self.all))
            }
            Err(e) => match e.kind() {
                csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                    Err(RowFault::Fields { expected: *expected_len, found: *len })
                }
                _ => return Err(read_error(&self.path, e)),
            },
        };
        let row = self.record.position().map_or(0, csv::Position::line);
        Ok(Some(RawRow { row, body }))
    }
}

fn fields(keys: &[Option<String>], fields: &ByteRecord) -> Result<Record, RowFault> {
    let mut columns = Record::new();
    let mut before = 0;
    for (key, field) in keys.iter().zip(fields) {
        if let Some(key) = key {
            let text =
                str::from_utf8(field).map_err(|e| RowFault::NotUtf8 { byte: before + e.valid_up_to() })?;
            columns.insert(key.clone(), Value::String(text.into()));
        }
        before += field.len() + 1;
    }
    Ok(columns)
}

fn read_error(path: &Path, e: csv::Error) -> DataError {
    let source = match e.into_kind() {
        csv::ErrorKind::Io(source) => source,
        other => io::Error::new(io::ErrorKind::InvalidData, format!("{other:?}")),
    };
    DataError::Read { path: path.into(), source }
}

/// Limits the bytes of a record, so that an unclosed quote cannot fill the memory.
struct Metered {
    inner: TextFile,
    left: Arc<AtomicU64>,
}

impl Read for Metered {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 {
            let text = format!("a record is longer than {LINE_CAP}; is there an unclosed quote?");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let count = self.inner.read(out)?;
        self.left.store(left.saturating_sub(count as u64), Ordering::Relaxed);
        Ok(count)
    }
}
