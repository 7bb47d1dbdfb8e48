//! The carrier of a run on several hosts: shared memory within a host, TCP between hosts.

use std::sync::Arc;
use std::time::Duration;

use lockstep_core::Rank;
use lockstep_device::{Memory, View};

use crate::call::Call;
use crate::carrier::Carrier;
use crate::error::{Abort, CommError};
use crate::net::Net;
use crate::shm::ShmCarrier;
use crate::tcp::TcpCarrier;

/// Combines a rank's two carriers. While it waits for a rank on its own host it keeps sending to the other hosts:
/// the rank it waits for may itself be waiting for a rank that needs those bytes.
pub struct MixedCarrier<N: Net> {
    shm: ShmCarrier,
    tcp: TcpCarrier<N>,
    /// For each rank: whether it is reached through shared memory.
    same_host: Vec<bool>,
}

impl<N: Net> MixedCarrier<N> {
    pub(crate) fn new(shm: ShmCarrier, tcp: TcpCarrier<N>, same_host: Vec<bool>) -> MixedCarrier<N> {
        MixedCarrier { shm, tcp, same_host }
    }

    fn on_same_host(&self, peer: Rank) -> bool {
        self.same_host[peer.0 as usize]
    }

    fn carrier(&mut self, peer: Rank) -> &mut dyn Carrier {
        if self.on_same_host(peer) { &mut self.shm } else { &mut self.tcp }
    }
}

impl<N: Net> Carrier for MixedCarrier<N> {
    fn rank(&self) -> Rank {
        self.shm.rank()
    }

    fn world(&self) -> u32 {
        self.shm.world()
    }

    /// Both carriers were created with the same signal.
    fn abort(&self) -> Abort {
        self.shm.abort()
    }

    fn set_deadline(&mut self, deadline: Duration) {
        self.shm.set_deadline(deadline);
        self.tcp.set_deadline(deadline);
    }

    fn bounce(&self) -> Option<Arc<Memory>> {
        self.shm.bounce()
    }

    fn post(&mut self, peer: Rank, call: &Call, offers: &[View<'_>]) -> Result<(), CommError> {
        self.carrier(peer).post(peer, call, offers)
    }

    fn meet(&mut self, peer: Rank, call: &Call) -> Result<(), CommError> {
        match self.on_same_host(peer) {
            true => self.shm.meet_with(peer, call, &mut self.tcp),
            false => self.tcp.meet(peer, call),
        }
    }

    fn pull(&mut self, peer: Rank, into: View<'_>) -> Result<(), CommError> {
        self.carrier(peer).pull(peer, into)
    }

    fn done(&mut self, peer: Rank) -> Result<(), CommError> {
        self.carrier(peer).done(peer)
    }

    fn finish(&mut self, peer: Rank) -> Result<(), CommError> {
        match self.on_same_host(peer) {
            true => self.shm.finish_with(peer, &mut self.tcp),
            false => self.tcp.finish(peer),
        }
    }
}
