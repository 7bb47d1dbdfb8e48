//! Connecting every pair of ranks: higher ranks connect to lower ones.
//!
//! All handshakes go on at once, so a stranger that says nothing keeps nobody waiting, and the listener
//! survives whatever is said to it.

use std::io::{ErrorKind, IoSlice};
use std::time::Duration;

use lockstep_core::Rank;
use lockstep_core::proof::Secret;

use crate::error::{Abort, CommError};
use crate::tcp::handshake::{Handshake, Pair};
use crate::tcp::net::{Interest, LinkId, Net};

/// How long one handshake may take.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// The longest wait between looks at the abort signal.
const SLICE: Duration = Duration::from_millis(50);
/// Between attempts to reach a rank.
const RETRY: Duration = Duration::from_millis(50);
/// A rank that has turned this many handshakes down is not asked again.
const MAX_REFUSALS: u32 = 3;
/// Unproved connections at once; beyond that the oldest goes.
const MAX_ATTEMPTS: usize = 256;

/// What is to be connected.
pub(crate) struct Wanted<'a> {
    pub(crate) rank: Rank,
    /// By rank: those to be linked with.
    pub(crate) peers: &'a [bool],
    /// From [`super::handshake::link_key`].
    pub(crate) key: &'a Secret,
    pub(crate) limit: Duration,
    pub(crate) abort: &'a Abort,
}

/// A connection that has not proved itself.
struct Attempt {
    link: LinkId,
    /// The rank this side connects to; `None` for a link that came in.
    to: Option<Rank>,
    handshake: Handshake,
    started: Duration,
}

/// How it went with a rank that this one connects to.
#[derive(Clone, Default)]
struct Tries {
    next: Duration,
    refusals: u32,
    why: Option<String>,
}

/// What driving an attempt came to.
enum Progress {
    Going,
    Done(Rank),
    /// The network failed.
    Failed(String),
    /// The other side was refused, or refused.
    Refused(String),
}

/// Links to all wanted ranks, by rank.
pub(crate) fn establish<N: Net>(net: &mut N, wanted: &Wanted<'_>) -> Result<Vec<Option<LinkId>>, CommError> {
    let world = wanted.peers.len();
    let mut state = State {
        links: vec![None; world],
        attempts: Vec::new(),
        tries: vec![Tries::default(); world],
        stranger: None,
    };
    let end = net.now() + wanted.limit;
    let outcome = state.run(net, wanted, end);
    state.attempts.iter().for_each(|attempt| net.close(attempt.link));
    outcome.map(|()| state.links)
}

struct State {
    links: Vec<Option<LinkId>>,
    attempts: Vec<Attempt>,
    tries: Vec<Tries>,
    /// Why the last stranger was turned away.
    stranger: Option<String>,
}

impl State {
    fn run<N: Net>(&mut self, net: &mut N, wanted: &Wanted<'_>, end: Duration) -> Result<(), CommError> {
        let mut interests = Vec::new();
        loop {
            self.connect(net, wanted)?;
            self.accept(net, wanted)?;
            self.drive(net, wanted)?;
            let missing = |peer: &usize| wanted.peers[*peer] && self.links[*peer].is_none();
            let Some(peer) = (0..self.links.len()).find(missing) else {
                return Ok(());
            };
            wanted.abort.check()?;
            let now = net.now();
            if now >= end {
                return Err(self.out_of_time(wanted, Rank(peer as u32)));
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

    /// Begins with every lower rank that is neither linked nor being asked.
    fn connect<N: Net>(&mut self, net: &mut N, wanted: &Wanted<'_>) -> Result<(), CommError> {
        let now = net.now();
        for to in (0..wanted.rank.0).map(Rank) {
            let i = to.0 as usize;
            let asked = self.attempts.iter().any(|attempt| attempt.to == Some(to));
            if !wanted.peers[i] || self.links[i].is_some() || asked || now < self.tries[i].next {
                continue;
            }
            let pair = Pair { connects: wanted.rank, accepts: to, world: wanted.peers.len() as u32 };
            match net.connect(to) {
                Ok(link) => {
                    let handshake = Handshake::connect(wanted.key, pair, nonce()?);
                    self.attempts.push(Attempt { link, to: Some(to), handshake, started: now });
                }
                Err(e) => self.tries[i].failed(now, e.to_string()),
            }
        }
        Ok(())
    }

    fn accept<N: Net>(&mut self, net: &mut N, wanted: &Wanted<'_>) -> Result<(), CommError> {
        loop {
            match net.accept() {
                Ok(Some(link)) => {
                    if self.attempts.len() >= MAX_ATTEMPTS
                        && let Some(oldest) = self.attempts.iter().position(|attempt| attempt.to.is_none())
                    {
                        net.close(self.attempts.remove(oldest).link);
                    }
                    let world = wanted.peers.len() as u32;
                    let handshake = Handshake::accept(wanted.key, wanted.rank, world, nonce()?);
                    self.attempts.push(Attempt { link, to: None, handshake, started: net.now() });
                }
                Ok(None) => return Ok(()),
                // One connection that failed before it was taken, or too many files: later ones may do.
                Err(_) => return Ok(()),
            }
        }
    }

    fn drive<N: Net>(&mut self, net: &mut N, wanted: &Wanted<'_>) -> Result<(), CommError> {
        let mut i = 0;
        while i < self.attempts.len() {
            let progress = self.attempts[i].drive(net);
            if matches!(progress, Progress::Going) {
                i += 1;
                continue;
            }
            let Attempt { link, to, .. } = self.attempts.swap_remove(i);
            match (progress, to) {
                (Progress::Done(peer), _) if wanted.peers[peer.0 as usize] => {
                    // A rank that comes again has given its first connection up.
                    if let Some(old) = self.links[peer.0 as usize].replace(link) {
                        net.close(old);
                    }
                }
                (Progress::Failed(why), Some(to)) => {
                    net.close(link);
                    self.tries[to.0 as usize].failed(net.now(), why);
                }
                (Progress::Refused(why), Some(to)) => {
                    net.close(link);
                    let tries = &mut self.tries[to.0 as usize];
                    tries.refusals += 1;
                    tries.failed(net.now(), why.clone());
                    if tries.refusals >= MAX_REFUSALS {
                        return Err(CommError::NotAuthorised { rank: wanted.rank, peer: to, why });
                    }
                }
                (Progress::Failed(why) | Progress::Refused(why), None) => {
                    net.close(link);
                    self.stranger = Some(why);
                }
                _ => net.close(link),
            }
        }
        Ok(())
    }

    fn out_of_time(&self, wanted: &Wanted<'_>, peer: Rank) -> CommError {
        let why = match (&self.tries[peer.0 as usize].why, &self.stranger) {
            (Some(why), _) => format!("{peer} cannot be reached by {}: {why}", wanted.rank),
            (None, Some(why)) if peer > wanted.rank => {
                format!("{peer} has not come to {}; somebody was turned away because {why}", wanted.rank)
            }
            _ => format!("{peer} has not come to {}", wanted.rank),
        };
        CommError::Setup { what: "the TCP links", why }
    }
}

impl Tries {
    fn failed(&mut self, now: Duration, why: String) {
        self.next = now + RETRY;
        self.why = Some(why);
    }
}

impl Attempt {
    /// Sends and reads what can be sent and read now.
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
                return Progress::Done(self.handshake.peer().expect("a rank proved itself"));
            }
            if !moved {
                break;
            }
        }
        if net.now() - self.started >= HANDSHAKE_LIMIT {
            return Progress::Failed(format!("no handshake within {} s", HANDSHAKE_LIMIT.as_secs()));
        }
        Progress::Going
    }
}

fn nonce() -> Result<[u8; 32], CommError> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce)
        .map_err(|e| CommError::Setup { what: "the TCP links", why: format!("no random numbers: {e}") })?;
    Ok(nonce)
}
