//! Buffers for one connection: outgoing calls, and bytes that were read ahead.

use std::io::{self, ErrorKind, IoSlice};

use lockstep_device::View;

use crate::carrier::MAX_OFFERS;
use crate::tcp::frame::HEADER_BYTES;
use crate::tcp::net::{LinkId, Net};

/// Bytes moved at a time, so that reading and writing alternate while the bytes are still in a core's cache.
pub(super) const BURST: usize = 256 << 10;

/// Reads of fewer bytes go through the inbox, which reads ahead.
const SMALL_READ: usize = 8 << 10;
const INBOX_BYTES: usize = 16 << 10;

/// The largest number of slices in one write: the header and some parts.
const MAX_SLICES: usize = 8;

/// A call's header and, once both sides agree on the call, its data.
pub(super) struct Outbox {
    header: [u8; HEADER_BYTES],
    header_sent: usize,
    parts: [Part; MAX_OFFERS],
    num_parts: usize,
    /// The part, and the byte in it, to send next.
    next: (usize, usize),
    /// Whether data may be sent after the header.
    released: bool,
}

/// The bytes of a view. Its owner does not change them until all are sent.
#[derive(Clone, Copy)]
struct Part {
    base: *const u8,
    len: usize,
}

// SAFETY: a part is an address. The carrier's caller keeps the bytes alive and unchanged until `finish`.
unsafe impl Send for Part {}

impl Outbox {
    pub(super) fn new() -> Outbox {
        let none = Part { base: std::ptr::null(), len: 0 };
        Outbox {
            header: [0; HEADER_BYTES],
            header_sent: HEADER_BYTES,
            parts: [none; MAX_OFFERS],
            num_parts: 0,
            next: (0, 0),
            released: false,
        }
    }

    pub(super) fn fill(&mut self, header: [u8; HEADER_BYTES], offers: &[View<'_>]) {
        debug_assert!(self.is_sent());
        (self.header, self.header_sent, self.num_parts, self.next, self.released) =
            (header, 0, 0, (0, 0), false);
        for view in offers.iter().filter(|view| !view.is_empty()) {
            self.parts[self.num_parts] = Part { base: view.as_ptr(), len: view.bytes() };
            self.num_parts += 1;
        }
    }

    /// Allows the data to be sent after the header.
    pub(super) fn release(&mut self) {
        self.released = true;
    }

    /// A position that changes whenever something is sent.
    pub(super) fn progress(&self) -> (usize, (usize, usize)) {
        (self.header_sent, self.next)
    }

    pub(super) fn header_is_sent(&self) -> bool {
        self.header_sent == HEADER_BYTES
    }

    /// Whether everything that may be sent now has been sent.
    pub(super) fn is_idle(&self) -> bool {
        self.header_is_sent() && (!self.released || self.next.0 == self.num_parts)
    }

    /// Whether header and data have been sent.
    pub(super) fn is_sent(&self) -> bool {
        self.header_is_sent() && self.next.0 == self.num_parts
    }

    /// Sends as much as the link accepts now, up to about [`BURST`] bytes.
    pub(super) fn send<N: Net>(&mut self, net: &mut N, link: LinkId) -> io::Result<()> {
        let mut burst = 0;
        while !self.is_idle() && burst < BURST {
            let mut slices = [IoSlice::new(&[]); MAX_SLICES];
            let mut num = 0;
            if !self.header_is_sent() {
                slices[0] = IoSlice::new(&self.header[self.header_sent..]);
                num = 1;
            }
            if self.released {
                let (first, skip) = self.next;
                for part in &self.parts[first..self.num_parts] {
                    if num == MAX_SLICES {
                        break;
                    }
                    // SAFETY: offered bytes are alive and unchanged until `finish` (see `Part`).
                    slices[num] = IoSlice::new(unsafe { std::slice::from_raw_parts(part.base, part.len) });
                    num += 1;
                }
                let skipped = usize::from(!self.header_is_sent());
                slices[skipped..num].first_mut().into_iter().for_each(|slice| slice.advance(skip));
            }
            match net.try_write(link, &slices[..num]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(n) => {
                    self.sent(n);
                    burst += n;
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn sent(&mut self, mut bytes: usize) {
        let header = bytes.min(HEADER_BYTES - self.header_sent);
        self.header_sent += header;
        bytes -= header;
        while bytes > 0 {
            let (part, at) = self.next;
            let len = bytes.min(self.parts[part].len - at);
            bytes -= len;
            self.next = if at + len == self.parts[part].len { (part + 1, 0) } else { (part, at + len) };
        }
    }
}

/// Bytes that were read ahead.
pub(super) struct Inbox {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Inbox {
    pub(super) fn new() -> Inbox {
        Inbox { bytes: vec![0; INBOX_BYTES].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Reads bytes into the front of `into` and returns how many; [`ErrorKind::WouldBlock`] if there are none yet.
    pub(super) fn read<N: Net>(&mut self, net: &mut N, link: LinkId, into: &mut [u8]) -> io::Result<usize> {
        if self.start == self.end {
            if into.len() >= SMALL_READ {
                let len = into.len().min(BURST);
                return not_closed(net.try_read(link, &mut into[..len])?);
            }
            (self.start, self.end) = (0, 0);
            self.end = not_closed(net.try_read(link, &mut self.bytes)?)?;
        }
        let len = into.len().min(self.end - self.start);
        into[..len].copy_from_slice(&self.bytes[self.start..][..len]);
        self.start += len;
        Ok(len)
    }
}

fn not_closed(n: usize) -> io::Result<usize> {
    match n {
        0 => Err(io::Error::new(ErrorKind::UnexpectedEof, "it closed the connection")),
        n => Ok(n),
    }
}
