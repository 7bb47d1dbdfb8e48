//! What the TCP carrier needs of a network and a clock. Sockets have it, and so has a fake network in tests.

use std::io::{self, IoSlice};
use std::time::Duration;

use lockstep_core::Rank;

/// A connection, by a number that its [`Net`] gave it.
pub type LinkId = usize;

/// What somebody waits for on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    pub link: LinkId,
    pub read: bool,
    pub write: bool,
}

/// Connections that never block, and the time.
pub trait Net: Send {
    /// Time since some start.
    fn now(&self) -> Duration;

    /// Begins to connect to a rank. Until the link stands, reads and writes would block.
    fn connect(&mut self, peer: Rank) -> io::Result<LinkId>;

    /// A new incoming link, if there is one.
    fn accept(&mut self) -> io::Result<Option<LinkId>>;

    /// Some bytes; none if the other side has closed; [`io::ErrorKind::WouldBlock`] if there are none yet.
    fn try_read(&mut self, link: LinkId, into: &mut [u8]) -> io::Result<usize>;

    /// Takes some bytes; [`io::ErrorKind::WouldBlock`] if there is no room.
    fn try_write(&mut self, link: LinkId, from: &[IoSlice<'_>]) -> io::Result<usize>;

    fn close(&mut self, link: LinkId);

    /// Waits until an interest can be served, a link comes in (if `accept`) or it is `until`. May return
    /// early.
    fn wait(&mut self, interests: &[Interest], accept: bool, until: Duration);
}
