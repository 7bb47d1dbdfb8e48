//! Reduction of gradients over ranks.

use lockstep_core::DType;
use lockstep_core::fold::fold_scratch_elems;

use crate::buffer::{Access, BufferKind, ParamState};
use crate::builder::{PassKind, StepBuilder, UnitPass};
use crate::input::AccumulationOrder;
use crate::lane::Lane;
use crate::schedule::{OpId, OpKind, ReduceInto, SpanPart};

impl StepBuilder<'_> {
    /// Whether a unit's gradient is reduced or offloaded after backward of `micro_batch`.
    pub fn reduces_after(&self, unit: u32, micro_batch: u32) -> bool {
        self.sums_after(unit, micro_batch) || self.offloads_after(unit, micro_batch)
    }

    /// Whether a unit's gradient is reduced over ranks after backward of `micro_batch`.
    fn sums_after(&self, unit: u32, micro_batch: u32) -> bool {
        match self.input.order {
            AccumulationOrder::Local if micro_batch + 1 < self.input.num_micro_batches => false,
            _ => !self.input.reductions(self.model, unit).is_empty(),
        }
    }

    /// The unit whose gradient is complete after a pass and must now be reduced or offloaded.
    pub fn unit_to_reduce(&self, done: &UnitPass) -> Option<u32> {
        let unit = match done.kind {
            PassKind::Head => self.head_unit(),
            PassKind::Backward(unit) => unit,
            PassKind::Forward(_) | PassKind::Score => return None,
        };
        self.reduces_after(unit, done.micro_batch).then_some(unit)
    }

    /// Adds a unit's gradient to the bucket, and reduces the bucket if it is full or this is the last unit. Units are
    /// not split over buckets, because each is sharded as a whole.
    pub fn reduce_unit(&mut self, unit: u32, micro_batch: u32) {
        let end = self.trained_elems(unit);
        if !self.sums_after(unit, micro_batch) {
            return self.offload_unreduced(unit, micro_batch);
        }
        self.flush_others(unit, micro_batch);
        if end > 0 {
            self.bucket.push(SpanPart { unit, start: 0, end });
        }
        let filled: usize = self.bucket.iter().map(|p| p.end - p.start).sum();
        let last = (0..unit).all(|earlier| self.trained_elems(earlier) == 0);
        if last || filled >= self.input.reduce_bucket_elems {
            self.flush_bucket(micro_batch);
        }
    }

    /// Adds a unit's gradient to the bucket and reduces every bucket that is full. Units may be split over buckets.
    pub fn add_to_bucket(&mut self, unit: u32, micro_batch: u32) {
        let end = self.trained_elems(unit);
        if !self.sums_after(unit, micro_batch) {
            return self.offload_unreduced(unit, micro_batch);
        }
        self.flush_others(unit, micro_batch);
        let cap = (self.input.ddp_bucket_bytes.0 as usize / 4 / 256).max(1) * 256;
        let mut start = 0;
        while start < end {
            let filled: usize = self.bucket.iter().map(|p| p.end - p.start).sum();
            let take = (cap - filled).min(end - start);
            self.bucket.push(SpanPart { unit, start, end: start + take });
            start += take;
            // The rest of a large gradient is reduced at once if that frees it: while it waits, all of it is on the device.
            let frees = self.grads_offloaded(unit) || self.input.rounds_grads();
            if filled + take == cap || start == end && end >= cap && frees {
                self.flush_bucket(micro_batch);
            }
        }
    }

    /// Reduces the bucket if its gradients are offloaded and `unit`'s is not, or the other way round: a bucket does not
    /// mix the two.
    fn flush_others(&mut self, unit: u32, micro_batch: u32) {
        let offloads = self.grads_offloaded(unit);
        if self.bucket.last().is_some_and(|part| self.grads_offloaded(part.unit) != offloads) {
            self.flush_bucket(micro_batch);
        }
    }

    /// Offloads a gradient that is not reduced over ranks.
    fn offload_unreduced(&mut self, unit: u32, micro_batch: u32) {
        if self.trained_elems(unit) > 0 && self.offloads_after(unit, micro_batch) {
            let last_copy = self.offload_gradient(unit, micro_batch);
            self.grad_buffer_frees.push(last_copy);
        }
    }

    /// Reduces the bucket, full or not.
    pub fn flush_bucket(&mut self, micro_batch: u32) {
        let parts = std::mem::take(&mut self.bucket);
        if !parts.is_empty() {
            self.reduce(parts, micro_batch);
        }
    }

    /// Reduces a span over the mesh axes, closest ranks first. All but the last axis reduce in place, so that the sums
    /// of earlier micro-batches in the accumulator are not reduced again; the last axis adds to the accumulator. If
    /// gradients are offloaded, the last axis reduces in place too.
    fn reduce(&mut self, parts: Vec<SpanPart>, micro_batch: u32) {
        let axes = self.input.reductions(self.model, parts[0].unit);
        let offloads = self.grads_offloaded(parts[0].unit);
        let fresh = micro_batch == 0 || self.input.order == AccumulationOrder::Local;
        let complete: Vec<u32> =
            parts.iter().filter(|p| p.end == self.trained_elems(p.unit)).map(|p| p.unit).collect();
        let mut units: Vec<u32> = parts.iter().map(|p| p.unit).collect();
        units.dedup();
        let in_place = self.accumulates_in_place(units[0]);
        let span = self.span(parts);
        let mut last = None;
        for (i, axis) in axes.iter().enumerate() {
            let into = match i + 1 == axes.len() && !offloads && !in_place {
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
            // The owner of a range adds every rank's contribution in a fixed order, a chunk at a time.
            let scratch = (ranks > 1)
                .then(|| self.device(BufferKind::ReduceScratch, fold_scratch_elems(ranks), DType::F32));
            accesses.extend(scratch.map(|scratch| (scratch, Access::Define)));
            let lane = if ranks > 1 { Lane::Comm } else { Lane::Compute };
            let kind = OpKind::Reduce { span, micro_batch, axis: *axis, into, scratch };
            last = Some(self.emit(kind, lane, accesses, &[]));
        }
        let offloaded: Vec<u32> =
            complete.iter().copied().filter(|unit| self.offloads_after(*unit, micro_batch)).collect();
        if let Some(last_copy) = offloaded.iter().map(|unit| self.offload_gradient(*unit, micro_batch)).last()
        {
            last = Some(last_copy);
        }
        self.grad_buffer_frees.extend(last.filter(|_| !complete.is_empty()));
    }

    /// What must finish before backward of some units may write their unsharded gradients. At most two unsharded
    /// gradients exist at a time, one being written and one being reduced or offloaded; otherwise sharding or
    /// offloading them would save no memory.
    pub(super) fn gradient_buffer_waits(&self, units: &[u32]) -> Vec<OpId> {
        let oldest = self.grad_buffer_frees.iter().rev().nth(1).copied();
        let needs_buffer = units.iter().any(|unit| !self.accumulates_in_place(*unit));
        oldest.filter(|_| needs_buffer).into_iter().collect()
    }
}
