//! Prints a plan: the memory table and the schedule.

use std::collections::BTreeMap;
use std::fmt::Write;

use lockstep_core::{Axis, Bytes, DType, Elems};
use lockstep_shape::Recompute;

use crate::axes::Axes;
use crate::buffer::{Buffer, BufferKind, MemoryTier, ParamState};
use crate::generation::GenerationBounds;
use crate::input::{ModelPlan, RecomputePolicy};
use crate::run_plan::{Phase, RunPlan};
use crate::schedule::{CopyEnd, CopyPayload, Lane, Op, OpKind, ReduceInto, SpanId, SpanPart, Wait};

/// Buffers are aligned to this, so the table rounds their sizes up to it.
const ALIGN: u64 = 4096;

/// A table of bytes per rank by use. Indented rows add up to the row above them.
pub fn memory_table(plan: &RunPlan) -> String {
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
    let residents = resident_rows(plan);
    let sum = |tier: usize| residents.iter().map(|(_, cells)| cells[tier]).sum();
    row(&mut out, "residents", [sum(0), sum(1), sum(2)]);
    for (name, cells) in &residents {
        row(&mut out, &format!("    {name}"), *cells);
    }
    let mut before = Vec::new();
    for phase in &plan.phases {
        let whole = [phase.memory.bytes, phase.host.bytes, Bytes::ZERO];
        row(&mut out, &format!("phase {}", phase.name), whole);
        let rows = phase_rows(plan, phase);
        // The same phase of another model with the same shape has the same rows; they are printed once.
        if rows != before {
            for (name, cells) in &rows {
                row(&mut out, &format!("    {name}"), *cells);
            }
            // Exported buffers of another phase can leave a gap in this one, which makes the difference negative.
            let parts = |tier: usize| rows.iter().map(|(_, cells)| cells[tier]).sum::<Bytes>();
            let reused = |tier: usize| Bytes(parts(tier).0.saturating_sub(whole[tier].0));
            reuse_row(&mut out, [reused(0), reused(1)]);
        }
        before = rows;
    }
    row(&mut out, "arena: residents + largest phase", [plan.arena_bytes, plan.host_bytes, plan.nvme_bytes]);
    let on_host = input.needs.host_overhead_bytes.unwrap_or_default();
    row(&mut out, "overhead: process, libraries, data", [input.needs.overhead_bytes, on_host, Bytes::ZERO]);
    row(&mut out, "total", [plan.device_bytes(), plan.host_bytes + on_host, plan.nvme_bytes]);
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

/// The bytes a phase saves because buffers that are never live at the same time share memory.
fn reuse_row(out: &mut String, cells: [Bytes; 2]) {
    let text = |cell: Bytes| if cell == Bytes::ZERO { "-".to_string() } else { format!("-{cell}") };
    let [device, host] = cells.map(text);
    if cells.iter().any(|cell| *cell > Bytes::ZERO) {
        let _ = writeln!(out, "{:<38}{device:>12}{host:>12}{:>12}", "    memory reuse", "-");
    }
}

fn resident_rows(plan: &RunPlan) -> Vec<(String, [Bytes; 3])> {
    let mut rows: BTreeMap<u8, (String, [Bytes; 3])> = BTreeMap::new();
    for buffer in plan.buffers.iter().filter(|b| b.kind.is_resident()) {
        let (position, name) = resident_row(plan, buffer);
        let row = rows.entry(position).or_insert((name, [Bytes::ZERO; 3]));
        row.1[buffer.tier as usize] += buffer.bytes().align_to(ALIGN);
    }
    rows.into_values().collect()
}

/// A resident's position in the table and its name, with the fraction of it that a rank holds.
fn resident_row(plan: &RunPlan, buffer: &Buffer) -> (u8, String) {
    let BufferKind::ParamState { model, state, .. } = buffer.kind else {
        return if buffer.kind == BufferKind::IoStaging {
            (5, "input and output staging".into())
        } else {
            (4, "rotary tables".into())
        };
    };
    let fraction = match plan.input.mesh.size_of(plan.input.sharded_over(model, state)) {
        1 => String::new(),
        parts => format!(", 1/{parts}"),
    };
    let (position, name) = match state {
        ParamState::Working => (0, "parameters"),
        ParamState::Master => (1, "master parameters"),
        ParamState::Grad => (2, "gradients"),
        ParamState::Optimizer(_) => (3, plan.input.model(model).optimizer.title),
    };
    (position, format!("{name}, {}{fraction}", buffer.dtype))
}

/// A phase's buffers by kind, largest first.
fn phase_rows(plan: &RunPlan, phase: &Phase) -> Vec<(&'static str, [Bytes; 3])> {
    let mut rows: Vec<(&'static str, [Bytes; 3])> = Vec::new();
    let trains = phase.schedule.ops.iter().any(|op| matches!(op.kind, OpKind::Backward { .. }));
    for (id, _) in phase.memory.offsets.iter().chain(&phase.host.offsets) {
        let buffer = &plan.buffers[id.0 as usize];
        let name = match buffer.kind {
            BufferKind::Residual { .. } | BufferKind::ResidualGrad { .. } if trains => {
                "residual stream and its gradient"
            }
            BufferKind::Residual { .. } => "residual stream",
            BufferKind::SavedActivations { .. } if trains => "activations saved for backward",
            BufferKind::SavedActivations { .. } => "activations inside a unit",
            BufferKind::RecomputedActivations { .. } => "recomputed activations",
            BufferKind::Scratch => "scratch and workspace",
            BufferKind::UnshardedParams { .. } => "gathered parameters",
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
        };
        if !rows.iter().any(|(n, _)| *n == name) {
            rows.push((name, [Bytes::ZERO; 3]));
        }
        let row = rows.iter_mut().find(|(n, _)| *n == name).expect("just pushed");
        row.1[buffer.tier as usize] += buffer.bytes().align_to(ALIGN);
    }
    rows.sort_by_key(|(_, cells)| std::cmp::Reverse((cells[0], cells[1])));
    rows
}

/// A schedule as a numbered list: lane, operation, the bytes it copies or communicates, and what it waits for.
pub fn schedule_text(plan: &RunPlan, phase: &Phase) -> String {
    let ops = &phase.schedule.ops;
    let lines: Vec<(String, String)> = ops.iter().map(|op| op_text(plan, phase, op)).collect();
    let width = lines.iter().map(|(text, _)| text.chars().count()).max().unwrap_or(0).clamp(9, 72);
    let mut out = format!("phase {}: {} operations\n", phase.name, ops.len());
    if ops.iter().any(|op| op.lane != Lane::Compute) {
        out.push_str(
            "Lanes run concurrently, each in this order. `after`: operations of other lanes that must finish first.\n",
        );
    }
    let _ = writeln!(out, "\n{:>5}  {:<8} {:<width$} {:>9}  after", "", "lane", "operation", "bytes");
    for (i, (op, (text, bytes))) in ops.iter().zip(&lines).enumerate() {
        let waits: Vec<String> = op.waits.iter().map(wait_text).collect();
        let (number, waits) = (format!("#{i}"), waits.join(", "));
        let line = format!("{number:>5}  {:<8} {text:<width$} {bytes:>9}  {waits}", op.lane);
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}

fn wait_text(wait: &Wait) -> String {
    match wait {
        Wait::SameRun(id) => id.to_string(),
        Wait::PreviousRun(id) => format!("{id} of the previous step"),
    }
}

/// One operation of a schedule, as [`schedule_text`] prints it: its number and what it does.
pub fn operation_text(plan: &RunPlan, phase: &Phase, i: usize) -> String {
    format!("#{i} {}", op_text(plan, phase, &phase.schedule.ops[i]).0)
}

/// The text of an operation, and the bytes it copies or communicates.
fn op_text(plan: &RunPlan, phase: &Phase, op: &Op) -> (String, String) {
    let operands = OperandPrinter { plan, phase };
    let micro_batch_text = |micro_batch: u32| match plan.input.num_micro_batches {
        1 => String::new(),
        _ => format!(", micro-batch {micro_batch}"),
    };
    let text = match op.kind {
        OpKind::Release(span) => format!("release {}", operands.span(span)),
        OpKind::Feed { micro_batch } => format!("feed inputs{}", micro_batch_text(micro_batch)),
        OpKind::Forward { unit, micro_batch } => {
            format!("forward {}{}", operands.unit(unit), micro_batch_text(micro_batch))
        }
        OpKind::HeadForward { micro_batch } => format!("forward head{}", micro_batch_text(micro_batch)),
        OpKind::Objective { micro_batch } => format!("objective{}", micro_batch_text(micro_batch)),
        OpKind::HeadBackward { micro_batch, .. } => format!("backward head{}", micro_batch_text(micro_batch)),
        OpKind::HeadStep { micro_batch, .. } => {
            format!("forward and backward head{}", micro_batch_text(micro_batch))
        }
        OpKind::Recompute { unit, micro_batch } => {
            format!("recompute {}{}", operands.unit(unit), micro_batch_text(micro_batch))
        }
        OpKind::Backward { unit, micro_batch, .. } => {
            format!("backward {}{}", operands.unit(unit), micro_batch_text(micro_batch))
        }
        OpKind::Gather { span, axes, .. } => {
            let bytes = operands.bytes(span, plan.input.storage);
            return (operands.gather_text(span, axes), bytes.to_string());
        }
        OpKind::Copy { payload, from, to, span } => return operands.copy_text(payload, from, to, span),
        OpKind::AllGatherUpdated { span, axes } => {
            let ranks = plan.input.mesh.size_of(axes);
            let text = format!("all-gather updated {} over {ranks} ranks", operands.span(span));
            return (text, operands.bytes(span, plan.input.storage).to_string());
        }
        OpKind::Reduce { span, micro_batch, axis, into, .. } => {
            let text = format!("{}{}", operands.reduce_text(span, axis, into), micro_batch_text(micro_batch));
            return (text, operands.reduced_bytes(span, axis).to_string());
        }
        OpKind::Add { span, micro_batch, .. } => {
            let text = format!("add gradient of {}{}", operands.span(span), micro_batch_text(micro_batch));
            return (text, operands.bytes(span, DType::F32).to_string());
        }
        OpKind::Squares { span, .. } => operands.squares_text(span),
        OpKind::ClipNorm { axes: [] } => "gradient norm and clip factor".into(),
        OpKind::ClipNorm { axes } => {
            format!("gradient norm over {} ranks and clip factor", plan.input.mesh.size_of(axes))
        }
        OpKind::Update { unit, start, end, .. } => match (start, end) {
            (0, end) if end == plan.input.optimizer_shard_elems(phase.model, unit) => {
                format!("update {}", operands.unit(unit))
            }
            _ => format!("update {}[{start}..{end}]", operands.unit(unit)),
        },
        OpKind::Generate => "generate: prefill and decode until all sequences end".into(),
    };
    (text, String::new())
}

/// Prints the operands of operations.
struct OperandPrinter<'a> {
    plan: &'a RunPlan,
    phase: &'a Phase,
}

impl OperandPrinter<'_> {
    fn unit(&self, unit: u32) -> String {
        self.plan.input.model(self.phase.model).units[unit as usize].kind.to_string()
    }

    fn span(&self, id: SpanId) -> String {
        let units = &self.plan.input.model(self.phase.model).units;
        let parts: Vec<String> = self
            .phase
            .schedule
            .span(id)
            .parts
            .iter()
            .map(|p| {
                let (unit, name) = (&units[p.unit as usize], self.unit(p.unit));
                match (p.start, p.end) {
                    (0, end) if end == unit.elems => name,
                    (0, end) if end == unit.trained_elems => format!("{name} (trained)"),
                    (start, end) => format!("{name}[{start}..{end}]"),
                }
            })
            .collect();
        parts.join(" + ")
    }

    fn bytes(&self, id: SpanId, dtype: DType) -> Bytes {
        Elems(self.phase.schedule.span(id).elems() as u64).bytes(dtype)
    }

    /// The bytes of a reduction. Of a sharded gradient only the shard is reduced along the other axes.
    fn reduced_bytes(&self, span: SpanId, axis: Axis) -> Bytes {
        let (all, mesh) = (self.bytes(span, DType::F32), self.plan.input.mesh);
        let sharded_over = self.plan.input.sharded_over(self.phase.model, ParamState::Grad);
        if sharded_over.contains(&axis) {
            all
        } else {
            Bytes(all.0.div_ceil(u64::from(mesh.size_of(sharded_over))))
        }
    }

    fn gather_text(&self, span: SpanId, axes: Axes) -> String {
        let input = &self.plan.input;
        match axes {
            [] => {
                let tier = input.model(self.phase.model).placements.params_tier;
                format!("fetch {} from {tier}", self.span(span))
            }
            axes => format!("all-gather {} from {} ranks", self.span(span), input.mesh.size_of(axes)),
        }
    }

    fn reduce_text(&self, span: SpanId, axis: Axis, into: ReduceInto) -> String {
        let (input, span) = (&self.plan.input, self.span(span));
        let is_sharded = input.sharded_over(self.phase.model, ParamState::Grad).contains(&axis);
        let name = if is_sharded { "reduce-scatter" } else { "all-reduce" };
        let text = match input.mesh.size(axis) {
            1 => return format!("accumulate {span}"),
            n if input.mesh.replicate > 1 => format!("{name} {span} over {n} ranks ({axis})"),
            n => format!("{name} {span} over {n} ranks"),
        };
        if into == (ReduceInto::Accumulator { fresh: false }) {
            format!("{text}, accumulating")
        } else {
            text
        }
    }

    /// The text of a copy between memories, and its bytes on the rank with the largest shard.
    fn copy_text(&self, payload: CopyPayload, from: CopyEnd, to: CopyEnd, span: SpanId) -> (String, String) {
        let (input, model) = (&self.plan.input, self.phase.model);
        let SpanPart { unit, start, end } = self.phase.schedule.span(span).parts[0];
        let elems = end - start;
        let tier = |state: ParamState| input.resident(model, unit, state).0;
        let (text, resident_tier, bytes) = match payload {
            CopyPayload::Params => {
                let shard_elems = elems.min(input.resident(model, unit, ParamState::Working).1);
                let bytes = Elems(shard_elems as u64).bytes(input.storage);
                (format!("parameters of {}", self.span(span)), tier(ParamState::Working), bytes)
            }
            CopyPayload::Grad => {
                let bytes = Elems(elems as u64).bytes(DType::F32);
                (format!("gradient of {}", self.span(span)), tier(ParamState::Grad), bytes)
            }
            CopyPayload::OptimizerStates => {
                let bytes = Bytes(input.optimizer_state_bytes(model, unit, elems) as u64);
                (format!("states of {}", self.span(span)), input.optimizer_tier(model, unit), bytes)
            }
            CopyPayload::NormLeaves => {
                return ("copy sums of squares from device to host".into(), String::new());
            }
        };
        let tier_of = |end: CopyEnd| match end {
            CopyEnd::Resident => resident_tier,
            CopyEnd::Buffer(id) => self.plan.buffers[id.0 as usize].tier,
        };
        (format!("copy {text} from {} to {}", tier_of(from), tier_of(to)), bytes.to_string())
    }

    fn squares_text(&self, span: SpanId) -> String {
        match &self.phase.schedule.span(span).parts[..] {
            [part] => format!("sum of squares of {}'s gradient", self.unit(part.unit)),
            _ => "sum of squares of gradients".into(),
        }
    }
}
