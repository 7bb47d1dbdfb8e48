//! How a rank reaches the others: carriers, NCCL between GPUs, the groups of the mesh, and aborting waits.

use std::sync::{Mutex, MutexGuard};

use lockstep_comm::{Abort, Call, Comm, Group, NcclSpec, NcclWorld, Traffic};
use lockstep_core::{Axis, Mesh, Rank};

use crate::error::EngineError;

/// The two communicators of a rank. Both connect the same ranks.
#[derive(Debug)]
pub struct Comms {
    /// For the collectives of a schedule, on the comm lane.
    pub lane: Comm,
    /// For collectives between steps, on the caller's thread: they do not wait for what the comm lane is still sending.
    pub host: Comm,
}

/// The communicators as the lanes share them, with NCCL and the groups of the mesh.
pub(crate) struct Transport {
    lane: Option<Mutex<Comm>>,
    host: Option<Mutex<Comm>>,
    nccl: Option<NcclWorld>,
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
        mut comms: Option<Comms>,
        nccl: Option<NcclSpec>,
    ) -> Result<Transport, EngineError> {
        let here = comms.as_ref().map_or(1, |comms| comms.lane.world());
        let world = mesh.size(Axis::World);
        assert_eq!(world, here, "the plan is for {world} ranks, the carrier for {here}");
        let groups = [Axis::Replicate, Axis::Shard, Axis::World].map(|axis| Group::along(mesh, axis, rank));
        let mut aborts: Vec<Abort> =
            comms.iter().flat_map(|comms| [comms.lane.abort(), comms.host.abort()]).collect();
        let nccl = match (nccl, &mut comms) {
            (Some(spec), Some(comms)) => {
                aborts.push(spec.abort.clone());
                let failed = |cause| EngineError::Comm { op: "setting up NCCL".into(), cause };
                Some(NcclWorld::connect(&spec, &groups, &mut comms.host, Call::HOST).map_err(failed)?)
            }
            _ => None,
        };
        if let Some(comms) = &mut comms {
            let failed = |cause| EngineError::Comm { op: "setting up communicators".into(), cause };
            groups.iter().try_for_each(|group| comms.lane.prepare(group)).map_err(failed)?;
        }
        let nccl_traffic = Traffic::default();
        let of_comms =
            comms.iter().flat_map(|comms| [comms.lane.traffic().clone(), comms.host.traffic().clone()]);
        let traffic = of_comms.chain([nccl_traffic.clone()]).collect();
        let (lane, host) = match comms {
            Some(Comms { lane, host }) => (Some(Mutex::new(lane)), Some(Mutex::new(host))),
            None => (None, None),
        };
        Ok(Transport { lane, host, nccl, aborts, groups, traffic, nccl_traffic })
    }

    /// The ranks along an axis, including this one.
    pub(crate) fn group(&self, axis: Axis) -> &Group {
        match axis {
            Axis::Replicate => &self.groups[0],
            Axis::Shard => &self.groups[1],
            Axis::World => &self.groups[2],
        }
    }

    /// For the collectives of a schedule.
    pub(crate) fn lane(&self) -> MutexGuard<'_, Comm> {
        lock(&self.lane)
    }

    /// For the collectives between steps.
    pub(crate) fn host(&self) -> MutexGuard<'_, Comm> {
        lock(&self.host)
    }

    /// NCCL, if ranks compute on GPUs.
    pub(crate) fn nccl(&self) -> Option<&NcclWorld> {
        self.nccl.as_ref()
    }

    /// What carries bytes between ranks, in words.
    pub(crate) fn note(&self) -> Option<String> {
        if self.is_single_rank() {
            return None;
        }
        let (lane, host) = (self.lane(), self.host());
        Some(match lane.library() {
            None => host.note().to_owned(),
            Some(_) => format!("{}, between steps {}", lane.note(), host.note()),
        })
    }

    /// The library in whose order the comm lane sums.
    pub(crate) fn summing_library(&self) -> Option<String> {
        if self.is_single_rank() { None } else { self.lane().library().map(str::to_owned) }
    }

    pub(crate) fn is_single_rank(&self) -> bool {
        self.lane.is_none()
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

fn lock(comm: &Option<Mutex<Comm>>) -> MutexGuard<'_, Comm> {
    let comm = comm.as_ref().expect("a world of several ranks has a carrier");
    comm.lock().unwrap_or_else(|e| e.into_inner())
}
