//! All communicators of a rank: how their members find each other, and how a rank waits for a stream.

use std::time::Duration;

use lockstep_device::cuda::{CudaQueue, Gpu};

use super::communicator::{NcclComm, Wait};
use super::library::Nccl;
use super::sys::{UNIQUE_ID_BYTES, UniqueId};
use crate::comm::Comm;
use crate::error::{Abort, CommError};
use crate::group::Group;

/// What communicators are made with.
#[derive(Debug)]
pub struct NcclSpec {
    pub nccl: &'static Nccl,
    pub gpu: &'static Gpu,
    /// For every wait.
    pub deadline: Duration,
    pub abort: Abort,
}

/// The communicators of a rank, one for each of its groups.
#[derive(Debug)]
pub struct NcclWorld {
    comms: Vec<NcclComm>,
}

impl NcclWorld {
    /// Makes a communicator for every group; groups with the same members have one in common. All ranks call it with
    /// groups along the same axes, in the same order. Members tell each other where to meet over `carrier`.
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

    /// The communicator of a group that it was connected for.
    pub fn of(&self, group: &Group) -> &NcclComm {
        self.find(group).expect("a group that communicators were made for")
    }

    fn find(&self, group: &Group) -> Option<&NcclComm> {
        self.comms.iter().find(|comm| comm.group().members() == group.members())
    }

    /// How long one wait may last, from the next call on.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.comms.iter_mut().for_each(|comm| comm.set_deadline(deadline));
    }

    /// Whether all communicators are well. Does not wait.
    pub fn check(&self) -> Result<(), CommError> {
        check(&self.comms)
    }

    /// Waits until the stream has done all that was issued to it. `what` names it in an error, which is the end of
    /// every communicator.
    pub fn wait(&self, queue: &CudaQueue, what: &str) -> Result<(), CommError> {
        wait(&self.comms, queue, what)
    }
}

impl Drop for NcclWorld {
    fn drop(&mut self) {
        // Where one has failed, the others have nobody to take leave of.
        if let Some(why) = self.comms.iter().find_map(NcclComm::failure) {
            self.comms.iter().for_each(|comm| comm.end(&why));
        }
    }
}

fn check(comms: &[NcclComm]) -> Result<(), CommError> {
    comms.iter().try_for_each(NcclComm::check).inspect_err(|why| comms.iter().for_each(|comm| comm.end(why)))
}

/// Waits for a stream while all `comms` are well, and takes all down if one is not.
pub(super) fn wait(comms: &[NcclComm], queue: &CudaQueue, what: &str) -> Result<(), CommError> {
    let first = comms.first().expect("a rank has at least one group");
    let mut wait = Wait::new(first.deadline());
    loop {
        // What NCCL says comes first: a stream whose collective was given up becomes idle too.
        check(comms)?;
        let why = match queue.is_idle() {
            Ok(true) => return check(comms),
            Ok(false) => match wait.a_moment() {
                Ok(()) => continue,
                Err(waited) => first.end_stalled(what, waited),
            },
            Err(cause) => first.end_gpu_failed(what, cause),
        };
        comms.iter().for_each(|comm| comm.end(&why));
        return Err(why);
    }
}

// ---- where members meet -------------------------------------------------------------------------------------

/// What a member tells the others: its version of NCCL, and if it is the first, where to meet or why there is no place.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Told {
    version: (u32, u32, u32),
    place: Result<Option<[u8; UNIQUE_ID_BYTES]>, String>,
}

const NOTHING: u8 = 0;
const PLACE: u8 = 1;
const NO_PLACE: u8 = 2;

impl Told {
    fn encode(&self) -> Vec<u8> {
        let (major, minor, patch) = self.version;
        let mut bytes: Vec<u8> = [major, minor, patch].iter().flat_map(|n| n.to_le_bytes()).collect();
        match &self.place {
            Ok(None) => bytes.push(NOTHING),
            Ok(Some(id)) => {
                bytes.push(PLACE);
                bytes.extend(id);
            }
            Err(why) => {
                bytes.push(NO_PLACE);
                bytes.extend(why.bytes());
            }
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Told> {
        let (version, rest) = bytes.split_at_checked(12)?;
        let number = |at: usize| Some(u32::from_le_bytes(version[at..at + 4].try_into().ok()?));
        let (kind, rest) = rest.split_first()?;
        let place = match *kind {
            NOTHING => Ok(None),
            PLACE => Ok(Some(rest.try_into().ok()?)),
            NO_PLACE => Err(String::from_utf8_lossy(rest).into_owned()),
            _ => return None,
        };
        Some(Told { version: (number(0)?, number(4)?, number(8)?), place })
    }
}

/// The first member makes the identifier, and all hear of it.
fn agree_on_id(nccl: &Nccl, group: &Group, carrier: &mut Comm, tag: u64) -> Result<UniqueId, CommError> {
    let place = if group.me() == 0 { nccl.unique_id().map(|id| Some(id.0)) } else { Ok(None) };
    let mine = Told { version: nccl.version, place };
    let mut all: Vec<Vec<u8>> = vec![Vec::new(); group.len()];
    carrier.all_gather_bytes(group, tag, &mine.encode(), &mut |m, bytes| all[m].extend(bytes))?;
    let all: Vec<Option<Told>> = all.iter().map(|bytes| Told::decode(bytes)).collect();
    id_from(group, nccl.version, &all).map(UniqueId).map_err(|why| CommError::Setup { what: "NCCL", why })
}

/// The identifier, unless members do not fit together.
fn id_from(
    group: &Group,
    mine: (u32, u32, u32),
    all: &[Option<Told>],
) -> Result<[u8; UNIQUE_ID_BYTES], String> {
    let rank = |m: usize| group.members()[m];
    let me = rank(group.me());
    for (m, told) in all.iter().enumerate() {
        let Some(told) = told else { return Err(format!("{me} does not understand {}", rank(m))) };
        if told.version != mine {
            let text = |(major, minor, patch)| format!("{major}.{minor}.{patch}");
            let (theirs, mine) = (text(told.version), text(mine));
            return Err(format!("{} has version {theirs} and {me} {mine}; all need the same", rank(m)));
        }
    }
    match all.first().and_then(Option::as_ref).map(|told| &told.place) {
        Some(Ok(Some(id))) => Ok(*id),
        Some(Err(why)) => Err(format!("{} cannot make a place to meet: {why}", rank(0))),
        _ => Err(format!("{} has not said where to meet", rank(0))),
    }
}

#[cfg(test)]
mod tests {
    use lockstep_core::{Axis, Mesh, Rank};

    use super::*;

    #[test]
    fn members_agree_or_say_why_not() {
        let group = Group::along(&Mesh::on_one_node(1, 2), Axis::World, Rank(1));
        let version = (2, 28, 3);
        let told = |version, place| Some(Told { version, place });
        let id = [7; UNIQUE_ID_BYTES];
        let second = told(version, Ok(None));
        let all = [told(version, Ok(Some(id))), second.clone()];
        assert_eq!(id_from(&group, version, &all), Ok(id));
        for one in all.iter().flatten() {
            assert_eq!(Told::decode(&one.encode()).as_ref(), Some(one));
            assert!((0..12).all(|len| Told::decode(&one.encode()[..len]).is_none()));
        }
        let why = |first: Option<Told>| id_from(&group, version, &[first, second.clone()]).unwrap_err();
        assert_eq!(why(None), "rank 1 does not understand rank 0");
        assert_eq!(
            why(told((2, 27, 7), Ok(Some(id)))),
            "rank 0 has version 2.27.7 and rank 1 2.28.3; all need the same"
        );
        let failed = told(version, Err("no network".into()));
        assert_eq!(failed, Told::decode(&failed.as_ref().unwrap().encode()));
        assert_eq!(why(failed), "rank 0 cannot make a place to meet: no network");
        assert_eq!(why(told(version, Ok(None))), "rank 0 has not said where to meet");
    }
}
