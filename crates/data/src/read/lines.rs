//! Reads files line by line, with a limit on the length of a line, so that a file without newlines cannot fill
//! the memory.

use std::io::{self, BufRead};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lockstep_core::Bytes;
use serde_json::Value;

use super::text_file::{self, TextFile};
use super::{Body, RawRow, Record, Rows, Wanted};
use crate::{DataError, RowFault};

/// The longest row that is accepted.
pub(crate) const LINE_CAP: Bytes = Bytes(64 << 20);

/// Files with one JSON object per line.
pub(super) struct JsonLines {
    lines: Lines<TextFile>,
    path: PathBuf,
}

impl JsonLines {
    pub(super) fn open(path: &Path) -> Result<Self, DataError> {
        Ok(JsonLines { lines: Lines::new(text_file::open(path)?, LINE_CAP), path: path.into() })
    }
}

impl Rows for JsonLines {
    fn next(&mut self) -> Result<Option<RawRow>, DataError> {
        let read = |source| DataError::Read { path: self.path.clone(), source };
        let line = self.lines.next().map_err(read)?;
        Ok(line.map(|line| RawRow { row: line.row, body: line.bytes.map(Body::Json) }))
    }
}

/// Text files with one document per line, like the `text` loader of `datasets`.
pub(super) struct TextLines {
    lines: JsonLines,
    /// The name of the only column.
    name: String,
    /// The names of all columns, for error messages.
    names: Arc<[String]>,
    all: bool,
}

impl TextLines {
    pub(super) fn open(path: &Path, wanted: Wanted<'_>) -> Result<Self, DataError> {
        let name = wanted.name("text").unwrap_or_else(|| "text".into());
        let names = Arc::new(["text".to_string()]);
        Ok(TextLines { lines: JsonLines::open(path)?, name, names, all: wanted.all() })
    }
}

impl Rows for TextLines {
    fn next(&mut self) -> Result<Option<RawRow>, DataError> {
        let Some(RawRow { row, body }) = self.lines.next()? else { return Ok(None) };
        let text = |body| match body {
            Body::Json(mut bytes) => {
                if bytes.last() == Some(&b'\r') {
                    bytes.pop();
                }
                let text = String::from_utf8(bytes)
                    .map_err(|e| RowFault::NotUtf8 { byte: e.utf8_error().valid_up_to() })?;
                let columns = Record::from_iter([(self.name.clone(), Value::String(text))]);
                Ok(Body::new(columns, &self.names, self.all))
            }
            record => Ok(record),
        };
        Ok(Some(RawRow { row, body: body.and_then(text) }))
    }
}

/// A line that is not blank.
struct Line {
    /// The line's number, from 1.
    row: u64,
    /// The bytes without the newline, or a fault if the line is too long.
    bytes: Result<Vec<u8>, RowFault>,
}

/// Reads line by line.
struct Lines<R> {
    reader: R,
    row: u64,
    cap: usize,
}

impl<R: BufRead> Lines<R> {
    fn new(reader: R, cap: Bytes) -> Self {
        Lines { reader, row: 0, cap: cap.0 as usize }
    }

    /// The next line that is not blank.
    fn next(&mut self) -> io::Result<Option<Line>> {
        loop {
            let Some(mut bytes) = self.read_line()? else { return Ok(None) };
            self.row += 1;
            if let Ok(line) = &mut bytes {
                if self.row == 1 && line.starts_with(b"\xEF\xBB\xBF") {
                    line.drain(..3);
                }
                if line.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
            }
            return Ok(Some(Line { row: self.row, bytes }));
        }
    }

    /// Reads one line without its newline. The rest of a line beyond the limit is discarded.
    fn read_line(&mut self) -> io::Result<Option<Result<Vec<u8>, RowFault>>> {
        let mut line = Vec::new();
        let mut any = false;
        let mut too_long = false;
        loop {
            let buffer = match self.reader.fill_buf() {
                Ok(buffer) => buffer,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            if buffer.is_empty() {
                break;
            }
            any = true;
            let newline = buffer.iter().position(|b| *b == b'\n');
            let part = &buffer[..newline.unwrap_or(buffer.len())];
            too_long |= line.len() + part.len() > self.cap;
            if too_long {
                line = Vec::new();
            } else {
                line.extend_from_slice(part);
            }
            let used = part.len() + usize::from(newline.is_some());
            self.reader.consume(used);
            if newline.is_some() {
                break;
            }
        }
        if !any {
            return Ok(None);
        }
        let cap = Bytes(self.cap as u64);
        Ok(Some(if too_long { Err(RowFault::TooLong { cap }) } else { Ok(line) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], buffer: usize, cap: u64) -> Vec<(u64, Option<String>)> {
        let mut lines = Lines::new(io::BufReader::with_capacity(buffer, bytes), Bytes(cap));
        let mut out = Vec::new();
        while let Some(line) = lines.next().unwrap() {
            out.push((line.row, line.bytes.ok().map(|b| String::from_utf8(b).unwrap())));
        }
        out
    }

    #[test]
    fn line_numbers_do_not_depend_on_the_buffer_size() {
        let text = b"\xEF\xBB\xBFone\n\n  \r\nlonger than ten\nlast\r";
        let expected = vec![(1, Some("one".to_string())), (4, None), (5, Some("last\r".to_string()))];
        for buffer in 1..40 {
            assert_eq!(read(text, buffer, 10), expected);
        }
    }
}
