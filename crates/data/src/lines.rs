//! Lines of a file, streamed, with a cap on the length of one: a file without newlines must not be
//! able to fill the memory.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use lockstep_core::Bytes;

use crate::{DataError, RowFault};

/// The longest row that is read.
pub(crate) const LINE_CAP: Bytes = Bytes(64 << 20);

/// One line that is not blank.
pub(crate) struct Line {
    /// The line's number, from 1.
    pub(crate) row: u64,
    /// Its bytes without the newline, or that there are too many.
    pub(crate) bytes: Result<Vec<u8>, RowFault>,
}

/// Reads a file line by line.
pub(crate) struct Lines<R> {
    reader: R,
    row: u64,
    cap: usize,
}

impl Lines<BufReader<File>> {
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let read = |source| DataError::Read { path: path.into(), source };
        // Looked at before opening: opening a pipe would wait for a writer.
        let found = match path.metadata() {
            Ok(found) => found,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(DataError::FileMissing { path: path.into() });
            }
            Err(e) => return Err(read(e)),
        };
        if !found.is_file() {
            return Err(DataError::NotAFile { path: path.into() });
        }
        let file = File::open(path).map_err(read)?;
        Ok(Lines::new(BufReader::with_capacity(1 << 20, file), LINE_CAP))
    }
}

impl<R: BufRead> Lines<R> {
    fn new(reader: R, cap: Bytes) -> Self {
        Lines { reader, row: 0, cap: cap.0 as usize }
    }

    /// The next line that has something on it.
    pub(crate) fn next(&mut self) -> io::Result<Option<Line>> {
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

    /// One line without its newline; past the cap the rest is read and thrown away.
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
        let mut lines = Lines::new(BufReader::with_capacity(buffer, bytes), Bytes(cap));
        let mut out = Vec::new();
        while let Some(line) = lines.next().unwrap() {
            out.push((line.row, line.bytes.ok().map(|b| String::from_utf8(b).unwrap())));
        }
        out
    }

    #[test]
    fn lines_keep_their_numbers_whatever_the_buffer() {
        let text = b"\xEF\xBB\xBFone\n\n  \r\nlonger than ten\nlast\r";
        let expected = vec![(1, Some("one".to_string())), (4, None), (5, Some("last\r".to_string()))];
        for buffer in 1..40 {
            assert_eq!(read(text, buffer, 10), expected);
        }
    }
}
