//! All communicators of a rank: how members find each other, and how a rank waits for a stream.

use std::time::Duration;

use lockstep_device::cuda::{CudaQueue, Gpu};

use super::communicator::{NcclComm, PollWait};
use super::library::Nccl;
use super::sys::{UNIQUE_ID_BYTES, UniqueId};
use crate::comm::Comm;
use crate::error::{Abort, CommError};
use crate::group::Group;

/// What [`NcclWorld::connect`] needs to create communicators.
#[derive(Debug)]
pub struct NcclSpec {
    pub nccl: &'static Nccl,
    pub gpu: &'static Gpu,
    /// The limit for every wait.
    pub deadline: Duration,
    pub abort: Abort,
}

/// The communicators of a rank, one for each of its groups.
#[derive(Debug)]
pub struct NcclWorld {
    comms: Vec<NcclComm>,
}

impl NcclWorld {
    /// Creates a communicator for every group; groups with the same members share one. All ranks must call it with
    /// groups along the same axes, in the same order. Members exchange NCCL's unique ids through `carrier`.
    pub fn connect(
        spec: &NcclSpec,
        groups: &[Group],
        carrier: &mut Comm,
        tag: u64,
    ) -> Result<NcclWorld, CommError> {
        assert!(!groups.is_empty(), "a rank has at least one group");
        let mut world = NcclWorld { comms: Vec::new() };
        for group in groups {
            if world.find(group).is_none() {
                let id = match group.len() {
                    1 => None,
                    _ => Some(agree_on_id(spec.nccl, group, carrier, tag)?),
                };
                let waits = (spec.deadline, spec.abort.clone());
                world.comms.push(NcclComm::meet((spec.nccl, spec.gpu), group, id, waits)?);
            }
        }
        Ok(world)
    }

    /// The communicator of a group that was passed to [`NcclWorld::connect`].
    pub fn of(&self, group: &Group) -> &NcclComm {
        self.find(group).expect("the group was passed to `connect`")
    }

    fn find(&self, group: &Group) -> Option<&NcclComm> {
        self.comms.iter().find(|comm| comm.group().members() == group.members())
    }

    /// Sets the limit for a single wait, starting with the next call.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.comms.iter_mut().for_each(|comm| comm.set_deadline(deadline));
    }

    /// Fails if a communicator has failed or the run was aborted. Does not wait.
    pub fn check(&self) -> Result<(), CommError> {
        check(&self.comms)
    }

    /// Waits until the stream has completed everything issued to it. `what` names the work in error messages. An
    /// error ends every communicator.
    pub fn wait(&self, queue: &CudaQueue, what: &str) -> Result<(), CommError> {
        wait(&self.comms, queue, what)
    }
}

impl Drop for NcclWorld {
    fn drop(&mut self) {
        // If one communicator has failed, the others cannot be finalized, so abort them.
        if let Some(why) = self.comms.iter().find_map(NcclComm::failure) {
            self.comms.iter().for_each(|comm| comm.end(&why));
        }
    }
}

fn check(comms: &[NcclComm]) -> Result<(), CommError> {
    comms.iter().try_for_each(NcclComm::check).inspect_err(|why| comms.iter().for_each(|comm| comm.end(why)))
}

/// Waits for a stream, and shuts all communicators down if one of them fails.
pub(super) fn wait(comms: &[NcclComm], queue: &CudaQueue, what: &str) -> Result<(), CommError> {
    let first = comms.first().expect("a rank has at least one group");
    let mut wait = PollWait::new(first.deadline());
    loop {
        // Check NCCL's status first: a stream whose collective was aborted becomes idle too.
        check(comms)?;
        let why = match queue.is_idle() {
            Ok(true) => return check(comms),
            Ok(false) => match wait.pause() {
                Ok(()) => continue,
                Err(waited) => first.end_stalled(what, waited),
            },
            Err(cause) => first.end_gpu_failed(what, cause),
        };
        comms.iter().for_each(|comm| comm.end(&why));
        return Err(why);
    }
}

// ---- how members agree on a unique id ------------------------------------------------------------------------

/// What members exchange before they create a communicator: the version of NCCL and, from the first member, the
/// unique id or the reason why there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NcclSetup {
    version: (u32, u32, u32),
    unique_id: Result<Option<[u8; UNIQUE_ID_BYTES]>, String>,
}

const VERSION_ONLY: u8 = 0;
const WITH_ID: u8 = 1;
const ID_FAILED: u8 = 2;

impl NcclSetup {
    fn encode(&self) -> Vec<u8> {
        let (major, minor, patch) = self.version;
        let mut bytes: Vec<u8> = [major, minor, patch].iter().flat_map(|n| n.to_le_bytes()).collect();
        match &self.unique_id {
            Ok(None) => bytes.push(VERSION_ONLY),
            Ok(Some(id)) => {
                bytes.push(WITH_ID);
                bytes.extend(id);
            }
            Err(why) => {
                bytes.push(ID_FAILED);
                bytes.extend(why.bytes());
            }
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<NcclSetup> {
        let (version, rest) = bytes.split_at_checked(12)?;
        let number = |at: usize| Some(u32::from_le_bytes(version[at..at + 4].try_into().ok()?));
        let (kind, rest) = rest.split_first()?;
        let unique_id = match *kind {
            VERSION_ONLY => Ok(None),
            WITH_ID => Ok(Some(rest.try_into().ok()?)),
            ID_FAILED => Err(String::from_utf8_lossy(rest).into_owned()),
            _ => return None,
        };
        Some(NcclSetup { version: (number(0)?, number(4)?, number(8)?), unique_id })
    }
}

/// The first member creates the unique id, and all members receive it.
fn agree_on_id(nccl: &Nccl, group: &Group, carrier: &mut Comm, tag: u64) -> Result<UniqueId, CommError> {
    let unique_id = if group.me() == 0 { nccl.unique_id().map(|id| Some(id.0)) } else { Ok(None) };
    let mine = NcclSetup { version: nccl.version, unique_id };
    let mut all: Vec<Vec<u8>> = vec![Vec::new(); group.len()];
    carrier.all_gather_bytes(group, tag, &mine.encode(), &mut |m, bytes| all[m].extend(bytes))?;
    let all: Vec<Option<NcclSetup>> = all.iter().map(|bytes| NcclSetup::decode(bytes)).collect();
    id_from(group, nccl.version, &all).map(UniqueId).map_err(|why| CommError::Setup { what: "NCCL", why })
}

/// The unique id, or why the members cannot create a communicator.
fn id_from(
    group: &Group,
    mine: (u32, u32, u32),
    all: &[Option<NcclSetup>],
) -> Result<[u8; UNIQUE_ID_BYTES], String> {
    let rank = |m: usize| group.members()[m];
    let me = rank(group.me());
    for (m, setup) in all.iter().enumerate() {
        let Some(setup) = setup else {
            return Err(format!("{me} cannot decode what {} sent; both must run the same binary", rank(m)));
        };
        if setup.version != mine {
            let text = |(major, minor, patch)| format!("{major}.{minor}.{patch}");
            let (theirs, mine) = (text(setup.version), text(mine));
            return Err(format!(
                "{} has version {theirs}, but {me} has {mine}; all ranks need the same version",
                rank(m)
            ));
        }
    }
    match all.first().and_then(Option::as_ref).map(|setup| &setup.unique_id) {
        Some(Ok(Some(id))) => Ok(*id),
        Some(Err(why)) => Err(format!("{} could not create a unique id: {why}", rank(0))),
        _ => Err(format!("{} did not send a unique id", rank(0))),
    }
}

#[cfg(test)]
mod tests {
    use lockstep_core::{Axis, Mesh, Rank};

    use super::*;

    #[test]
    fn members_agree_on_an_id_or_the_error_says_why_not() {
        let group = Group::along(&Mesh::on_one_node(1, 2), Axis::World, Rank(1));
        let version = (2, 28, 3);
        let setup = |version, unique_id| Some(NcclSetup { version, unique_id });
        let id = [7; UNIQUE_ID_BYTES];
        let second = setup(version, Ok(None));
        let all = [setup(version, Ok(Some(id))), second.clone()];
        assert_eq!(id_from(&group, version, &all), Ok(id));
        for one in all.iter().flatten() {
            assert_eq!(NcclSetup::decode(&one.encode()).as_ref(), Some(one));
            assert!((0..12).all(|len| NcclSetup::decode(&one.encode()[..len]).is_none()));
        }
        let why = |first: Option<NcclSetup>| id_from(&group, version, &[first, second.clone()]).unwrap_err();
        assert_eq!(why(None), "rank 1 cannot decode what rank 0 sent; both must run the same binary");
        assert_eq!(
            why(setup((2, 27, 7), Ok(Some(id)))),
            "rank 0 has version 2.27.7, but rank 1 has 2.28.3; all ranks need the same version"
        );
        let failed = setup(version, Err("no network".into()));
        assert_eq!(failed, NcclSetup::decode(&failed.as_ref().unwrap().encode()));
        assert_eq!(why(failed), "rank 0 could not create a unique id: no network");
        assert_eq!(why(setup(version, Ok(None))), "rank 0 did not send a unique id");
    }
}
