//! What a plan is made from.

use lockstep_core::{Bytes, DType, Mesh, Rank, shard_range};
use lockstep_shape::{
    Adapter, ModelShape, Programs, Recompute, UnitShape, block_programs, embed_programs, head_programs, units,
};

use crate::buffer::{State, Tier};
use crate::schedule::ModelId;
use crate::scratch::{Sizes, UnitLayout};

/// Whole on every rank, or cut over the shard axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    Whole,
    Shard,
}

/// The cells of the strategy table: how each state is placed, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placements {
    pub params: Placement,
    pub grads: Placement,
    pub optimizer: Placement,
    pub params_tier: Tier,
    pub optimizer_tier: Tier,
    /// Units, counted from the first, whose optimizer states are on the device wherever those of the others are:
    /// a device with room to spare updates them while the host updates the rest. The first, for the next
    /// forward begins with them.
    pub stay: u32,
}

/// The order in which a window's gradients are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccumulationOrder {
    /// Over micro-batches on each rank, then over ranks: whole gradients.
    Local,
    /// Over ranks for each micro-batch, then over micro-batches.
    Reduced,
}

/// The largest micro-batch a phase can meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Tokens, rounded up to 256.
    pub tokens: usize,
    pub docs: usize,
    pub max_doc: usize,
}

impl Bounds {
    /// `rows` rows of at most `max_length` tokens, one of which is never an input. A row may hold many
    /// short documents, each at least two tokens long.
    pub fn of_rows(rows: usize, max_length: usize, packed: bool) -> Bounds {
        let positions = rows * (max_length - 1);
        let docs = if packed { rows * (max_length / 2).max(1) } else { rows };
        Bounds { tokens: positions.next_multiple_of(256), docs, max_doc: max_length - 1 }
    }
}

/// What the device's kernels ask for, and what is not ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceNeeds {
    /// The largest workspace of any operation.
    pub workspace: Bytes,
    /// Bytes on the device that the plan does not hand out. On the CPU: code, stacks, libraries, the data set.
    pub foreign: Bytes,
    /// The same of the process, where the device has memory of its own; `None`: the device is the host.
    pub host_foreign: Option<Bytes>,
}

/// What backward computes again: one thing in the first blocks, less in the last, for what those keep is given back
/// first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recomputation {
    pub early: Recompute,
    pub late: Recompute,
    /// How many blocks are late.
    pub late_blocks: u32,
}

impl From<Recompute> for Recomputation {
    /// The same in all blocks.
    fn from(all: Recompute) -> Recomputation {
        Recomputation { early: all, late: all, late_blocks: 0 }
    }
}

impl Recomputation {
    /// The choices for a model of so many blocks, from nothing (0) to everything (twice their number), each a little
    /// more than the one before.
    pub fn nth(n: u32, blocks: u32) -> Recomputation {
        if n <= blocks {
            let late_blocks = blocks - n;
            return Recomputation { early: Recompute::Selective, late: Recompute::None, late_blocks };
        }
        let late_blocks = (2 * blocks).saturating_sub(n);
        Recomputation { early: Recompute::Full, late: Recompute::Selective, late_blocks }
    }
}

/// What a model is in the run for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Policy,
    Value,
    Reference,
    Reward,
}

/// One model of the run: its units and the programs they run.
#[derive(Clone, Debug)]
pub struct ModelPlan {
    pub role: Role,
    pub shape: ModelShape,
    pub units: Vec<UnitShape>,
    pub recompute: Recomputation,
    /// By [`UnitKind`].
    programs: [Programs; 4],
}

/// Units of one kind run the same programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitKind {
    Embed,
    EarlyBlock,
    LateBlock,
    Head,
}

impl ModelPlan {
    pub fn new(
        role: Role,
        shape: &ModelShape,
        recompute: impl Into<Recomputation>,
        adapter: Option<&Adapter>,
        decay_norms: bool,
    ) -> ModelPlan {
        let frozen = matches!(role, Role::Reference | Role::Reward);
        let recompute = recompute.into();
        ModelPlan {
            role,
            shape: shape.clone(),
            units: units(shape, frozen, adapter, decay_norms),
            recompute,
            programs: programs(shape, recompute),
        }
    }

    pub fn trainable(&self) -> bool {
        self.units.iter().any(|u| u.trainable_elems > 0)
    }

    /// The same model, with other recomputation.
    pub(crate) fn recomputing(self, recompute: Recomputation) -> ModelPlan {
        ModelPlan { recompute, programs: programs(&self.shape, recompute), ..self }
    }

    pub fn kind(&self, unit: usize) -> UnitKind {
        let head = self.units.len() - 1;
        match unit {
            0 => UnitKind::Embed,
            _ if unit == head => UnitKind::Head,
            _ if unit + self.recompute.late_blocks as usize >= head => UnitKind::LateBlock,
            _ => UnitKind::EarlyBlock,
        }
    }

    pub fn programs(&self, unit: usize) -> &Programs {
        &self.programs[self.kind(unit) as usize]
    }

    /// Slot layouts by [`UnitKind`].
    pub(crate) fn layouts(&self, sizes: Sizes) -> [UnitLayout; 4] {
        self.programs.each_ref().map(|programs| UnitLayout::new(programs, sizes))
    }

    pub fn params(&self) -> u64 {
        self.units.iter().map(|u| u.params()).sum()
    }
}

fn programs(shape: &ModelShape, recompute: Recomputation) -> [Programs; 4] {
    [
        embed_programs(shape),
        block_programs(shape, recompute.early),
        block_programs(shape, recompute.late),
        head_programs(shape),
    ]
}

/// Everything a schedule and its memory depend on.
#[derive(Clone, Debug)]
pub struct PlanInput {
    pub models: Vec<ModelPlan>,
    pub mesh: Mesh,
    pub strategy: crate::strategy::Strategy,
    pub placements: Placements,
    pub order: AccumulationOrder,
    pub micros: u32,
    pub prefetch: u32,
    /// Whole gradients are reduced in buckets of this size.
    pub bucket: Bytes,
    /// Sharded gradients are reduced in buckets of at least this many elements, of whole units.
    pub reduce_bucket: usize,
    /// Updated parameters are published in buckets of at least this many elements, of whole units.
    pub publish_bucket: usize,
    /// Storage type of activations and working parameters.
    pub storage: DType,
    pub bounds: Bounds,
    pub head_chunk: usize,
    pub needs: DeviceNeeds,
    /// Whether the objective's coefficients are known before the head runs.
    pub coefficients_ahead: bool,
    pub clip: bool,
    /// Whether what is trained is also scored: evaluation during training.
    pub evaluates: bool,
    /// Generation: documents that grow at once, and the room each has.
    pub generation: Option<Generation>,
}

impl PlanInput {
    /// Tier, elements and type of a resident state on the rank that holds most. The trainable and the
    /// frozen part of a unit are cut over the shard axis separately, so that every rank has its share of
    /// both.
    pub fn resident(&self, model: ModelId, unit: u32, state: State) -> (Tier, usize, DType) {
        let shape = &self.models[model.0 as usize].units[unit as usize];
        let p = &self.placements;
        let share = |elems: usize, placement: Placement| match placement {
            Placement::Whole => elems,
            Placement::Shard => shard_range(elems, self.mesh.shard, 0).elems(),
        };
        let (trained, frozen) = (shape.trainable_elems, shape.elems - shape.trainable_elems);
        match state {
            State::Working => {
                (p.params_tier, share(trained, p.params) + share(frozen, p.params), self.storage)
            }
            // Gradients live where the optimizer reads them: updates on the host find theirs there, also when the
            // states come from a disk.
            State::Grad => {
                let tier = if self.grads_leave(unit) { Tier::Host } else { Tier::Device };
                (tier, share(trained, p.grads), DType::F32)
            }
            State::Master | State::ExpAvg | State::ExpAvgSq => {
                (self.optimizer_tier(unit), share(trained, p.optimizer), DType::F32)
            }
        }
    }

    /// Whether the device has memory of its own: then batches and results cross over through a port on the
    /// host, and what decides an update stays on the device.
    pub fn is_separate(&self) -> bool {
        self.needs.host_foreign.is_some()
    }

    /// Tokens, targets, positions and document bounds of a micro-batch; in generation also places in the
    /// cache and the rows to draw from; with dropout also samples. In u32.
    pub fn inputs_elems(&self) -> usize {
        let grown = self.generation.map_or(0, |r| r.docs);
        let samples = if self.has_dropout() { self.docs_room() } else { 0 };
        3 * self.bounds.tokens + self.docs_room().max(grown) + 1 + 2 * grown + samples
    }

    /// Documents of a micro-batch as the device sees it. One with memory of its own is given whole blocks of 256 tokens,
    /// so that shapes are few; what fills the last block is a document besides.
    pub fn docs_room(&self) -> usize {
        self.bounds.docs + usize::from(self.is_separate())
    }

    /// What of the port belongs to one micro-batch: its inputs, coefficients and log-probabilities, each on a
    /// boundary of 256 elements of four bytes.
    pub fn port_stride(&self) -> usize {
        self.inputs_elems().next_multiple_of(256) + 2 * self.bounds.tokens.next_multiple_of(256)
    }

    /// The port: a part for each micro-batch, then, in generation, a chunk of logits.
    pub fn port_elems(&self) -> usize {
        let logits = self.generation.map_or(0, |r| r.docs * self.models[0].shape.vocab);
        self.micros as usize * self.port_stride() + logits
    }

    /// Whether any model drops: then batches say which sample each document is.
    pub fn has_dropout(&self) -> bool {
        self.models.iter().any(|m| m.shape.dropout.is_on())
    }

    /// Whether ranks hold different parts of a state.
    pub fn is_sharded(&self, state: State) -> bool {
        let p = &self.placements;
        let placement = match state {
            State::Working => p.params,
            State::Grad => p.grads,
            State::Master | State::ExpAvg | State::ExpAvgSq => p.optimizer,
        };
        placement == Placement::Shard && self.mesh.shard > 1
    }

    /// The parts of a unit that a rank holds of a state: the trained one and the frozen one.
    pub fn owned(&self, model: ModelId, unit: u32, state: State, rank: Rank) -> [OwnedPart; 2] {
        let shape = &self.models[model.0 as usize].units[unit as usize];
        let (num, idx) =
            if self.is_sharded(state) { (self.mesh.shard, self.mesh.shard_idx(rank)) } else { (1, 0) };
        let trained = shard_range(shape.trainable_elems, num, idx);
        let frozen = match state {
            State::Working => shard_range(shape.elems - shape.trainable_elems, num, idx),
            _ => shard_range(0, num, idx),
        };
        // The frozen part begins at the same place on every rank: behind the longest trained one.
        let behind = shard_range(shape.trainable_elems, num, 0).elems();
        [
            OwnedPart { start: trained.start, end: trained.end, at: 0 },
            OwnedPart {
                start: shape.trainable_elems + frozen.start,
                end: shape.trainable_elems + frozen.end,
                at: behind,
            },
        ]
    }

    /// Where a unit's optimizer states live.
    pub fn optimizer_tier(&self, unit: u32) -> Tier {
        if unit < self.placements.stay { Tier::Device } else { self.placements.optimizer_tier }
    }

    /// Whether a unit's gradients are only made on the device, and live on the host.
    pub fn grads_leave(&self, unit: u32) -> bool {
        self.optimizer_tier(unit) != Tier::Device
    }

    /// Whether a rank's accumulator holds whole gradients.
    pub fn grads_are_whole(&self) -> bool {
        !self.is_sharded(State::Grad)
    }

    /// Whether the optimizer keeps an f32 copy of a unit of its own: where the working copy is narrower, or lies
    /// on the other side of the bus.
    fn has_master(&self, unit: u32) -> bool {
        let params_tier = self.placements.params_tier;
        self.storage != DType::F32
            || (params_tier == Tier::Device) != (self.optimizer_tier(unit) == Tier::Device)
    }

    /// The states a unit's update reads and writes, besides the working copy.
    pub fn optimizer_states(&self, unit: u32) -> &'static [State] {
        let all = &[State::ExpAvg, State::ExpAvgSq, State::Master];
        if self.has_master(unit) { all } else { &all[..2] }
    }
}

/// Elements `[start, end)` of a unit, kept from element `at` of a rank's buffer on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedPart {
    pub start: usize,
    pub end: usize,
    pub at: usize,
}

impl OwnedPart {
    pub const fn elems(&self) -> usize {
        self.end - self.start
    }
}

/// Bounds of generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation {
    pub docs: usize,
    pub tokens_per_doc: usize,
    /// What the kernels keep of one layer's keys and values for all of these documents, in f32.
    pub cache_elems: usize,
}
