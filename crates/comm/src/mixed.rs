//! Ranks of several hosts: shared memory with those of this one, TCP with the others.

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

/// Both carriers of a rank. While it waits for a rank of its host it keeps sending to those of others,
/// because somebody may wait for those bytes whom the awaited one waits for.
pub struct Mixed<N: Net> {
    shm: ShmCarrier,
    tcp: TcpCarrier<N>,
    /// By rank: those reached by shared memory.
    near: Vec<bool>,
}

impl<N: Net> Mixed<N> {
    pub(crate) fn new(shm: ShmCarrier, tcp: TcpCarrier<N>, near: Vec<bool>) -> Mixed<N> {
        Mixed { shm, tcp, near }
    }

    fn is_near(&self, peer: Rank) -> bool {
        self.near[peer.0 as usize]
    }

    fn carrier(&mut self, peer: Rank) -> &mut dyn Carrier {
        if self.is_near(peer) { &mut self.shm } else { &mut self.tcp }
    }
}

impl<N: Net> Carrier for Mixed<N> {
    fn rank(&self) -> Rank {
        self.shm.rank()
    }

    fn world(&self) -> u32 {
        self.shm.world()
    }

    /// Both carriers were made with the same one.
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
        match self.is_near(peer) {
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
        match self.is_near(peer) {
            true => self.shm.finish_with(peer, &mut self.tcp),
            false => self.tcp.finish(peer),
        }
    }
}
