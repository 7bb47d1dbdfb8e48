//! Bounded memory for what a program writes: the lines of its stdout, and the last lines of its stderr.

use std::collections::VecDeque;

/// A line of stdout must not be longer.
pub(crate) const MAX_LINE_BYTES: usize = 1 << 20;
/// How many lines of stderr an error shows.
const MAX_TAIL_LINES: usize = 20;
/// Longer lines of stderr are cut.
const MAX_TAIL_LINE_BYTES: usize = 500;

/// A line is longer than [`MAX_LINE_BYTES`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LineTooLong;

/// Splits stdout into lines.
#[derive(Default)]
pub(crate) struct LineBuffer {
    bytes: Vec<u8>,
    /// Where the next line begins.
    start: usize,
    /// No newline is between `start` and here.
    scanned: usize,
}

impl LineBuffer {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.start);
        self.scanned -= self.start;
        self.start = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The next complete line that is not blank, without its newline.
    pub(crate) fn next_line(&mut self) -> Result<Option<Vec<u8>>, LineTooLong> {
        while let Some(length) = self.bytes[self.scanned..].iter().position(|b| *b == b'\n') {
            let line = self.start..self.scanned + length;
            self.start = line.end + 1;
            self.scanned = self.start;
            if line.len() > MAX_LINE_BYTES {
                return Err(LineTooLong);
            }
            if !self.bytes[line.clone()].trim_ascii().is_empty() {
                return Ok(Some(self.bytes[line].to_vec()));
            }
        }
        self.scanned = self.bytes.len();
        if self.scanned - self.start > MAX_LINE_BYTES { Err(LineTooLong) } else { Ok(None) }
    }
}

/// The last lines of stderr.
#[derive(Default)]
pub(crate) struct StderrTail {
    lines: VecDeque<String>,
    current: Vec<u8>,
}

impl StderrTail {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        for part in bytes.split_inclusive(|b| *b == b'\n') {
            let text = part.strip_suffix(b"\n").unwrap_or(part);
            let free = MAX_TAIL_LINE_BYTES.saturating_sub(self.current.len());
            self.current.extend_from_slice(&text[..text.len().min(free)]);
            if text.len() < part.len() {
                self.end_line();
            }
        }
    }

    /// The lines so far, oldest first. Begins anew.
    pub(crate) fn take(&mut self) -> Vec<String> {
        if !self.current.is_empty() {
            self.end_line();
        }
        std::mem::take(&mut self.lines).into()
    }

    fn end_line(&mut self) {
        let line = String::from_utf8_lossy(&self.current);
        // Tabs are the only control characters that do no harm on a terminal.
        let line: String = line.chars().filter(|c| !c.is_control() || *c == '\t').collect();
        self.current.clear();
        if self.lines.len() == MAX_TAIL_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_whole() {
        let mut buffer = LineBuffer::default();
        buffer.push(b"one\n\n  \r\ntw");
        assert_eq!(buffer.next_line(), Ok(Some(b"one".to_vec())));
        assert_eq!(buffer.next_line(), Ok(None));
        buffer.push(b"o\nthree\n");
        assert_eq!(buffer.next_line(), Ok(Some(b"two".to_vec())));
        assert_eq!(buffer.next_line(), Ok(Some(b"three".to_vec())));
        assert_eq!(buffer.next_line(), Ok(None));
    }

    #[test]
    fn long_lines_are_refused() {
        for end in ["", "\n"] {
            let mut buffer = LineBuffer::default();
            buffer.push(&[b'x'; MAX_LINE_BYTES]);
            assert_eq!(buffer.next_line(), Ok(None));
            buffer.push(format!("x{end}").as_bytes());
            assert_eq!(buffer.next_line(), Err(LineTooLong));
        }
    }

    #[test]
    fn the_tail_is_bounded() {
        let mut tail = StderrTail::default();
        for i in 0..1000 {
            tail.push(format!("line {i}\x1b\n").as_bytes());
        }
        tail.push(&[b'y'; 100_000]);
        let lines = tail.take();
        assert_eq!((lines.len(), lines[0].as_str()), (MAX_TAIL_LINES, "line 981"));
        assert_eq!(lines[19].len(), MAX_TAIL_LINE_BYTES);
        assert!(tail.take().is_empty());
    }
}
