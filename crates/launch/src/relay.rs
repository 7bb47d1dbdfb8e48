//! Relays the output of ranks: rank 0's unchanged, that of the others line by line with a `[rank N]` prefix.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Where the launcher's output goes.
pub trait Console {
    fn stdout(&mut self, bytes: &[u8]);
    fn stderr(&mut self, bytes: &[u8]);
}

/// Longer lines are truncated, so that a rank cannot fill the launcher's memory.
const MAX_LINE_BYTES: usize = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Out,
    Err,
}

/// One output stream of one rank.
pub(crate) struct Pipe {
    source: File,
    rank: u32,
    stream: Stream,
    shown: bool,
    copy: Option<File>,
    line: Vec<u8>,
    open: bool,
}

impl Pipe {
    pub(crate) fn new(
        source: OwnedFd,
        rank: u32,
        stream: Stream,
        shown: bool,
        copy: Option<File>,
    ) -> std::io::Result<Pipe> {
        let flags = rustix::fs::fcntl_getfl(&source)?;
        rustix::fs::fcntl_setfl(&source, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Pipe { source: source.into(), rank, stream, shown, copy, line: Vec::new(), open: true })
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Relays the output that is available now.
    pub(crate) fn relay(&mut self, console: &mut dyn Console) {
        let mut buffer = [0; 16 << 10];
        // Read a few times only, so that one rank cannot keep the launcher from the others.
        for _ in 0..4 {
            if !self.open {
                return;
            }
            match self.source.read(&mut buffer) {
                Ok(0) => self.close(console),
                Ok(count) => self.take(&buffer[..count], console),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(_) => self.close(console),
            }
        }
    }

    /// Relays the output that is available now and closes the pipe: a process started by the rank may still hold it
    /// open.
    pub(crate) fn finish(&mut self, console: &mut dyn Console) {
        for _ in 0..64 {
            self.relay(console);
        }
        self.close(console);
    }

    fn close(&mut self, console: &mut dyn Console) {
        if self.open && !self.line.is_empty() {
            self.line.push(b'\n');
            self.flush_line(console);
        }
        self.open = false;
    }

    fn take(&mut self, bytes: &[u8], console: &mut dyn Console) {
        if let Some(copy) = &mut self.copy {
            // A full disk must not stop the run just because the copy fails.
            let _ = copy.write_all(bytes);
        }
        if !self.shown {
            return;
        }
        if self.rank == 0 {
            return match self.stream {
                Stream::Out => console.stdout(bytes),
                Stream::Err => console.stderr(bytes),
            };
        }
        for part in bytes.split_inclusive(|b| *b == b'\n') {
            let free = MAX_LINE_BYTES.saturating_sub(self.line.len());
            self.line.extend_from_slice(&part[..part.len().min(free)]);
            if part.ends_with(b"\n") {
                if self.line.last() != Some(&b'\n') {
                    self.line.push(b'\n');
                }
                self.flush_line(console);
            }
        }
    }

    /// Standard output is reserved for rank 0, so the output of all other ranks goes to standard error.
    fn flush_line(&mut self, console: &mut dyn Console) {
        let mut text = format!("[rank {}] ", self.rank).into_bytes();
        text.append(&mut self.line);
        console.stderr(&text);
    }
}

impl AsFd for Pipe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.source.as_fd()
    }
}
