//! Gradients on their way to their owners.

use lockstep_core::DType;
use lockstep_core::fold::fold_scratch_elems;

use crate::buffer::{Access, BufferKind, ParamState};
use crate::builder::{PassKind, StepBuilder, UnitPass};
use crate::input::AccumulationOrder;
use crate::schedule::{Lane, OpId, OpKind, ReduceInto, SpanPart};

impl StepBuilder<'_> {
    /// Whether a unit's gradient of `micro` goes on when it is complete: is summed over ranks, or leaves the device.
    pub fn reduces_after(&self, unit: u32, micro_batch: u32) -> bool {
        self.sums_after(unit, micro_batch) || self.offloads_after(unit, micro_batch)
    }

    /// Whether a unit's gradient of `micro` is summed over ranks.
    fn sums_after(&self, unit: u32, micro_batch: u32) -> bool {
        match self.input.order {
            AccumulationOrder::Local if micro_batch + 1 < self.input.num_micro_batches => false,
            _ => !self.input.reductions(self.model, unit).is_empty(),
        }
    }

    /// The unit whose gradient is complete after a use and is now to be reduced, or to leave the device.
    pub fn unit_to_reduce(&self, done: &UnitPass) -> Option<u32> {
        let unit = match done.work {
            PassKind::Head => self.head_unit(),
            PassKind::Backward(unit) => unit,
            PassKind::Forward(_) | PassKind::Score => return None,
        };
        self.reduces_after(unit, done.micro_batch).then_some(unit)
    }

    /// Adds a unit's whole gradient to the bucket, and reduces the bucket if it is full or the micro-batch has no
    /// more to add. Units are not cut: each belongs to the same owners as its states.
    pub fn reduce_unit(&mut self, unit: u32, micro_batch: u32) {
        let end = self.trained_elems(unit);
        if !self.sums_after(unit, micro_batch) {
            return self.offload_unreduced(unit, micro_batch);
        }
        self.flush_others(unit, micro_batch);
        if end > 0 {
            self.pending.push(SpanPart { unit, start: 0, end });
        }
        let filled: usize = self.pending.iter().map(|p| p.end - p.start).sum();
        let last = (0..unit).all(|earlier| self.trained_elems(earlier) == 0);
        if last || filled >= self.input.reduce_bucket_elems {
            self.flush_bucket(micro_batch);
        }
    }

    /// Adds a unit's gradient to the bucket, and reduces buckets as they fill.
    pub fn add_to_bucket(&mut self, unit: u32, micro_batch: u32) {
        let end = self.trained_elems(unit);
        if !self.sums_after(unit, micro_batch) {
            return self.offload_unreduced(unit, micro_batch);
        }
        self.flush_others(unit, micro_batch);
        let cap = (self.input.ddp_bucket_bytes.0 as usize / 4 / 256).max(1) * 256;
        let mut start = 0;
        while start < end {
            let filled: usize = self.pending.iter().map(|p| p.end - p.start).sum();
            let take = (cap - filled).min(end - start);
            self.pending.push(SpanPart { unit, start, end: start + take });
            start += take;
            // The rest of a large gradient does not wait for others, or the whole of it would, on the device.
            let leaves = start == end && end >= cap && self.grads_offloaded(unit);
            if filled + take == cap || leaves {
                self.flush_bucket(micro_batch);
            }
        }
    }

    /// A bucket's gradients all stay or all leave: those that do not go where `unit`'s goes do not wait for it.
    fn flush_others(&mut self, unit: u32, micro_batch: u32) {
        let leaves = self.grads_offloaded(unit);
        if self.pending.last().is_some_and(|part| self.grads_offloaded(part.unit) != leaves) {
            self.flush_bucket(micro_batch);
        }
    }

    /// A gradient that no rank adds to leaves by itself.
    fn offload_unreduced(&mut self, unit: u32, micro_batch: u32) {
        if self.trained_elems(unit) > 0 && self.offloads_after(unit, micro_batch) {
            let left = self.offload_gradient(unit, micro_batch);
            self.reduced.push(left);
        }
    }

    /// Reduces what is left in the bucket.
    pub fn flush_bucket(&mut self, micro_batch: u32) {
        let parts = std::mem::take(&mut self.pending);
        if !parts.is_empty() {
            self.reduce(parts, micro_batch);
        }
    }

    /// Sums a span over the axes of the mesh, nearest first. All but the last axis sum in place, in the
    /// owner's slice of the whole gradient, so that what earlier micro-batches left in the accumulator is
    /// not summed again; the last axis adds to the accumulator. Where gradients leave the device, the last
    /// one sums in place too.
    fn reduce(&mut self, parts: Vec<SpanPart>, micro_batch: u32) {
        let axes = self.input.reductions(self.model, parts[0].unit);
        let leaves = self.grads_offloaded(parts[0].unit);
        let fresh = micro_batch == 0 || self.input.order == AccumulationOrder::Local;
        let complete: Vec<u32> =
            parts.iter().filter(|p| p.end == self.trained_elems(p.unit)).map(|p| p.unit).collect();
        let mut units: Vec<u32> = parts.iter().map(|p| p.unit).collect();
        units.dedup();
        let in_state = self.grad_goes_to_state(units[0]);
        let span = self.span(parts);
        let mut last = None;
        for (i, axis) in axes.iter().enumerate() {
            let into = match i + 1 == axes.len() && !leaves && !in_state {
                true => ReduceInto::Accumulator { fresh },
                false => ReduceInto::InPlace,
            };
            let mut accesses = Vec::new();
            for unit in &units {
                let from = self.grad_target(*unit);
                match into {
                    ReduceInto::InPlace => accesses.push((from, Access::Update)),
                    ReduceInto::Accumulator { .. } => {
                        let to = self.state(*unit, ParamState::Grad);
                        accesses.extend([(from, Access::Read), (to, Access::Update)]);
                    }
                }
            }
            let ranks = self.input.mesh.size(*axis);
            // The owner folds every member's contribution in the mesh's order, a chunk at a time.
            let scratch = (ranks > 1)
                .then(|| self.device(BufferKind::ReduceScratch, fold_scratch_elems(ranks), DType::F32));
            accesses.extend(scratch.map(|scratch| (scratch, Access::Define)));
            let lane = if ranks > 1 { Lane::Comm } else { Lane::Compute };
            let kind = OpKind::Reduce { span, micro_batch, axis: *axis, into, scratch };
            last = Some(self.emit(kind, lane, accesses, &[]));
        }
        let leaving: Vec<u32> =
            complete.iter().copied().filter(|unit| self.offloads_after(*unit, micro_batch)).collect();
        if let Some(copied) = leaving.iter().map(|unit| self.offload_gradient(*unit, micro_batch)).last() {
            last = Some(copied);
        }
        self.reduced.extend(last.filter(|_| !complete.is_empty()));
    }

    /// What must be over before whole gradients of some units are made: at most two are in flight, one being
    /// made and one on its way, or sharding or offloading them would save nothing.
    pub(super) fn gradient_buffer_waits(&self, units: &[u32]) -> Vec<OpId> {
        let oldest = self.reduced.iter().rev().nth(1).copied();
        let need_room = units.iter().any(|unit| !self.grad_goes_to_state(*unit));
        oldest.filter(|_| need_room).into_iter().collect()
    }
}
