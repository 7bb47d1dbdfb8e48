//! The end of the step: gradient norm, clip factor, updates, and copies and all-gathers of updated parameters.

use lockstep_core::{ALIGN_ELEMS, DType};

use crate::buffer::{Access, BufferId, BufferKind, MemoryTier, ParamState};
use crate::builder::StepBuilder;
use crate::lane::Lane;
use crate::schedule::{CopyEnd, CopyPayload, OpKind, SpanId, SpanPart};

/// A shard is updated on the host in pieces of at least 2 MiB of f32, and in at most `MAX_PIECES` pieces.
const MIN_PIECE_ELEMS: usize = 1 << 19;
const MAX_PIECES: usize = 32;

/// Elements `[start, end)` of the largest shard of a unit.
#[derive(Clone, Copy)]
struct Piece {
    unit: u32,
    start: usize,
    end: usize,
}

impl StepBuilder<'_> {
    /// Computes the gradient norm and runs the optimizer on all trained units.
    pub fn clip_and_update(&mut self) {
        let trained = (0..=self.head_unit()).filter(|u| self.trained_elems(*u) > 0);
        let (offloaded, on_device): (Vec<u32>, Vec<u32>) =
            trained.partition(|unit| self.grads_offloaded(*unit));
        assert_eq!(self.num_squared_units, offloaded.len(), "a gradient was never offloaded");
        let norm = self.norm_leaves();
        if !on_device.is_empty() {
            self.squares_on_device(&on_device);
        }
        let axes = self.input.sharded_over(self.model, ParamState::Grad);
        let lane = match offloaded.is_empty() {
            _ if !axes.is_empty() => Lane::Comm,
            false => Lane::Host,
            true => Lane::Compute,
        };
        self.emit(OpKind::ClipNorm { axes }, lane, vec![(norm, Access::Update)], &[]);
        on_device.iter().for_each(|unit| self.update_on_device(*unit, norm));
        // The copies of a piece are emitted before the update of the previous piece, so that they overlap it.
        let pieces: Vec<Piece> = offloaded.iter().flat_map(|unit| self.pieces(*unit)).collect();
        for (i, piece) in pieces.iter().enumerate() {
            if i == 0 {
                self.fetch_states(*piece, 0);
            }
            if let Some(next) = pieces.get(i + 1) {
                self.fetch_states(*next, (i as u32 + 1) % 2);
            }
            self.update_on_host(*piece, i as u32 % 2, norm);
            if pieces.get(i + 1).is_none_or(|next| next.unit != piece.unit) {
                self.gather_updated(piece.unit);
            }
        }
        self.flush_updated_bucket();
    }

    /// Sums of squares of a unit's offloaded gradient.
    pub(super) fn squares_on_host(&mut self, unit: u32) {
        let norm = self.norm_leaves();
        let access = if self.num_squared_units > 0 { Access::Update } else { Access::Define };
        let accesses = vec![(self.state(unit, ParamState::Grad), Access::Read), (norm, access)];
        self.num_squared_units += 1;
        let span = self.trained_span(unit);
        self.emit(OpKind::Squares { span, leaves: norm }, Lane::Host, accesses, &[]);
    }

    /// Sums of squares of gradients on the device. If other gradients are offloaded, they are copied to the host.
    fn squares_on_device(&mut self, units: &[u32]) {
        let norm = self.norm_leaves();
        let some_on_host = self.num_squared_units > 0;
        let leaves = match some_on_host {
            true => {
                let kind = BufferKind::DeviceNormLeaves { model: self.model };
                self.device(kind, self.leaves_of(units), DType::F64)
            }
            false => norm,
        };
        let mut accesses: Vec<_> =
            units.iter().map(|unit| (self.state(*unit, ParamState::Grad), Access::Read)).collect();
        accesses.push((leaves, Access::Define));
        let part = |unit: &u32| SpanPart { unit: *unit, start: 0, end: self.trained_elems(*unit) };
        let parts = units.iter().map(part).collect();
        let span = self.span(parts);
        self.emit(OpKind::Squares { span, leaves }, Lane::Compute, accesses, &[]);
        if some_on_host {
            let accesses = vec![(leaves, Access::Read), (norm, Access::Update)];
            let (from, to) = (CopyEnd::Buffer(leaves), CopyEnd::Buffer(norm));
            self.emit(
                OpKind::Copy { payload: CopyPayload::NormLeaves, from, to, span },
                Lane::Copy,
                accesses,
                &[],
            );
        }
    }

    /// One leaf for each block of this rank's gradients, in the memory where the norm is computed.
    fn norm_leaves(&mut self) -> BufferId {
        let units: Vec<u32> = (0..=self.head_unit()).collect();
        let offloads = units.iter().any(|unit| self.trained_elems(*unit) > 0 && self.grads_offloaded(*unit));
        let tier = if offloads { MemoryTier::Host } else { MemoryTier::Device };
        self.table.get(BufferKind::NormLeaves { model: self.model }, tier, self.leaves_of(&units), DType::F64)
    }

    fn leaves_of(&self, units: &[u32]) -> usize {
        let shard_elems = |unit: &u32| self.input.resident(self.model, *unit, ParamState::Grad).1;
        units.iter().map(shard_elems).sum::<usize>() / ALIGN_ELEMS
    }

    /// The pieces in which a shard passes through the staging buffers of the host. They are small, because staging holds
    /// two of them with all their states, but not so small that the step of a large model has thousands of operations.
    fn pieces(&self, unit: u32) -> Vec<Piece> {
        let shard_elems = self.input.optimizer_shard_elems(self.model, unit);
        let len = shard_elems.div_ceil(MAX_PIECES).next_multiple_of(ALIGN_ELEMS).max(MIN_PIECE_ELEMS);
        (0..shard_elems)
            .step_by(len)
            .map(|start| Piece { unit, start, end: (start + len).min(shard_elems) })
            .collect()
    }

    fn update_on_device(&mut self, unit: u32, norm: BufferId) {
        let shard_elems = self.input.optimizer_shard_elems(self.model, unit);
        let mut accesses = vec![(norm, Access::Read), (self.state(unit, ParamState::Grad), Access::Read)];
        for state in self.input.optimizer_states(self.model, unit) {
            accesses.push((self.state(unit, state), Access::Update));
        }
        let working = self.state(unit, ParamState::Working);
        if self.plan().placements.params_tier == MemoryTier::Device {
            accesses.push((working, Access::Update));
            let kind = OpKind::Update { unit, start: 0, end: shard_elems, staging: None };
            self.emit(kind, Lane::Compute, accesses, &[]);
        } else {
            let staging = self.param_staging(shard_elems);
            accesses.push((staging, Access::Define));
            let kind = OpKind::Update { unit, start: 0, end: shard_elems, staging: Some(staging) };
            self.emit(kind, Lane::Compute, accesses, &[]);
            let (from, to, span) =
                (CopyEnd::Buffer(staging), CopyEnd::Resident, self.prefix_span(unit, shard_elems));
            let accesses = vec![(staging, Access::Read), (working, Access::Update)];
            self.emit(
                OpKind::Copy { payload: CopyPayload::Params, from, to, span },
                Lane::Copy,
                accesses,
                &[],
            );
        }
        self.gather_updated(unit);
    }

    /// If the optimizer is sharded and parameters are not: all-gathers updated parameters, a bucket at a time.
    fn gather_updated(&mut self, unit: u32) {
        if !self.input.updates_gathered_over(self.model).is_empty() {
            self.bucket.push(SpanPart { unit, start: 0, end: self.trained_elems(unit) });
            let filled: usize = self.bucket.iter().map(|part| part.end - part.start).sum();
            if filled >= self.input.allgather_bucket_elems {
                self.flush_updated_bucket();
            }
        }
    }

    fn flush_updated_bucket(&mut self) {
        let parts = std::mem::take(&mut self.bucket);
        if !parts.is_empty() {
            let mut accesses = Vec::new();
            for part in &parts {
                accesses.push((self.state(part.unit, ParamState::Working), Access::Update));
            }
            let span = self.span(parts);
            let axes = self.input.updates_gathered_over(self.model);
            self.emit(OpKind::AllGatherUpdated { span, axes }, Lane::Comm, accesses, &[]);
        }
    }

    /// The staging buffer for a piece's update ([`BufferKind::HostStaging`]). `None`: everything it needs lives on the
    /// host.
    fn host_staging(&mut self, piece: Piece, turn: u32) -> Option<BufferId> {
        let (elems, p) = (piece.end - piece.start, self.plan().placements);
        let states = match p.optimizer_tier {
            MemoryTier::Nvme => self.input.staged_states(self.model, piece.unit, elems).1.0 as usize,
            MemoryTier::Device | MemoryTier::Host => 0,
        };
        let params = if p.params_tier == MemoryTier::Host { 0 } else { elems * self.input.storage.size() };
        let staged = (states + params).div_ceil(DType::F32.size());
        let kind = BufferKind::HostStaging { turn };
        (staged > 0).then(|| self.table.get(kind, MemoryTier::Host, staged, DType::F32))
    }

    fn piece_span(&mut self, piece: Piece) -> SpanId {
        self.span(vec![SpanPart { unit: piece.unit, start: piece.start, end: piece.end }])
    }

    fn optimizer_residents(&mut self, unit: u32) -> Vec<BufferId> {
        let states = self.input.optimizer_states(self.model, unit).into_iter();
        states.map(|state| self.state(unit, state)).collect()
    }

    /// Fetches states from NVMe to the host. This does not wait for the norm.
    fn fetch_states(&mut self, piece: Piece, turn: u32) {
        let residents = self.optimizer_residents(piece.unit);
        if self.plan().placements.optimizer_tier == MemoryTier::Nvme && !residents.is_empty() {
            let (span, staging) = (self.piece_span(piece), self.host_staging(piece, turn));
            let staging = staging.expect("states on a disk are staged");
            let residents = residents.into_iter().map(|resident| (resident, Access::Read));
            let accesses = residents.chain([(staging, Access::Define)]).collect();
            let (payload, from, to) =
                (CopyPayload::OptimizerStates, CopyEnd::Resident, CopyEnd::Buffer(staging));
            self.emit(OpKind::Copy { payload, from, to, span }, Lane::Copy, accesses, &[]);
        }
    }

    /// Updates on the host's cores, then copies states and parameters to where they live.
    fn update_on_host(&mut self, piece: Piece, turn: u32, norm: BufferId) {
        let (span, staging) = (self.piece_span(piece), self.host_staging(piece, turn));
        let Piece { unit, start, end } = piece;
        let params_on_device = self.plan().placements.params_tier == MemoryTier::Device;
        let working = self.state(unit, ParamState::Working);
        let residents: Vec<_> =
            self.optimizer_residents(unit).into_iter().map(|resident| (resident, Access::Update)).collect();
        let staged = self.plan().placements.optimizer_tier == MemoryTier::Nvme && !residents.is_empty();

        let mut accesses = vec![(norm, Access::Read), (self.state(unit, ParamState::Grad), Access::Read)];
        let access = if staged { Access::Update } else { Access::Define };
        accesses.extend(staging.map(|staging| (staging, access)));
        accesses.extend((!params_on_device).then_some((working, Access::Update)));
        if !staged {
            accesses.extend(&residents);
        }
        self.emit(OpKind::Update { unit, start, end, staging }, Lane::Host, accesses, &[]);
        let Some(staging) = staging else { return };
        let (from, to) = (CopyEnd::Buffer(staging), CopyEnd::Resident);
        if staged {
            let accesses = residents.into_iter().chain([(staging, Access::Read)]).collect();
            let payload = CopyPayload::OptimizerStates;
            self.emit(OpKind::Copy { payload, from, to, span }, Lane::Copy, accesses, &[]);
        }
        if params_on_device {
            let accesses = vec![(staging, Access::Read), (working, Access::Update)];
            self.emit(
                OpKind::Copy { payload: CopyPayload::Params, from, to, span },
                Lane::Copy,
                accesses,
                &[],
            );
        }
    }
}
