//! A simulated network and clock, driven by a seed.
//!
//! Ranks run in threads, one at a time. A rank that waits hands over to another that can continue, chosen by the
//! seed; if none can, the clock jumps to the next event. So a seed always gives the same run. Bytes of one connection
//! stay in order. The seed decides everything else: how they are split, how long they take, how much a connection
//! buffers, which connection breaks or stalls, and what intruders send to listeners.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use lockstep_comm::net::{Interest, LinkId, Net};
use lockstep_core::Rank;

/// The number of network calls after which a run is considered an endless loop.
const MAX_CALLS: u64 = 3_000_000;

/// A random number generator (splitmix64).
#[derive(Clone, Debug)]
pub(crate) struct SeededRng(pub(crate) u64);

impl SeededRng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// A fault of a connection, and the number of bytes after which it occurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Cut { after: usize },
    Stall { after: usize },
}

/// How the network behaves in a run.
#[derive(Clone, Debug)]
pub(crate) struct NetConditions {
    /// Bytes that one direction of a connection buffers.
    pub(crate) window: usize,
    pub(crate) longest_delay: Duration,
    /// A fault, and the connection it affects, in the order in which connections are made.
    pub(crate) fault: Option<(usize, Fault)>,
    /// For each intruder: the rank it connects to, what it sends, and whether it then closes.
    pub(crate) intruders: Vec<(usize, Vec<u8>, bool)>,
}

pub(crate) struct FakeNet {
    shared: Arc<Shared>,
    rank: usize,
    links: Vec<Option<(usize, usize)>>,
}

struct Shared {
    state: Mutex<State>,
    wakeups: Vec<Condvar>,
}

struct State {
    rng: SeededRng,
    now: Duration,
    conditions: NetConditions,
    connections: Vec<Connection>,
    /// The number of connections made between ranks.
    num_made: usize,
    /// For each rank: incoming connections that are not accepted yet.
    backlog: Vec<VecDeque<usize>>,
    ranks: Vec<RankState>,
    running: Option<usize>,
    calls: u64,
}

enum RankState {
    Ready,
    Waiting { interests: Vec<(usize, usize, bool, bool)>, accept: bool, until: Duration },
    Ended,
}

/// Both directions: `halves[side]` holds the bytes that `side` reads.
struct Connection {
    halves: [HalfConnection; 2],
    fault: Option<Fault>,
    reset: bool,
}

#[derive(Default)]
struct HalfConnection {
    /// Bytes in flight, with their time of arrival.
    in_flight: VecDeque<(Duration, Vec<u8>)>,
    /// Bytes that have arrived.
    ready: VecDeque<u8>,
    /// Bytes written so far.
    total: usize,
    /// The writer has closed.
    ended: bool,
    /// The arrival time of the last bytes in flight.
    last: Duration,
    stalled: bool,
}

impl HalfConnection {
    fn held(&self) -> usize {
        self.ready.len() + self.in_flight.iter().map(|(_, bytes)| bytes.len()).sum::<usize>()
    }

    fn arrive(&mut self, now: Duration) {
        while !self.stalled && self.in_flight.front().is_some_and(|(at, _)| *at <= now) {
            self.ready.extend(self.in_flight.pop_front().unwrap().1);
        }
    }
}

/// The simulated networks of `world` ranks.
pub(crate) fn fake_world(world: usize, seed: u64, conditions: NetConditions) -> Vec<FakeNet> {
    let mut state = State {
        rng: SeededRng(seed),
        now: Duration::ZERO,
        connections: Vec::new(),
        num_made: 0,
        backlog: vec![VecDeque::new(); world],
        ranks: (0..world).map(|_| RankState::Ready).collect(),
        running: None,
        calls: 0,
        conditions,
    };
    for (to, bytes, closes) in std::mem::take(&mut state.conditions.intruders) {
        let mut connection = Connection::new(None);
        connection.halves[1].in_flight.push_back((Duration::from_micros(state.rng.next() % 3000), bytes));
        connection.halves[1].ended = closes;
        state.connections.push(connection);
        state.backlog[to].push_back(state.connections.len() - 1);
    }
    let wakeups = (0..world).map(|_| Condvar::new()).collect();
    let shared = Arc::new(Shared { state: Mutex::new(state), wakeups });
    (0..world).map(|rank| FakeNet { shared: shared.clone(), rank, links: Vec::new() }).collect()
}

/// Holds a rank's turn: it blocks until the rank may run, and passes the turn on when dropped.
pub(crate) struct TurnGuard {
    shared: Arc<Shared>,
    rank: usize,
}

impl TurnGuard {
    /// Must be called in the rank's thread, before it uses its network.
    pub(crate) fn begin(net: &FakeNet) -> TurnGuard {
        let (shared, rank) = (net.shared.clone(), net.rank);
        let mut state = shared.lock();
        // Rank 0 always starts first, so that the timing of threads does not matter.
        if rank == 0 {
            state.running = Some(0);
        }
        while state.running != Some(rank) {
            state = shared.wakeups[rank].wait(state).unwrap();
        }
        drop(state);
        TurnGuard { shared, rank }
    }
}

impl Drop for TurnGuard {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.ranks[self.rank] = RankState::Ended;
        self.shared.pass_on(&mut state);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // If a rank panics its test has failed, but the others must still get their turns.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Passes the turn to a rank that can continue, advancing the clock if none can.
    fn pass_on(&self, state: &mut State) {
        loop {
            let able: Vec<usize> = (0..state.ranks.len()).filter(|r| state.is_able(*r)).collect();
            if !able.is_empty() {
                let next = able[state.rng.below(able.len())];
                state.ranks[next] = RankState::Ready;
                state.running = Some(next);
                self.wakeups[next].notify_all();
                return;
            }
            let Some(next) = state.next_event() else {
                state.running = None;
                return;
            };
            state.now = next;
        }
    }
}

impl State {
    fn is_able(&mut self, rank: usize) -> bool {
        let now = self.now;
        match &self.ranks[rank] {
            RankState::Ready => true,
            RankState::Ended => false,
            RankState::Waiting { until, .. } if *until <= now => true,
            RankState::Waiting { interests, accept, .. } => {
                (*accept && !self.backlog[rank].is_empty())
                    || interests.iter().any(|(c, side, read, write)| {
                        let connection = &mut self.connections[*c];
                        connection.halves[*side].arrive(now);
                        let (mine, theirs) = (&connection.halves[*side], &connection.halves[1 - *side]);
                        connection.reset
                            || (*read
                                && (!mine.ready.is_empty() || (mine.ended && mine.in_flight.is_empty())))
                            || (*write && (theirs.held() < self.conditions.window || mine.ended))
                    })
            }
        }
    }

    fn next_event(&self) -> Option<Duration> {
        let arrivals = self.connections.iter().filter(|c| !c.reset).flat_map(|c| &c.halves);
        let arrivals = arrivals
            .filter(|half| !half.stalled)
            .filter_map(|half| half.in_flight.front().map(|(at, _)| *at));
        let ends = self.ranks.iter().filter_map(|doing| match doing {
            RankState::Waiting { until, .. } => Some(*until),
            _ => None,
        });
        // If no rank waits, the run is over.
        ends.clone().next()?;
        arrivals.chain(ends).filter(|at| *at > self.now).min()
    }

    fn count(&mut self) {
        self.calls += 1;
        assert!(self.calls < MAX_CALLS, "the run is in an endless loop");
    }

    fn close(&mut self, (connection, side): (usize, usize)) {
        let connection = &mut self.connections[connection];
        // Like TCP: closing with unread bytes sends a reset, which may overtake bytes in flight.
        let unread = connection.halves[side].held() > 0;
        connection.halves[1 - side].ended = true;
        if unread && self.rng.one_in(2) {
            connection.reset = true;
        }
    }
}

impl Connection {
    fn new(fault: Option<Fault>) -> Connection {
        Connection { halves: [HalfConnection::default(), HalfConnection::default()], fault, reset: false }
    }
}

impl FakeNet {
    /// Reads the simulated clock, to check how long a run took.
    pub(crate) fn clock(&self) -> impl Fn() -> Duration + use<> {
        let shared = self.shared.clone();
        move || shared.lock().now
    }

    fn add(&mut self, end: (usize, usize)) -> LinkId {
        self.links.push(Some(end));
        self.links.len() - 1
    }

    fn end(&self, link: LinkId) -> io::Result<(usize, usize)> {
        self.links[link].ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Net for FakeNet {
    fn now(&self) -> Duration {
        self.shared.lock().now
    }

    fn connect(&mut self, peer: Rank) -> io::Result<LinkId> {
        let shared = self.shared.clone();
        let mut state = shared.lock();
        state.count();
        let number = state.num_made;
        state.num_made += 1;
        let fault = state.conditions.fault.filter(|(which, _)| *which == number).map(|(_, fault)| fault);
        state.connections.push(Connection::new(fault));
        let connection = state.connections.len() - 1;
        state.backlog[peer.0 as usize].push_back(connection);
        Ok(self.add((connection, 1)))
    }

    fn accept(&mut self) -> io::Result<Option<LinkId>> {
        let shared = self.shared.clone();
        let mut state = shared.lock();
        state.count();
        let connection = state.backlog[self.rank].pop_front();
        Ok(connection.map(|connection| self.add((connection, 0))))
    }

    fn try_read(&mut self, link: LinkId, into: &mut [u8]) -> io::Result<usize> {
        let (connection, side) = self.end(link)?;
        let mut state = self.shared.lock();
        state.count();
        let State { rng, now, connections, .. } = &mut *state;
        let connection = &mut connections[connection];
        let half = &mut connection.halves[side];
        half.arrive(*now);
        if connection.reset && (half.ready.is_empty() || rng.one_in(2)) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        if half.ready.is_empty() {
            return match half.ended && half.in_flight.is_empty() {
                true => Ok(0),
                false => Err(io::ErrorKind::WouldBlock.into()),
            };
        }
        let most = half.ready.len().min(into.len());
        let len = if rng.one_in(3) { 1 + rng.below(most) } else { most };
        for (into, byte) in into[..len].iter_mut().zip(half.ready.drain(..len)) {
            *into = byte;
        }
        Ok(len)
    }

    fn try_write(&mut self, link: LinkId, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let (connection, side) = self.end(link)?;
        let mut state = self.shared.lock();
        state.count();
        let State { rng, now, connections, conditions, .. } = &mut *state;
        let connection = &mut connections[connection];
        if connection.reset || connection.halves[side].ended {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let half = &mut connection.halves[1 - side];
        let free = conditions.window.saturating_sub(half.held());
        let all: Vec<u8> = from.iter().flat_map(|slice| slice.iter().copied()).take(free).collect();
        if all.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let len = if rng.one_in(3) { 1 + rng.below(all.len()) } else { all.len() };
        let delay = Duration::from_nanos(rng.next() % conditions.longest_delay.as_nanos().max(1) as u64);
        half.last = half.last.max(*now + delay);
        let cut = rng.below(len);
        for piece in [&all[..cut], &all[cut..len]] {
            half.in_flight.push_back((half.last, piece.to_vec()));
        }
        half.total += len;
        match connection.fault {
            Some(Fault::Cut { after }) if half.total > after => connection.reset = true,
            Some(Fault::Stall { after }) if half.total > after => half.stalled = true,
            _ => {}
        }
        Ok(len)
    }

    fn close(&mut self, link: LinkId) {
        if let Some(end) = self.links[link].take() {
            self.shared.lock().close(end);
        }
    }

    fn wait(&mut self, interests: &[Interest], accept: bool, until: Duration) {
        let mut state = self.shared.lock();
        state.count();
        let interests = interests.iter().filter_map(|i| {
            let (connection, side) = self.links[i.link]?;
            Some((connection, side, i.read, i.write))
        });
        let interests = interests.collect();
        // Occasionally a wait ends for no reason.
        if state.rng.one_in(20) {
            state.ranks[self.rank] = RankState::Ready;
        } else {
            state.ranks[self.rank] = RankState::Waiting { interests, accept, until };
        }
        self.shared.pass_on(&mut state);
        while state.running != Some(self.rank) {
            state = self.shared.wakeups[self.rank].wait(state).unwrap();
        }
    }
}

impl Drop for FakeNet {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        for end in self.links.drain(..).flatten() {
            state.close(end);
        }
    }
}
