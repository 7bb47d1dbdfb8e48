//! What waits to be sent to a peer, and what has come from it.

use std::io::{self, ErrorKind, IoSlice};

use lockstep_device::View;

use crate::carrier::MAX_OFFERS;
use crate::tcp::frame::HEAD_BYTES;
use crate::tcp::net::{LinkId, Net};

/// Bytes moved in one go, so that reading and writing take turns while the bytes are in a core's cache.
pub(super) const BURST: usize = 256 << 10;

/// Reads of fewer bytes go through the inbox, which fetches what follows them as well.
const SMALL_READ: usize = 8 << 10;
const INBOX_BYTES: usize = 16 << 10;

/// Slices that one write takes at most: the head and some parts.
const MAX_SLICES: usize = 8;

/// A call's head and, once both sides agree, its data.
pub(super) struct Outbox {
    head: [u8; HEAD_BYTES],
    head_sent: usize,
    parts: [Part; MAX_OFFERS],
    num_parts: usize,
    /// The part and byte of it that are next.
    next: (usize, usize),
    released: bool,
}

/// The bytes of a view that its owner leaves as they are until all are sent.
#[derive(Clone, Copy)]
struct Part {
    base: *const u8,
    len: usize,
}

// SAFETY: a part is an address; the carrier's caller keeps what is there alive and unchanged until `finish`.
unsafe impl Send for Part {}

impl Outbox {
    pub(super) fn new() -> Outbox {
        let none = Part { base: std::ptr::null(), len: 0 };
        Outbox {
            head: [0; HEAD_BYTES],
            head_sent: HEAD_BYTES,
            parts: [none; MAX_OFFERS],
            num_parts: 0,
            next: (0, 0),
            released: false,
        }
    }

    pub(super) fn fill(&mut self, head: [u8; HEAD_BYTES], offers: &[View<'_>]) {
        debug_assert!(self.is_sent());
        (self.head, self.head_sent, self.num_parts, self.next, self.released) = (head, 0, 0, (0, 0), false);
        for view in offers.iter().filter(|view| !view.is_empty()) {
            self.parts[self.num_parts] = Part { base: view.as_ptr(), len: view.bytes() };
            self.num_parts += 1;
        }
    }

    /// Lets the data go after the head.
    pub(super) fn release(&mut self) {
        self.released = true;
    }

    /// Changes whenever something was sent.
    pub(super) fn progress(&self) -> (usize, (usize, usize)) {
        (self.head_sent, self.next)
    }

    pub(super) fn head_is_sent(&self) -> bool {
        self.head_sent == HEAD_BYTES
    }

    /// Whether all that may be sent now is.
    pub(super) fn is_idle(&self) -> bool {
        self.head_is_sent() && (!self.released || self.next.0 == self.num_parts)
    }

    /// Whether everything is sent.
    pub(super) fn is_sent(&self) -> bool {
        self.head_is_sent() && self.next.0 == self.num_parts
    }

    /// Sends what the link takes now, up to about [`BURST`] bytes.
    pub(super) fn send<N: Net>(&mut self, net: &mut N, link: LinkId) -> io::Result<()> {
        let mut burst = 0;
        while !self.is_idle() && burst < BURST {
            let mut slices = [IoSlice::new(&[]); MAX_SLICES];
            let mut num = 0;
            if !self.head_is_sent() {
                slices[0] = IoSlice::new(&self.head[self.head_sent..]);
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
                let skipped = usize::from(!self.head_is_sent());
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
        let head = bytes.min(HEAD_BYTES - self.head_sent);
        self.head_sent += head;
        bytes -= head;
        while bytes > 0 {
            let (part, at) = self.next;
            let now = bytes.min(self.parts[part].len - at);
            bytes -= now;
            self.next = if at + now == self.parts[part].len { (part + 1, 0) } else { (part, at + now) };
        }
    }
}

/// Bytes that were read along with others.
pub(super) struct Inbox {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Inbox {
    pub(super) fn new() -> Inbox {
        Inbox { bytes: vec![0; INBOX_BYTES].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Moves bytes from the link to the front of `into`: how many; [`ErrorKind::WouldBlock`] if none are
    /// there.
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
