//! The input of a plan: models, mesh, strategy and bounds.

use lockstep_core::{Bytes, DType, Mesh, Rank};
use lockstep_shape::{
    Channel, Channels, FlatParam, Freeze, Head, ModelShape, Param, Programs, Recompute, UnitKind, UnitShape,
    block_programs, embed_programs, head_programs, score_head_programs, units,
};

use crate::buffer::{MemoryTier, ParamState};
use crate::generation::GenerationBounds;
use crate::optimizer::{MasterFormat, OptimizerSpec, StateFormat};
use crate::quantised::{scale_table_elems, shard_of};
use crate::schedule::ModelId;
use crate::unit_layout::{Sizes, UnitLayout};

/// How a state is distributed: replicated on every rank, or sharded over the shard axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    Replicate,
    Shard,
}

/// How each state is distributed over ranks, and which memory it lives in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placements {
    pub params: Placement,
    pub grads: Placement,
    pub optimizer: Placement,
    pub params_tier: MemoryTier,
    pub optimizer_tier: MemoryTier,
    /// The optimizer states of this many units, counted from the first, are on the device even if `optimizer_tier` is
    /// not: the device updates these units while the host updates the others. The first units, because the next
    /// forward starts with them.
    pub optimizer_units_on_device: u32,
}

impl Placements {
    /// Everything replicated, on the device.
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
            ParamState::Working | ParamState::Codes | ParamState::ScaleCodes => self.params,
            ParamState::ScaleTable => Placement::Replicate,
            ParamState::Grad => self.grads,
            ParamState::Master | ParamState::Optimizer(_) | ParamState::Scales(_) => self.optimizer,
        }
    }
}

/// The order in which the gradients of an accumulation window are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccumulationOrder {
    /// Over micro-batches on each rank, then over ranks.
    Local,
    /// Over ranks for each micro-batch, then over micro-batches.
    Reduced,
}

/// The size of the largest micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchBounds {
    /// Tokens, rounded up to 256.
    pub tokens: usize,
    pub docs: usize,
    pub max_doc: usize,
    /// Whether documents that begin alike share the rows of their beginning: preference pairs, and the completions of
    /// one prompt.
    pub shares_rows: bool,
}

impl BatchBounds {
    /// Bounds for `rows` rows of at most `max_length` tokens, the last of which is never an input. A packed row may
    /// hold many short documents of at least two tokens each.
    pub fn of_rows(rows: usize, max_length: usize, packed: bool) -> BatchBounds {
        let positions = rows * (max_length - 1);
        let docs = if packed { rows * (max_length / 2).max(1) } else { rows };
        let tokens = positions.next_multiple_of(256);
        BatchBounds { tokens, docs, max_doc: max_length - 1, shares_rows: false }
    }

    /// Bounds for sequences of at most `max_length` tokens of which every token is an input, as scalar heads need it.
    pub fn of_sequences(sequences: usize, max_length: usize) -> BatchBounds {
        let tokens = (sequences * max_length).next_multiple_of(256);
        BatchBounds { tokens, docs: sequences, max_doc: max_length, shares_rows: false }
    }

    /// The same for documents that may begin alike.
    pub fn sharing_rows(self) -> BatchBounds {
        BatchBounds { shares_rows: true, ..self }
    }
}

/// Memory that the device needs besides buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceNeeds {
    /// The largest workspace that any operation needs.
    pub workspace_bytes: Bytes,
    /// Bytes on the device that the plan does not manage. On the CPU: code, stacks, libraries, the data set.
    pub overhead_bytes: Bytes,
    /// The same for the host process, if the device has its own memory. `None`: the device is the host.
    pub host_overhead_bytes: Option<Bytes>,
}

/// How much backward recomputes in each block. The last blocks recompute less, because backward frees their saved
/// activations first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecomputePolicy {
    pub early: Recompute,
    pub late: Recompute,
    /// The number of blocks, counted from the last, that use `late`.
    pub late_blocks: u32,
}

impl From<Recompute> for RecomputePolicy {
    /// The same mode in all blocks.
    fn from(all: Recompute) -> RecomputePolicy {
        RecomputePolicy { early: all, late: all, late_blocks: 0 }
    }
}

impl RecomputePolicy {
    /// The choices for a model of `blocks` blocks, ordered by how much they recompute: nothing for `n` = 0, everything
    /// for `n` = 2 · `blocks`.
    pub fn nth(n: u32, blocks: u32) -> RecomputePolicy {
        if n <= blocks {
            let late_blocks = blocks - n;
            return RecomputePolicy { early: Recompute::Selective, late: Recompute::None, late_blocks };
        }
        let late_blocks = (2 * blocks).saturating_sub(n);
        RecomputePolicy { early: Recompute::Full, late: Recompute::Selective, late_blocks }
    }
}

/// The part a model plays in the run.
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

/// How a model is placed, and which phases it has.
#[derive(Clone, Debug)]
pub struct ModelSettings {
    pub placements: Placements,
    pub bounds: BatchBounds,
    /// The head computes the logits of this many tokens at a time.
    pub head_chunk_tokens: usize,
    pub recompute: RecomputePolicy,
    /// The outputs that its head computes.
    pub channels: Channels,
    /// The outputs of a language model's head are those of softmax(logits / temperature), in every phase.
    pub temperature: f32,
    pub optimizer: OptimizerSpec,
    pub freeze: Freeze,
    pub decay_norms: bool,
    /// Whether it has a score phase: for evaluation during training, or as a reference or reward model.
    pub scores: bool,
    /// `Some` if it has a generate phase.
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
    pub temperature: f32,
    pub optimizer: OptimizerSpec,
    pub scores: bool,
    pub generation: Option<GenerationBounds>,
    /// The model whose weights it uses, without that model's adapters. `None`: it has weights of its own.
    pub shares_weights_of: Option<ModelId>,
    /// The distinct programs: units that compute the same share one.
    programs: Vec<Programs>,
    /// For every unit, its index in `programs`.
    program_of: Vec<usize>,
}

impl ModelPlan {
    /// A model whose role is not trained is frozen, whatever the settings say.
    pub fn new(role: ModelRole, shape: &ModelShape, settings: ModelSettings) -> ModelPlan {
        let ModelSettings { placements, bounds, head_chunk_tokens, recompute, channels, .. } = settings;
        let ModelSettings { temperature, optimizer, scores, generation, .. } = settings;
        let fits = match shape.head {
            Head::LanguageModel => channels.contains(Channel::LogProb) && !channels.contains(Channel::Value),
            Head::Score => channels == Channels::VALUE,
        };
        assert!(fits, "a model that ends in {:?} has no {channels:?}", shape.head);
        assert!(temperature.is_finite() && temperature > 0.0, "a temperature of {temperature}");
        let freeze = if role.trains() { settings.freeze } else { Freeze::All };
        let units = units(shape, &freeze, settings.decay_norms);
        // Masks of dropout differ between documents, so their rows do, too.
        let bounds = BatchBounds { shares_rows: bounds.shares_rows && !shape.has_dropout(), ..bounds };
        let (programs, program_of) = programs(shape, &units, recompute, bounds.shares_rows);
        ModelPlan {
            role,
            shape: shape.clone(),
            units,
            placements,
            bounds,
            head_chunk_tokens,
            recompute,
            channels,
            temperature,
            optimizer,
            scores,
            generation,
            shares_weights_of: None,
            programs,
            program_of,
        }
    }

    /// The same model without its adapters, which only scores: the reference of a policy that trains adapters. It has no
    /// weights of its own.
    pub fn without_adapters(&self, id: ModelId, role: ModelRole, settings: &ModelSettings) -> ModelPlan {
        let shape = ModelShape { lora: None, ..self.shape.clone() };
        let bounds = settings.bounds;
        let bounds = BatchBounds { shares_rows: bounds.shares_rows && !shape.has_dropout(), ..bounds };
        let (programs, program_of) = programs(&shape, &self.units, self.recompute, bounds.shares_rows);
        ModelPlan {
            role,
            shape,
            bounds,
            channels: settings.channels,
            scores: true,
            generation: None,
            shares_weights_of: Some(id),
            programs,
            program_of,
            ..self.clone()
        }
    }

    pub fn trains(&self) -> bool {
        self.shares_weights_of.is_none() && self.units.iter().any(|u| u.trained_elems > 0)
    }

    /// The factor by which the head scales logits. Training, scoring and generation use this one number, so that their
    /// log-probabilities have the same bits.
    pub fn inverse_temperature(&self) -> f32 {
        1.0 / self.temperature
    }

    /// The same model with another recompute policy.
    pub(crate) fn with_recompute(self, recompute: RecomputePolicy) -> ModelPlan {
        let (programs, program_of) = programs(&self.shape, &self.units, recompute, self.bounds.shares_rows);
        ModelPlan { recompute, programs, program_of, ..self }
    }

    /// The unit with the embedding table.
    pub fn embed(&self) -> u32 {
        self.unit_of(UnitKind::Embed)
    }

    /// The last unit.
    pub fn head(&self) -> u32 {
        self.unit_of(match self.shape.head {
            Head::LanguageModel => UnitKind::Head,
            Head::Score => UnitKind::ScoreHead,
        })
    }

    fn unit_of(&self, kind: UnitKind) -> u32 {
        self.units.iter().position(|unit| unit.kind == kind).expect("every model has one") as u32
    }

    /// The index of a unit's layout in [`crate::PlanData::layouts`].
    pub fn layout_of(&self, unit: u32) -> usize {
        self.program_of[unit as usize]
    }

    pub fn programs(&self, unit: u32) -> &Programs {
        &self.programs[self.layout_of(unit)]
    }

    /// The slot layouts of its programs. See [`ModelPlan::layout_of`].
    pub(crate) fn layouts(&self, storage: DType) -> Vec<UnitLayout> {
        let sizes = Sizes { tokens: self.bounds.tokens, chunk: self.head_chunk_tokens, storage };
        self.programs.iter().map(|programs| UnitLayout::new(programs, sizes)).collect()
    }

    pub fn params(&self) -> u64 {
        self.units.iter().map(|u| u.params()).sum()
    }

    /// Elements (u32) of the inputs of a micro-batch.
    pub fn inputs_elems(&self, has_separate_memory: bool) -> usize {
        self.inputs_layout(has_separate_memory).end
    }

    /// Elements of a micro-batch's outputs, and of its coefficients: one number per token and channel.
    pub fn per_token_elems(&self) -> usize {
        self.channels.count() * self.bounds.tokens
    }

    /// Where the parts of a micro-batch's inputs lie in their buffer.
    pub fn inputs_layout(&self, has_separate_memory: bool) -> InputsLayout {
        let docs = self.max_docs(has_separate_memory);
        InputsLayout::of(InputsSize {
            tokens: self.bounds.tokens,
            docs: docs.max(self.max_decode_docs()),
            page_tables: self.page_table_elems(),
            shares_rows: self.bounds.shares_rows,
            samples: if self.shape.has_dropout() { docs } else { 0 },
        })
    }

    /// The largest number of documents of a micro-batch on the device. A device with its own memory gets multiples of
    /// 256 tokens, so that there are few distinct shapes; the padding is one more document.
    pub fn max_docs(&self, has_separate_memory: bool) -> usize {
        self.bounds.docs + usize::from(has_separate_memory)
    }

    /// The largest number of sequences in one decode batch.
    pub fn max_decode_docs(&self) -> usize {
        self.generation.map_or(0, |generation| generation.docs)
    }

    /// Elements (u32) of the page tables of a decode batch.
    pub fn page_table_elems(&self) -> usize {
        self.generation.map_or(0, |generation| generation.docs * generation.pages_per_doc())
    }

    /// Elements (of four bytes) of I/O staging per micro-batch: its inputs, coefficients and outputs, each padded to a
    /// multiple of 256 elements.
    pub fn io_staging_stride_elems(&self) -> usize {
        let per_channel = 2 * self.bounds.tokens.next_multiple_of(256);
        self.inputs_elems(true).next_multiple_of(256) + self.channels.count() * per_channel
    }
}

/// The first element (u32) of each part of a micro-batch's inputs. A row map has three parts: the row of each position,
/// where each row's positions begin, and the positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputsLayout {
    pub tokens: usize,
    pub targets: usize,
    pub positions: usize,
    pub cu_seqlens: usize,
    /// For generation.
    pub page_tables: usize,
    pub head_rows: [usize; 3],
    pub shared_rows: Option<[usize; 3]>,
    /// With dropout.
    pub samples: usize,
    pub end: usize,
}

/// The largest sizes of the parts of a micro-batch's inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputsSize {
    pub tokens: usize,
    pub docs: usize,
    pub page_tables: usize,
    pub shares_rows: bool,
    pub samples: usize,
}

impl InputsLayout {
    pub fn of(size: InputsSize) -> InputsLayout {
        let InputsSize { tokens, docs, page_tables, shares_rows, samples } = size;
        let mut end = 0;
        let mut part = |elems: usize| {
            end += elems;
            end - elems
        };
        let row_map = [tokens, tokens + 1, tokens];
        InputsLayout {
            tokens: part(tokens),
            targets: part(tokens),
            positions: part(tokens),
            cu_seqlens: part(docs + 1),
            page_tables: part(page_tables),
            head_rows: row_map.map(&mut part),
            shared_rows: shares_rows.then(|| row_map.map(&mut part)),
            samples: part(samples),
            end,
        }
    }
}

/// The distinct programs of a model, and for each unit the index of its own.
fn programs(
    shape: &ModelShape,
    units: &[UnitShape],
    recompute: RecomputePolicy,
    shares_rows: bool,
) -> (Vec<Programs>, Vec<usize>) {
    let blocks = units.iter().filter(|unit| matches!(unit.kind, UnitKind::Block(_))).count() as u32;
    // Blocks have equal programs if they recompute the same, have the same adapters and train the same tensors.
    type Key = (Option<Recompute>, Vec<(Param, bool)>);
    let mut keys: Vec<Key> = Vec::new();
    let (mut programs, mut program_of) = (Vec::new(), Vec::new());
    for unit in units {
        let recompute = match unit.kind {
            UnitKind::Block(i) if i + recompute.late_blocks >= blocks => Some(recompute.late),
            UnitKind::Block(_) => Some(recompute.early),
            UnitKind::Embed | UnitKind::Head | UnitKind::ScoreHead => None,
        };
        let trained = unit.segments.iter().map(|segment| (segment.param, segment.is_trained())).collect();
        let key = (recompute, trained);
        let known = keys.iter().position(|known| *known == key && recompute.is_some());
        program_of.push(known.unwrap_or(programs.len()));
        if known.is_none() {
            keys.push(key);
            programs.push(match (unit.kind, recompute) {
                (UnitKind::Embed, _) => embed_programs(shape),
                (UnitKind::Block(_), recompute) => {
                    block_programs(shape, unit, recompute.expect("blocks have a choice"), shares_rows)
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
    /// Replicated gradients are all-reduced in buckets of this size.
    pub ddp_bucket_bytes: Bytes,
    /// Sharded gradients are reduce-scattered in buckets of whole units, of at least this many elements.
    pub reduce_bucket_elems: usize,
    /// Updated parameters are all-gathered in buckets of whole units, of at least this many elements.
    pub allgather_bucket_elems: usize,
    /// The type that activations and working parameters are stored in.
    pub storage: DType,
    pub masters: MasterFormat,
    /// The type that reduced gradients are stored in until the update: f32, or bf16 if there is one micro-batch.
    pub grad_dtype: DType,
    pub needs: DeviceNeeds,
    /// Whether the objective's coefficients are known before the head runs.
    pub coefficients_ahead: bool,
}

impl PlanInput {
    /// The simplest input: one rank, one micro-batch per step, no prefetch. Others are described by what differs.
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
            masters: MasterFormat::F32,
            grad_dtype: DType::F32,
            needs,
            coefficients_ahead: true,
        }
    }

    pub fn model(&self, id: ModelId) -> &ModelPlan {
        &self.models[id.0 as usize]
    }

    /// The model that holds a model's weights: itself, unless it shares those of another.
    pub fn weights_of(&self, id: ModelId) -> ModelId {
        self.model(id).shares_weights_of.unwrap_or(id)
    }

    pub(crate) fn unit(&self, model: ModelId, unit: u32) -> &UnitShape {
        &self.model(model).units[unit as usize]
    }

    /// Tier, elements and type of a resident state, on the rank with the largest shard.
    pub fn resident(&self, model: ModelId, unit: u32, state: ParamState) -> (MemoryTier, usize, DType) {
        let num_shards = self.mesh.size_of(self.sharded_over(model, state));
        let flat_params = self.flat_params_with(model, unit, state);
        let params: usize = flat_params.map(|flat| shard_of(&flat, state, num_shards, 0).elems()).sum();
        let (plan, elems) = (self.model(model), params / state.params_per_number());
        match state {
            ParamState::Working => (plan.placements.params_tier, elems, self.storage),
            ParamState::Codes | ParamState::ScaleCodes => (plan.placements.params_tier, elems, DType::U8),
            ParamState::ScaleTable => {
                let elems = scale_table_elems(self.unit(model, unit));
                (plan.placements.params_tier, elems, DType::F32)
            }
            // Gradients live where the optimizer reads them: on the host for updates on the host, even if the states
            // are on NVMe.
            ParamState::Grad => {
                let tier =
                    if self.grads_offloaded(model, unit) { MemoryTier::Host } else { MemoryTier::Device };
                (tier, elems, self.grad_dtype)
            }
            ParamState::Master => {
                let dtype = self.master_dtype(model, unit).unwrap_or(DType::F32);
                (self.optimizer_tier(model, unit), elems, dtype)
            }
            ParamState::Optimizer(_) => {
                (self.optimizer_tier(model, unit), elems, plan.optimizer.format.dtype())
            }
            ParamState::Scales(_) => (self.optimizer_tier(model, unit), elems, DType::F32),
        }
    }

    /// The flat parameters of a unit that have a state: working parameters or codes, and if they are trained, the other
    /// states.
    fn flat_params_with(
        &self,
        model: ModelId,
        unit: u32,
        state: ParamState,
    ) -> impl Iterator<Item = FlatParam> {
        let flat_params = self.unit(model, unit).flat_params().into_iter();
        flat_params.filter(move |flat| match state {
            ParamState::Working => !flat.quantised,
            ParamState::Codes | ParamState::ScaleCodes | ParamState::ScaleTable => flat.quantised,
            ParamState::Master | ParamState::Optimizer(_) | ParamState::Scales(_) | ParamState::Grad => {
                flat.trained_start.is_some()
            }
        })
    }

    /// Elements of the largest shard of a unit that a rank updates.
    pub fn optimizer_shard_elems(&self, model: ModelId, unit: u32) -> usize {
        self.resident(model, unit, ParamState::Master).1
    }

    /// Whether the device has its own memory. Then batches and outputs pass through staging memory on the host, and
    /// the clip factor of an update stays on the device.
    pub fn has_separate_memory(&self) -> bool {
        self.needs.host_overhead_bytes.is_some()
    }

    /// Elements of I/O staging: a part for each micro-batch, then, for generation, the logits to sample from.
    pub fn io_staging_elems(&self) -> usize {
        let of = |model: &ModelPlan| {
            self.num_micro_batches as usize * model.io_staging_stride_elems()
                + model.max_decode_docs() * model.shape.vocab
        };
        self.models.iter().map(of).max().unwrap_or(0)
    }

    /// The parts of a unit's state that a rank holds, in order. Every flat parameter is sharded by itself, so that each
    /// rank has a shard of each; a part starts at the same local offset on every rank.
    pub fn owned(&self, model: ModelId, unit: u32, state: ParamState, rank: Rank) -> Vec<OwnedPart> {
        let axes = self.sharded_over(model, state);
        self.parts(model, unit, state, (self.mesh.size_of(axes), self.mesh.index_along(axes, rank)))
    }

    /// The parts of a unit's state if a single rank holds all of it: where each flat parameter lies in the whole state.
    pub fn whole(&self, model: ModelId, unit: u32, state: ParamState) -> Vec<OwnedPart> {
        self.parts(model, unit, state, (1, 0))
    }

    fn parts(
        &self,
        model: ModelId,
        unit: u32,
        state: ParamState,
        (num_shards, shard_idx): (u32, u32),
    ) -> Vec<OwnedPart> {
        let mut local_start = 0;
        let part = |flat: FlatParam| {
            let shard = shard_of(&flat, state, num_shards, shard_idx);
            let start = flat.start / state.elems_per_entry();
            let part = OwnedPart {
                start: start + shard.start,
                end: start + shard.end,
                trained_start: flat.trained_start.map(|first| first + shard.start),
                local_start,
            };
            local_start += shard_of(&flat, state, num_shards, 0).elems();
            part
        };
        self.flat_params_with(model, unit, state).map(part).collect()
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

    /// Whether a unit's gradients are offloaded to the host as soon as backward has computed them.
    pub fn grads_offloaded(&self, model: ModelId, unit: u32) -> bool {
        self.optimizer_tier(model, unit) != MemoryTier::Device
    }

    /// The type of what the optimizer keeps of a unit's parameters besides the working copy: f32 masters, the remainders of
    /// bf16 weights (i16), or, without masters, bf16 weights in the optimizer's memory. `None`: it updates the working copy
    /// and needs nothing else.
    pub fn master_dtype(&self, model: ModelId, unit: u32) -> Option<DType> {
        let on_device = |tier| tier == MemoryTier::Device;
        let is_apart = on_device(self.model(model).placements.params_tier)
            != on_device(self.optimizer_tier(model, unit));
        match (self.storage, self.masters) {
            (DType::BF16, MasterFormat::None) => is_apart.then_some(DType::BF16),
            (DType::BF16, MasterFormat::F32) if !is_apart => Some(DType::I16),
            (DType::F32, _) => is_apart.then_some(DType::F32),
            _ => Some(DType::F32),
        }
    }

    /// Whether an update rounds stochastically, with random bits that depend on the tensor.
    pub fn rounds_stochastically(&self, model: ModelId) -> bool {
        let without_masters = self.masters == MasterFormat::None && self.storage == DType::BF16;
        without_masters || self.model(model).optimizer.format == StateFormat::Bf16
    }

    /// Whether an update of a unit reads its working copy.
    pub fn updates_read_working(&self, model: ModelId, unit: u32) -> bool {
        matches!(self.master_dtype(model, unit), None | Some(DType::I16))
    }

    /// The states that a unit's update reads and writes, besides the working copy.
    pub fn optimizer_states(&self, model: ModelId, unit: u32) -> Vec<ParamState> {
        let master = self.master_dtype(model, unit).map(|_| ParamState::Master);
        self.model(model).optimizer.states().chain(master).collect()
    }

    /// Bytes of all states that an update of `elems` elements of a unit needs.
    pub fn optimizer_state_bytes(&self, model: ModelId, unit: u32, elems: usize) -> usize {
        let states = self.optimizer_states(model, unit).into_iter();
        states.map(|state| self.state_bytes(model, unit, state, elems)).sum()
    }

    fn state_bytes(&self, model: ModelId, unit: u32, state: ParamState, elems: usize) -> usize {
        elems / state.params_per_number() * self.resident(model, unit, state).2.size()
    }

    /// Where the states of `elems` elements of a unit lie in staging memory, and how many bytes that takes.
    pub fn staged_states(
        &self,
        model: ModelId,
        unit: u32,
        elems: usize,
    ) -> (Vec<(ParamState, Bytes)>, Bytes) {
        let mut end = Bytes::ZERO;
        let states = self.optimizer_states(model, unit).into_iter().map(|state| {
            let start = end;
            end = (end + Bytes(self.state_bytes(model, unit, state, elems) as u64)).align_to(64);
            (state, start)
        });
        (states.collect(), end)
    }
}

/// Elements `[start, end)` of a unit that a rank holds, stored from element `local_start` of its buffer on. Of a state with
/// fewer entries than elements ([`ParamState::elems_per_entry`]) all of these count entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedPart {
    pub start: usize,
    pub end: usize,
    /// The index of its first element among the unit's trained elements; `None`: frozen.
    pub trained_start: Option<usize>,
    pub local_start: usize,
}

impl OwnedPart {
    pub const fn elems(&self) -> usize {
        self.end - self.start
    }
}
