//! The communicator of one lane: the communicators of its groups, the memory it stages sums in, and its failures.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use lockstep_core::{Axis, Bytes, DType, Mesh, Rank};
use lockstep_device::{Memory, Pool, View};

use super::sys::{self, Count, Displacement, Handle, MpiTable};
use super::thread::{Completion, Limits, Operation, WaitError};
use super::world::{Failed, MpiWorld, SentHandle, accept};
use crate::call::Call;
use crate::carrier::MAX_OFFERS;
use crate::error::{Abort, CommError};
use crate::group::Group;
use crate::traffic::Traffic;

/// Pieces of sums that are under way at a time.
pub(super) const PIECES: usize = 4;
/// Elements of a piece, over all members. MPI takes about as much memory again while it sums.
pub(super) const PIECE_ELEMS: usize = 1 << 18;
/// Shares are divided into pieces at multiples of this.
const PIECE_ALIGN: usize = 256;

/// The collectives of one rank by MPI. The contract is that of [`crate::Comm`], except that sums have MPI's order.
pub(crate) struct MpiComm {
    pub(super) world: Arc<MpiWorld>,
    pub(super) everyone: Group,
    /// The communicator of all ranks, apart from those of other lanes.
    pub(super) base: SentHandle,
    groups: Vec<(Vec<Rank>, SentHandle)>,
    limits: Limits,
    /// Of operations that need no staging.
    pub(super) done: Arc<Completion>,
    /// One for each operation that may be under way.
    pub(super) layouts: Vec<Layout>,
    pub(super) pieces: [Arc<Completion>; PIECES],
    staging: Arc<Memory>,
    regions: Vec<Arc<Memory>>,
    pub(super) traffic: Traffic,
}

/// How many elements each member has of a buffer, and where they start. MPI reads it until the operation is complete.
pub(super) struct Layout {
    pub(super) counts: Vec<Count>,
    pub(super) starts: Vec<Displacement>,
}

impl Layout {
    /// Lays out the members' parts, of so many bytes, one behind the other. Returns their sum.
    pub(super) fn fill(&mut self, group: &Group, bytes_of: impl Fn(usize) -> usize) -> usize {
        let mut end = 0;
        for m in 0..group.len() {
            (self.counts[m], self.starts[m]) = (bytes_of(m) as Count, end as Displacement);
            end += bytes_of(m);
        }
        end
    }
}

impl MpiComm {
    pub(super) fn connect(world: Arc<MpiWorld>, regions: Vec<Arc<Memory>>) -> Result<MpiComm, CommError> {
        let base = world.run("setting up a communicator", |table| duplicate(table, sys::COMM_WORLD))?;
        let ranks = world.world as usize;
        let layout = || Layout { counts: vec![0; ranks], starts: vec![0; ranks] };
        let bytes = Bytes((PIECES * (piece_elems(ranks) * (ranks + 1)) * 4) as u64);
        let staging = Memory::allocate(bytes, &Pool::new(1))
            .map_err(|e| CommError::Setup { what: "MPI", why: e.to_string() })?;
        let staging = Arc::new(staging);
        let everyone = Group::along(&Mesh::on_one_node(1, world.world), Axis::World, world.rank);
        Ok(MpiComm {
            everyone,
            base,
            groups: Vec::new(),
            limits: world.limits.clone(),
            done: Arc::default(),
            layouts: (0..MAX_OFFERS).map(|_| layout()).collect(),
            pieces: Default::default(),
            staging,
            regions,
            traffic: Traffic::default(),
            world,
        })
    }

    pub(crate) fn rank(&self) -> Rank {
        self.world.rank
    }

    pub(crate) fn world(&self) -> u32 {
        self.world.world
    }

    pub(crate) fn abort(&self) -> Abort {
        self.limits.abort.clone()
    }

    pub(crate) fn set_deadline(&mut self, deadline: Duration) {
        self.limits.deadline = deadline;
    }

    pub(crate) fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    /// The library that sums.
    pub(crate) fn library(&self) -> &str {
        &self.world.mpi.version
    }

    /// Creates the communicator of a group, unless it exists. All members must call it for the same groups in the same
    /// order, and no other lane may do so at the same time.
    pub(crate) fn prepare(&mut self, group: &Group) -> Result<(), CommError> {
        let members = group.members();
        if members.len() == 1 || self.groups.iter().any(|(known, _)| known == members) {
            return Ok(());
        }
        let what = format!("setting up a communicator of {} ranks", members.len());
        let (base, host) = (self.base, self.world.host_comm);
        let comm = if members.len() == self.world.world as usize {
            base
        } else if members == self.world.host_members {
            self.world.run(&what, move |table| duplicate(table, { host }.0))?
        } else {
            let ranks: Vec<c_int> = members.iter().map(|rank| rank.0 as c_int).collect();
            self.world.run(&what, move |table| create(table, { base }.0, &ranks))?
        };
        self.groups.push((members.to_vec(), comm));
        Ok(())
    }

    pub(super) fn comm_of(&mut self, group: &Group) -> Result<Handle, CommError> {
        self.prepare(group)?;
        let found = self.groups.iter().find(|(members, _)| members == group.members());
        Ok(found.map_or(self.base.0, |(_, comm)| comm.0))
    }

    /// Elements of each member's share that one piece has at most.
    pub(super) fn piece_elems(&self, group: &Group) -> usize {
        piece_elems(group.len()).min(self.staging_elems() / (group.len() + 1))
    }

    fn staging_elems(&self) -> usize {
        self.staging.bytes().0 as usize / 4 / PIECES
    }

    /// Where a piece is packed, and where its sum arrives.
    pub(super) fn staged(&self, piece: usize, group: &Group) -> (View<'_>, View<'_>) {
        let all = self.staging.view(0, PIECES * self.staging_elems(), DType::F32);
        let mine = all.slice(piece * self.staging_elems(), self.staging_elems());
        let elems = self.piece_elems(group);
        (mine.slice(elems, elems * group.len()), mine.slice(0, elems))
    }

    pub(super) fn start(&self, comm: Handle, operation: Operation) {
        self.world.thread.start(comm, operation, &self.done);
    }

    pub(super) fn start_piece(&self, comm: Handle, operation: Operation, piece: usize) {
        self.world.thread.start(comm, operation, &self.pieces[piece]);
    }

    /// Waits until at most `open` of the operations without staging are not complete.
    pub(super) fn wait(&self, group: &Group, call: &Call, open: usize) -> Result<(), CommError> {
        self.wait_for(&self.done, group, call, open)
    }

    pub(super) fn wait_for(
        &self,
        done: &Completion,
        group: &Group,
        call: &Call,
        open: usize,
    ) -> Result<(), CommError> {
        self.world.thread.wait(done, open, &self.limits).map_err(|why| self.failed(group, call, why))
    }

    /// The error of a call. Afterwards nothing calls MPI any more.
    fn failed(&self, group: &Group, call: &Call, why: WaitError) -> CommError {
        let rank = self.rank();
        let call = format!("{call} among {} ranks", group.len());
        match why {
            WaitError::Aborted(aborted) => aborted,
            WaitError::TimedOut(waited) => CommError::MpiTimedOut { rank, call, waited },
            WaitError::GivenUp => {
                let text = "MPI is no longer used after an earlier failure".into();
                CommError::Mpi { rank, call, text, is_mismatch: false }
            }
            WaitError::Failed(status) => {
                let (text, is_mismatch) = self.world.mpi.meaning_of(status);
                CommError::Mpi { rank, call, text, is_mismatch }
            }
        }
    }
}

impl Drop for MpiComm {
    fn drop(&mut self) {
        // If operations are still under way, MPI knows their addresses, and the network card possibly too: keep that
        // memory until the process ends.
        if self.world.thread.has_given_up() || std::thread::panicking() {
            std::mem::forget((std::mem::take(&mut self.regions), std::mem::take(&mut self.layouts)));
            std::mem::forget(Arc::clone(&self.staging));
        }
    }
}

/// Elements of each member's share in a piece, if `members` share it.
fn piece_elems(members: usize) -> usize {
    (PIECE_ELEMS / members / PIECE_ALIGN).max(1) * PIECE_ALIGN
}

fn duplicate(table: &MpiTable, comm: Handle) -> Result<SentHandle, Failed> {
    let mut copy = sys::COMM_NULL;
    // SAFETY: the communicator is alive, and this is the thread of MPI.
    accept("MPI_Comm_dup", unsafe { (table.comm_dup)(comm, &mut copy) })?;
    returns_errors(table, copy)
}

/// A communicator of some of the ranks of `comm`. Only they call it.
fn create(table: &MpiTable, comm: Handle, ranks: &[c_int]) -> Result<SentHandle, Failed> {
    let (mut all, mut some, mut created) = (std::ptr::null_mut(), std::ptr::null_mut(), sys::COMM_NULL);
    // SAFETY: as above; MPI writes the handles of groups, which are released, and copies the ranks.
    unsafe {
        accept("MPI_Comm_group", (table.comm_group)(comm, &mut all))?;
        let included = (table.group_incl)(all, ranks.len() as c_int, ranks.as_ptr(), &mut some);
        accept("MPI_Group_incl", included)?;
        accept("MPI_Comm_create_group", (table.comm_create_group)(comm, some, 0, &mut created))?;
        accept("MPI_Group_free", (table.group_free)(&mut some))?;
        accept("MPI_Group_free", (table.group_free)(&mut all))?;
    }
    returns_errors(table, created)
}

/// Makes a communicator's errors statuses of calls; otherwise they end the process.
fn returns_errors(table: &MpiTable, comm: Handle) -> Result<SentHandle, Failed> {
    // SAFETY: as above.
    let set = unsafe { (table.comm_set_errhandler)(comm, sys::ERRORS_RETURN) };
    accept("MPI_Comm_set_errhandler", set)?;
    Ok(SentHandle(comm))
}
