//! The complete plan: models, buffers with offsets, and a schedule for each phase.

use std::ops::{Deref, Range};

use lockstep_core::{Bytes, DType, Fault, FaultClass, Rank};

use crate::buffer::{Access, Buffer, BufferId, BufferKind, MemoryTier, ParamState};
use crate::builder::{BufferTable, StepBuilder};
use crate::check::{Violation, check_phase};
use crate::input::{AccumulationOrder, OwnedPart, PlanInput};
use crate::memory::{ALIGN, MemoryPlan, pack};
use crate::schedule::{ModelId, OpKind, Schedule};
use crate::unit_layout::UnitLayout;

/// The kind of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PhaseKind {
    /// Prefill and decode with a KV cache.
    Generate,
    /// Forward only: computes the head's outputs.
    Score,
    /// One optimizer step.
    Train,
}

/// One phase: its operations, and the offsets of its buffers after the residents.
#[derive(Clone, Debug)]
pub struct Phase {
    pub kind: PhaseKind,
    pub name: String,
    pub model: ModelId,
    pub schedule: Schedule,
    /// Buffers on the device.
    pub memory: MemoryPlan,
    /// Buffers on the host.
    pub host: MemoryPlan,
}

/// A checked plan: nothing is read before it is written, buffers that are live at the same time do not share bytes,
/// every gradient is reduced once and every parameter is updated once. Only [`build`] creates one and nothing can
/// change it afterwards, so the engine does not check again.
#[derive(Clone, Debug)]
pub struct RunPlan(PlanData);

impl Deref for RunPlan {
    type Target = PlanData;

    fn deref(&self) -> &PlanData {
        &self.0
    }
}

/// Everything that a run does and stores, known before it starts.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PlanData {
    /// What the ranks of a run compare: it is the same on all of them.
    pub input: PlanInput,
    /// The rank that this plan is for; the rest is its part of the run. On today's axes all ranks have plans of the same
    /// shape, and differ in which part of a shard they own.
    pub rank: Rank,
    pub buffers: Vec<Buffer>,
    /// Residents by tier: at the start of the device arena, of the host arena, and of the NVMe file.
    pub residents: [Residents; MemoryTier::COUNT],
    pub phases: Vec<Phase>,
    /// Size of the device arena: residents and the largest phase.
    pub arena_bytes: Bytes,
    /// The part of the device arena that other ranks can read: the last residents and the first buffers of each phase.
    /// The rest is private to the rank.
    pub exported: Range<Bytes>,
    /// Size of the host arena: residents and the largest phase.
    pub host_bytes: Bytes,
    /// Size of the NVMe file that states are offloaded to.
    pub nvme_bytes: Bytes,
}

/// The buffers of one tier that live from step to step, and their offsets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Residents {
    pub offsets: Vec<(BufferId, Bytes)>,
    pub bytes: Bytes,
}

/// Why no plan could be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    #[error("the plan needs {needed} on the device, {over} over the budget of {budget}")]
    OverBudget { needed: Bytes, over: Bytes, budget: Bytes },
    #[error("every tensor is frozen: there is nothing to train")]
    NothingTrains,
    #[error("the `freeze` pattern `{pattern}` matches no tensor of the model")]
    UnmatchedFreezePattern { pattern: String, closest: Option<String> },
    #[error("`recompute: auto` recomputes as little as fits into memory, but the memory size is unknown")]
    NoBudget,
    #[error("`master_weights: none` is for bf16 weights; this run's weights are {storage}")]
    NoMasters { storage: DType },
    #[error("`gradient_dtype: bf16` needs one micro-batch per step, but there are {num_micro_batches}")]
    RoundedGradients { num_micro_batches: u32 },
    #[error("`gradient_dtype: bf16` does not work with fp16, whose loss scaling needs fp32 gradients")]
    ScaledGradients,
    #[error("`offload_param` needs sharded parameters (zero3 or full_shard), but the strategy is {strategy}")]
    ParamOffload { strategy: String },
    #[error("`offload_param` is not implemented for weights in 4 bits")]
    QuantisedOffload,
    #[error(
        "hybrid_shard shards inside a node and replicates across nodes; it needs at least two nodes of at least two ranks, found {nodes} node(s) of {per_node} rank(s)"
    )]
    HybridMesh { nodes: u32, per_node: u32 },
    #[error("the strategy's {phase} phase is invalid: {}", list(violations))]
    InvalidSchedule { phase: String, violations: Vec<Violation> },
}

/// The first few violations, and how many more there are.
fn list(violations: &[Violation]) -> String {
    const SHOWN: usize = 3;
    let mut text = violations.iter().take(SHOWN).map(ToString::to_string).collect::<Vec<_>>().join("; ");
    if violations.len() > SHOWN {
        text += &format!("; and {} more", violations.len() - SHOWN);
    }
    text
}

impl Fault for PlanError {
    fn class(&self) -> FaultClass {
        match self {
            PlanError::InvalidSchedule { .. } => FaultClass::Internal,
            _ => FaultClass::BadConfig,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            PlanError::OverBudget { .. } => Some(
                "To use less memory, cheapest first: set recompute to auto, selective or full; lower \
                 per_device_train_batch_size and raise gradient_accumulation_steps; lower max_length; use a strategy \
                 that shards more; set offload_optimizer: cpu."
                    .into(),
            ),
            PlanError::NoBudget => Some(
                "Set memory_budget_gib. Without it, the memory size of the GPU or the host is used, and this machine does \
                 not report it."
                    .into(),
            ),
            PlanError::InvalidSchedule { .. } => Some(
                "Emit all operations of a custom strategy through StepBuilder; `lockstep plan --schedule` prints the \
                 schedule of a built-in one."
                    .into(),
            ),
            PlanError::UnmatchedFreezePattern { closest, .. } => Some(match closest {
                Some(name) => format!(
                    "Did you mean `{name}`? `*` matches any text; the name of a module matches all its tensors."
                ),
                None => "`*` matches any text, as in `model.layers.*.mlp`; the name of a module matches all its tensors."
                    .into(),
            }),
            PlanError::NoMasters { .. } => {
                Some("Set `mixed_precision: bf16`, or `master_weights: fp32`.".into())
            }
            PlanError::RoundedGradients { .. } => Some(
                "Every sum would be rounded. Set gradient_accumulation_steps to 1, or `gradient_dtype: fp32`."
                    .into(),
            ),
            PlanError::ScaledGradients => {
                Some("Set `gradient_dtype: fp32`, or train in bf16 (`mixed_precision: bf16`).".into())
            }
            PlanError::NothingTrains => Some("Remove patterns from `freeze`.".into()),
            PlanError::QuantisedOffload => Some(
                "Remove `offload_param`: 4-bit weights take an eighth of f32. `offload_optimizer` works.".into(),
            ),
            PlanError::ParamOffload { .. } | PlanError::HybridMesh { .. } => None,
        }
    }
}

impl std::fmt::Display for PhaseKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            PhaseKind::Generate => "generate",
            PhaseKind::Score => "score",
            PhaseKind::Train => "train",
        })
    }
}

/// The exported range starts and ends on a page boundary, for every page size in use.
const EXPORT_ALIGN: u64 = 64 << 10;

/// Emits every phase of one rank, packs memory, and checks the result. The mesh of the input and the rank are its
/// coordinates on all axes.
pub fn build(input: PlanInput, rank: Rank) -> Result<RunPlan, PlanError> {
    assert!(rank.0 < input.mesh.world_size(), "{rank} of {} ranks", input.mesh.world_size());
    let plan = lay_out_rank(input, rank);
    for phase in &plan.phases {
        let violations = check_phase(&plan, phase);
        if !violations.is_empty() {
            return Err(PlanError::InvalidSchedule { phase: phase.name.clone(), violations });
        }
    }
    Ok(RunPlan(plan))
}

/// The first rank's plan without the checks of [`build`], to compare the sizes of several choices.
pub(crate) fn lay_out(input: PlanInput) -> PlanData {
    lay_out_rank(input, Rank(0))
}

/// Emits every phase and packs memory.
fn lay_out_rank(mut input: PlanInput, rank: Rank) -> PlanData {
    let sharded = |i: usize| input.is_sharded(ModelId(i as u8), ParamState::Grad);
    if input.num_micro_batches == 1 && !(0..input.models.len()).any(sharded) {
        // With one micro-batch both orders give the same sum, and `Local` needs no second buffer.
        input.order = AccumulationOrder::Local;
    }
    let mut table = BufferTable::default();
    register_residents(&input, &mut table);
    let mut schedules: Vec<(PhaseKind, ModelId, Schedule)> = Vec::new();
    let mut phase = |kind, model: usize, emit: &dyn Fn(&mut StepBuilder), table: &mut BufferTable| {
        let id = ModelId(model as u8);
        let mut builder = StepBuilder::new(&input, id, table);
        emit(&mut builder);
        schedules.push((kind, id, builder.finish()));
    };
    let models = || input.models.iter().enumerate();
    for (i, _) in models().filter(|(_, model)| model.generation.is_some()) {
        phase(PhaseKind::Generate, i, &|b| b.generate(), &mut table);
    }
    for (i, _) in models().filter(|(_, model)| model.scores) {
        phase(PhaseKind::Score, i, &|b| b.score(), &mut table);
    }
    for (i, _) in models().filter(|(_, model)| model.trains()) {
        phase(PhaseKind::Train, i, &input.strategy, &mut table);
    }
    let many = input.models.len() > 1;
    let buffers = table.buffers;
    let is_exported = exported_buffers(&input, &buffers, schedules.iter().map(|(_, _, schedule)| schedule));
    let on = |tier: MemoryTier, id: BufferId| buffers[id.0 as usize].tier == tier;
    let pack_exported =
        |schedule| pack(schedule, &buffers, |id| on(MemoryTier::Device, id) && is_exported[id.0 as usize]);
    let all_exported: Vec<MemoryPlan> =
        schedules.iter().map(|(_, _, schedule)| pack_exported(schedule)).collect();
    let largest_exported =
        all_exported.iter().map(|exported| exported.bytes).max().unwrap_or_default().align_to(EXPORT_ALIGN);
    let phases: Vec<Phase> = schedules
        .into_iter()
        .zip(all_exported)
        .map(|((kind, model, schedule), exported)| {
            let own =
                pack(&schedule, &buffers, |id| on(MemoryTier::Device, id) && !is_exported[id.0 as usize]);
            let host = pack(&schedule, &buffers, |id| on(MemoryTier::Host, id));
            let role = format!("{:?}", input.model(model).role).to_lowercase();
            let name = if many { format!("{kind} {role}") } else { kind.to_string() };
            Phase { kind, name, model, schedule, memory: exported.then(largest_exported, own), host }
        })
        .collect();
    assign_offsets((input, rank), buffers, phases, &is_exported, largest_exported)
}

/// Which buffers other ranks read directly: those that collectives send from. On GPUs NCCL does this instead.
fn exported_buffers<'s>(
    input: &PlanInput,
    buffers: &[Buffer],
    schedules: impl Iterator<Item = &'s Schedule>,
) -> Vec<bool> {
    let mut is_exported = vec![false; buffers.len()];
    if input.has_separate_memory() || input.mesh.world_size() == 1 {
        return is_exported;
    }
    for op in schedules.flat_map(|schedule| &schedule.ops) {
        if matches!(op.kind, OpKind::Gather { .. } | OpKind::Reduce { .. } | OpKind::AllGatherUpdated { .. })
        {
            // A buffer that is only written is a destination.
            for (id, _) in op.accesses.iter().filter(|(_, access)| *access != Access::Define) {
                is_exported[id.0 as usize] |= buffers[id.0 as usize].tier == MemoryTier::Device;
            }
        }
    }
    is_exported
}

/// Adds all residents to the table: they exist whether or not a phase uses them.
fn register_residents(input: &PlanInput, table: &mut BufferTable) {
    let with_weights = |(_, model): &(usize, &crate::input::ModelPlan)| model.shares_weights_of.is_none();
    for (m, model) in input.models.iter().enumerate().filter(with_weights) {
        for (u, unit) in model.units.iter().enumerate() {
            let (model, u) = (ModelId(m as u8), u as u32);
            let mut states = vec![ParamState::Working];
            states.extend(ParamState::QUANTISED.into_iter().filter(|_| unit.has_quantised()));
            if unit.trained_elems > 0 {
                states.push(ParamState::Grad);
                states.extend(input.optimizer_states(model, u));
            }
            for state in states {
                let unit = u;
                let (tier, elems, dtype) = input.resident(model, unit, state);
                table.get(BufferKind::ParamState { model, unit, state }, tier, elems, dtype);
            }
        }
    }
    if input.has_separate_memory() {
        table.get(BufferKind::UpdateDecision, MemoryTier::Device, 4, DType::F64);
        table.get(BufferKind::IoStaging, MemoryTier::Host, input.io_staging_elems(), DType::U32);
    }
}

/// Assigns offsets to residents, and computes the sizes of all arenas.
fn assign_offsets(
    (input, rank): (PlanInput, Rank),
    buffers: Vec<Buffer>,
    phases: Vec<Phase>,
    is_exported: &[bool],
    largest_exported: Bytes,
) -> PlanData {
    let mut residents: [Residents; MemoryTier::COUNT] = Default::default();
    let mut exported_from = Bytes::ZERO;
    let exports = is_exported.contains(&true);
    for exported in [false, true] {
        exported_from = residents[MemoryTier::Device as usize].bytes;
        let all = buffers.iter().zip(is_exported).enumerate();
        for (i, (buffer, _)) in
            all.filter(|(_, (b, is_exported))| b.kind.is_resident() && **is_exported == exported)
        {
            let tier = &mut residents[buffer.tier as usize];
            tier.offsets.push((BufferId(i as u32), tier.bytes));
            tier.bytes += buffer.bytes().align_to(ALIGN);
        }
        if exports {
            let device = &mut residents[MemoryTier::Device as usize];
            device.bytes = device.bytes.align_to(EXPORT_ALIGN);
        }
    }
    residents.iter_mut().for_each(|tier| tier.offsets.sort_unstable_by_key(|(id, _)| *id));
    let exported = exported_from..residents[MemoryTier::Device as usize].bytes + largest_exported;
    let largest = phases.iter().map(|p| p.memory.bytes).max().unwrap_or_default();
    let largest_host = phases.iter().map(|p| p.host.bytes).max().unwrap_or_default();
    let [device, host, nvme] = [0, 1, 2].map(|tier: usize| residents[tier].bytes);
    PlanData {
        input,
        rank,
        buffers,
        residents,
        phases,
        arena_bytes: device + largest,
        exported,
        host_bytes: host + largest_host,
        nvme_bytes: nvme,
    }
}

impl PlanData {
    /// The parts of a unit's state that this rank holds.
    pub fn owned(&self, model: ModelId, unit: u32, state: ParamState) -> Vec<OwnedPart> {
        self.input.owned(model, unit, state, self.rank)
    }

    /// The index of a model's phase of this kind, if the plan has one.
    pub fn phase(&self, kind: PhaseKind, model: ModelId) -> Option<usize> {
        self.phases.iter().position(|p| p.kind == kind && p.model == model)
    }

    pub fn find(&self, kind: BufferKind) -> Option<BufferId> {
        self.buffers.iter().position(|b| b.kind == kind).map(|i| BufferId(i as u32))
    }

    /// The offset of a buffer in its tier's arena during `phase`.
    pub fn offset(&self, phase: &Phase, id: BufferId) -> Option<Bytes> {
        let tier = self.buffers[id.0 as usize].tier;
        let transient = match tier {
            MemoryTier::Device => &phase.memory.offsets[..],
            MemoryTier::Host => &phase.host.offsets[..],
            MemoryTier::Nvme => &[],
        };
        self.resident_offset(id)
            .or_else(|| Some(self.residents[tier as usize].bytes + offset_in(transient, id)?))
    }

    /// The offset of a resident buffer in its tier's arena. `None`: it is not resident.
    pub fn resident_offset(&self, id: BufferId) -> Option<Bytes> {
        let tier = self.buffers[id.0 as usize].tier;
        offset_in(&self.residents[tier as usize].offsets, id)
    }

    /// The slot layouts of a model's units, indexed by [`ModelPlan::layout_of`].
    ///
    /// [`ModelPlan::layout_of`]: crate::ModelPlan::layout_of
    pub fn layouts(&self, model: ModelId) -> Vec<UnitLayout> {
        self.input.model(model).layouts(self.input.storage)
    }

    /// The offset of the kernels' workspace in the scratch buffer.
    pub fn workspace_offset(&self, model: ModelId) -> Bytes {
        self.layouts(model).iter().map(UnitLayout::scratch).max().unwrap_or_default().align_to(4096)
    }

    /// The host memory that the process will use: arenas and overhead.
    pub fn process_bytes(&self) -> Bytes {
        match self.input.needs.host_overhead_bytes {
            Some(foreign) => self.host_bytes + foreign,
            None => self.device_bytes() + self.host_bytes,
        }
    }

    /// The device memory that the process will use: the arena and overhead.
    pub fn device_bytes(&self) -> Bytes {
        self.arena_bytes + self.input.needs.overhead_bytes
    }

    pub fn check_budget(&self, budget: Bytes) -> Result<(), PlanError> {
        let needed = self.device_bytes();
        if needed > budget {
            return Err(PlanError::OverBudget { needed, over: needed - budget, budget });
        }
        Ok(())
    }
}

fn offset_in(list: &[(BufferId, Bytes)], id: BufferId) -> Option<Bytes> {
    list.binary_search_by_key(&id, |(id, _)| *id).ok().map(|i| list[i].1)
}
