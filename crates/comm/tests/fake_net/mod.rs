//! A network and a clock that exist only in memory, driven by a seed.
//!
//! Ranks run in threads, one at a time: a rank that waits hands over to another that has something to do,
//! chosen by the seed; if nobody has, the clock jumps to the next event. A seed therefore always gives the
//! same run. Bytes of one connection stay in order; everything else is up to the seed: how they are cut, how
//! long they take, how much fits into a connection, which connection is cut or stalls, and what strangers
//! say to listeners.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use lockstep_comm::net::{Interest, LinkId, Net};
use lockstep_core::Rank;

/// Calls after which a run is taken to go in circles.
const MAX_CALLS: u64 = 3_000_000;

/// Numbers from a seed (splitmix64).
#[derive(Clone, Debug)]
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// What goes wrong with a connection's bytes, after so many of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Cut { after: usize },
    Stall { after: usize },
}

/// How a run's network behaves.
#[derive(Clone, Debug)]
pub(crate) struct Weather {
    /// Bytes that one direction of a connection holds.
    pub(crate) window: usize,
    pub(crate) longest_delay: Duration,
    /// The connection, in the order in which they are made, that a fault befalls.
    pub(crate) fault: Option<(usize, Fault)>,
    /// What strangers say, to which rank; then they stay or close.
    pub(crate) strangers: Vec<(usize, Vec<u8>, bool)>,
}

pub(crate) struct FakeNet {
    shared: Arc<Shared>,
    rank: usize,
    links: Vec<Option<(usize, usize)>>,
}

struct Shared {
    state: Mutex<State>,
    turns: Vec<Condvar>,
}

struct State {
    dice: Dice,
    now: Duration,
    weather: Weather,
    connections: Vec<Connection>,
    /// Connections made between ranks, strangers' not counted.
    num_made: usize,
    /// By rank: connections that came in and were not taken.
    backlog: Vec<VecDeque<usize>>,
    ranks: Vec<Doing>,
    running: Option<usize>,
    calls: u64,
}

enum Doing {
    Ready,
    Waits { interests: Vec<(usize, usize, bool, bool)>, accept: bool, until: Duration },
    Ended,
}

/// Two directions: `ways[side]` is what `side` reads.
struct Connection {
    ways: [Way; 2],
    fault: Option<Fault>,
    reset: bool,
}

#[derive(Default)]
struct Way {
    coming: VecDeque<(Duration, Vec<u8>)>,
    ready: VecDeque<u8>,
    total: usize,
    /// The writer has closed.
    ended: bool,
    last: Duration,
    stalled: bool,
}

impl Way {
    fn held(&self) -> usize {
        self.ready.len() + self.coming.iter().map(|(_, bytes)| bytes.len()).sum::<usize>()
    }

    fn arrive(&mut self, now: Duration) {
        while !self.stalled && self.coming.front().is_some_and(|(at, _)| *at <= now) {
            self.ready.extend(self.coming.pop_front().unwrap().1);
        }
    }
}

/// The networks of `world` ranks, and what runs them.
pub(crate) fn fake_world(world: usize, seed: u64, weather: Weather) -> Vec<FakeNet> {
    let mut state = State {
        dice: Dice(seed),
        now: Duration::ZERO,
        connections: Vec::new(),
        num_made: 0,
        backlog: vec![VecDeque::new(); world],
        ranks: (0..world).map(|_| Doing::Ready).collect(),
        running: None,
        calls: 0,
        weather,
    };
    for (to, says, closes) in std::mem::take(&mut state.weather.strangers) {
        let mut connection = Connection::new(None);
        connection.ways[1].coming.push_back((Duration::from_micros(state.dice.next() % 3000), says));
        connection.ways[1].ended = closes;
        state.connections.push(connection);
        state.backlog[to].push_back(state.connections.len() - 1);
    }
    let turns = (0..world).map(|_| Condvar::new()).collect();
    let shared = Arc::new(Shared { state: Mutex::new(state), turns });
    (0..world).map(|rank| FakeNet { shared: shared.clone(), rank, links: Vec::new() }).collect()
}

/// Lets a rank of a fake world begin when it is its turn, and passes the turn on when it is dropped.
pub(crate) struct Turn {
    shared: Arc<Shared>,
    rank: usize,
}

impl Turn {
    /// Call in the rank's thread, before it touches its net. The first to come gets the first turn.
    pub(crate) fn begin(net: &FakeNet) -> Turn {
        let (shared, rank) = (net.shared.clone(), net.rank);
        let mut state = shared.lock();
        // Everyone starts in the order of ranks, so that threads' timing does not matter.
        if rank == 0 {
            state.running = Some(0);
        }
        while state.running != Some(rank) {
            state = shared.turns[rank].wait(state).unwrap();
        }
        drop(state);
        Turn { shared, rank }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.ranks[self.rank] = Doing::Ended;
        self.shared.pass_on(&mut state);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A rank that panicked has failed its test; the others still get their turns.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Gives the turn to a rank that can go on, moving the clock if need be.
    fn pass_on(&self, state: &mut State) {
        loop {
            let able: Vec<usize> = (0..state.ranks.len()).filter(|r| state.is_able(*r)).collect();
            if !able.is_empty() {
                let next = able[state.dice.below(able.len())];
                state.ranks[next] = Doing::Ready;
                state.running = Some(next);
                self.turns[next].notify_all();
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
            Doing::Ready => true,
            Doing::Ended => false,
            Doing::Waits { until, .. } if *until <= now => true,
            Doing::Waits { interests, accept, .. } => {
                (*accept && !self.backlog[rank].is_empty())
                    || interests.iter().any(|(c, side, read, write)| {
                        let connection = &mut self.connections[*c];
                        connection.ways[*side].arrive(now);
                        let (mine, theirs) = (&connection.ways[*side], &connection.ways[1 - *side]);
                        connection.reset
                            || (*read && (!mine.ready.is_empty() || (mine.ended && mine.coming.is_empty())))
                            || (*write && (theirs.held() < self.weather.window || mine.ended))
                    })
            }
        }
    }

    fn next_event(&self) -> Option<Duration> {
        let arrivals = self.connections.iter().filter(|c| !c.reset).flat_map(|c| &c.ways);
        let arrivals =
            arrivals.filter(|way| !way.stalled).filter_map(|way| way.coming.front().map(|(at, _)| *at));
        let ends = self.ranks.iter().filter_map(|doing| match doing {
            Doing::Waits { until, .. } => Some(*until),
            _ => None,
        });
        // Without a rank that waits there is nothing to go on for.
        ends.clone().next()?;
        arrivals.chain(ends).filter(|at| *at > self.now).min()
    }

    fn count(&mut self) {
        self.calls += 1;
        assert!(self.calls < MAX_CALLS, "ranks go in circles");
    }

    fn close(&mut self, (connection, side): (usize, usize)) {
        let connection = &mut self.connections[connection];
        // As TCP does: what nobody read is answered by a reset, which may overtake what was sent.
        let unread = connection.ways[side].held() > 0;
        connection.ways[1 - side].ended = true;
        if unread && self.dice.one_in(2) {
            connection.reset = true;
        }
    }
}

impl Connection {
    fn new(fault: Option<Fault>) -> Connection {
        Connection { ways: [Way::default(), Way::default()], fault, reset: false }
    }
}

impl FakeNet {
    /// The fake time, for judging how long a run took.
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
        let fault = state.weather.fault.filter(|(which, _)| *which == number).map(|(_, fault)| fault);
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
        let State { dice, now, connections, .. } = &mut *state;
        let connection = &mut connections[connection];
        let way = &mut connection.ways[side];
        way.arrive(*now);
        if connection.reset && (way.ready.is_empty() || dice.one_in(2)) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        if way.ready.is_empty() {
            return match way.ended && way.coming.is_empty() {
                true => Ok(0),
                false => Err(io::ErrorKind::WouldBlock.into()),
            };
        }
        let most = way.ready.len().min(into.len());
        let len = if dice.one_in(3) { 1 + dice.below(most) } else { most };
        for (into, byte) in into[..len].iter_mut().zip(way.ready.drain(..len)) {
            *into = byte;
        }
        Ok(len)
    }

    fn try_write(&mut self, link: LinkId, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let (connection, side) = self.end(link)?;
        let mut state = self.shared.lock();
        state.count();
        let State { dice, now, connections, weather, .. } = &mut *state;
        let connection = &mut connections[connection];
        if connection.reset || connection.ways[side].ended {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let way = &mut connection.ways[1 - side];
        let room = weather.window.saturating_sub(way.held());
        let all: Vec<u8> = from.iter().flat_map(|slice| slice.iter().copied()).take(room).collect();
        if all.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let len = if dice.one_in(3) { 1 + dice.below(all.len()) } else { all.len() };
        let delay = Duration::from_nanos(dice.next() % weather.longest_delay.as_nanos().max(1) as u64);
        way.last = way.last.max(*now + delay);
        let cut = dice.below(len);
        for piece in [&all[..cut], &all[cut..len]] {
            way.coming.push_back((way.last, piece.to_vec()));
        }
        way.total += len;
        match connection.fault {
            Some(Fault::Cut { after }) if way.total > after => connection.reset = true,
            Some(Fault::Stall { after }) if way.total > after => way.stalled = true,
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
        // Now and then a wait ends for no reason.
        if state.dice.one_in(20) {
            state.ranks[self.rank] = Doing::Ready;
        } else {
            state.ranks[self.rank] = Doing::Waits { interests, accept, until };
        }
        self.shared.pass_on(&mut state);
        while state.running != Some(self.rank) {
            state = self.shared.turns[self.rank].wait(state).unwrap();
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
