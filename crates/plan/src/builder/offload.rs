//! Offload of gradients to the host. Each is offloaded as soon as backward and the reduction have finished, so that the
//! device holds the gradients of two units and not of all.
//!
//! The order of summation does not depend on where gradients are. `reduced`: the host's cores add a micro-batch's
//! reduced gradient to the earlier ones. `local`: backward adds to the sum of the earlier micro-batches, which is
//! fetched back for it. That works only if the host holds whole gradients; if it holds one rank's shard, the local
//! sums of all units stay on the device until the end of the accumulation window.

use lockstep_core::{ALIGN_ELEMS, DType};

use crate::buffer::{Access, BufferId, BufferKind, MemoryTier, ParamState};
use crate::builder::StepBuilder;
use crate::input::AccumulationOrder;
use crate::lane::Lane;
use crate::schedule::{CopyEnd, CopyPayload, OpId, OpKind, SpanPart};

/// A shard is added in pieces of at least 2 MiB of f32, and in at most `MAX_PIECES` pieces.
const MIN_PIECE_ELEMS: usize = 1 << 19;
const MAX_PIECES: usize = 8;

impl StepBuilder<'_> {
    /// Whether a unit's gradient is offloaded after `micro_batch`.
    pub(super) fn offloads_after(&self, unit: u32, micro_batch: u32) -> bool {
        let is_last = micro_batch + 1 == self.input.num_micro_batches;
        let offloads_each = self.input.order == AccumulationOrder::Reduced
            || !self.input.is_sharded(self.model, ParamState::Grad);
        self.grads_offloaded(unit) && (is_last || offloads_each)
    }

    /// Copies this rank's shard of a unit's gradient to the host. Returns the last copy that reads it on the device.
    pub(super) fn offload_gradient(&mut self, unit: u32, micro_batch: u32) -> OpId {
        let shard_elems = self.input.resident(self.model, unit, ParamState::Grad).1;
        let (whole, resident) = (self.grad_target(unit), self.state(unit, ParamState::Grad));
        let adds = micro_batch > 0 && self.input.order == AccumulationOrder::Reduced;
        let last = if adds {
            let len = shard_elems.div_ceil(MAX_PIECES).next_multiple_of(ALIGN_ELEMS).max(MIN_PIECE_ELEMS);
            let pieces = (0..shard_elems).step_by(len).map(|start| (start, (start + len).min(shard_elems)));
            let copies = pieces.map(|(start, end)| {
                self.offload_piece_to_add(whole, resident, unit, micro_batch, (start, end))
            });
            copies.last().expect("a trained unit has a gradient")
        } else {
            let span = self.prefix_span(unit, shard_elems);
            let (from, payload) = match self.input.rounds_grads() {
                true => (self.round_gradient(unit, whole, shard_elems), CopyPayload::RoundedGrad),
                false => (whole, CopyPayload::Grad),
            };
            let kind = OpKind::Copy { payload, from: CopyEnd::Buffer(from), to: CopyEnd::Resident, span };
            self.emit(kind, Lane::Copy, vec![(from, Access::Read), (resident, Access::Define)], &[])
        };
        if micro_batch + 1 == self.input.num_micro_batches {
            self.squares_on_host(unit);
        }
        last
    }

    /// Rounds this rank's shard of a gradient that is complete. Returns the buffer with the result.
    fn round_gradient(&mut self, unit: u32, whole: BufferId, shard_elems: usize) -> BufferId {
        let kind = BufferKind::RoundedGrad { model: self.model, unit };
        let into = self.device(kind, shard_elems, self.input.grad_dtype);
        let accesses = vec![(whole, Access::Read), (into, Access::Define)];
        self.emit(OpKind::Round { unit, into }, Lane::Compute, accesses, &[]);
        into
    }

    /// Copies one piece to a staging buffer on the host and adds it to the sum there.
    fn offload_piece_to_add(
        &mut self,
        whole: BufferId,
        resident: BufferId,
        unit: u32,
        micro_batch: u32,
        (start, end): (usize, usize),
    ) -> OpId {
        let kind = BufferKind::GradStaging { turn: self.num_staged_pieces % 2 };
        self.num_staged_pieces += 1;
        let staging = self.table.get(kind, MemoryTier::Host, end - start, DType::F32);
        let span = self.span(vec![SpanPart { unit, start, end }]);
        let accesses = vec![(whole, Access::Read), (staging, Access::Define)];
        let (from, to) = (CopyEnd::Buffer(whole), CopyEnd::Buffer(staging));
        let copy =
            self.emit(OpKind::Copy { payload: CopyPayload::Grad, from, to, span }, Lane::Copy, accesses, &[]);
        let accesses = vec![(staging, Access::Read), (resident, Access::Update)];
        self.emit(OpKind::Add { span, micro_batch, from: staging }, Lane::Host, accesses, &[]);
        copy
    }

    /// Whether backward of `micro_batch` adds to a gradient that was offloaded.
    fn is_fetched_back(&self, unit: u32, micro_batch: u32) -> bool {
        micro_batch > 0
            && self.input.order == AccumulationOrder::Local
            && self.offloads_after(unit, micro_batch - 1)
    }

    /// Fetches the offloaded sums of earlier micro-batches back to the device, before backward adds to them.
    pub(super) fn fetch_gradients(&mut self, units: &[u32], micro_batch: u32) {
        for unit in units.iter().filter(|unit| self.is_fetched_back(**unit, micro_batch)).collect::<Vec<_>>()
        {
            let shard_elems = self.input.resident(self.model, *unit, ParamState::Grad).1;
            let (whole, resident, span) = (
                self.grad_target(*unit),
                self.state(*unit, ParamState::Grad),
                self.prefix_span(*unit, shard_elems),
            );
            // This copy comes after the previous unit's copy to the host, on the same lane. So there are two gradients
            // on the device: this one, and the one that backward is writing.
            let accesses = vec![(resident, Access::Read), (whole, Access::Define)];
            let (from, to) = (CopyEnd::Resident, CopyEnd::Buffer(whole));
            self.emit(OpKind::Copy { payload: CopyPayload::Grad, from, to, span }, Lane::Copy, accesses, &[]);
        }
    }

    /// Does the same for the unit whose backward follows that of `unit`. Emit it before the copy of `unit`'s gradient
    /// to the host: that copy waits for the backward of `unit`, and this one must not.
    pub(super) fn fetch_next_gradient(&mut self, unit: u32, micro_batch: u32) {
        let next = (0..unit).rev().find(|u| self.trained_elems(*u) > 0);
        // A tied table's gradient was fetched for the head already.
        if let Some(next) = next.filter(|next| *next != self.embed_unit() || !self.is_tied()) {
            self.fetch_gradients(&[next], micro_batch);
        }
    }
}
