//! The whole plan: models, buffers with offsets, and a schedule per phase.

use std::ops::{Deref, Range};

use lockstep_core::{Bytes, DType, Fault, FaultClass};

use crate::buffer::{Access, Buffer, BufferId, BufferKind, MemoryTier, ParamState};
use crate::builder::{BufferTable, StepBuilder};
use crate::check::{Violation, check_phase};
use crate::input::{AccumulationOrder, PlanInput};
use crate::memory::{MemoryPlan, pack};
use crate::schedule::{ModelId, OpKind, Schedule};
use crate::unit_layout::UnitLayout;

/// What a phase is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PhaseKind {
    /// Documents grow token by token, with a cache of keys and values.
    Generate,
    /// The head's outputs alone.
    Score,
    /// An optimizer step.
    Train,
}

/// One phase: its operations and where its buffers lie behind the residents.
#[derive(Clone, Debug)]
pub struct Phase {
    pub kind: PhaseKind,
    pub name: String,
    pub model: ModelId,
    pub schedule: Schedule,
    pub memory: MemoryPlan,
    pub host: MemoryPlan,
}

/// A plan that has been checked: nothing is read before it is written, no two buffers that are alive together share
/// bytes, every gradient is reduced and every parameter updated exactly once. Only [`build`] makes one, and nothing can
/// change it afterwards, so an engine need not ask again.
#[derive(Clone, Debug)]
pub struct RunPlan(PlanData);

impl Deref for RunPlan {
    type Target = PlanData;

    fn deref(&self) -> &PlanData {
        &self.0
    }
}

/// Everything a run does and holds, known before it starts.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PlanData {
    pub input: PlanInput,
    pub buffers: Vec<Buffer>,
    /// Residents by tier: at the front of the device's arena, of the host's, and of the spill file.
    pub residents: [Residents; MemoryTier::COUNT],
    pub phases: Vec<Phase>,
    /// The device arena: residents and the largest phase.
    pub arena_bytes: Bytes,
    /// The part of it that other ranks read, where ranks read each other's memory: at the end of the residents, and
    /// at the front of what is behind them. The rest is a rank's own.
    pub exported: Range<Bytes>,
    /// The host arena, likewise.
    pub host_bytes: Bytes,
    /// The spill file.
    pub nvme_bytes: Bytes,
}

/// Buffers that live from step to step in one tier, and where.
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
    #[error("`freeze` has the pattern `{pattern}`, which names no tensor of the model")]
    FreezesNothing { pattern: String, closest: Option<String> },
    #[error(
        "`recompute: auto` computes as little again as there is room for, and nothing says how much there is"
    )]
    NoBudget,
    #[error("offloading parameters needs sharded parameters (zero3 or full_shard), not {strategy}")]
    ParamOffload { strategy: String },
    #[error(
        "hybrid_shard shards inside a node and replicates across nodes: it needs more than one of each, not {nodes} node(s) of {per_node}"
    )]
    HybridMesh { nodes: u32, per_node: u32 },
    #[error("the strategy's {phase} phase is unsound: {}", list(violations))]
    Unsound { phase: String, violations: Vec<Violation> },
}

/// The first few, and how many there are beside them.
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
            PlanError::Unsound { .. } => FaultClass::Internal,
            _ => FaultClass::BadConfig,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            PlanError::OverBudget { .. } => Some(
                "Smaller, in order of cost: recompute: auto, or selective, then full; fewer rows per device with more \
                 gradient_accumulation_steps; a smaller max_length; a strategy that shards more; offload_optimizer: cpu."
                    .into(),
            ),
            PlanError::NoBudget => Some(
                "Set memory_budget_gib. Without it a GPU's own memory counts, where there is one to be asked.".into(),
            ),
            PlanError::Unsound { .. } => Some(
                "A strategy emits its operations through StepBuilder; `lockstep plan --schedule` shows a sound one."
                    .into(),
            ),
            PlanError::FreezesNothing { closest, .. } => Some(match closest {
                Some(name) => format!("did you mean `{name}`? `*` stands for any text, a module's name for all in it."),
                None => "`*` stands for any text, as in `model.layers.*.mlp`; a module's name stands for all in it.".into(),
            }),
            PlanError::NothingTrains => Some("`freeze` names too much.".into()),
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

const ALIGN: u64 = 4096;
/// What is lent starts and ends on a page, of whatever size this system has.
const EXPORT_ALIGN: u64 = 64 << 10;

/// Emits every phase, packs memory, and checks the result.
pub fn build(input: PlanInput) -> Result<RunPlan, PlanError> {
    let plan = lay_out(input);
    for phase in &plan.phases {
        let violations = check_phase(&plan, phase);
        if !violations.is_empty() {
            return Err(PlanError::Unsound { phase: phase.name.clone(), violations });
        }
    }
    Ok(RunPlan(plan))
}

/// Emits every phase and packs memory: what [`build`] checks. For comparing sizes, before one is chosen.
pub(crate) fn lay_out(mut input: PlanInput) -> PlanData {
    let sharded = |i: usize| input.is_sharded(ModelId(i as u8), ParamState::Grad);
    if input.num_micro_batches == 1 && !(0..input.models.len()).any(sharded) {
        // With one micro-batch both orders are the same sum, and this one needs no second buffer.
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
    let is_exported = exported(&input, &buffers, schedules.iter().map(|(_, _, schedule)| schedule));
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
    place(input, buffers, phases, &is_exported, largest_exported)
}

/// Which buffers other ranks read: those of the device that collectives send from. GPUs have their own ways.
fn exported<'s>(
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
            // What is only written receives.
            for (id, _) in op.accesses.iter().filter(|(_, access)| *access != Access::Define) {
                is_exported[id.0 as usize] |= buffers[id.0 as usize].tier == MemoryTier::Device;
            }
        }
    }
    is_exported
}

/// Residents exist whether or not a phase touches them.
fn register_residents(input: &PlanInput, table: &mut BufferTable) {
    for (m, model) in input.models.iter().enumerate() {
        for (u, unit) in model.units.iter().enumerate() {
            let (model, u) = (ModelId(m as u8), u as u32);
            let mut states = vec![ParamState::Working];
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

fn place(
    input: PlanInput,
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
    /// A model's phase of a kind, if the plan has one.
    pub fn phase(&self, kind: PhaseKind, model: ModelId) -> Option<usize> {
        self.phases.iter().position(|p| p.kind == kind && p.model == model)
    }

    pub fn find(&self, what: BufferKind) -> Option<BufferId> {
        self.buffers.iter().position(|b| b.kind == what).map(|i| BufferId(i as u32))
    }

    /// Where a buffer lies in its tier's arena during `phase`.
    pub fn offset(&self, phase: &Phase, id: BufferId) -> Option<Bytes> {
        let tier = self.buffers[id.0 as usize].tier;
        let passing = match tier {
            MemoryTier::Device => &phase.memory.offsets[..],
            MemoryTier::Host => &phase.host.offsets[..],
            MemoryTier::Nvme => &[],
        };
        self.resident_offset(id).or_else(|| Some(self.residents[tier as usize].bytes + among(passing, id)?))
    }

    /// Where a buffer lies in its tier's arena from step to step, if it does.
    pub fn resident_offset(&self, id: BufferId) -> Option<Bytes> {
        let tier = self.buffers[id.0 as usize].tier;
        among(&self.residents[tier as usize].offsets, id)
    }

    /// Slot layouts of a model's units, by [`ModelPlan::layout_of`].
    ///
    /// [`ModelPlan::layout_of`]: crate::ModelPlan::layout_of
    pub fn layouts(&self, model: ModelId) -> Vec<UnitLayout> {
        self.input.model(model).layouts(self.input.storage)
    }

    /// The first byte of the scratch buffer that belongs to the kernels' workspace.
    pub fn workspace_offset(&self, model: ModelId) -> Bytes {
        self.layouts(model).iter().map(UnitLayout::scratch).max().unwrap_or_default().align_to(4096)
    }

    /// What the process will hold of the host's memory: arenas and what is not ours.
    pub fn process_bytes(&self) -> Bytes {
        match self.input.needs.host_overhead_bytes {
            Some(foreign) => self.host_bytes + foreign,
            None => self.device_bytes() + self.host_bytes,
        }
    }

    /// What the device will hold: the arena and what is not ours.
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

fn among(list: &[(BufferId, Bytes)], id: BufferId) -> Option<Bytes> {
    list.binary_search_by_key(&id, |(id, _)| *id).ok().map(|i| list[i].1)
}
