//! The real network: non-blocking sockets and `poll`.

use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use lockstep_core::Rank;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};

use crate::tcp::net::{Interest, LinkId, Net};

/// The TCP connections of one rank.
pub struct Sockets {
    start: Instant,
    listener: Option<TcpListener>,
    /// The address that each rank listens on.
    addresses: Vec<Option<SocketAddr>>,
    streams: Vec<Option<TcpStream>>,
    /// Filled before each `poll` and cleared after it; kept so that waiting does not allocate.
    polled: Vec<PollFd<'static>>,
}

impl Sockets {
    /// Listens on `bind`; port 0 picks a free port.
    pub fn listen(bind: SocketAddr) -> io::Result<Sockets> {
        let listener = TcpListener::bind(bind)?;
        listener.set_nonblocking(true)?;
        Ok(Sockets {
            start: Instant::now(),
            listener: Some(listener),
            addresses: Vec::new(),
            streams: Vec::new(),
            polled: Vec::new(),
        })
    }

    pub fn local_address(&self) -> io::Result<SocketAddr> {
        match &self.listener {
            Some(listener) => listener.local_addr(),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Sets the addresses that ranks listen on, indexed by rank.
    pub fn set_addresses(&mut self, addresses: Vec<Option<SocketAddr>>) {
        self.addresses = addresses;
    }

    /// Closes the listener.
    pub fn stop_listening(&mut self) {
        self.listener = None;
        self.polled.reserve(self.streams.len() + 1);
    }

    fn add(&mut self, stream: TcpStream) -> io::Result<LinkId> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let free = self.streams.iter().position(Option::is_none);
        let link = free.unwrap_or_else(|| {
            self.streams.push(None);
            self.streams.len() - 1
        });
        self.streams[link] = Some(stream);
        Ok(link)
    }

    fn stream(&self, link: LinkId) -> io::Result<&TcpStream> {
        self.streams.get(link).and_then(Option::as_ref).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Net for Sockets {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn connect(&mut self, peer: Rank) -> io::Result<LinkId> {
        let address = self.addresses.get(peer.0 as usize).copied().flatten();
        let address = address.ok_or_else(|| io::Error::other("its address is not known"))?;
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, SocketType::STREAM, flags, None)?;
        match connect(&socket, &address) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
            Err(e) => return Err(e.into()),
        }
        self.add(TcpStream::from(socket))
    }

    fn accept(&mut self) -> io::Result<Option<LinkId>> {
        let Some(listener) = &self.listener else { return Ok(None) };
        match listener.accept() {
            Ok((stream, _)) => self.add(stream).map(Some),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn try_read(&mut self, link: LinkId, into: &mut [u8]) -> io::Result<usize> {
        retry(|| self.stream(link)?.read(into))
    }

    fn try_write(&mut self, link: LinkId, from: &[IoSlice<'_>]) -> io::Result<usize> {
        retry(|| self.stream(link)?.write_vectored(from))
    }

    fn close(&mut self, link: LinkId) {
        self.streams[link] = None;
    }

    fn wait(&mut self, interests: &[Interest], accept: bool, until: Duration) {
        for interest in interests {
            let Some(Some(stream)) = self.streams.get(interest.link) else { continue };
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, interest.read);
            flags.set(PollFlags::OUT, interest.write);
            // SAFETY: the stream stays open until this call has cleared the list.
            let fd = unsafe { BorrowedFd::borrow_raw(stream.as_raw_fd()) };
            self.polled.push(PollFd::from_borrowed_fd(fd, flags));
        }
        if let (true, Some(listener)) = (accept, &self.listener) {
            // SAFETY: as above.
            let fd = unsafe { BorrowedFd::borrow_raw(listener.as_raw_fd()) };
            self.polled.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        }
        let time = until.saturating_sub(self.now());
        let time = Timespec::try_from(time).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        // Whether a socket is ready, the time is up or a signal interrupted it, the caller checks again.
        let _ = poll(&mut self.polled, Some(&time));
        self.polled.clear();
    }
}

/// Retries after signals. A connection that is not established yet counts as one that would block.
fn retry(mut attempt: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match attempt() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.raw_os_error() == Some(rustix::io::Errno::NOTCONN.raw_os_error()) => {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            other => return other,
        }
    }
}
