//! Gradients that live on the host: they leave the device as soon as backward and the ranks' sum are over,
//! so that it holds two units' gradients and not all of them.
//!
//! The order of summation is the plan's, wherever gradients are. `reduced`: a micro-batch's sum over ranks is
//! added to those before it, by the host's cores. `local`: backward itself adds to what earlier micro-batches
//! left, which is fetched back for it. That is possible where the host keeps whole gradients; where it keeps
//! a rank's share alone, the local sums of all units stay on the device until the window is over.

use lockstep_core::{ALIGN_ELEMS, DType};

use crate::buffer::{Access, BufferId, BufferKind, MemoryTier, ParamState};
use crate::builder::StepBuilder;
use crate::input::AccumulationOrder;
use crate::schedule::{CopyEnd, CopyPayload, Lane, OpId, OpKind, SpanPart};

/// Elements of the smallest piece that is added at a time, 2 MiB of f32, and pieces of a share at most.
const SMALLEST_PIECE: usize = 1 << 19;
const MOST_PIECES: usize = 8;

impl StepBuilder<'_> {
    /// Whether a unit's gradient leaves the device after `micro`.
    pub(super) fn offloads_after(&self, unit: u32, micro_batch: u32) -> bool {
        let window_over = micro_batch + 1 == self.input.num_micro_batches;
        let sums_leave = self.input.order == AccumulationOrder::Reduced
            || !self.input.is_sharded(self.model, ParamState::Grad);
        self.grads_offloaded(unit) && (window_over || sums_leave)
    }

    /// Moves this rank's share of a unit's gradient to the host; the last copy that reads it on the device.
    pub(super) fn offload_gradient(&mut self, unit: u32, micro_batch: u32) -> OpId {
        let share = self.input.resident(self.model, unit, ParamState::Grad).1;
        let (whole, home) = (self.grad_target(unit), self.state(unit, ParamState::Grad));
        let adds = micro_batch > 0 && self.input.order == AccumulationOrder::Reduced;
        let last = if adds {
            let len = share.div_ceil(MOST_PIECES).next_multiple_of(ALIGN_ELEMS).max(SMALLEST_PIECE);
            let pieces = (0..share).step_by(len).map(|start| (start, (start + len).min(share)));
            let copies = pieces
                .map(|(start, end)| self.offload_piece_to_add(whole, home, unit, micro_batch, (start, end)));
            copies.last().expect("a trained unit has a gradient")
        } else {
            let span = self.front_span(unit, share);
            let (from, to) = (CopyEnd::Buffer(whole), CopyEnd::Resident);
            let kind = OpKind::Copy { payload: CopyPayload::Grad, from, to, span };
            self.emit(kind, Lane::Copy, vec![(whole, Access::Read), (home, Access::Define)], &[])
        };
        if micro_batch + 1 == self.input.num_micro_batches {
            self.squares_on_host(unit);
        }
        last
    }

    /// One piece, through a staging buffer of the host, to what is there.
    fn offload_piece_to_add(
        &mut self,
        whole: BufferId,
        home: BufferId,
        unit: u32,
        micro_batch: u32,
        (start, end): (usize, usize),
    ) -> OpId {
        let what = BufferKind::GradStaging { turn: self.spills % 2 };
        self.spills += 1;
        let staging = self.table.get(what, MemoryTier::Host, end - start, DType::F32);
        let span = self.span(vec![SpanPart { unit, start, end }]);
        let accesses = vec![(whole, Access::Read), (staging, Access::Define)];
        let (from, to) = (CopyEnd::Buffer(whole), CopyEnd::Buffer(staging));
        let copy =
            self.emit(OpKind::Copy { payload: CopyPayload::Grad, from, to, span }, Lane::Copy, accesses, &[]);
        let accesses = vec![(staging, Access::Read), (home, Access::Update)];
        self.emit(OpKind::Add { span, micro_batch, from: staging }, Lane::Host, accesses, &[]);
        copy
    }

    /// Whether backward of `micro` adds to a gradient that has left.
    fn is_fetched_back(&self, unit: u32, micro_batch: u32) -> bool {
        micro_batch > 0
            && self.input.order == AccumulationOrder::Local
            && self.offloads_after(unit, micro_batch - 1)
    }

    /// Brings what earlier micro-batches left of some units' gradients back to the device, before backward
    /// adds to it.
    pub(super) fn fetch_gradients(&mut self, units: &[u32], micro_batch: u32) {
        for unit in units.iter().filter(|unit| self.is_fetched_back(**unit, micro_batch)).collect::<Vec<_>>()
        {
            let share = self.input.resident(self.model, *unit, ParamState::Grad).1;
            let (whole, home, span) =
                (self.grad_target(*unit), self.state(*unit, ParamState::Grad), self.front_span(*unit, share));
            // Behind the move of the unit before, on the same lane: with the one that backward is writing there
            // are two on the device.
            let accesses = vec![(home, Access::Read), (whole, Access::Define)];
            let (from, to) = (CopyEnd::Resident, CopyEnd::Buffer(whole));
            self.emit(OpKind::Copy { payload: CopyPayload::Grad, from, to, span }, Lane::Copy, accesses, &[]);
        }
    }

    /// As [`StepBuilder::bring_back`], for the unit whose backward follows that of `unit`: issued before the
    /// move of `unit` to the host, which waits for its backward, so that this one does not.
    pub(super) fn fetch_next_gradient(&mut self, unit: u32, micro_batch: u32) {
        let next = (0..unit).rev().find(|u| self.trained_elems(*u) > 0);
        // A tied table's gradient came back for the head.
        if let Some(next) = next.filter(|next| *next != self.embed_unit() || !self.tied()) {
            self.fetch_gradients(&[next], micro_batch);
        }
    }
}
