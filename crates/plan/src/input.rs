//! What a plan is made from.

use lockstep_core::{Bytes, DType, Mesh, Rank, shard_range};
use lockstep_shape::{
    Channel, Channels, FlatParam, Freeze, Head, ModelShape, Programs, Recompute, UnitKind, UnitShape,
    block_programs, embed_programs, head_programs, score_head_programs, units,
};

use crate::buffer::{MemoryTier, ParamState};
use crate::optimizer::OptimizerSpec;
use crate::schedule::ModelId;
use crate::unit_layout::{Sizes, UnitLayout};

/// Whole on every rank, or sharded over the shard axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    Replicate,
    Shard,
}

/// The cells of the strategy table: how each state is placed, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placements {
    pub params: Placement,
    pub grads: Placement,
    pub optimizer: Placement,
    pub params_tier: MemoryTier,
    pub optimizer_tier: MemoryTier,
    /// Units, counted from the first, whose optimizer states are on the device wherever those of the others are:
    /// a device with room to spare updates them while the host updates the rest. The first, for the next
    /// forward begins with them.
    pub optimizer_units_on_device: u32,
}

impl Placements {
    /// Everything whole and on the device.
    pub const REPLICATED: Placements = Placements {
        params: Placement::Replicate,
        grads: Placement::Replicate,
        optimizer: Placement::Replicate,
        params_tier: MemoryTier::Device,
        optimizer_tier: MemoryTier::Device,
        optimizer_units_on_device: 0,
    };

    pub(crate) fn of(&self, state: ParamState) -> Placement {
        match state {
            ParamState::Working => self.params,
            ParamState::Grad => self.grads,
            ParamState::Master | ParamState::Optimizer(_) => self.optimizer,
        }
    }
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
pub struct BatchBounds {
    /// Tokens, rounded up to 256.
    pub tokens: usize,
    pub docs: usize,
    pub max_doc: usize,
}

impl BatchBounds {
    /// `rows` rows of at most `max_length` tokens, one of which is never an input. A row may hold many
    /// short documents, each at least two tokens long.
    pub fn of_rows(rows: usize, max_length: usize, packed: bool) -> BatchBounds {
        let positions = rows * (max_length - 1);
        let docs = if packed { rows * (max_length / 2).max(1) } else { rows };
        BatchBounds { tokens: positions.next_multiple_of(256), docs, max_doc: max_length - 1 }
    }
}

/// What the device's kernels ask for, and what is not ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceNeeds {
    /// The largest workspace of any operation.
    pub workspace_bytes: Bytes,
    /// Bytes on the device that the plan does not hand out. On the CPU: code, stacks, libraries, the data set.
    pub overhead_bytes: Bytes,
    /// The same of the process, where the device has memory of its own; `None`: the device is the host.
    pub host_overhead_bytes: Option<Bytes>,
}

/// What backward computes again: one thing in the first blocks, less in the last, for what those keep is given back
/// first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecomputePolicy {
    pub early: Recompute,
    pub late: Recompute,
    /// How many blocks are late.
    pub late_blocks: u32,
}

impl From<Recompute> for RecomputePolicy {
    /// The same in all blocks.
    fn from(all: Recompute) -> RecomputePolicy {
        RecomputePolicy { early: all, late: all, late_blocks: 0 }
    }
}

impl RecomputePolicy {
    /// The choices for a model of so many blocks, from nothing (0) to everything (twice their number), each a little
    /// more than the one before.
    pub fn nth(n: u32, blocks: u32) -> RecomputePolicy {
        if n <= blocks {
            let late_blocks = blocks - n;
            return RecomputePolicy { early: Recompute::Selective, late: Recompute::None, late_blocks };
        }
        let late_blocks = (2 * blocks).saturating_sub(n);
        RecomputePolicy { early: Recompute::Full, late: Recompute::Selective, late_blocks }
    }
}

/// What a model is in the run for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelRole {
    Policy,
    Value,
    Reference,
    Reward,
}

impl ModelRole {
    /// Whether a model in this role can be trained.
    pub const fn trains(self) -> bool {
        matches!(self, ModelRole::Policy | ModelRole::Value)
    }
}

/// How a model is held and what is done with it.
#[derive(Clone, Debug)]
pub struct ModelSettings {
    pub placements: Placements,
    /// The largest micro-batch it meets.
    pub bounds: BatchBounds,
    /// Tokens whose logits are there at once.
    pub head_chunk_tokens: usize,
    pub recompute: RecomputePolicy,
    /// What its head is asked for.
    pub channels: Channels,
    pub optimizer: OptimizerSpec,
    pub freeze: Freeze,
    pub decay_norms: bool,
    /// Whether it is also scored: evaluation during training, a reference, a reward model.
    pub scores: bool,
    /// Whether it generates: documents that grow at once, and the room each has.
    pub generation: Option<GenerationBounds>,
}

/// One model of the run: its units and the programs they run.
#[derive(Clone, Debug)]
pub struct ModelPlan {
    pub role: ModelRole,
    pub shape: ModelShape,
    pub units: Vec<UnitShape>,
    pub placements: Placements,
    pub bounds: BatchBounds,
    pub head_chunk_tokens: usize,
    pub recompute: RecomputePolicy,
    pub channels: Channels,
    pub optimizer: OptimizerSpec,
    pub scores: bool,
    pub generation: Option<GenerationBounds>,
    /// Units that compute alike share one.
    programs: Vec<Programs>,
    /// For every unit, its place among the programs.
    program_of: Vec<usize>,
}

impl ModelPlan {
    /// A model in a role that is not trained is frozen, whatever the settings say.
    pub fn new(role: ModelRole, shape: &ModelShape, settings: ModelSettings) -> ModelPlan {
        let ModelSettings { placements, bounds, head_chunk_tokens, recompute, channels, .. } = settings;
        let ModelSettings { optimizer, scores, generation, .. } = settings;
        let fits = match shape.head {
            Head::LanguageModel => channels.contains(Channel::LogProb) && !channels.contains(Channel::Value),
            Head::Score => channels == Channels::VALUE,
        };
        assert!(fits, "a model that ends in {:?} has no {channels:?}", shape.head);
        let freeze = if role.trains() { settings.freeze } else { Freeze::All };
        let units = units(shape, &freeze, settings.decay_norms);
        let (programs, program_of) = programs(shape, &units, recompute);
        ModelPlan {
            role,
            shape: shape.clone(),
            units,
            placements,
            bounds,
            head_chunk_tokens,
            recompute,
            channels,
            optimizer,
            scores,
            generation,
            programs,
            program_of,
        }
    }

    pub fn trains(&self) -> bool {
        self.units.iter().any(|u| u.trained_elems > 0)
    }

    /// The same model, with other recomputation.
    pub(crate) fn recomputing(self, recompute: RecomputePolicy) -> ModelPlan {
        let (programs, program_of) = programs(&self.shape, &self.units, recompute);
        ModelPlan { recompute, programs, program_of, ..self }
    }

    /// The unit that holds the embedding's table.
    pub fn embed(&self) -> u32 {
        self.unit_of(UnitKind::Embed)
    }

    /// The unit that ends the model.
    pub fn head(&self) -> u32 {
        self.unit_of(match self.shape.head {
            Head::LanguageModel => UnitKind::Head,
            Head::Score => UnitKind::ScoreHead,
        })
    }

    fn unit_of(&self, kind: UnitKind) -> u32 {
        self.units.iter().position(|unit| unit.kind == kind).expect("every model has one") as u32
    }

    /// A unit's place among [`crate::PlanData::layouts`].
    pub fn layout_of(&self, unit: u32) -> usize {
        self.program_of[unit as usize]
    }

    pub fn programs(&self, unit: u32) -> &Programs {
        &self.programs[self.layout_of(unit)]
    }

    /// Slot layouts of its programs. See [`ModelPlan::layout_of`].
    pub(crate) fn layouts(&self, storage: DType) -> Vec<UnitLayout> {
        let sizes = Sizes { tokens: self.bounds.tokens, chunk: self.head_chunk_tokens, storage };
        self.programs.iter().map(|programs| UnitLayout::new(programs, sizes)).collect()
    }

    pub fn params(&self) -> u64 {
        self.units.iter().map(|u| u.params()).sum()
    }

    /// Tokens, targets, positions and document bounds of a micro-batch; in generation also places in the
    /// cache and the rows to draw from; with dropout also samples. In u32.
    pub fn inputs_elems(&self, has_separate_memory: bool) -> usize {
        let (docs, grown) = (self.max_docs(has_separate_memory), self.max_decode_docs());
        let samples = if self.shape.dropout.is_on() { docs } else { 0 };
        3 * self.bounds.tokens + docs.max(grown) + 1 + 2 * grown + samples
    }

    /// Documents of a micro-batch as the device sees it. One with memory of its own is given whole blocks of 256 tokens,
    /// so that shapes are few; what fills the last block is a document besides.
    pub fn max_docs(&self, has_separate_memory: bool) -> usize {
        self.bounds.docs + usize::from(has_separate_memory)
    }

    /// Documents that grow at once.
    pub fn max_decode_docs(&self) -> usize {
        self.generation.map_or(0, |generation| generation.docs)
    }

    /// What of the port belongs to one micro-batch: its inputs, coefficients and outputs, each on a boundary of 256
    /// elements of four bytes.
    pub fn io_staging_stride_elems(&self) -> usize {
        let per_channel = 2 * self.bounds.tokens.next_multiple_of(256);
        self.inputs_elems(true).next_multiple_of(256) + self.channels.count() * per_channel
    }
}

/// The programs of a model, and for each unit which it runs.
fn programs(
    shape: &ModelShape,
    units: &[UnitShape],
    recompute: RecomputePolicy,
) -> (Vec<Programs>, Vec<usize>) {
    let blocks = units.iter().filter(|unit| matches!(unit.kind, UnitKind::Block(_))).count() as u32;
    // What tells programs apart: what is recomputed, and which tensors are trained.
    let mut keys: Vec<(Option<Recompute>, Vec<bool>)> = Vec::new();
    let (mut programs, mut program_of) = (Vec::new(), Vec::new());
    for unit in units {
        let recompute = match unit.kind {
            UnitKind::Block(i) if i + recompute.late_blocks >= blocks => Some(recompute.late),
            UnitKind::Block(_) => Some(recompute.early),
            UnitKind::Embed | UnitKind::Head | UnitKind::ScoreHead => None,
        };
        let trained = unit.segments.iter().map(|segment| segment.is_trained()).collect();
        let key = (recompute, trained);
        let known = keys.iter().position(|known| *known == key && recompute.is_some());
        program_of.push(known.unwrap_or(programs.len()));
        if known.is_none() {
            keys.push(key);
            programs.push(match (unit.kind, recompute) {
                (UnitKind::Embed, _) => embed_programs(shape),
                (UnitKind::Block(_), recompute) => {
                    block_programs(shape, unit, recompute.expect("blocks have a choice"))
                }
                (UnitKind::Head, _) => head_programs(shape),
                (UnitKind::ScoreHead, _) => score_head_programs(shape),
            });
        }
    }
    (programs, program_of)
}

/// Everything a schedule and its memory depend on.
#[derive(Clone, Debug)]
pub struct PlanInput {
    pub models: Vec<ModelPlan>,
    pub mesh: Mesh,
    pub strategy: crate::strategy::Strategy,
    pub order: AccumulationOrder,
    pub num_micro_batches: u32,
    pub prefetch: u32,
    /// Whole gradients are reduced in buckets of this size.
    pub ddp_bucket_bytes: Bytes,
    /// Sharded gradients are reduced in buckets of at least this many elements, of whole units.
    pub reduce_bucket_elems: usize,
    /// Updated parameters are published in buckets of at least this many elements, of whole units.
    pub allgather_bucket_elems: usize,
    /// Storage type of activations and working parameters.
    pub storage: DType,
    pub needs: DeviceNeeds,
    /// Whether the objective's coefficients are known before the head runs.
    pub coefficients_ahead: bool,
}

impl PlanInput {
    /// Models on one rank, one micro-batch a step, nothing ahead of its use: what others differ from.
    pub fn single_rank(models: Vec<ModelPlan>, storage: DType, needs: DeviceNeeds) -> PlanInput {
        PlanInput {
            models,
            mesh: Mesh::SINGLE,
            strategy: crate::strategy::ddp,
            order: AccumulationOrder::Local,
            num_micro_batches: 1,
            prefetch: 0,
            ddp_bucket_bytes: Bytes::ZERO,
            reduce_bucket_elems: 0,
            allgather_bucket_elems: 0,
            storage,
            needs,
            coefficients_ahead: true,
        }
    }

    pub fn model(&self, id: ModelId) -> &ModelPlan {
        &self.models[id.0 as usize]
    }

    fn unit(&self, model: ModelId, unit: u32) -> &UnitShape {
        &self.model(model).units[unit as usize]
    }

    /// Tier, elements and type of a resident state on the rank that holds most.
    pub fn resident(&self, model: ModelId, unit: u32, state: ParamState) -> (MemoryTier, usize, DType) {
        let parts = self.mesh.size_of(self.sharded_over(model, state));
        let cuts = self.flat_params_with(model, unit, state);
        let elems = cuts.map(|cut| shard_range(cut.elems(), parts, 0).elems()).sum();
        let plan = self.model(model);
        match state {
            ParamState::Working => (plan.placements.params_tier, elems, self.storage),
            // Gradients live where the optimizer reads them: updates on the host find theirs there, also when the
            // states come from a disk.
            ParamState::Grad => {
                let tier =
                    if self.grads_offloaded(model, unit) { MemoryTier::Host } else { MemoryTier::Device };
                (tier, elems, DType::F32)
            }
            ParamState::Master => (self.optimizer_tier(model, unit), elems, DType::F32),
            ParamState::Optimizer(i) => {
                (self.optimizer_tier(model, unit), elems, plan.optimizer.states[i as usize].dtype)
            }
        }
    }

    /// The flat parameters of a unit for which a state exists: parameters for all, anything else for the trained ones.
    fn flat_params_with(
        &self,
        model: ModelId,
        unit: u32,
        state: ParamState,
    ) -> impl Iterator<Item = FlatParam> {
        let cuts = self.unit(model, unit).flat_params().into_iter();
        cuts.filter(move |cut| state == ParamState::Working || cut.trained_start.is_some())
    }

    /// Elements of a unit that the rank with the longest share updates.
    pub fn share(&self, model: ModelId, unit: u32) -> usize {
        self.resident(model, unit, ParamState::Master).1
    }

    /// Whether the device has memory of its own: then batches and results cross over through a port on the
    /// host, and what decides an update stays on the device.
    pub fn has_separate_memory(&self) -> bool {
        self.needs.host_overhead_bytes.is_some()
    }

    /// The port: a part for each micro-batch, then, in generation, a chunk of logits.
    pub fn io_staging_elems(&self) -> usize {
        let of = |model: &ModelPlan| {
            self.num_micro_batches as usize * model.io_staging_stride_elems()
                + model.max_decode_docs() * model.shape.vocab
        };
        self.models.iter().map(of).max().unwrap_or(0)
    }

    /// The parts of a unit that a rank holds of a state, in order. Every flat parameter is sharded by itself, so that each
    /// rank has its share of all; a part begins at the same place of the buffer on every rank.
    pub fn owned(&self, model: ModelId, unit: u32, state: ParamState, rank: Rank) -> Vec<OwnedPart> {
        let axes = self.sharded_over(model, state);
        let (parts, index) = (self.mesh.size_of(axes), self.mesh.index_along(axes, rank));
        let mut at = 0;
        let own = |cut: FlatParam| {
            let own = shard_range(cut.elems(), parts, index);
            let part = OwnedPart {
                start: cut.start + own.start,
                end: cut.start + own.end,
                trained_start: cut.trained_start.map(|first| first + own.start),
                at,
            };
            at += shard_range(cut.elems(), parts, 0).elems();
            part
        };
        self.flat_params_with(model, unit, state).map(own).collect()
    }

    /// Where a unit's optimizer states live.
    pub fn optimizer_tier(&self, model: ModelId, unit: u32) -> MemoryTier {
        let placements = &self.model(model).placements;
        if unit < placements.optimizer_units_on_device {
            MemoryTier::Device
        } else {
            placements.optimizer_tier
        }
    }

    /// Whether a unit's gradients are only made on the device, and live on the host.
    pub fn grads_offloaded(&self, model: ModelId, unit: u32) -> bool {
        self.optimizer_tier(model, unit) != MemoryTier::Device
    }

    /// Whether the optimizer keeps an f32 copy of a unit of its own: where the working copy is narrower, or lies
    /// on the other side of the bus.
    fn has_master(&self, model: ModelId, unit: u32) -> bool {
        let params_tier = self.model(model).placements.params_tier;
        self.storage != DType::F32
            || (params_tier == MemoryTier::Device) != (self.optimizer_tier(model, unit) == MemoryTier::Device)
    }

    /// The states a unit's update reads and writes, besides the working copy.
    pub fn optimizer_states(&self, model: ModelId, unit: u32) -> Vec<ParamState> {
        let master = self.has_master(model, unit).then_some(ParamState::Master);
        self.model(model).optimizer.states().chain(master).collect()
    }

    /// Bytes of `elems` elements of all states that a unit's update needs, one state after the other.
    pub fn optimizer_state_bytes(&self, model: ModelId, unit: u32, elems: usize) -> usize {
        let states = self.optimizer_states(model, unit).into_iter();
        states.map(|state| elems * self.resident(model, unit, state).2.size()).sum()
    }
}

/// Elements `[start, end)` of a unit, kept from element `at` of a rank's buffer on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedPart {
    pub start: usize,
    pub end: usize,
    /// Its first element among the unit's trained ones; `None`: frozen.
    pub trained_start: Option<usize>,
    pub at: usize,
}

impl OwnedPart {
    pub const fn elems(&self) -> usize {
        self.end - self.start
    }
}

/// Bounds of generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GenerationBounds {
    pub docs: usize,
    pub tokens_per_doc: usize,
    /// What the kernels keep of one layer's keys and values for all of these documents, in f32.
    pub cache_elems: usize,
}
