//! The network and clock that the TCP carrier needs. Sockets implement it, and so does a fake network in tests.

use std::io::{self, IoSlice};
use std::time::Duration;

use lockstep_core::Rank;

/// The number that a [`Net`] assigns to a connection.
pub type LinkId = usize;

/// The events to wait for on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    pub link: LinkId,
    pub read: bool,
    pub write: bool,
}

/// Non-blocking connections, and a clock.
pub trait Net: Send {
    /// The time since an arbitrary start.
    fn now(&self) -> Duration;

    /// Starts to connect to a rank. Reads and writes would block until the connection is established.
    fn connect(&mut self, peer: Rank) -> io::Result<LinkId>;

    /// A new incoming link, if there is one.
    fn accept(&mut self) -> io::Result<Option<LinkId>>;

    /// Reads some bytes. Returns 0 if the other side has closed, [`io::ErrorKind::WouldBlock`] if there are none yet.
    fn try_read(&mut self, link: LinkId, into: &mut [u8]) -> io::Result<usize>;

    /// Writes some of the bytes; [`io::ErrorKind::WouldBlock`] if the send buffer is full.
    fn try_write(&mut self, link: LinkId, from: &[IoSlice<'_>]) -> io::Result<usize>;

    fn close(&mut self, link: LinkId);

    /// Waits until one of the events occurs, a link comes in (if `accept`) or the clock reaches `until`. May return
    /// early.
    fn wait(&mut self, interests: &[Interest], accept: bool, until: Duration);
}
