//! The TCP carrier, for ranks connected by a network.
//!
//! Every pair of ranks has one connection, authenticated by a handshake. A call starts with a header from each side.
//! Once a rank has found the peer's header equal to its own it sends the data of its offers: the peer will make the
//! same comparison and expect it. A rank that waits keeps sending to all peers, so ranks that wait for each other in
//! a circle still make progress.

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
use crate::shm::BackgroundWork;
use crate::tcp::establish::{LinkSpec, establish};
use crate::tcp::frame::{FrameHeader, HEADER_BYTES};
use crate::tcp::net::{Interest, LinkId, Net};
use crate::tcp::queue::{Inbox, Outbox};
pub use sockets::Sockets;

/// The longest sleep between checks of the abort signal.
const SLICE: Duration = Duration::from_millis(50);

/// How long sending may take at a time while another carrier waits.
const BACKGROUND_SEND: Duration = Duration::from_micros(200);

/// After a mismatch: how long a rank tries to send its header, so that the peer can report the mismatch too.
const MISMATCH_FLUSH: Duration = Duration::from_millis(500);

/// One rank's carrier, over sockets or another [`Net`].
pub struct TcpCarrier<N: Net> {
    net: N,
    rank: Rank,
    /// Indexed by rank; `None` for this rank and for ranks reached through another carrier.
    pairs: Vec<Option<Pair>>,
    deadline: Duration,
    spin: Duration,
    abort: Abort,
    /// Scratch list for each wait, kept so that waiting does not allocate.
    interests: Vec<Interest>,
}

/// Whether a wait is for incoming or for outgoing bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    In,
    Out,
}

/// What [`TcpCarrier::establish`] needs to know.
pub struct TcpSpec<'a> {
    pub rank: Rank,
    /// For each rank: whether to connect to it.
    pub peers: &'a [bool],
    pub session: &'a Secret,
    pub run_id: &'a str,
    /// The limit for every wait, and for all handshakes together.
    pub deadline: Duration,
    /// How long a wait spins before it sleeps.
    pub spin: Duration,
    pub abort: Abort,
}

/// This rank's state for one peer.
struct Pair {
    link: LinkId,
    /// The number of the latest call; both sides count the same way.
    sequence: u64,
    /// The open call, for error messages.
    call: Option<Call>,
    outbox: Outbox,
    inbox: Inbox,
    /// The peer's header, of which `header_read` bytes have arrived.
    header: [u8; HEADER_BYTES],
    header_read: usize,
    /// Bytes of the open call that have not been pulled yet.
    incoming: u64,
    /// Why nothing can be sent any more.
    broken: Option<std::io::Error>,
}

impl<N: Net> TcpCarrier<N> {
    /// Connects to all requested peers and authenticates them.
    pub fn establish(mut net: N, spec: &TcpSpec<'_>) -> Result<TcpCarrier<N>, CommError> {
        let key = handshake::link_key(spec.session, spec.run_id);
        let link_spec = LinkSpec {
            rank: spec.rank,
            peers: spec.peers,
            key: &key,
            limit: spec.deadline,
            abort: &spec.abort,
        };
        let links = establish(&mut net, &link_spec)?;
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
        self.pairs[peer.0 as usize].as_mut().unwrap_or_else(|| panic!("{peer} has no TCP connection"))
    }

    fn call_text(&mut self, peer: Rank) -> String {
        self.pair(peer).call.map_or_else(String::new, |call| call.to_string())
    }

    fn lost(&mut self, peer: Rank, why: &std::io::Error) -> CommError {
        let (rank, call) = (self.rank, self.call_text(peer));
        CommError::Lost { rank, peer, call, why: why.to_string() }
    }

    fn invalid_data(&mut self, peer: Rank, why: String) -> CommError {
        let (rank, call) = (self.rank, self.call_text(peer));
        CommError::InvalidData { rank, peer, call, why }
    }

    /// Sends whatever can be sent now, to every peer. An error is reported when this rank waits for that peer.
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

    /// Waits for `peer` until `attempt` returns `Ok(true)`, and keeps sending to every peer in the meantime. `limit`
    /// bounds the time without progress between the two ranks.
    fn wait(
        &mut self,
        (peer, direction): (Rank, Direction),
        limit: Duration,
        attempt: &mut dyn FnMut(&mut Pair, &mut N) -> std::io::Result<bool>,
    ) -> Result<(), CommError> {
        let mut start = None;
        loop {
            let before = self.pair(peer).outbox.progress();
            self.send_all();
            let pair = self.pairs[peer.0 as usize]
                .as_mut()
                .unwrap_or_else(|| panic!("{peer} has no TCP connection"));
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
            self.collect_interests((direction == Direction::In).then_some(peer));
            self.net.wait(&self.interests, false, now + SLICE.min(limit - waited));
        }
    }

    fn collect_interests(&mut self, awaited: Option<Rank>) {
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

    /// Sends for up to `time`. Returns `false` if there is nothing to send.
    pub(crate) fn send_in_background(&mut self, time: Duration) -> bool {
        self.send_all();
        self.collect_interests(None);
        if self.interests.is_empty() {
            return false;
        }
        let until = self.net.now() + time;
        self.net.wait(&self.interests, false, until);
        self.send_all();
        true
    }

    /// Reads the peer's header.
    fn read_header(&mut self, peer: Rank) -> Result<FrameHeader, CommError> {
        self.wait((peer, Direction::In), self.deadline, &mut |pair, net| {
            let n = pair.inbox.read(net, pair.link, &mut pair.header[pair.header_read..])?;
            pair.header_read += n;
            Ok(pair.header_read == HEADER_BYTES)
        })?;
        let pair = self.pair(peer);
        pair.header_read = 0;
        match FrameHeader::decode(&pair.header) {
            Some(frame) => Ok(frame),
            None => Err(self.invalid_data(peer, "it sent bytes that are not a call header".into())),
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
        pair.outbox.fill(FrameHeader { sequence: pair.sequence, call: *call, bytes }.encode(), offers);
        self.send_all();
        Ok(())
    }

    fn meet(&mut self, peer: Rank, call: &Call) -> Result<(), CommError> {
        let frame = self.read_header(peer)?;
        let sequence = self.pair(peer).sequence;
        if frame.call != *call || frame.sequence != sequence {
            // The peer needs this rank's header to detect the mismatch too.
            let _ = self.wait((peer, Direction::Out), MISMATCH_FLUSH, &mut |pair, _| match (
                pair.outbox.header_is_sent(),
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
            let why = format!("it is in call {}, but this rank is in call {sequence}", frame.sequence);
            return Err(self.invalid_data(peer, why));
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
            return Err(self.invalid_data(peer, format!("expected {bytes} bytes, but it offers {incoming}")));
        }
        if into.is_empty() {
            return Ok(());
        }
        self.pair(peer).incoming -= bytes;
        // SAFETY: the caller passes `into` to be written, and any bits are a valid value of every dtype.
        let into = unsafe { into.as_bytes_mut() };
        let mut at = 0;
        self.wait((peer, Direction::In), self.deadline, &mut |pair, net| {
            at += pair.inbox.read(net, pair.link, &mut into[at..])?;
            Ok(at == into.len())
        })
    }

    fn done(&mut self, peer: Rank) -> Result<(), CommError> {
        match self.pair(peer).incoming {
            0 => Ok(()),
            left => Err(self.invalid_data(peer, format!("it offers {left} bytes more than expected"))),
        }
    }

    fn finish(&mut self, peer: Rank) -> Result<(), CommError> {
        self.wait((peer, Direction::Out), self.deadline, &mut |pair, _| match (
            &mut pair.broken,
            pair.outbox.is_sent(),
        ) {
            (_, true) => Ok(true),
            (Some(e), _) => Err(std::io::Error::new(e.kind(), e.to_string())),
            (None, false) => Err(ErrorKind::WouldBlock.into()),
        })
    }
}

impl<N: Net> BackgroundWork for TcpCarrier<N> {
    fn work(&mut self) -> Result<bool, CommError> {
        Ok(self.send_in_background(BACKGROUND_SEND))
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
            header: [0; HEADER_BYTES],
            header_read: 0,
            incoming: 0,
            broken: None,
        }
    }
}
