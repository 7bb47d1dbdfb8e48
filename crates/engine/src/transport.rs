//! How a rank reaches the others: carriers, NCCL between GPUs, groups of the mesh, and how waits for others end.

use std::sync::{Mutex, MutexGuard};

use lockstep_comm::{Abort, Call, Comm, Group, NcclSpec, NcclWorld};
use lockstep_core::{Axis, Mesh, Rank};

use crate::error::EngineError;

/// How a rank reaches the others. Both connect the same ranks.
#[derive(Debug)]
pub struct Comms {
    /// For the collectives of a schedule, on the comm lane.
    pub lane: Comm,
    /// For calls between steps, on the caller's thread: they need not wait for what the comm lane still sends.
    pub host: Comm,
}

/// The same, as lanes share it.
pub(crate) struct Transport {
    lane: Option<Mutex<Comm>>,
    host: Option<Mutex<Comm>>,
    nccl: Option<NcclWorld>,
    /// End the waits for other ranks when this one fails.
    aborts: Vec<Abort>,
    groups: [Group; 3],
}

impl Transport {
    /// `nccl`: ranks compute on GPUs, and reach each other's by it.
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
        let (lane, host) = match comms {
            Some(Comms { lane, host }) => (Some(Mutex::new(lane)), Some(Mutex::new(host))),
            None => (None, None),
        };
        Ok(Transport { lane, host, nccl, aborts, groups })
    }

    /// The ranks along an axis, this one among them.
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

    /// For the calls between steps.
    pub(crate) fn host(&self) -> MutexGuard<'_, Comm> {
        lock(&self.host)
    }

    /// What carries between GPUs.
    pub(crate) fn nccl(&self) -> Option<&NcclWorld> {
        self.nccl.as_ref()
    }

    pub(crate) fn is_alone(&self) -> bool {
        self.lane.is_none()
    }

    /// Ends every wait for another rank.
    pub(crate) fn abort(&self, why: &str) {
        self.aborts.iter().for_each(|abort| abort.raise(why));
    }
}

fn lock(comm: &Option<Mutex<Comm>>) -> MutexGuard<'_, Comm> {
    let comm = comm.as_ref().expect("a world of several ranks has a carrier");
    comm.lock().unwrap_or_else(|e| e.into_inner())
}
