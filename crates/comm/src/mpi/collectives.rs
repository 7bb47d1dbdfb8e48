//! The collectives. Each starts its operations and waits until they are complete.

use std::ffi::{c_int, c_void};

use lockstep_core::{DType, Rank};
use lockstep_device::View;

use super::communicator::{Layout, MpiComm, PIECE_ELEMS, PIECES};
use super::sys::{Count, Handle};
use super::thread::Operation;
use crate::call::{Call, CallKind};
use crate::carrier::MAX_OFFERS;
use crate::comm::{GatherPart, member_idx, others, share};
use crate::error::CommError;
use crate::group::Group;

/// Tags of messages, which keep gathers apart from messages between two ranks.
const GATHER: c_int = 1;
const MESSAGE: c_int = 2;

fn address(view: &View<'_>) -> *mut c_void {
    assert!(!view.on_gpu(), "MPI moves host memory only");
    view.as_ptr::<u8>().cast()
}

impl MpiComm {
    pub(crate) fn barrier(&mut self, group: &Group, tag: u64) -> Result<(), CommError> {
        if group.len() == 1 {
            return Ok(());
        }
        let call = Call::new(CallKind::Barrier, group, tag, [].into_iter());
        let comm = self.comm_of(group)?;
        self.start(comm, Operation::Barrier);
        self.wait(group, &call, 0)
    }

    pub(crate) fn all_gather(
        &mut self,
        group: &Group,
        tag: u64,
        parts: &[GatherPart<'_>],
    ) -> Result<(), CommError> {
        // MPI needs shares that lie in place on all ranks or on none.
        for part in parts {
            let own = share(group, part.whole, group.me());
            if own.as_ptr::<u8>() != part.own.as_ptr::<u8>() {
                own.copy_from_host(&part.own);
            }
        }
        if group.len() == 1 {
            return Ok(());
        }
        let comm = self.comm_of(group)?;
        for parts in parts.chunks(MAX_OFFERS) {
            let call = Call::new(CallKind::AllGather, group, tag, parts.iter().map(|part| part.whole));
            for (i, part) in parts.iter().enumerate().filter(|(_, part)| !part.whole.is_empty()) {
                let whole = part.whole;
                let total = self.layouts[i].fill(group, |m| share(group, whole, m).bytes());
                assert_eq!(total, whole.bytes(), "shares fill the whole");
                let Layout { counts, starts } = &self.layouts[i];
                let (counts, starts) = (counts.as_ptr(), starts.as_ptr());
                self.start(comm, Operation::AllGather { to: address(&whole), counts, starts });
                let own = part.own.bytes() as u64;
                self.traffic.add_sent(own * (group.len() as u64 - 1));
                self.traffic.add_received(whole.bytes() as u64 - own);
            }
            self.wait(group, &call, 0)?;
        }
        Ok(())
    }

    pub(crate) fn broadcast(
        &mut self,
        group: &Group,
        tag: u64,
        root: Rank,
        parts: &[View<'_>],
    ) -> Result<(), CommError> {
        let from = member_idx(group, root);
        if group.len() == 1 {
            return Ok(());
        }
        let comm = self.comm_of(group)?;
        for parts in parts.chunks(MAX_OFFERS) {
            let call = Call::new(CallKind::Broadcast, group, tag, parts.iter().copied());
            for part in parts.iter().filter(|part| !part.is_empty()) {
                let (data, bytes) = (address(part), part.bytes() as Count);
                self.start(comm, Operation::Broadcast { data, bytes, root: from as c_int });
                match from == group.me() {
                    true => self.traffic.add_sent(bytes as u64),
                    false => self.traffic.add_received(bytes as u64),
                }
            }
            self.wait(group, &call, 0)?;
        }
        Ok(())
    }

    pub(crate) fn gather(
        &mut self,
        group: &Group,
        tag: u64,
        root: Rank,
        mine: View<'_>,
        into: &[View<'_>],
    ) -> Result<(), CommError> {
        let to = member_idx(group, root);
        let call = Call::new(CallKind::Gather, group, tag, [mine].into_iter());
        if group.me() != to {
            let comm = self.comm_of(group)?;
            self.start_send(comm, &mine, (to, GATHER));
            return self.wait(group, &call, 0);
        }
        assert_eq!(into.len(), group.len(), "the root needs one destination for each member");
        if into[to].as_ptr::<u8>() != mine.as_ptr::<u8>() {
            into[to].copy_from_host(&mine);
        }
        if group.len() == 1 {
            return Ok(());
        }
        let comm = self.comm_of(group)?;
        for (m, _) in others(group) {
            self.start_receive(comm, &into[m], (m, GATHER));
        }
        self.wait(group, &call, 0)
    }

    pub(crate) fn send(&mut self, to: Rank, tag: u64, parts: &[View<'_>]) -> Result<(), CommError> {
        let call = Call::new(CallKind::Message, &self.everyone, tag, parts.iter().copied());
        for part in parts {
            self.start_send(self.base.0, part, (to.0 as usize, MESSAGE));
        }
        self.wait(&self.everyone, &call, 0)
    }

    pub(crate) fn recv(&mut self, from: Rank, tag: u64, parts: &[View<'_>]) -> Result<(), CommError> {
        let call = Call::new(CallKind::Message, &self.everyone, tag, parts.iter().copied());
        for part in parts {
            self.start_receive(self.base.0, part, (from.0 as usize, MESSAGE));
        }
        self.wait(&self.everyone, &call, 0)
    }

    fn start_send(&self, comm: Handle, part: &View<'_>, (to, tag): (usize, c_int)) {
        let bytes = part.bytes() as Count;
        self.start(comm, Operation::Send { data: address(part), bytes, to: to as c_int, tag });
        self.traffic.add_sent(bytes as u64);
    }

    fn start_receive(&self, comm: Handle, part: &View<'_>, (from, tag): (usize, c_int)) {
        let bytes = part.bytes() as Count;
        self.start(comm, Operation::Receive { data: address(part), bytes, from: from as c_int, tag });
        self.traffic.add_received(bytes as u64);
    }

    // ---- sums ---------------------------------------------------------------------------------------------

    pub(crate) fn reduce_scatter(
        &mut self,
        group: &Group,
        tag: u64,
        parts: &[View<'_>],
    ) -> Result<(), CommError> {
        assert!(parts.iter().all(|part| part.dtype() == DType::F32), "reduce-scatter sums f32 parts only");
        if group.len() == 1 {
            return Ok(());
        }
        let comm = self.comm_of(group)?;
        let call = Call::new(CallKind::ReduceScatter, group, tag, parts.iter().copied());
        // Where the sum of each piece that is under way belongs.
        let mut into: [Option<View<'_>>; PIECES] = [None; PIECES];
        let mut num_pieces = 0;
        for part in parts {
            let step = self.piece_elems(group);
            for start in (0..group.share(part.len(), 0).elems()).step_by(step) {
                let piece = num_pieces % PIECES;
                num_pieces += 1;
                self.finish_piece(piece, into[piece].take(), (group, &call))?;
                into[piece] = Some(self.start_sum(comm, piece, *part, start, group));
            }
            let moved = part.bytes() as u64 * (group.len() as u64 - 1) / group.len() as u64;
            self.traffic.add_sent(moved);
            self.traffic.add_received(moved);
        }
        (0..PIECES).try_for_each(|piece| self.finish_piece(piece, into[piece].take(), (group, &call)))
    }

    /// Starts the sum of a piece: the elements of every share from `start` on. Returns where this rank's sum belongs.
    fn start_sum<'v>(
        &mut self,
        comm: Handle,
        piece: usize,
        part: View<'v>,
        start: usize,
        group: &Group,
    ) -> View<'v> {
        let step = self.piece_elems(group);
        let of_member = |m: usize| {
            let share = share(group, part, m);
            let start = start.min(share.len());
            share.slice(start, step.min(share.len() - start))
        };
        for m in 0..group.len() {
            self.layouts[piece].counts[m] = of_member(m).len() as Count;
        }
        let (packed, sum) = self.staged(piece, group);
        // MPI needs the contributions one behind the other, as whole shares are.
        let from = if group.share(part.len(), 0).elems() <= step {
            address(&part)
        } else {
            let mut end = 0;
            for m in 0..group.len() {
                let contribution = of_member(m);
                packed.slice(end, contribution.len()).copy_from_host(&contribution);
                end += contribution.len();
            }
            address(&packed)
        };
        let counts = self.layouts[piece].counts.as_ptr();
        self.start_piece(comm, Operation::ReduceScatter { from, to: address(&sum), counts }, piece);
        of_member(group.me())
    }

    /// Waits for the sum of a piece, if it is under way, and copies it to where it belongs.
    fn finish_piece(
        &self,
        piece: usize,
        into: Option<View<'_>>,
        (group, call): (&Group, &Call),
    ) -> Result<(), CommError> {
        let Some(into) = into else { return Ok(()) };
        self.wait_for(&self.pieces[piece], group, call, 0)?;
        into.copy_from_host(&self.staged(piece, group).1.first(into.len()));
        Ok(())
    }

    pub(crate) fn all_reduce(
        &mut self,
        group: &Group,
        tag: u64,
        parts: &[View<'_>],
    ) -> Result<(), CommError> {
        assert!(parts.iter().all(|part| part.dtype() == DType::F32), "all-reduce sums f32 parts only");
        if group.len() == 1 {
            return Ok(());
        }
        let comm = self.comm_of(group)?;
        let call = Call::new(CallKind::AllReduce, group, tag, parts.iter().copied());
        for part in parts {
            for start in (0..part.len()).step_by(PIECE_ELEMS) {
                let piece = part.slice(start, PIECE_ELEMS.min(part.len() - start));
                self.wait(group, &call, PIECES - 1)?;
                self.start(comm, Operation::AllReduce { data: address(&piece), elems: piece.len() as Count });
            }
            let moved = 2 * part.bytes() as u64 * (group.len() as u64 - 1) / group.len() as u64;
            self.traffic.add_sent(moved);
            self.traffic.add_received(moved);
        }
        self.wait(group, &call, 0)
    }

    // ---- byte strings -------------------------------------------------------------------------------------

    pub(crate) fn all_gather_bytes(
        &mut self,
        group: &Group,
        tag: u64,
        mine: &[u8],
        each: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), CommError> {
        if group.len() == 1 {
            each(0, mine);
            return Ok(());
        }
        let me = group.me();
        let mut lengths = vec![0u64; group.len()];
        lengths[me] = mine.len() as u64;
        let lengths = self.gather_into(group, tag, lengths, |_| size_of::<u64>())?;
        let length = |m: usize| lengths[m] as usize;
        let start = |m: usize| (0..m).map(length).sum::<usize>();
        let mut all = vec![0u8; start(group.len())];
        all[start(me)..][..mine.len()].copy_from_slice(mine);
        let all = self.gather_into(group, tag, all, length)?;
        (0..group.len()).for_each(|m| each(m, &all[start(m)..][..length(m)]));
        Ok(())
    }

    /// Gathers into a buffer that holds this rank's part in its place.
    fn gather_into<T>(
        &mut self,
        group: &Group,
        tag: u64,
        mut buffer: Vec<T>,
        bytes_of: impl Fn(usize) -> usize,
    ) -> Result<Vec<T>, CommError> {
        let call = Call::new(CallKind::Bytes, group, tag, [].into_iter());
        let comm = self.comm_of(group)?;
        let total = self.layouts[0].fill(group, bytes_of);
        assert_eq!(total, size_of_val(&buffer[..]), "the members' parts fill the buffer");
        let Layout { counts, starts } = &self.layouts[0];
        let (counts, starts) = (counts.as_ptr(), starts.as_ptr());
        self.start(comm, Operation::AllGather { to: buffer.as_mut_ptr().cast(), counts, starts });
        match self.wait(group, &call, 0) {
            Ok(()) => Ok(buffer),
            Err(error) => {
                // MPI still knows its address.
                std::mem::forget(buffer);
                Err(error)
            }
        }
    }
}
