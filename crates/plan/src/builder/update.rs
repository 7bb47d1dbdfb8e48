//! The end of the step: norm, clip factor, updates, and whatever brings updated parameters to where
//! forward reads them.

use lockstep_core::{ALIGN_ELEMS, DType};

use crate::buffer::{Access, BufferId, BufferKind, MemoryTier, ParamState};
use crate::builder::StepBuilder;
use crate::schedule::{CopyEnd, CopyPayload, Lane, OpKind, SpanId, SpanPart};

/// Elements of the smallest piece, 2 MiB of f32, and pieces of a share at most.
const SMALLEST_PIECE: usize = 1 << 19;
const MOST_PIECES: usize = 32;

/// Elements `[start, end)` of the longest share of a unit.
#[derive(Clone, Copy)]
struct Piece {
    unit: u32,
    start: usize,
    end: usize,
}

impl StepBuilder<'_> {
    pub fn clip_and_update(&mut self) {
        let trained = (0..=self.head_unit()).filter(|u| self.trained_elems(*u) > 0);
        let (leave, stay): (Vec<u32>, Vec<u32>) = trained.partition(|unit| self.grads_offloaded(*unit));
        assert_eq!(self.squared, leave.len(), "a gradient never left the device");
        let norm = self.norm_leaves();
        if !stay.is_empty() {
            self.squares_on_device(&stay);
        }
        let axes = self.input.sharded_over(self.model, ParamState::Grad);
        let lane = match leave.is_empty() {
            _ if !axes.is_empty() => Lane::Comm,
            false => Lane::Host,
            true => Lane::Compute,
        };
        self.emit(OpKind::ClipNorm { axes }, lane, vec![(norm, Access::Update)], &[]);
        stay.iter().for_each(|unit| self.update_on_device(*unit, norm));
        // A piece's copies are issued before its neighbour's update, so that they overlap it.
        let pieces: Vec<Piece> = leave.iter().flat_map(|unit| self.pieces(*unit)).collect();
        for (i, piece) in pieces.iter().enumerate() {
            if i == 0 {
                self.fetch_states(*piece, 0);
            }
            if let Some(next) = pieces.get(i + 1) {
                self.fetch_states(*next, (i as u32 + 1) % 2);
            }
            self.update_on_host(*piece, i as u32 % 2, norm);
            if pieces.get(i + 1).is_none_or(|next| next.unit != piece.unit) {
                self.publish(piece.unit);
            }
        }
        self.publish_bucket();
    }

    /// Sums of squares of the gradient of a unit that has left the device.
    pub(super) fn squares_on_host(&mut self, unit: u32) {
        let norm = self.norm_leaves();
        let access = if self.squared > 0 { Access::Update } else { Access::Define };
        let accesses = vec![(self.state(unit, ParamState::Grad), Access::Read), (norm, access)];
        self.squared += 1;
        let span = self.trained_span(unit);
        self.emit(OpKind::Squares { span, leaves: norm }, Lane::Host, accesses, &[]);
    }

    /// Sums of squares of gradients that stay; where others leave, brought to theirs.
    fn squares_on_device(&mut self, units: &[u32]) {
        let norm = self.norm_leaves();
        let joins = self.squared > 0;
        let here = match joins {
            true => {
                let what = BufferKind::DeviceNormLeaves { model: self.model };
                self.device(what, self.leaves_of(units), DType::F64)
            }
            false => norm,
        };
        let mut accesses: Vec<_> =
            units.iter().map(|unit| (self.state(*unit, ParamState::Grad), Access::Read)).collect();
        accesses.push((here, Access::Define));
        let part = |unit: &u32| SpanPart { unit: *unit, start: 0, end: self.trained_elems(*unit) };
        let parts = units.iter().map(part).collect();
        let span = self.span(parts);
        self.emit(OpKind::Squares { span, leaves: here }, Lane::Compute, accesses, &[]);
        if joins {
            let accesses = vec![(here, Access::Read), (norm, Access::Update)];
            let (from, to) = (CopyEnd::Buffer(here), CopyEnd::Buffer(norm));
            self.emit(
                OpKind::Copy { payload: CopyPayload::NormLeaves, from, to, span },
                Lane::Copy,
                accesses,
                &[],
            );
        }
    }

    /// One leaf for each block of this rank's gradients, where the norm is found.
    fn norm_leaves(&mut self) -> BufferId {
        let units: Vec<u32> = (0..=self.head_unit()).collect();
        let leave = units.iter().any(|unit| self.trained_elems(*unit) > 0 && self.grads_offloaded(*unit));
        let tier = if leave { MemoryTier::Host } else { MemoryTier::Device };
        self.table.get(BufferKind::NormLeaves { model: self.model }, tier, self.leaves_of(&units), DType::F64)
    }

    fn leaves_of(&self, units: &[u32]) -> usize {
        let share = |unit: &u32| self.input.resident(self.model, *unit, ParamState::Grad).1;
        units.iter().map(share).sum::<usize>() / ALIGN_ELEMS
    }

    /// What passes through the host's staging at a time. Small, because staging holds two of them with all
    /// their states; but not so small that a large model's step becomes a list of thousands.
    fn pieces(&self, unit: u32) -> Vec<Piece> {
        let share = self.input.share(self.model, unit);
        let len = share.div_ceil(MOST_PIECES).next_multiple_of(ALIGN_ELEMS).max(SMALLEST_PIECE);
        (0..share).step_by(len).map(|start| Piece { unit, start, end: (start + len).min(share) }).collect()
    }

    fn update_on_device(&mut self, unit: u32, norm: BufferId) {
        let share = self.input.share(self.model, unit);
        let mut accesses = vec![(norm, Access::Read), (self.state(unit, ParamState::Grad), Access::Read)];
        for state in self.input.optimizer_states(self.model, unit) {
            accesses.push((self.state(unit, state), Access::Update));
        }
        let working = self.state(unit, ParamState::Working);
        if self.plan().placements.params_tier == MemoryTier::Device {
            accesses.push((working, Access::Update));
            let kind = OpKind::Update { unit, start: 0, end: share, staging: None };
            self.emit(kind, Lane::Compute, accesses, &[]);
        } else {
            let staging = self.param_staging(share);
            accesses.push((staging, Access::Define));
            let kind = OpKind::Update { unit, start: 0, end: share, staging: Some(staging) };
            self.emit(kind, Lane::Compute, accesses, &[]);
            let (from, to, span) =
                (CopyEnd::Buffer(staging), CopyEnd::Resident, self.front_span(unit, share));
            let accesses = vec![(staging, Access::Read), (working, Access::Update)];
            self.emit(
                OpKind::Copy { payload: CopyPayload::Params, from, to, span },
                Lane::Copy,
                accesses,
                &[],
            );
        }
        self.publish(unit);
    }

    /// Optimizer sharded, parameters whole: everyone gets everyone's updates, a bucket at a time.
    fn publish(&mut self, unit: u32) {
        if !self.input.updates_gathered_over(self.model).is_empty() {
            self.pending.push(SpanPart { unit, start: 0, end: self.trained_elems(unit) });
            let filled: usize = self.pending.iter().map(|part| part.end - part.start).sum();
            if filled >= self.input.allgather_bucket_elems {
                self.publish_bucket();
            }
        }
    }

    fn publish_bucket(&mut self) {
        let parts = std::mem::take(&mut self.pending);
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

    /// Room on the host for a piece's update, described at [`BufferKind::HostStaging`]. `None`: all it needs has its
    /// home there.
    fn host_staging(&mut self, piece: Piece, turn: u32) -> Option<BufferId> {
        let (elems, p) = (piece.end - piece.start, self.plan().placements);
        let states = match p.optimizer_tier {
            MemoryTier::Nvme => self.input.optimizer_state_bytes(self.model, piece.unit, elems),
            MemoryTier::Device | MemoryTier::Host => 0,
        };
        let params = if p.params_tier == MemoryTier::Host { 0 } else { elems * self.input.storage.size() };
        let staged = (states + params).div_ceil(DType::F32.size());
        let what = BufferKind::HostStaging { turn };
        (staged > 0).then(|| self.table.get(what, MemoryTier::Host, staged, DType::F32))
    }

    fn piece_span(&mut self, piece: Piece) -> SpanId {
        self.span(vec![SpanPart { unit: piece.unit, start: piece.start, end: piece.end }])
    }

    fn optimizer_homes(&mut self, unit: u32) -> Vec<BufferId> {
        let states = self.input.optimizer_states(self.model, unit).into_iter();
        states.map(|state| self.state(unit, state)).collect()
    }

    /// States whose home is a disk, to the host. Does not wait for the norm.
    fn fetch_states(&mut self, piece: Piece, turn: u32) {
        let residents = self.optimizer_homes(piece.unit);
        if self.plan().placements.optimizer_tier == MemoryTier::Nvme && !residents.is_empty() {
            let (span, staging) = (self.piece_span(piece), self.host_staging(piece, turn));
            let staging = staging.expect("states on a disk are staged");
            let residents = residents.into_iter().map(|home| (home, Access::Read));
            let accesses = residents.chain([(staging, Access::Define)]).collect();
            let (payload, from, to) =
                (CopyPayload::OptimizerStates, CopyEnd::Resident, CopyEnd::Buffer(staging));
            self.emit(OpKind::Copy { payload, from, to, span }, Lane::Copy, accesses, &[]);
        }
    }

    /// Update on the host's cores; states and parameters back to their homes.
    fn update_on_host(&mut self, piece: Piece, turn: u32, norm: BufferId) {
        let (span, staging) = (self.piece_span(piece), self.host_staging(piece, turn));
        let Piece { unit, start, end } = piece;
        let params_on_device = self.plan().placements.params_tier == MemoryTier::Device;
        let working = self.state(unit, ParamState::Working);
        let residents: Vec<_> =
            self.optimizer_homes(unit).into_iter().map(|home| (home, Access::Update)).collect();
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
