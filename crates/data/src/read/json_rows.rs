//! JSON files: a list of objects, an object that contains such a list under one key, or a sequence of objects
//! (many files named `.json` are in fact JSON lines).
//!
//! Elements are found by counting brackets outside strings and returned as bytes, so a file of any size is read
//! with the memory of one element. The parser checks later whether an element is valid.

use std::io::{self, BufRead};
use std::path::{Path, PathBuf};

use super::text_file::{self, TextFile};
use super::{Body, LINE_CAP, RawRow, Rows};
use crate::columns::Columns;
use crate::{DataError, RowFault};

pub(super) fn open(path: &Path, columns: &Columns) -> Result<Box<dyn Rows>, DataError> {
    let read = |source| DataError::Read { path: path.into(), source };
    let start = find_rows(&mut text_file::open(path)?, columns).map_err(read)?;
    let mut reader = text_file::open(path)?;
    let (skip, listed) = match start {
        Start::Objects { at } => (at, false),
        Start::List { at } => (at, true),
    };
    io::copy(&mut io::Read::take(&mut reader, skip), &mut io::sink()).map_err(read)?;
    Ok(Box::new(Elements { reader, path: path.into(), listed, row: 0, ended: false }))
}

/// Where the rows begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// A sequence of objects, which begins at this byte.
    Objects { at: u64 },
    /// The elements of a list, which begin at this byte, after the bracket.
    List { at: u64 },
}

/// Reads the file until the start of the rows is known. An object without a known column but with a list of objects
/// is a container, and the first such list holds the rows.
fn find_rows(reader: &mut dyn BufRead, columns: &Columns) -> io::Result<Start> {
    let mut bytes = Bytes { reader, at: 0 };
    if bytes.peek()? == Some(0xEF) {
        (0..3).try_for_each(|_| bytes.next().map(|_| ()))?;
    }
    bytes.skip_space()?;
    let start = Start::Objects { at: bytes.at };
    match bytes.next()? {
        Some(b'[') => return Ok(Start::List { at: bytes.at }),
        Some(b'{') => {}
        _ => return Ok(start),
    }
    let (mut depth, mut key, mut at_key) = (1u32, Vec::new(), true);
    let mut list = None;
    while let Some(byte) = bytes.next()? {
        match byte {
            b'"' if depth == 1 && at_key => {
                bytes.string(Some(&mut key))?;
                if columns.known(&String::from_utf8_lossy(&key)).is_some() {
                    return Ok(start);
                }
            }
            b'"' => bytes.string(None)?,
            b':' if depth == 1 => at_key = false,
            b',' if depth == 1 => at_key = true,
            b'{' | b'[' => {
                if byte == b'[' && depth == 1 && list.is_none() {
                    let at = bytes.at;
                    bytes.skip_space()?;
                    list = (bytes.peek()? == Some(b'{')).then_some(Start::List { at });
                }
                depth += 1;
            }
            b'}' | b']' => {
                depth -= 1;
                if depth == 0 {
                    break;
                }
            }
            _ => {}
        }
    }
    Ok(list.unwrap_or(start))
}

/// Reads byte by byte and counts the bytes.
struct Bytes<'a> {
    reader: &'a mut dyn BufRead,
    at: u64,
}

impl Bytes<'_> {
    fn peek(&mut self) -> io::Result<Option<u8>> {
        loop {
            match self.reader.fill_buf() {
                Ok(buffer) => return Ok(buffer.first().copied()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    fn next(&mut self) -> io::Result<Option<u8>> {
        let byte = self.peek()?;
        if byte.is_some() {
            self.reader.consume(1);
            self.at += 1;
        }
        Ok(byte)
    }

    fn skip_space(&mut self) -> io::Result<()> {
        while self.peek()?.is_some_and(|b| b.is_ascii_whitespace()) {
            self.next()?;
        }
        Ok(())
    }

    /// Reads the rest of a string, without decoding escapes. Keeps at most 256 bytes, which is enough for any column
    /// name.
    fn string(&mut self, mut out: Option<&mut Vec<u8>>) -> io::Result<()> {
        if let Some(out) = &mut out {
            out.clear();
        }
        while let Some(byte) = self.next()? {
            let escaped = if byte == b'\\' { self.next()? } else { None };
            match &mut out {
                _ if byte == b'"' => break,
                Some(out) if out.len() < 256 => out.extend([byte].into_iter().chain(escaped)),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Reads the elements of a list, or a sequence of objects.
struct Elements {
    reader: TextFile,
    path: PathBuf,
    listed: bool,
    row: u64,
    ended: bool,
}

impl Rows for Elements {
    fn next(&mut self) -> Result<Option<RawRow>, DataError> {
        let element = if self.ended { Ok(None) } else { self.element() };
        let element = element.map_err(|source| DataError::Read { path: self.path.clone(), source })?;
        self.ended = element.is_none();
        Ok(element.map(|body| {
            self.row += 1;
            RawRow { row: self.row, body: body.map(Body::Json) }
        }))
    }
}

impl Elements {
    /// The bytes of the next value, or a fault if it is too long.
    fn element(&mut self) -> io::Result<Option<Result<Vec<u8>, RowFault>>> {
        let mut bytes = Bytes { reader: &mut self.reader, at: 0 };
        loop {
            match bytes.peek()? {
                None => return Ok(None),
                Some(b']') if self.listed => return Ok(None),
                Some(b) if b == b',' || b.is_ascii_whitespace() => bytes.next()?,
                Some(_) => break,
            };
        }
        let mut scan = Scan::default();
        let mut out = Vec::new();
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
            let (used, done) = scan.take(buffer);
            too_long |= out.len() + used > LINE_CAP.0 as usize;
            if too_long {
                out = Vec::new();
            } else {
                out.extend_from_slice(&buffer[..used]);
            }
            self.reader.consume(used);
            if done {
                break;
            }
        }
        Ok(Some(if too_long { Err(RowFault::TooLong { cap: LINE_CAP }) } else { Ok(out) }))
    }
}

/// The state of scanning for the end of a value.
#[derive(Default)]
struct Scan {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Scan {
    /// Returns how many of `bytes` belong to the value, and whether it ends there.
    fn take(&mut self, bytes: &[u8]) -> (usize, bool) {
        for (at, byte) in bytes.iter().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' if self.depth > 1 => self.depth -= 1,
                b'}' | b']' if self.depth == 1 => return (at + 1, true),
                // A value that is not an object or a list ends where the next one could begin.
                b',' | b']' | b'}' | b'\n' if self.depth == 0 => return (at, true),
                _ => {}
            }
        }
        (bytes.len(), false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(text: &str) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        std::fs::write(&path, text).unwrap();
        let mut rows = open(&path, &Columns::default()).unwrap();
        let mut out = Vec::new();
        while let Some(row) = rows.next().unwrap() {
            assert_eq!(row.row, out.len() as u64 + 1);
            let Ok(Body::Json(bytes)) = row.body else { panic!("{row:?}") };
            out.push(String::from_utf8(bytes).unwrap());
        }
        out
    }

    #[test]
    fn lists_containers_and_sequences_are_read() {
        let two = [r#"{"text": "a]\"}"}"#, r#"{"text": [1, {"x": "\\"}]}"#];
        let [a, b] = two;
        assert_eq!(rows(&format!(" [ {a} ,\n{b}\n] ")), two);
        assert_eq!(
            rows(&format!(
                "\u{FEFF}{{\"version\": [1], \"d\\\"\": {{}}, \"data\": [{a},{b}], \"z\": [{{}}]}}"
            )),
            two
        );
        assert_eq!(rows(&format!("{a}\n{b}\n")), two);
        let one = r#"{"meta": [{"a": 1}], "text": "b"}"#;
        assert_eq!(rows(one), [one]);
        assert_eq!(rows("[1, \"a\", {}]"), ["1", "\"a\"", "{}"]);
        assert_eq!(rows("{\"a\": [], \"b\": 1}"), ["{\"a\": [], \"b\": 1}"]);
        assert_eq!(rows("[{\"text\": \"no end"), ["{\"text\": \"no end"]);
        for nothing in ["", "[]", "  ", "[", "{\"rows\": [ ]"] {
            assert!(rows(nothing).len() <= usize::from(nothing.starts_with('{')), "{nothing}");
        }
    }
}
