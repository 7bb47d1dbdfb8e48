//! A simulated network and clock. Links deliver bytes in order, with delays, in chunks of any size, or not at all. A
//! seed decides everything.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

/// SplitMix64.
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    pub(super) fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    pub(super) fn nonce(&mut self) -> [u8; 32] {
        let mut out = [0; 32];
        out.chunks_exact_mut(8).for_each(|part| part.copy_from_slice(&self.next().to_le_bytes()));
        out
    }

    pub(super) fn ms(&mut self, limit: u64) -> Duration {
        Duration::from_millis(self.below(limit))
    }
}

pub(super) type LinkId = u64;

/// An end of a link: the one that connected, or the one that accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum End {
    Caller,
    Server,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Delivery {
    Opened {
        link: LinkId,
    },
    Bytes {
        link: LinkId,
        to: End,
        bytes: Vec<u8>,
    },
    Closed {
        link: LinkId,
        to: End,
    },
    /// A timer that the test has set.
    Timer(usize),
}

pub(super) struct Net {
    pub(super) rng: Rng,
    pub(super) now: Duration,
    max_delay_ms: u64,
    count: u64,
    next_link: LinkId,
    queue: BinaryHeap<Reverse<(Duration, u64, Delivery)>>,
    /// Ends that are still open, with the arrival time of the last delivery to them.
    open: BTreeMap<(LinkId, End), Duration>,
    /// Everything that callers have sent, for replay attacks.
    pub(super) recorded: Vec<Vec<u8>>,
}

impl Net {
    pub(super) fn new(seed: u64, max_delay_ms: u64) -> Net {
        Net {
            rng: Rng::new(seed),
            now: Duration::ZERO,
            max_delay_ms,
            count: 0,
            next_link: 0,
            queue: BinaryHeap::new(),
            open: BTreeMap::new(),
            recorded: Vec::new(),
        }
    }

    pub(super) fn timer(&mut self, at: Duration, id: usize) {
        self.push(at, Delivery::Timer(id));
    }

    pub(super) fn connect(&mut self) -> LinkId {
        let link = self.next_link;
        self.next_link += 1;
        let at = self.now + self.delay();
        self.open.insert((link, End::Caller), at);
        self.open.insert((link, End::Server), at);
        self.push(at, Delivery::Opened { link });
        link
    }

    /// Sends in chunks of random size.
    pub(super) fn send(&mut self, link: LinkId, to: End, bytes: &[u8]) {
        if to == End::Server {
            self.recorded.push(bytes.to_vec());
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            let size = 1 + self.rng.below(2 * rest.len() as u64) as usize;
            let (chunk, tail) = rest.split_at(size.min(rest.len()));
            self.deliver(link, to, Delivery::Bytes { link, to, bytes: chunk.to_vec() });
            rest = tail;
        }
    }

    /// Closes one end. The other end is notified after everything that was sent before.
    pub(super) fn close(&mut self, link: LinkId, by: End) {
        let to = if by == End::Caller { End::Server } else { End::Caller };
        self.open.remove(&(link, by));
        self.deliver(link, to, Delivery::Closed { link, to });
    }

    /// Breaks the link: both ends are notified, and bytes in flight may be lost.
    pub(super) fn cut(&mut self, link: LinkId) {
        for to in [End::Caller, End::Server] {
            if self.open.contains_key(&(link, to)) {
                self.push(self.now, Delivery::Closed { link, to });
            }
        }
    }

    pub(super) fn next(&mut self) -> Option<Delivery> {
        loop {
            let Reverse((at, _, delivery)) = self.queue.pop()?;
            self.now = self.now.max(at);
            match &delivery {
                Delivery::Bytes { link, to, .. } if !self.open.contains_key(&(*link, *to)) => {}
                Delivery::Closed { link, to } if self.open.remove(&(*link, *to)).is_none() => {}
                _ => return Some(delivery),
            }
        }
    }

    fn deliver(&mut self, link: LinkId, to: End, delivery: Delivery) {
        let Some(&after) = self.open.get(&(link, to)) else { return };
        let at = after.max(self.now + self.delay());
        self.open.insert((link, to), at);
        self.push(at, delivery);
    }

    fn delay(&mut self) -> Duration {
        let most = self.max_delay_ms;
        self.rng.ms(most)
    }

    fn push(&mut self, at: Duration, delivery: Delivery) {
        self.count += 1;
        self.queue.push(Reverse((at, self.count, delivery)));
    }
}
