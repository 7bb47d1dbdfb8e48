//! Ranks that a network connects.
//!
//! A connection for every pair, proved in a handshake when it is made. A call is a head from each side; when
//! a rank has found the peer's head equal to its own, the peer will as well, and the data of its offers
//! follows. No wait leaves other peers' data lying: whoever waits keeps sending to all, so ranks that wait
//! for each other in a circle get on.

mod establish;
mod frame;
mod handshake;
pub mod net;
mod queue;
mod sockets;

use std::io::ErrorKind;
use std::time::Duration;

use lockstep_core::Rank;
use lockstep_core::proof::Secret;
use lockstep_device::View;

use crate::call::Call;
use crate::carrier::{Carrier, MAX_OFFERS};
use crate::error::{Abort, CommError};
use crate::shm::Meanwhile;
use crate::tcp::establish::{Wanted, establish};
use crate::tcp::frame::{Frame, HEAD_BYTES};
use crate::tcp::net::{Interest, LinkId, Net};
use crate::tcp::queue::{Inbox, Outbox};
pub use sockets::Sockets;

/// The longest wait between looks at the abort signal.
const SLICE: Duration = Duration::from_millis(50);

/// How long a wait on another carrier is left alone for sending.
const MEANWHILE: Duration = Duration::from_micros(200);

/// How long a rank that has found itself in another call than its peer tries to tell the peer.
const FAREWELL: Duration = Duration::from_millis(500);

/// One rank's side, over sockets or another [`Net`].
pub struct TcpCarrier<N: Net> {
    net: N,
    rank: Rank,
    /// By rank; `None` for this rank and those that another carrier reaches.
    pairs: Vec<Option<Pair>>,
    deadline: Duration,
    spin: Duration,
    abort: Abort,
    /// Filled for each wait; kept, so that it allocates nothing.
    interests: Vec<Interest>,
}

/// Whether a wait is for bytes to come or to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    In,
    Out,
}

/// How a TCP carrier is set up.
pub struct TcpSpec<'a> {
    pub rank: Rank,
    /// By rank: those to be linked with.
    pub peers: &'a [bool],
    pub session: &'a Secret,
    pub run_id: &'a str,
    /// For every wait, and for all handshakes together.
    pub deadline: Duration,
    /// How long a wait tries again and again before it sleeps.
    pub spin: Duration,
    pub abort: Abort,
}

/// What this rank knows of a pair it is in.
struct Pair {
    link: LinkId,
    /// The number of the newest call; both sides count alike.
    sequence: u64,
    /// The open call, for messages.
    call: Option<Call>,
    outbox: Outbox,
    inbox: Inbox,
    /// The peer's head, as far as it has come.
    head: [u8; HEAD_BYTES],
    head_read: usize,
    /// Bytes of the open call that have not been pulled.
    incoming: u64,
    /// Why nothing can be sent any more.
    broken: Option<std::io::Error>,
}

impl<N: Net> TcpCarrier<N> {
    /// Connects to all wanted peers and has them prove that they belong to the run.
    pub fn establish(mut net: N, spec: &TcpSpec<'_>) -> Result<TcpCarrier<N>, CommError> {
        let key = handshake::link_key(spec.session, spec.run_id);
        let wanted = Wanted {
            rank: spec.rank,
            peers: spec.peers,
            key: &key,
            limit: spec.deadline,
            abort: &spec.abort,
        };
        let links = establish(&mut net, &wanted)?;
        Ok(TcpCarrier {
            net,
            rank: spec.rank,
            interests: Vec::with_capacity(links.len()),
            pairs: links.into_iter().map(|link| link.map(Pair::new)).collect(),
            deadline: spec.deadline,
            spin: spec.spin,
            abort: spec.abort.clone(),
        })
    }

    pub(crate) fn net_mut(&mut self) -> &mut N {
        &mut self.net
    }

    fn pair(&mut self, peer: Rank) -> &mut Pair {
        self.pairs[peer.0 as usize].as_mut().unwrap_or_else(|| panic!("{peer} is not reached by TCP"))
    }

    fn call_text(&mut self, peer: Rank) -> String {
        self.pair(peer).call.map_or_else(String::new, |call| call.to_string())
    }

    fn lost(&mut self, peer: Rank, why: &std::io::Error) -> CommError {
        let (rank, call) = (self.rank, self.call_text(peer));
        CommError::Lost { rank, peer, call, why: why.to_string() }
    }

    fn garbled(&mut self, peer: Rank, why: String) -> CommError {
        let (rank, call) = (self.rank, self.call_text(peer));
        CommError::Garbled { rank, peer, call, why }
    }

    /// Sends what can be sent now, to everyone. Trouble with a peer is told when it is waited for.
    fn send_all(&mut self) {
        for pair in self.pairs.iter_mut().flatten() {
            if pair.broken.is_none()
                && !pair.outbox.is_idle()
                && let Err(e) = pair.outbox.send(&mut self.net, pair.link)
            {
                pair.broken = Some(e);
            }
        }
    }

    /// Waits until `attempt` is through, which is about `peer`, and keeps sending to everyone meanwhile. The
    /// limit is for a time in which nothing moves between the two.
    fn wait(
        &mut self,
        (peer, way): (Rank, Way),
        limit: Duration,
        attempt: &mut dyn FnMut(&mut Pair, &mut N) -> std::io::Result<bool>,
    ) -> Result<(), CommError> {
        let mut start = None;
        loop {
            let before = self.pair(peer).outbox.progress();
            self.send_all();
            let pair = self.pairs[peer.0 as usize]
                .as_mut()
                .unwrap_or_else(|| panic!("{peer} is not reached by TCP"));
            let mut moved = pair.outbox.progress() != before;
            match attempt(pair, &mut self.net) {
                Ok(true) => return Ok(()),
                Ok(false) => moved = true,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Err(self.lost(peer, &e)),
            }
            self.abort.check()?;
            if moved {
                start = None;
                continue;
            }
            let now = self.net.now();
            let waited = now - *start.get_or_insert(now);
            if waited >= limit {
                let (rank, call) = (self.rank, self.call_text(peer));
                return Err(CommError::TimedOut { rank, peer, call, waited });
            }
            if waited < self.spin {
                std::hint::spin_loop();
                continue;
            }
            self.note_interests((way == Way::In).then_some(peer));
            self.net.wait(&self.interests, false, now + SLICE.min(limit - waited));
        }
    }

    fn note_interests(&mut self, awaited: Option<Rank>) {
        self.interests.clear();
        for (rank, pair) in (0..).map(Rank).zip(&self.pairs) {
            let Some(pair) = pair else { continue };
            let write = pair.broken.is_none() && !pair.outbox.is_idle();
            let read = awaited == Some(rank);
            if read || write {
                self.interests.push(Interest { link: pair.link, read, write });
            }
        }
    }

    /// Sends for up to `time` if there is anything to send. `false` if there is not.
    pub(crate) fn send_meanwhile(&mut self, time: Duration) -> bool {
        self.send_all();
        self.note_interests(None);
        if self.interests.is_empty() {
            return false;
        }
        let until = self.net.now() + time;
        self.net.wait(&self.interests, false, until);
        self.send_all();
        true
    }

    /// Reads the peer's head.
    fn read_head(&mut self, peer: Rank) -> Result<Frame, CommError> {
        self.wait((peer, Way::In), self.deadline, &mut |pair, net| {
            let n = pair.inbox.read(net, pair.link, &mut pair.head[pair.head_read..])?;
            pair.head_read += n;
            Ok(pair.head_read == HEAD_BYTES)
        })?;
        let pair = self.pair(peer);
        pair.head_read = 0;
        match Frame::decode(&pair.head) {
            Some(frame) => Ok(frame),
            None => Err(self.garbled(peer, "what it sent is no head of a call".into())),
        }
    }
}

impl<N: Net> Carrier for TcpCarrier<N> {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> u32 {
        self.pairs.len() as u32
    }

    fn abort(&self) -> Abort {
        self.abort.clone()
    }

    fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    fn post(&mut self, peer: Rank, call: &Call, offers: &[View<'_>]) -> Result<(), CommError> {
        assert!(offers.len() <= MAX_OFFERS, "{} offers in one call", offers.len());
        let pair = self.pair(peer);
        pair.sequence += 1;
        pair.call = Some(*call);
        pair.incoming = 0;
        let bytes = offers.iter().map(|view| view.bytes() as u64).sum();
        pair.outbox.fill(Frame { sequence: pair.sequence, call: *call, bytes }.encode(), offers);
        self.send_all();
        Ok(())
    }

    fn meet(&mut self, peer: Rank, call: &Call) -> Result<(), CommError> {
        let frame = self.read_head(peer)?;
        let sequence = self.pair(peer).sequence;
        if frame.call != *call || frame.sequence != sequence {
            // The peer should find it out too, so it must have this rank's head.
            let _ = self.wait((peer, Way::Out), FAREWELL, &mut |pair, _| match (
                pair.outbox.head_is_sent(),
                &pair.broken,
            ) {
                (false, None) => Err(ErrorKind::WouldBlock.into()),
                _ => Ok(true),
            });
        }
        if frame.call != *call {
            return Err(CommError::mismatch(self.rank, peer, call, &frame.call));
        }
        if frame.sequence != sequence {
            let why = format!("it is in call {} of the pair, not {sequence}", frame.sequence);
            return Err(self.garbled(peer, why));
        }
        let pair = self.pair(peer);
        pair.incoming = frame.bytes;
        pair.outbox.release();
        self.send_all();
        Ok(())
    }

    fn pull(&mut self, peer: Rank, into: View<'_>) -> Result<(), CommError> {
        let bytes = into.bytes() as u64;
        let incoming = self.pair(peer).incoming;
        if bytes > incoming {
            return Err(self.garbled(peer, format!("{bytes} bytes are wanted of {incoming} that it offers")));
        }
        if into.is_empty() {
            return Ok(());
        }
        self.pair(peer).incoming -= bytes;
        // SAFETY: the caller gives `into` to be written, and any bits are a valid value of every dtype.
        let into = unsafe { into.as_bytes_mut() };
        let mut at = 0;
        self.wait((peer, Way::In), self.deadline, &mut |pair, net| {
            at += pair.inbox.read(net, pair.link, &mut into[at..])?;
            Ok(at == into.len())
        })
    }

    fn done(&mut self, peer: Rank) -> Result<(), CommError> {
        match self.pair(peer).incoming {
            0 => Ok(()),
            left => Err(self.garbled(peer, format!("it offers {left} bytes that nobody wants"))),
        }
    }

    fn finish(&mut self, peer: Rank) -> Result<(), CommError> {
        self.wait((peer, Way::Out), self.deadline, &mut |pair, _| match (
            &mut pair.broken,
            pair.outbox.is_sent(),
        ) {
            (_, true) => Ok(true),
            (Some(e), _) => Err(std::io::Error::new(e.kind(), e.to_string())),
            (None, false) => Err(ErrorKind::WouldBlock.into()),
        })
    }
}

impl<N: Net> Meanwhile for TcpCarrier<N> {
    fn work(&mut self) -> Result<bool, CommError> {
        Ok(self.send_meanwhile(MEANWHILE))
    }
}

impl Pair {
    fn new(link: LinkId) -> Pair {
        Pair {
            link,
            sequence: 0,
            call: None,
            outbox: Outbox::new(),
            inbox: Inbox::new(),
            head: [0; HEAD_BYTES],
            head_read: 0,
            incoming: 0,
            broken: None,
        }
    }
}
