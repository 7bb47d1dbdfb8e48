//! Prints where a rank's bytes go.
//!
//! Every row is a number of bytes that exist, so none is negative. Residents come first. A phase is broken down at its
//! peak: the buffers that are live at the same time, and what packing leaves unused between buffers. So the parts of
//! residents, of the largest phase and the overhead add up to the total.

use std::collections::BTreeMap;
use std::fmt::Write;

use lockstep_core::{Bytes, Elems};
use lockstep_shape::Recompute;

use crate::buffer::{Buffer, BufferKind, MemoryTier, ParamState};
use crate::generation::GenerationBounds;
use crate::input::{ModelPlan, RecomputePolicy};
use crate::memory::ALIGN;
use crate::run_plan::{Phase, PlanData};
use crate::schedule::OpKind;

/// Bytes of a rank, by tier.
pub type TierBytes = [Bytes; MemoryTier::COUNT];

/// Some of a rank's memory, and the parts that add up to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryGroup {
    pub name: String,
    pub bytes: TierBytes,
    pub parts: Vec<(String, TierBytes)>,
}

/// A rank's memory: residents, the phases, which use the same memory one after the other, and the overhead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBreakdown {
    pub residents: MemoryGroup,
    pub phases: Vec<MemoryGroup>,
    /// Residents and the largest phase.
    pub arena: TierBytes,
    /// The process, libraries, data.
    pub overhead: TierBytes,
    pub total: TierBytes,
}

impl MemoryBreakdown {
    pub fn of(plan: &PlanData) -> MemoryBreakdown {
        let arena = [plan.arena_bytes, plan.host_bytes, plan.nvme_bytes];
        let on_host = plan.input.needs.host_overhead_bytes.unwrap_or_default();
        let overhead = [plan.input.needs.overhead_bytes, on_host, Bytes::ZERO];
        MemoryBreakdown {
            residents: residents(plan),
            phases: plan.phases.iter().map(|phase| phase_group(plan, phase)).collect(),
            arena,
            overhead,
            total: std::array::from_fn(|tier| arena[tier] + overhead[tier]),
        }
    }
}

/// Adds a part with what the others leave of the whole, if that is not nothing.
fn add_rest(parts: &mut Vec<(String, TierBytes)>, name: &str, whole: TierBytes) {
    let rest: TierBytes =
        std::array::from_fn(|tier| whole[tier] - parts.iter().map(|(_, bytes)| bytes[tier]).sum::<Bytes>());
    if rest != [Bytes::ZERO; MemoryTier::COUNT] {
        parts.push((name.into(), rest));
    }
}

/// A table of bytes per rank by use. Indented rows add up to the row above them.
pub fn memory_table(plan: &PlanData) -> String {
    let mut out = String::new();
    let input = &plan.input;
    for model in &input.models {
        let trained: u64 = model.units.iter().map(|u| u.trained_params()).sum();
        let note = match trained {
            0 => ", frozen".to_string(),
            _ if trained < model.params() => format!(", {} of them trained", Elems(trained)),
            _ => String::new(),
        };
        let (role, family) = (
            format!("{:?}", model.role).to_lowercase(),
            model.shape.architecture.class_name(model.shape.head),
        );
        let _ = writeln!(out, "{role:<10}{family}, {} parameters{note}", Elems(model.params()));
    }
    let (mesh, tokens) =
        (input.mesh, input.models.iter().map(|model| model.bounds.tokens).max().unwrap_or(0));
    let mesh_text = match mesh.replicate {
        1 => String::new(),
        _ => format!(" = {} replicas x {} shards", mesh.replicate, mesh.shard),
    };
    let _ = writeln!(out, "{:<10}{}{mesh_text}", "ranks", mesh.world_size());
    let batches = if input.num_micro_batches == 1 { "micro-batch" } else { "micro-batches" };
    let _ =
        writeln!(out, "{:<10}{} {batches} of {tokens} tokens on each rank", "step", input.num_micro_batches);
    input.models.iter().filter(|model| model.trains()).for_each(|model| choice_rows(&mut out, model));
    input.models.iter().for_each(|model| generation_row(&mut out, model));

    let _ = writeln!(out, "\n{:<38}{:>12}{:>12}{:>12}", "bytes per rank", "device", "host", "nvme");
    let breakdown = MemoryBreakdown::of(plan);
    let group = |out: &mut String, group: &MemoryGroup, with_parts: bool| {
        row(out, &group.name, group.bytes);
        for (name, bytes) in group.parts.iter().filter(|_| with_parts) {
            row(out, &format!("    {name}"), *bytes);
        }
    };
    group(&mut out, &breakdown.residents, true);
    let mut before: Option<&MemoryGroup> = None;
    for phase in &breakdown.phases {
        // The same phase of another model with the same shape has the same parts; they are printed once.
        group(&mut out, phase, before.is_none_or(|before| before.parts != phase.parts));
        before = Some(phase);
    }
    row(&mut out, "arena: residents + largest phase", breakdown.arena);
    row(&mut out, "overhead: process, libraries, data", breakdown.overhead);
    row(&mut out, "total", breakdown.total);
    out
}

/// The recompute and offload choices that differ between units.
fn choice_rows(out: &mut String, model: &ModelPlan) {
    let RecomputePolicy { early, late, late_blocks } = model.recompute;
    let blocks = model.shape.layers as u32;
    if (1..blocks).contains(&late_blocks) {
        let name = |mode: Recompute| format!("{mode:?}").to_lowercase();
        let first = blocks - late_blocks;
        let (early, late) = (name(early), name(late));
        let _ = writeln!(
            out,
            "{:<10}{early} in the first {first} blocks, {late} in the last {late_blocks}",
            "recompute"
        );
    }
    let (units, on_device) = (model.units.len(), model.placements.optimizer_units_on_device);
    if on_device > 0 && model.placements.optimizer_tier != MemoryTier::Device {
        let offloaded = units.saturating_sub(on_device as usize);
        let _ = writeln!(out, "{:<10}optimizer states of the last {offloaded} of {units} units", "offload");
    }
}

/// How many sequences a model generates at once.
fn generation_row(out: &mut String, model: &ModelPlan) {
    if let Some(GenerationBounds { docs, tokens_per_doc, pages, page_tokens, .. }) = model.generation {
        let _ = writeln!(
            out,
            "{:<10}up to {docs} sequences of {tokens_per_doc} tokens at once, KV cache of {pages} pages of \
             {page_tokens} tokens",
            "generate"
        );
    }
}

fn row(out: &mut String, name: &str, cells: [Bytes; 3]) {
    let text = |cell: Bytes| if cell == Bytes::ZERO { "-".to_string() } else { cell.to_string() };
    let [device, host, nvme] = cells.map(text);
    let _ = writeln!(out, "{name:<38}{device:>12}{host:>12}{nvme:>12}");
}

fn residents(plan: &PlanData) -> MemoryGroup {
    let mut rows: BTreeMap<u8, (String, TierBytes)> = BTreeMap::new();
    for buffer in plan.buffers.iter().filter(|b| b.kind.is_resident()) {
        let (position, name) = resident_row(plan, buffer);
        let row = rows.entry(position).or_insert((name, [Bytes::ZERO; MemoryTier::COUNT]));
        row.1[buffer.tier as usize] += buffer.bytes().align_to(ALIGN);
    }
    let bytes = plan.residents.each_ref().map(|residents| residents.bytes);
    let mut parts = rows.into_values().collect();
    add_rest(&mut parts, "alignment", bytes);
    MemoryGroup { name: "residents".into(), bytes, parts }
}

/// A resident's position in the table and its name, with the fraction of it that a rank holds.
fn resident_row(plan: &PlanData, buffer: &Buffer) -> (u8, String) {
    let BufferKind::ParamState { model, state, .. } = buffer.kind else {
        return if buffer.kind == BufferKind::IoStaging {
            (7, "input and output staging".into())
        } else {
            (6, "rotary tables".into())
        };
    };
    let fraction = match plan.input.mesh.size_of(plan.input.sharded_over(model, state)) {
        1 => String::new(),
        parts => format!(", 1/{parts}"),
    };
    let (position, name) = match state {
        ParamState::Working => (0, "parameters"),
        ParamState::Codes | ParamState::ScaleCodes => (1, "4-bit weights"),
        ParamState::ScaleTable => (2, "scales of 4-bit weights"),
        ParamState::Master => (3, "master parameters"),
        ParamState::Grad => (4, "gradients"),
        ParamState::Optimizer(_) => (5, plan.input.model(model).optimizer.title),
    };
    (position, format!("{name}, {}{fraction}", buffer.dtype))
}

/// A phase at its peak, by kind, largest first, and the gaps.
fn phase_group(plan: &PlanData, phase: &Phase) -> MemoryGroup {
    let mut parts: Vec<(String, TierBytes)> = Vec::new();
    for id in phase.memory.peak.iter().chain(&phase.host.peak) {
        let buffer = &plan.buffers[id.0 as usize];
        let name = transient_name(plan, phase, buffer.kind);
        if !parts.iter().any(|(other, _)| other == name) {
            parts.push((name.into(), [Bytes::ZERO; MemoryTier::COUNT]));
        }
        let part = parts.iter_mut().find(|(other, _)| other == name).expect("just pushed");
        part.1[buffer.tier as usize] += buffer.bytes().align_to(ALIGN);
    }
    parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let bytes = [phase.memory.bytes, phase.host.bytes, Bytes::ZERO];
    add_rest(&mut parts, "gaps between buffers", bytes);
    MemoryGroup { name: format!("phase {}, at its peak", phase.name), bytes, parts }
}

fn transient_name(plan: &PlanData, phase: &Phase, kind: BufferKind) -> &'static str {
    let trains = phase.schedule.ops.iter().any(|op| matches!(op.kind, OpKind::Backward { .. }));
    match kind {
        BufferKind::Residual { .. } | BufferKind::ResidualGrad { .. } if trains => {
            "residual stream and its gradient"
        }
        BufferKind::Residual { .. } => "residual stream",
        BufferKind::SavedActivations { .. } if trains => "activations saved for backward",
        BufferKind::SavedActivations { .. } => "activations inside a unit",
        BufferKind::RecomputedActivations { .. } => "recomputed activations",
        BufferKind::Scratch => "scratch and workspace",
        BufferKind::UnshardedParams { model, unit } if plan.input.has_quantised(model, unit) => {
            "dequantised weights"
        }
        BufferKind::UnshardedParams { .. } | BufferKind::GatheredState { .. } => "gathered parameters",
        BufferKind::UnshardedGrad { model, unit } if plan.input.grads_offloaded(model, unit) => {
            "gradients before offload"
        }
        BufferKind::UnshardedGrad { .. } => "gradients before reduction",
        BufferKind::GradStaging { .. } => "gradient staging on the host",
        BufferKind::ReduceScratch => "reduction scratch",
        BufferKind::ParamStaging { .. } => "parameter staging",
        BufferKind::HostStaging { .. } => "update staging on the host",
        BufferKind::KvCache { .. } => "KV cache",
        _ => "inputs and outputs",
    }
}
