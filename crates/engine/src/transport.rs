//! How a rank reaches the others: carriers, NCCL between GPUs, the groups of the mesh, and aborting waits.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use lockstep_comm::{Abort, Call, Comm, Group, NcclSpec, NcclWorld, Traffic, thread_world};
use lockstep_core::{Axis, Mesh, Rank};
use lockstep_plan::Lane;

use crate::error::EngineError;

/// What a communicator is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommUse {
    /// The collectives of a schedule on this lane.
    Lane(Lane),
    /// Collectives between steps, on the caller's thread: they do not wait for what a lane is still sending.
    BetweenSteps,
}

/// The communicators of a rank. All connect the same ranks.
#[derive(Debug)]
pub struct Comms {
    /// One for each of [`Lane::communicating`].
    lanes: Vec<Comm>,
    host: Comm,
}

impl Comms {
    /// Creates every communicator that an engine needs, in the same order on all ranks.
    pub fn connect<E>(mut connect: impl FnMut(CommUse) -> Result<Comm, E>) -> Result<Comms, E> {
        let lanes =
            Lane::communicating().map(|lane| connect(CommUse::Lane(lane))).collect::<Result<_, _>>()?;
        Ok(Comms { lanes, host: connect(CommUse::BetweenSteps)? })
    }

    /// The communicator of one lane, which must be one that communicates.
    pub fn into_comm_of(self, lane: Lane) -> Comm {
        let found = Lane::communicating().zip(self.lanes).find(|(one, _)| *one == lane);
        found.unwrap_or_else(|| panic!("the {lane} lane does not communicate")).1
    }

    /// The communicators of ranks that are threads of this process.
    pub fn between_threads(ranks: u32, deadline: Duration) -> Vec<Comms> {
        let mut uses: Vec<_> = (0..=Lane::communicating().count())
            .map(|_| thread_world(ranks, deadline).into_iter().map(|carrier| Comm::new(Box::new(carrier))))
            .collect();
        let mut next =
            || uses.iter_mut().map(|all| all.next().expect("one for each rank")).collect::<Vec<_>>();
        let of_rank = |_| {
            let mut lanes = next();
            let host = lanes.pop().expect("the last one is for collectives between steps");
            Comms { lanes, host }
        };
        (0..ranks).map(of_rank).collect()
    }
}

/// How a lane reaches other ranks.
struct LaneLink {
    lane: Lane,
    comm: Mutex<Comm>,
    /// Set if ranks compute on GPUs.
    nccl: Option<NcclWorld>,
}

/// The communicators as the lanes share them, with NCCL and the groups of the mesh.
pub(crate) struct Transport {
    /// Empty for a single rank.
    links: Vec<LaneLink>,
    host: Option<Mutex<Comm>>,
    /// Abort the waits for other ranks when this rank fails.
    aborts: Vec<Abort>,
    groups: [Group; 3],
    /// Of each communicator, and of the collectives that NCCL was asked for.
    traffic: Vec<Traffic>,
    nccl_traffic: Traffic,
}

impl Transport {
    /// `nccl` is set if ranks compute on GPUs.
    pub(crate) fn new(
        mesh: &Mesh,
        rank: Rank,
        comms: Option<Comms>,
        nccl: Option<NcclSpec>,
    ) -> Result<Transport, EngineError> {
        let here = comms.as_ref().map_or(1, |comms| comms.host.world());
        let world = mesh.size(Axis::World);
        assert_eq!(world, here, "the plan is for {world} ranks, the carrier for {here}");
        let groups = [Axis::Replicate, Axis::Shard, Axis::World].map(|axis| Group::along(mesh, axis, rank));
        let nccl_traffic = Traffic::default();
        let (mut links, mut aborts, mut traffic) = (Vec::new(), Vec::new(), vec![nccl_traffic.clone()]);
        let host = match comms {
            None => None,
            Some(Comms { lanes, mut host }) => {
                for comm in lanes.iter().chain([&host]) {
                    aborts.push(comm.abort());
                    traffic.push(comm.traffic().clone());
                }
                aborts.extend(nccl.iter().map(|spec| spec.abort.clone()));
                let mut connect = |spec: &NcclSpec| {
                    let failed = |cause| EngineError::Comm { op: "setting up NCCL".into(), cause };
                    NcclWorld::connect(spec, &groups, &mut host, Call::HOST).map_err(failed)
                };
                for (lane, comm) in Lane::communicating().zip(lanes) {
                    let nccl = nccl.as_ref().map(&mut connect).transpose()?;
                    links.push(LaneLink { lane, comm: Mutex::new(comm), nccl });
                }
                Some(Mutex::new(host))
            }
        };
        Ok(Transport { links, host, aborts, groups, traffic, nccl_traffic })
    }

    /// The ranks along an axis, including this one.
    pub(crate) fn group(&self, axis: Axis) -> &Group {
        match axis {
            Axis::Replicate => &self.groups[0],
            Axis::Shard => &self.groups[1],
            Axis::World => &self.groups[2],
        }
    }

    /// For the collectives of a schedule on `lane`.
    pub(crate) fn lane(&self, lane: Lane) -> MutexGuard<'_, Comm> {
        lock(&self.link(lane).expect("a lane that communicates has a communicator").comm)
    }

    /// NCCL for the collectives on `lane`, if ranks compute on GPUs.
    pub(crate) fn nccl(&self, lane: Lane) -> Option<&NcclWorld> {
        self.link(lane)?.nccl.as_ref()
    }

    /// Aborts NCCL's communicators if one has failed, and with them kernels that wait for other ranks.
    pub(crate) fn abort_failed_nccl(&self) {
        self.links.iter().filter_map(|link| link.nccl.as_ref()).for_each(|nccl| drop(nccl.check()));
    }

    fn link(&self, lane: Lane) -> Option<&LaneLink> {
        self.links.iter().find(|link| link.lane == lane)
    }

    /// For the collectives between steps.
    pub(crate) fn host(&self) -> MutexGuard<'_, Comm> {
        lock(self.host.as_ref().expect("a world of several ranks has a carrier"))
    }

    pub(crate) fn is_single_rank(&self) -> bool {
        self.host.is_none()
    }

    /// Bytes sent to and received from other ranks.
    pub(crate) fn traffic(&self) -> (u64, u64) {
        (self.traffic.iter().map(Traffic::sent).sum(), self.traffic.iter().map(Traffic::received).sum())
    }

    /// Counts a collective that NCCL runs: on a ring, each rank passes on all but its own share, `passes` times.
    pub(crate) fn count_nccl(&self, axis: Axis, bytes: usize, passes: u64) {
        let ranks = self.group(axis).len() as u64;
        let moved = passes * (bytes as u64 * (ranks - 1) / ranks);
        self.nccl_traffic.add_sent(moved);
        self.nccl_traffic.add_received(moved);
    }

    /// Aborts every wait for another rank.
    pub(crate) fn abort(&self, why: &str) {
        self.aborts.iter().for_each(|abort| abort.raise(why));
    }
}

fn lock(comm: &Mutex<Comm>) -> MutexGuard<'_, Comm> {
    comm.lock().unwrap_or_else(|e| e.into_inner())
}
