//! JSON files: a list of objects, an object that has such a list under one key, or objects one after the
//! other, which many files of this name are.
//!
//! Elements are found by counting brackets outside strings and handed on as bytes, so a file of any size
//! is read with the memory of one element. Whether an element is valid is for the parser to say.

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

/// Where rows begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// Objects one after the other from this byte on.
    Objects { at: u64 },
    /// The elements of a list, after its bracket.
    List { at: u64 },
}

/// Reads as far as it takes to know. An object without a known column, but with a list of objects, is
/// what surrounds the rows; its first such list counts.
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

/// A reader that is looked at byte by byte.
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

    /// The rest of a string, its escapes as they are written; kept up to a length no name has.
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

/// Elements of a list, or objects one after the other.
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
    /// The bytes of the next value, or that there are too many.
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

/// How far into a value the bytes so far go.
#[derive(Default)]
struct Scan {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Scan {
    /// How many of `bytes` belong to the value, and whether it ends there.
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
                // A value that is no object: it ends where the next would begin.
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
    fn lists_objects_with_a_list_and_objects() {
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
