//! The computation of units: forward, head, recompute, backward.

use crate::buffer::{Access, BufferId, BufferKind};
use crate::builder::{IN_FLIGHT, StepBuilder};
use crate::input::AccumulationOrder;
use crate::lane::Lane;
use crate::schedule::{OpId, OpKind};

impl StepBuilder<'_> {
    /// Forward of a unit of the body. The first one also copies the batch to the device.
    pub fn forward(&mut self, unit: u32, micro_batch: u32) -> OpId {
        if unit == self.embed_unit() {
            let [inputs, _] = self.inputs();
            self.emit(OpKind::Feed { micro_batch }, Lane::Compute, vec![(inputs, Access::Define)], &[]);
        }
        self.dequantise(unit);
        let mut accesses = self.common_accesses();
        accesses.push((self.params(unit), Access::Read));
        if unit != self.embed_unit() {
            accesses.push((self.residual(unit), Access::Read));
        }
        accesses.push((self.residual(unit + 1), Access::Define));
        let saved = self.layout(unit).saved;
        if saved.0 > 0 {
            accesses.push((
                self.bytes(
                    BufferKind::SavedActivations { model: self.model, unit, in_flight: IN_FLIGHT },
                    saved,
                ),
                Access::Define,
            ));
        }
        let id = self.emit(OpKind::Forward { unit, micro_batch }, Lane::Compute, accesses, &[]);
        if unit + 1 == self.head_unit() {
            let trained = self.trained_by_head();
            self.fetch_gradients(&trained, micro_batch);
        }
        id
    }

    fn head_accesses(&mut self) -> Vec<(BufferId, Access)> {
        let head = self.head_unit();
        let mut accesses = self.common_accesses();
        accesses.push((self.params(head), Access::Read));
        if self.is_tied() {
            accesses.push((self.params(self.embed_unit()), Access::Read));
        }
        accesses.push((self.residual(head), Access::Read));
        accesses
    }

    /// The head and the objective: one fused pass if the coefficients do not depend on the head's outputs.
    pub fn head(&mut self, micro_batch: u32) -> OpId {
        let [inputs, _] = self.inputs();
        let window = self.num_micro_batches();
        let (outputs, coefficients) =
            (self.per_token(BufferKind::Outputs, window), self.per_token(BufferKind::Coefficients, window));
        let ahead = self.input.coefficients_ahead;
        if !ahead {
            self.head_score(micro_batch, window);
        }
        let mut accesses = vec![(inputs, Access::Read), (coefficients, Self::writes_window(micro_batch))];
        // Updated, because the host moves them from the head's rows to their positions.
        accesses.extend((!ahead).then_some((outputs, Access::Update)));
        self.emit(OpKind::Objective { micro_batch }, Lane::Compute, accesses, &[]);

        let fresh = self.fresh(micro_batch);
        let mut accesses = self.head_accesses();
        accesses.push((coefficients, Access::Read));
        accesses.push((outputs, if ahead { Self::writes_window(micro_batch) } else { Access::Update }));
        accesses.push((self.residual_grad(), Access::Define));
        let trained = self.trained_by_head();
        for unit in trained.iter().copied() {
            let access = if fresh { Access::Define } else { Access::Update };
            accesses.push((self.grad_target(unit), access));
        }
        let kind = if ahead {
            OpKind::HeadStep { micro_batch, fresh }
        } else {
            OpKind::HeadBackward { micro_batch, fresh }
        };
        let after = self.gradient_buffer_waits(&trained);
        let id = self.emit(kind, Lane::Compute, accesses, &after);
        self.fetch_next_gradient(self.head_unit(), micro_batch);
        if micro_batch + 1 == window {
            self.deliver(outputs);
        }
        id
    }

    pub(super) fn deliver(&mut self, outputs: BufferId) {
        // Updated, because the host moves them from the head's rows to their positions.
        self.emit(OpKind::Deliver, Lane::Compute, vec![(outputs, Access::Update)], &[]);
    }

    /// The units whose gradients the head's backward writes.
    fn trained_by_head(&self) -> Vec<u32> {
        let units = [Some(self.head_unit()), self.is_tied().then_some(self.embed_unit())];
        units.into_iter().flatten().filter(|u| self.trained_elems(*u) > 0).collect()
    }

    /// The head's forward, without a backward, in a window of so many micro-batches.
    pub(super) fn head_score(&mut self, micro_batch: u32, window: u32) -> OpId {
        let mut accesses = self.head_accesses();
        accesses.push((self.per_token(BufferKind::Outputs, window), Self::writes_window(micro_batch)));
        self.emit(OpKind::HeadForward { micro_batch }, Lane::Compute, accesses, &[])
    }

    /// Whether the gradient of `micro_batch` starts a new sum.
    fn fresh(&self, micro_batch: u32) -> bool {
        micro_batch == 0 || self.input.order == AccumulationOrder::Reduced
    }

    /// Backward of a unit of the body, preceded by its recompute pass if it has one.
    pub fn backward(&mut self, unit: u32, micro_batch: u32) -> OpId {
        self.dequantise(unit);
        let layout = self.layout(unit);
        let (saved, recomputed) = (layout.saved, layout.recomputed);
        if recomputed.0 > 0 {
            let mut accesses = self.common_accesses();
            accesses.push((self.params(unit), Access::Read));
            accesses.push((self.residual(unit), Access::Read));
            accesses.push((
                self.bytes(
                    BufferKind::RecomputedActivations { model: self.model, unit, in_flight: IN_FLIGHT },
                    recomputed,
                ),
                Access::Define,
            ));
            self.emit(OpKind::Recompute { unit, micro_batch }, Lane::Compute, accesses, &[]);
        }
        let mut accesses = self.common_accesses();
        if unit != self.embed_unit() {
            accesses.push((self.params(unit), Access::Read));
            accesses.push((self.residual(unit), Access::Read));
        }
        for (kind, bytes) in [
            (BufferKind::SavedActivations { model: self.model, unit, in_flight: IN_FLIGHT }, saved),
            (BufferKind::RecomputedActivations { model: self.model, unit, in_flight: IN_FLIGHT }, recomputed),
        ] {
            if bytes.0 > 0 {
                // Updated, because SwiGLU's gradients overwrite its inputs.
                accesses.push((self.bytes(kind, bytes), Access::Update));
            }
        }
        accesses.push((self.residual_grad(), Access::Update));
        // The head has already written its part of a tied table's gradient.
        let fresh = self.fresh(micro_batch) && !(unit == self.embed_unit() && self.is_tied());
        if self.trained_elems(unit) > 0 {
            accesses.push((self.grad_target(unit), if fresh { Access::Define } else { Access::Update }));
        }
        let after = self.gradient_buffer_waits(&[unit]);
        let id = self.emit(OpKind::Backward { unit, micro_batch, fresh }, Lane::Compute, accesses, &after);
        self.fetch_next_gradient(unit, micro_batch);
        id
    }

    /// The accesses of every computation, besides parameters and activations.
    fn common_accesses(&mut self) -> Vec<(BufferId, Access)> {
        let [inputs, tables] = self.inputs();
        vec![(inputs, Access::Read), (tables, Access::Read), (self.scratch(), Access::Define)]
    }
}
