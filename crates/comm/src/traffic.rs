//! Counts the bytes that a rank exchanges with others: payload only, without the headers of a transport.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lockstep_core::Rank;
use lockstep_device::{Memory, View};

use crate::call::Call;
use crate::carrier::Carrier;
use crate::error::{Abort, CommError};

/// Bytes sent and received since the start. Any thread may read them.
#[derive(Clone, Debug, Default)]
pub struct Traffic(Arc<[AtomicU64; 2]>);

impl Traffic {
    pub fn add_sent(&self, bytes: u64) {
        self.0[0].fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn add_received(&self, bytes: u64) {
        self.0[1].fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn sent(&self) -> u64 {
        self.0[0].load(Ordering::Relaxed)
    }

    pub fn received(&self) -> u64 {
        self.0[1].load(Ordering::Relaxed)
    }
}

/// A carrier that counts what passes through it: an offer to a peer is sent, a pull is received.
pub(crate) struct CountingCarrier {
    pub(crate) inner: Box<dyn Carrier>,
    pub(crate) traffic: Traffic,
}

impl Carrier for CountingCarrier {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world(&self) -> u32 {
        self.inner.world()
    }

    fn set_deadline(&mut self, deadline: Duration) {
        self.inner.set_deadline(deadline);
    }

    fn abort(&self) -> Abort {
        self.inner.abort()
    }

    fn bounce(&self) -> Option<Arc<Memory>> {
        self.inner.bounce()
    }

    fn post(&mut self, peer: Rank, call: &Call, offers: &[View<'_>]) -> Result<(), CommError> {
        self.traffic.add_sent(offers.iter().map(|offer| offer.bytes() as u64).sum());
        self.inner.post(peer, call, offers)
    }

    fn meet(&mut self, peer: Rank, call: &Call) -> Result<(), CommError> {
        self.inner.meet(peer, call)
    }

    fn pull(&mut self, peer: Rank, into: View<'_>) -> Result<(), CommError> {
        self.traffic.add_received(into.bytes() as u64);
        self.inner.pull(peer, into)
    }

    fn done(&mut self, peer: Rank) -> Result<(), CommError> {
        self.inner.done(peer)
    }

    fn finish(&mut self, peer: Rank) -> Result<(), CommError> {
        self.inner.finish(peer)
    }
}
