//! The plan as people read it: where the bytes go, and the schedule.

use std::collections::BTreeMap;
use std::fmt::Write;

use lockstep_core::{Axis, Bytes, DType, Elems};
use lockstep_shape::Recompute;

use crate::axes::Axes;
use crate::buffer::{Buffer, State, Tier, What};
use crate::input::{ModelPlan, Recomputation};
use crate::run_plan::{Phase, RunPlan};
use crate::schedule::{End, Lane, Moved, Op, OpKind, ReduceInto, SpanId, SpanPart, Wait};

/// What buffers are aligned to, and therefore counted in.
const ALIGN: u64 = 4096;

/// A table of bytes per rank by what they are for. Indented rows add up to the row above them.
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
        let (role, family) =
            (format!("{:?}", model.role).to_lowercase(), model.shape.architecture.class_name());
        let _ = writeln!(out, "{role:<10}{family}, {} parameters{note}", Elems(model.params()));
    }
    let (mesh, tokens) =
        (input.mesh, input.models.iter().map(|model| model.bounds.tokens).max().unwrap_or(0));
    let arranged = match mesh.replicate {
        1 => String::new(),
        _ => format!(" = {} replicas x {} shards", mesh.replicate, mesh.shard),
    };
    let _ = writeln!(out, "{:<10}{}{arranged}", "ranks", mesh.world());
    let batches = if input.micros == 1 { "micro-batch" } else { "micro-batches" };
    let _ = writeln!(out, "{:<10}{} {batches} of {tokens} tokens on each rank", "step", input.micros);
    input.models.iter().filter(|model| model.trains()).for_each(|model| choices(&mut out, model));

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
        // The same phase of another model of the same shape has the same parts.
        if rows != before {
            for (name, cells) in &rows {
                row(&mut out, &format!("    {name}"), *cells);
            }
            // Nothing, where the room that another phase lends leaves a gap.
            let parts = |tier: usize| rows.iter().map(|(_, cells)| cells[tier]).sum::<Bytes>();
            let shared = |tier: usize| Bytes(parts(tier).0.saturating_sub(whole[tier].0));
            shared_row(&mut out, [shared(0), shared(1)]);
        }
        before = rows;
    }
    row(&mut out, "arena: residents + largest phase", [plan.arena, plan.host_bytes, plan.nvme_bytes]);
    let on_host = input.needs.host_foreign.unwrap_or_default();
    row(&mut out, "foreign: process, libraries, data", [input.needs.foreign, on_host, Bytes::ZERO]);
    row(&mut out, "total", [plan.device_bytes(), plan.host_bytes + on_host, plan.nvme_bytes]);
    out
}

/// What is not the same in all units.
fn choices(out: &mut String, model: &ModelPlan) {
    let Recomputation { early, late, late_blocks } = model.recompute;
    let blocks = model.shape.layers as u32;
    if (1..blocks).contains(&late_blocks) {
        let words = |again: Recompute| format!("{again:?}").to_lowercase();
        let first = blocks - late_blocks;
        let (early, late) = (words(early), words(late));
        let _ = writeln!(
            out,
            "{:<10}{early} in the first {first} blocks, {late} in the last {late_blocks}",
            "recompute"
        );
    }
    let (units, stay) = (model.units.len(), model.placements.stay);
    if stay > 0 && model.placements.optimizer_tier != Tier::Device {
        let _ = writeln!(out, "{:<10}of the first {stay} of {units} units stay on the device", "states");
    }
}

fn row(out: &mut String, name: &str, cells: [Bytes; 3]) {
    let text = |cell: Bytes| if cell == Bytes::ZERO { "-".to_string() } else { cell.to_string() };
    let [device, host, nvme] = cells.map(text);
    let _ = writeln!(out, "{name:<38}{device:>12}{host:>12}{nvme:>12}");
}

/// What a phase saves because buffers that are never alive together lie on the same bytes.
fn shared_row(out: &mut String, cells: [Bytes; 2]) {
    let text = |cell: Bytes| if cell == Bytes::ZERO { "-".to_string() } else { format!("-{cell}") };
    let [device, host] = cells.map(text);
    if cells.iter().any(|cell| *cell > Bytes::ZERO) {
        let _ = writeln!(out, "{:<38}{device:>12}{host:>12}{:>12}", "    less bytes shared over time", "-");
    }
}

fn resident_rows(plan: &RunPlan) -> Vec<(String, [Bytes; 3])> {
    let mut rows: BTreeMap<u8, (String, [Bytes; 3])> = BTreeMap::new();
    for buffer in plan.buffers.iter().filter(|b| b.what.is_resident()) {
        let (place, name) = resident_name(plan, buffer);
        let row = rows.entry(place).or_insert((name, [Bytes::ZERO; 3]));
        row.1[buffer.tier as usize] += buffer.bytes().align_to(ALIGN);
    }
    rows.into_values().collect()
}

/// A resident's place in the table and its name, with the share of it that a rank holds.
fn resident_name(plan: &RunPlan, buffer: &Buffer) -> (u8, String) {
    let What::State { model, state, .. } = buffer.what else {
        return if buffer.what == What::Port {
            (5, "batches on their way".into())
        } else {
            (4, "tables".into())
        };
    };
    let share = match plan.input.mesh.size_of(plan.input.sharded_over(model, state)) {
        1 => String::new(),
        parts => format!(", 1/{parts}"),
    };
    let (place, name) = match state {
        State::Working => (0, "parameters"),
        State::Master => (1, "master parameters"),
        State::Grad => (2, "gradients"),
        State::Optimizer(_) => (3, plan.input.model(model).optimizer.title),
    };
    (place, format!("{name}, {}{share}", buffer.dtype))
}

/// A phase's buffers by kind, largest first.
fn phase_rows(plan: &RunPlan, phase: &Phase) -> Vec<(&'static str, [Bytes; 3])> {
    let mut rows: Vec<(&'static str, [Bytes; 3])> = Vec::new();
    let trains = phase.schedule.ops.iter().any(|op| matches!(op.kind, OpKind::Backward { .. }));
    for (id, _) in phase.memory.offsets.iter().chain(&phase.host.offsets) {
        let buffer = &plan.buffers[id.0 as usize];
        let name = match buffer.what {
            What::Stream { .. } | What::GradStream { .. } if trains => "residual stream and its gradient",
            What::Stream { .. } => "residual stream",
            What::Saved { .. } if trains => "kept for backward",
            What::Saved { .. } => "activations inside a unit",
            What::Rebuilt { .. } => "recomputed for backward",
            What::Scratch => "scratch and workspace",
            What::Whole { .. } => "parameters gathered whole",
            What::GradWhole { model, unit } if plan.input.grads_leave(model, unit) => {
                "gradients on their way to the host"
            }
            What::GradWhole { .. } => "gradients before reduction",
            What::GradStaging { .. } => "gradients to be added on the host",
            What::Staging => "partial sums of gradients",
            What::ParamStaging { .. } => "parameters between host and device",
            What::HostStaging { .. } => "update on the host",
            What::KvCache { .. } => "key-value cache",
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

/// A schedule as a numbered list: lane, operation, the bytes it moves, what it waits for.
pub fn schedule_text(plan: &RunPlan, phase: &Phase) -> String {
    let ops = &phase.schedule.ops;
    let lines: Vec<(String, String)> = ops.iter().map(|op| op_text(plan, phase, op)).collect();
    let width = lines.iter().map(|(text, _)| text.chars().count()).max().unwrap_or(0).clamp(9, 72);
    let mut out = format!("phase {}: {} operations\n", phase.name, ops.len());
    if ops.iter().any(|op| op.lane != Lane::Compute) {
        out.push_str(
            "Lanes run side by side, each in this order; `after`: what must be over on another lane.\n",
        );
    }
    let _ = writeln!(out, "\n{:>5}  {:<8} {:<width$} {:>9}  after", "", "lane", "operation", "moves");
    for (i, (op, (text, moves))) in ops.iter().zip(&lines).enumerate() {
        let waits: Vec<String> = op.waits.iter().map(wait_text).collect();
        let (number, waits) = (format!("#{i}"), waits.join(", "));
        let line = format!("{number:>5}  {:<8} {text:<width$} {moves:>9}  {waits}", op.lane);
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}

fn wait_text(wait: &Wait) -> String {
    match wait {
        Wait::This(id) => id.to_string(),
        Wait::Previous(id) => format!("{id} of the step before"),
    }
}

/// One operation of a schedule, as [`schedule_text`] has it: its number and what it does.
pub fn operation_text(plan: &RunPlan, phase: &Phase, i: usize) -> String {
    format!("#{i} {}", op_text(plan, phase, &phase.schedule.ops[i]).0)
}

/// An operation in words, and the bytes it moves.
fn op_text(plan: &RunPlan, phase: &Phase, op: &Op) -> (String, String) {
    let words = Words { plan, phase };
    let micro_text = |micro: u32| match plan.input.micros {
        1 => String::new(),
        _ => format!(", micro-batch {micro}"),
    };
    let text = match op.kind {
        OpKind::Release(span) => format!("release {}", words.span(span)),
        OpKind::Feed { micro } => format!("feed inputs{}", micro_text(micro)),
        OpKind::Forward { unit, micro } => format!("forward {}{}", words.unit(unit), micro_text(micro)),
        OpKind::HeadForward { micro } => format!("forward head{}", micro_text(micro)),
        OpKind::Objective { micro } => format!("objective{}", micro_text(micro)),
        OpKind::HeadBackward { micro, .. } => format!("backward head{}", micro_text(micro)),
        OpKind::HeadStep { micro, .. } => format!("forward and backward head{}", micro_text(micro)),
        OpKind::Recompute { unit, micro } => format!("recompute {}{}", words.unit(unit), micro_text(micro)),
        OpKind::Backward { unit, micro, .. } => format!("backward {}{}", words.unit(unit), micro_text(micro)),
        OpKind::Gather { span, axes, .. } => {
            let bytes = words.bytes(span, plan.input.storage);
            return (words.gather_text(span, axes), bytes.to_string());
        }
        OpKind::Move { what, from, to, span } => return words.move_text(what, from, to, span),
        OpKind::Publish { span, axes } => {
            let text = format!("publish {} to {} ranks", words.span(span), plan.input.mesh.size_of(axes));
            return (text, words.bytes(span, plan.input.storage).to_string());
        }
        OpKind::Reduce { span, micro, axis, into, .. } => {
            let text = format!("{}{}", words.reduce_text(span, axis, into), micro_text(micro));
            return (text, words.reduced_bytes(span, axis).to_string());
        }
        OpKind::Add { span, micro, .. } => {
            let text = format!("add gradient of {}{}", words.span(span), micro_text(micro));
            return (text, words.bytes(span, DType::F32).to_string());
        }
        OpKind::Squares { span, .. } => words.squares_text(span),
        OpKind::ClipNorm { axes: [] } => "gradient norm and clip factor".into(),
        OpKind::ClipNorm { axes } => {
            format!("gradient norm over {} ranks and clip factor", plan.input.mesh.size_of(axes))
        }
        OpKind::Update { unit, start, end, .. } => match (start, end) {
            (0, end) if end == plan.input.share(phase.model, unit) => format!("update {}", words.unit(unit)),
            _ => format!("update {}[{start}..{end}]", words.unit(unit)),
        },
        OpKind::Generate => "generate: new tokens through all units and into the cache, repeated".into(),
    };
    (text, String::new())
}

/// Names for one operation.
struct Words<'a> {
    plan: &'a RunPlan,
    phase: &'a Phase,
}

impl Words<'_> {
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
                    (0, end) if end == unit.trained_elems => format!("{name}'s trained part"),
                    (start, end) => format!("{name}[{start}..{end}]"),
                }
            })
            .collect();
        parts.join(" + ")
    }

    fn bytes(&self, id: SpanId, dtype: DType) -> Bytes {
        Elems(self.phase.schedule.span(id).elems() as u64).bytes(dtype)
    }

    /// Of a gradient that is cut, only the owner's slice moves along any other axis.
    fn reduced_bytes(&self, span: SpanId, axis: Axis) -> Bytes {
        let (all, mesh) = (self.bytes(span, DType::F32), self.plan.input.mesh);
        let cut = self.plan.input.sharded_over(self.phase.model, State::Grad);
        if cut.contains(&axis) { all } else { Bytes(all.0.div_ceil(u64::from(mesh.size_of(cut)))) }
    }

    fn gather_text(&self, span: SpanId, axes: Axes) -> String {
        let input = &self.plan.input;
        let source = match axes {
            [] => input.model(self.phase.model).placements.params_tier.to_string(),
            axes => format!("{} ranks", input.mesh.size_of(axes)),
        };
        format!("gather {} from {source}", self.span(span))
    }

    /// Whether the sum is added to what earlier micro-batches left.
    fn reduce_text(&self, span: SpanId, axis: Axis, into: ReduceInto) -> String {
        let mesh = self.plan.input.mesh;
        let text = match mesh.size(axis) {
            1 => return format!("accumulate {}", self.span(span)),
            n if mesh.replicate > 1 => format!("reduce {} over {n} ranks ({axis})", self.span(span)),
            n => format!("reduce {} over {n} ranks", self.span(span)),
        };
        if into == (ReduceInto::Accumulator { fresh: false }) { format!("{text}, adding") } else { text }
    }

    /// A copy between memories, as people read it, and its bytes on the rank that has most.
    fn move_text(&self, what: Moved, from: End, to: End, span: SpanId) -> (String, String) {
        let (input, model) = (&self.plan.input, self.phase.model);
        let SpanPart { unit, start, end } = self.phase.schedule.span(span).parts[0];
        let elems = end - start;
        let home = |state: State| input.resident(model, unit, state).0;
        let (text, tier, bytes) = match what {
            Moved::Params => {
                let share = elems.min(input.resident(model, unit, State::Working).1);
                let bytes = Elems(share as u64).bytes(input.storage);
                (format!("parameters of {}", self.span(span)), home(State::Working), bytes)
            }
            Moved::Grad => {
                let bytes = Elems(elems as u64).bytes(DType::F32);
                (format!("gradient of {}", self.span(span)), home(State::Grad), bytes)
            }
            Moved::OptimizerStates => {
                let bytes = Bytes(input.staged_bytes(model, unit, elems) as u64);
                (format!("states of {}", self.span(span)), input.optimizer_tier(model, unit), bytes)
            }
            Moved::Squares => {
                return ("squares of what stays on the device to the others".into(), String::new());
            }
        };
        let tier_of = |end: End| match end {
            End::Resident => tier,
            End::Buffer(id) => self.plan.buffers[id.0 as usize].tier,
        };
        (format!("move {text} from {} to {}", tier_of(from), tier_of(to)), bytes.to_string())
    }

    /// Where squares are summed unit by unit, of which.
    fn squares_text(&self, span: SpanId) -> String {
        match &self.phase.schedule.span(span).parts[..] {
            [part] => format!("squares of {}'s gradient", self.unit(part.unit)),
            _ => "squares of the gradients".into(),
        }
    }
}
