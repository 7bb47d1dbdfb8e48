//! Connects every pair of ranks: the higher rank connects to the lower one.
//!
//! All handshakes run concurrently, so an unknown client that sends nothing blocks nobody, and no input can bring the
//! listener down.

use std::io::{ErrorKind, IoSlice};
use std::time::Duration;

use lockstep_core::Rank;
use lockstep_core::proof::Secret;

use crate::error::{Abort, CommError};
use crate::tcp::handshake::{Handshake, Pair};
use crate::tcp::net::{Interest, LinkId, Net};

/// The limit for one handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// The longest sleep between checks of the abort signal.
const SLICE: Duration = Duration::from_millis(50);
/// The pause between attempts to connect to a rank.
const RETRY: Duration = Duration::from_millis(50);
/// Connecting fails once a rank has refused this many handshakes.
const MAX_REFUSALS: u32 = 3;
/// The largest number of unauthenticated connections; beyond it the oldest is closed.
const MAX_ATTEMPTS: usize = 256;

/// The connections to establish.
pub(crate) struct LinkSpec<'a> {
    pub(crate) rank: Rank,
    /// For each rank: whether to connect to it.
    pub(crate) peers: &'a [bool],
    /// From [`super::handshake::link_key`].
    pub(crate) key: &'a Secret,
    pub(crate) limit: Duration,
    pub(crate) abort: &'a Abort,
}

/// A connection that is not authenticated yet.
struct Attempt {
    link: LinkId,
    /// The rank this side connects to; `None` for an incoming connection.
    to: Option<Rank>,
    handshake: Handshake,
    started: Duration,
}

/// The attempts so far to connect to a rank.
#[derive(Clone, Default)]
struct ConnectHistory {
    /// When to try again.
    next: Duration,
    refusals: u32,
    why: Option<String>,
}

/// The state of an attempt after [`Attempt::drive`].
enum Progress {
    Pending,
    Done(Rank),
    /// The network failed.
    Failed(String),
    /// One side refused the other.
    Refused(String),
}

/// Connects to all requested ranks. The result is indexed by rank.
pub(crate) fn establish<N: Net>(net: &mut N, spec: &LinkSpec<'_>) -> Result<Vec<Option<LinkId>>, CommError> {
    let world = spec.peers.len();
    let mut state = State {
        links: vec![None; world],
        attempts: Vec::new(),
        history: vec![ConnectHistory::default(); world],
        rejected: None,
    };
    let end = net.now() + spec.limit;
    let outcome = state.run(net, spec, end);
    state.attempts.iter().for_each(|attempt| net.close(attempt.link));
    outcome.map(|()| state.links)
}

struct State {
    links: Vec<Option<LinkId>>,
    attempts: Vec<Attempt>,
    history: Vec<ConnectHistory>,
    /// Why the last incoming connection was rejected.
    rejected: Option<String>,
}

impl State {
    fn run<N: Net>(&mut self, net: &mut N, spec: &LinkSpec<'_>, end: Duration) -> Result<(), CommError> {
        let mut interests = Vec::new();
        loop {
            self.connect(net, spec)?;
            self.accept(net, spec)?;
            self.drive(net, spec)?;
            let missing = |peer: &usize| spec.peers[*peer] && self.links[*peer].is_none();
            let Some(peer) = (0..self.links.len()).find(missing) else {
                return Ok(());
            };
            spec.abort.check()?;
            let now = net.now();
            if now >= end {
                return Err(self.out_of_time(spec, Rank(peer as u32)));
            }
            interests.clear();
            interests.extend(self.attempts.iter_mut().map(|attempt| Interest {
                link: attempt.link,
                read: attempt.handshake.wants() > 0,
                write: !attempt.handshake.output().is_empty(),
            }));
            net.wait(&interests, true, (now + SLICE).min(end));
        }
    }

    /// Starts to connect to every lower rank that has no link and no attempt under way.
    fn connect<N: Net>(&mut self, net: &mut N, spec: &LinkSpec<'_>) -> Result<(), CommError> {
        let now = net.now();
        for to in (0..spec.rank.0).map(Rank) {
            let i = to.0 as usize;
            let pending = self.attempts.iter().any(|attempt| attempt.to == Some(to));
            if !spec.peers[i] || self.links[i].is_some() || pending || now < self.history[i].next {
                continue;
            }
            let pair = Pair { connects: spec.rank, accepts: to, world: spec.peers.len() as u32 };
            match net.connect(to) {
                Ok(link) => {
                    let handshake = Handshake::connect(spec.key, pair, nonce()?);
                    self.attempts.push(Attempt { link, to: Some(to), handshake, started: now });
                }
                Err(e) => self.history[i].failed(now, e.to_string()),
            }
        }
        Ok(())
    }

    fn accept<N: Net>(&mut self, net: &mut N, spec: &LinkSpec<'_>) -> Result<(), CommError> {
        loop {
            match net.accept() {
                Ok(Some(link)) => {
                    if self.attempts.len() >= MAX_ATTEMPTS
                        && let Some(oldest) = self.attempts.iter().position(|attempt| attempt.to.is_none())
                    {
                        net.close(self.attempts.remove(oldest).link);
                    }
                    let world = spec.peers.len() as u32;
                    let handshake = Handshake::accept(spec.key, spec.rank, world, nonce()?);
                    self.attempts.push(Attempt { link, to: None, handshake, started: net.now() });
                }
                Ok(None) => return Ok(()),
                // A connection failed before it was accepted, or there are too many open files. Later ones may
                // succeed.
                Err(_) => return Ok(()),
            }
        }
    }

    fn drive<N: Net>(&mut self, net: &mut N, spec: &LinkSpec<'_>) -> Result<(), CommError> {
        let mut i = 0;
        while i < self.attempts.len() {
            let progress = self.attempts[i].drive(net);
            if matches!(progress, Progress::Pending) {
                i += 1;
                continue;
            }
            let Attempt { link, to, .. } = self.attempts.swap_remove(i);
            match (progress, to) {
                (Progress::Done(peer), _) if spec.peers[peer.0 as usize] => {
                    // A rank that connects again has given up its first connection.
                    if let Some(old) = self.links[peer.0 as usize].replace(link) {
                        net.close(old);
                    }
                }
                (Progress::Failed(why), Some(to)) => {
                    net.close(link);
                    self.history[to.0 as usize].failed(net.now(), why);
                }
                (Progress::Refused(why), Some(to)) => {
                    net.close(link);
                    let history = &mut self.history[to.0 as usize];
                    history.refusals += 1;
                    history.failed(net.now(), why.clone());
                    if history.refusals >= MAX_REFUSALS {
                        return Err(CommError::NotAuthorised { rank: spec.rank, peer: to, why });
                    }
                }
                (Progress::Failed(why) | Progress::Refused(why), None) => {
                    net.close(link);
                    self.rejected = Some(why);
                }
                _ => net.close(link),
            }
        }
        Ok(())
    }

    fn out_of_time(&self, spec: &LinkSpec<'_>, peer: Rank) -> CommError {
        let (rank, limit) = (spec.rank, spec.limit.as_secs_f64());
        let why = match (&self.history[peer.0 as usize].why, &self.rejected) {
            (Some(why), _) => format!("{rank} could not connect to {peer} within {limit:.1} s: {why}"),
            (None, Some(why)) if peer > rank => {
                format!(
                    "{peer} did not connect to {rank} within {limit:.1} s; a connection was rejected because {why}"
                )
            }
            _ => format!("{peer} did not connect to {rank} within {limit:.1} s"),
        };
        CommError::Setup { what: "TCP connections", why }
    }
}

impl ConnectHistory {
    fn failed(&mut self, now: Duration, why: String) {
        self.next = now + RETRY;
        self.why = Some(why);
    }
}

impl Attempt {
    /// Sends and reads as much as possible without blocking.
    fn drive<N: Net>(&mut self, net: &mut N) -> Progress {
        loop {
            let mut moved = false;
            if !self.handshake.output().is_empty() {
                match net.try_write(self.link, &[IoSlice::new(self.handshake.output())]) {
                    Ok(n) => {
                        self.handshake.output().drain(..n);
                        moved = n > 0;
                    }
                    Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                    Err(e) => return Progress::Failed(e.to_string()),
                }
            }
            let mut buffer = [0; 128];
            let wants = self.handshake.wants();
            if wants > 0 {
                match net.try_read(self.link, &mut buffer[..wants]) {
                    Ok(0) if self.to.is_some() => {
                        return Progress::Refused("it closed the connection during the handshake".into());
                    }
                    Ok(0) => return Progress::Failed("it closed the connection".into()),
                    Ok(n) => {
                        if let Err(why) = self.handshake.feed(&buffer[..n]) {
                            return Progress::Refused(why.into());
                        }
                        moved = true;
                    }
                    Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                    Err(e) => return Progress::Failed(e.to_string()),
                }
            }
            if self.handshake.is_done() && self.handshake.output().is_empty() {
                return Progress::Done(self.handshake.peer().expect("a finished handshake knows its peer"));
            }
            if !moved {
                break;
            }
        }
        if net.now() - self.started >= HANDSHAKE_LIMIT {
            return Progress::Failed(format!("no handshake within {} s", HANDSHAKE_LIMIT.as_secs()));
        }
        Progress::Pending
    }
}

fn nonce() -> Result<[u8; 32], CommError> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce)
        .map_err(|e| CommError::Setup { what: "TCP connections", why: format!("no random numbers: {e}") })?;
    Ok(nonce)
}
