//! The rendezvous server: one thread that runs `server` on real sockets. It runs in the launcher of node 0, or in
//! rank 0's process if another launcher started the ranks.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::abort::Abort;
use crate::error::LaunchError;
use crate::port;
use crate::server::{Action, ConnId, Event, Server, ServerConfig};
use crate::token::{Token, no_secret, nonce};

/// The longest sleep of the event loops.
pub(crate) const IDLE: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// After the end of a run: how long to stay, so that ranks receive the outcome.
const LINGER: Duration = Duration::from_secs(1);
/// After a failure: how long to stay at least, so that ranks that connect late receive the reason.
const LATECOMERS: Duration = Duration::from_millis(200);
/// A rank with more unsent bytes than this is considered lost.
const MAX_UNSENT_BYTES: usize = 256 << 20;
const MAX_ACCEPTS: usize = 64;
const MAX_CLOSING: usize = 128;

/// What [`serve`] needs to know about the run.
pub struct ServerOptions {
    pub world_size: u32,
    pub local_world_size: u32,
    pub attempt: u32,
    pub token: Option<Token>,
    /// The version of the program. Ranks with another version are refused.
    pub version: String,
    pub join_timeout: Duration,
    /// Receives messages about rejected connections.
    pub log: Box<dyn FnMut(&str) + Send>,
}

/// How a run ended, as the rendezvous saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RendezvousOutcome {
    /// Every rank has left.
    Done,
    Failed(Abort),
}

/// A running rendezvous server. Dropping it stops the server.
pub struct RunningServer {
    addr: SocketAddr,
    wake: UnixStream,
    thread: Option<JoinHandle<()>>,
    outcome: Arc<(Mutex<Option<RendezvousOutcome>>, Condvar)>,
}

/// Opens the port of a rendezvous. It is reachable from the network only for a run on several nodes, which needs a
/// token. Port 0 picks a free port.
pub(crate) fn open(nodes: u32, port: u16, token: Option<&Token>) -> Result<TcpListener, LaunchError> {
    let ip = match (nodes, token) {
        (..=1, _) => Ipv4Addr::LOCALHOST,
        (_, Some(_)) => Ipv4Addr::UNSPECIFIED,
        (_, None) => return Err(LaunchError::NoToken { nodes }),
    };
    port::listen(SocketAddr::new(IpAddr::V4(ip), port))
}

/// Starts a rendezvous on `listener`.
pub fn serve(listener: &TcpListener, options: ServerOptions) -> Result<RunningServer, LaunchError> {
    let failed = |cause| LaunchError::System { what: "start the rendezvous", cause };
    let listener = listener.try_clone().map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let addr = listener.local_addr().map_err(failed)?;
    let (wake, woken) = UnixStream::pair().map_err(failed)?;
    let outcome = Arc::new((Mutex::new(None), Condvar::new()));
    let mut io = ServerLoop {
        listener,
        woken,
        peers: BTreeMap::new(),
        closing: Vec::new(),
        next_id: 0,
        start: Instant::now(),
        outcome: Arc::clone(&outcome),
        log: options.log,
        over: None,
    };
    let server = Server::new(ServerConfig {
        secret: options.token.as_ref().map_or_else(no_secret, Token::secret),
        world_size: options.world_size,
        local_world_size: options.local_world_size,
        attempt: options.attempt,
        version: options.version,
        run: nonce()?,
        join_timeout: options.join_timeout,
    });
    let thread = std::thread::Builder::new()
        .name("rendezvous".into())
        .spawn(move || io.run(server))
        .map_err(failed)?;
    Ok(RunningServer { addr, wake, thread: Some(thread), outcome })
}

impl RunningServer {
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn outcome(&self) -> Option<RendezvousOutcome> {
        self.outcome.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until every rank has left or one has failed. It needs no deadline: ranks send heartbeats, and one that
    /// stops is noticed within seconds.
    pub fn wait(&self) -> RendezvousOutcome {
        let mut outcome = self.outcome.0.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = &*outcome {
                return outcome.clone();
            }
            outcome = self.outcome.1.wait(outcome).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until the thread has sent the outcome to all ranks, for about a second at most.
    pub(crate) fn finish(mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        let _ = self.wake.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Peer {
    stream: TcpStream,
    unsent: Vec<u8>,
    answered: bool,
}

struct ServerLoop {
    listener: TcpListener,
    woken: UnixStream,
    peers: BTreeMap<ConnId, Peer>,
    /// Connections that are shut down, but kept open until the peer closes: closing at once could discard our last
    /// message in flight.
    closing: Vec<(TcpStream, Instant)>,
    next_id: ConnId,
    start: Instant,
    outcome: Arc<(Mutex<Option<RendezvousOutcome>>, Condvar)>,
    log: Box<dyn FnMut(&str) + Send>,
    /// When the run ended, and how long to stay at least.
    over: Option<(Instant, Duration)>,
}

impl ServerLoop {
    fn run(&mut self, mut server: Server) {
        loop {
            let (stop, accept, ready) = self.wait();
            if stop {
                return;
            }
            if accept {
                self.accept(&mut server);
            }
            for conn in ready {
                self.read(&mut server, conn);
            }
            self.event(&mut server, Event::Tick);
            self.flush(&mut server);
            self.closing.retain_mut(|(stream, since)| {
                since.elapsed() < LINGER && !matches!(stream.read(&mut [0; 512]), Ok(0))
            });
            let done = |(since, least): (Instant, Duration)| {
                since.elapsed() >= LINGER || since.elapsed() >= least && server.is_empty()
            };
            if self.over.is_some_and(done) {
                return;
            }
        }
    }

    /// Whether to stop, whether there are new connections, and which connections are ready.
    fn wait(&self) -> (bool, bool, Vec<ConnId>) {
        let mut fds =
            vec![PollFd::new(&self.woken, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(self.peers.values().map(|peer| {
            let out = if peer.unsent.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
            PollFd::new(&peer.stream, PollFlags::IN | out)
        }));
        // An interrupted call does not matter: the loop polls again soon.
        let _ = poll(&mut fds, Some(&IDLE));
        let hit = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let ready = self.peers.keys().zip(&fds[2..]).filter(|(_, fd)| hit(fd)).map(|(id, _)| *id).collect();
        (hit(&fds[0]), hit(&fds[1]), ready)
    }

    fn accept(&mut self, server: &mut Server) {
        for _ in 0..MAX_ACCEPTS {
            let Ok((stream, from)) = self.listener.accept() else { return };
            let (Ok(()), Ok(nonce)) = (stream.set_nonblocking(true), nonce()) else { continue };
            let _ = stream.set_nodelay(true);
            let conn = self.next_id;
            self.next_id += 1;
            self.peers.insert(conn, Peer { stream, unsent: Vec::new(), answered: false });
            self.event(server, Event::Opened { conn, from: from.to_string(), nonce });
        }
    }

    fn read(&mut self, server: &mut Server, conn: ConnId) {
        let mut buffer = [0; 16 << 10];
        // Read a few times only, so that one connection cannot keep the others waiting.
        for _ in 0..4 {
            let Some(peer) = self.peers.get_mut(&conn) else { return };
            match peer.stream.read(&mut buffer) {
                Ok(0) => return self.lost(server, conn),
                Ok(count) => self.event(server, Event::Bytes { conn, bytes: &buffer[..count] }),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return self.lost(server, conn),
            }
        }
    }

    fn lost(&mut self, server: &mut Server, conn: ConnId) {
        self.peers.remove(&conn);
        self.event(server, Event::Closed { conn });
    }

    fn event(&mut self, server: &mut Server, event: Event<'_>) {
        for action in server.handle(self.start.elapsed(), event) {
            match action {
                Action::Send { conn, bytes } => {
                    if let Some(peer) = self.peers.get_mut(&conn) {
                        peer.unsent.extend_from_slice(&bytes);
                        peer.answered = true;
                    }
                }
                Action::Close { conn } => self.close(conn),
                Action::Log(line) => (self.log)(&line),
                Action::Over(result) => {
                    let least = if result.is_ok() { Duration::ZERO } else { LATECOMERS };
                    self.over = Some((Instant::now(), least));
                    let outcome = result.map_or_else(RendezvousOutcome::Failed, |()| RendezvousOutcome::Done);
                    *self.outcome.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
                    self.outcome.1.notify_all();
                }
            }
        }
    }

    fn close(&mut self, conn: ConnId) {
        let Some(mut peer) = self.peers.remove(&conn) else { return };
        if peer.answered {
            let _ = peer.stream.write(&peer.unsent);
            let _ = peer.stream.shutdown(Shutdown::Write);
            if self.closing.len() >= MAX_CLOSING {
                self.closing.remove(0);
            }
            self.closing.push((peer.stream, Instant::now()));
        }
    }

    fn flush(&mut self, server: &mut Server) {
        let mut lost = Vec::new();
        for (conn, peer) in &mut self.peers {
            while !peer.unsent.is_empty() {
                match peer.stream.write(&peer.unsent) {
                    Ok(count) => _ = peer.unsent.drain(..count),
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    Err(_) => {
                        peer.unsent.clear();
                        lost.push(*conn);
                    }
                }
            }
            if peer.unsent.len() > MAX_UNSENT_BYTES {
                lost.push(*conn);
            }
        }
        for conn in lost {
            self.lost(server, conn);
        }
    }
}
