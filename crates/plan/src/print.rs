//! The plan as people read it: where the bytes go, and the schedule.

use std::collections::BTreeMap;
use std::fmt::Write;

use lockstep_core::{Axis, Bytes, DType, Elems};
use lockstep_shape::Recompute;

use crate::buffer::{Access, Buffer, BufferId, State, Tier, What};
use crate::input::{Placement, PlanInput, Recomputation};
use crate::run_plan::{Phase, RunPlan};
use crate::schedule::{Lane, Op, OpKind, SpanId, SpanPart, Wait};

/// What buffers are aligned to, and therefore counted in.
const ALIGN: u64 = 4096;

/// A table of bytes per rank by what they are for. Indented rows add up to the row above them.
pub fn memory_table(plan: &RunPlan) -> String {
    let mut out = String::new();
    let input = &plan.input;
    for model in &input.models {
        let trained: u64 = model.units.iter().map(|u| u.trainable_elems as u64).sum();
        let all: u64 = model.units.iter().map(|u| u.elems as u64).sum();
        let note = match trained {
            0 => ", frozen".to_string(),
            _ if trained < all => format!(", {} of them trained", Elems(trained)),
            _ => String::new(),
        };
        let (role, family) =
            (format!("{:?}", model.role).to_lowercase(), model.shape.architecture.class_name());
        let _ = writeln!(out, "{role:<10}{family}, {} parameters{note}", Elems(model.params()));
    }
    let (mesh, tokens) = (input.mesh, input.bounds.tokens);
    let arranged = match mesh.replicate {
        1 => String::new(),
        _ => format!(" = {} replicas x {} shards", mesh.replicate, mesh.shard),
    };
    let _ = writeln!(out, "{:<10}{}{arranged}", "ranks", mesh.world());
    let batches = if input.micros == 1 { "micro-batch" } else { "micro-batches" };
    let _ = writeln!(out, "{:<10}{} {batches} of {tokens} tokens on each rank", "step", input.micros);
    choices(&mut out, input);

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
fn choices(out: &mut String, input: &PlanInput) {
    let Recomputation { early, late, late_blocks } = input.models[0].recompute;
    let blocks = input.models[0].shape.layers as u32;
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
    let (units, stay) = (input.models[0].units.len(), input.placements.stay);
    if stay > 0 && input.placements.optimizer_tier != Tier::Device {
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
    let (p, shards) = (&plan.input.placements, plan.input.mesh.shard);
    let share = |placement: Placement| match placement {
        Placement::Shard if shards > 1 => format!(", 1/{shards}"),
        _ => String::new(),
    };
    let named = |name: &str, placement| format!("{name}, {}{}", buffer.dtype, share(placement));
    match buffer.what {
        What::State { state: State::Working, .. } => (0, named("parameters", p.params)),
        What::State { state: State::Master, .. } => (1, named("master parameters", p.optimizer)),
        What::State { state: State::Grad, .. } => (2, named("gradients", p.grads)),
        What::State { .. } => (3, named("Adam moments", p.optimizer)),
        What::Port => (5, "batches on their way".into()),
        _ => (4, "tables".into()),
    }
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
            What::GradWhole { unit, .. } if plan.input.grads_leave(unit) => {
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
    let words = Words { plan, phase, op };
    let micro_text = |micro: u32| match plan.input.micros {
        1 => String::new(),
        _ => format!(", micro-batch {micro}"),
    };
    let text = match op.kind {
        OpKind::Release(span) => format!("release {}", words.span(span)),
        OpKind::Forward { unit, micro } => format!("forward {}{}", words.unit(unit), micro_text(micro)),
        OpKind::HeadForward { micro } => format!("forward head{}", micro_text(micro)),
        OpKind::Objective { micro } => format!("objective{}", micro_text(micro)),
        OpKind::HeadBackward { micro, .. } => format!("backward head{}", micro_text(micro)),
        OpKind::HeadStep { micro, .. } => format!("forward and backward head{}", micro_text(micro)),
        OpKind::Recompute { unit, micro } => format!("recompute {}{}", words.unit(unit), micro_text(micro)),
        OpKind::Backward { unit, micro, .. } => format!("backward {}{}", words.unit(unit), micro_text(micro)),
        OpKind::Gather(span) => {
            let bytes = words.bytes(span, plan.input.storage);
            return (words.gather_text(span), bytes.to_string());
        }
        OpKind::Fetch(span) => return words.copy("fetch", span),
        OpKind::Spill(span) => return words.copy("spill", span),
        OpKind::Publish(span) => {
            let text = format!("publish {} to {} ranks", words.span(span), plan.input.mesh.shard);
            return (text, words.bytes(span, plan.input.storage).to_string());
        }
        OpKind::Reduce { span, micro, axis, .. } => {
            let text = format!("{}{}", words.reduce_text(span, axis), micro_text(micro));
            return (text, words.reduced_bytes(span, axis).to_string());
        }
        OpKind::Add { span, micro } => {
            let text = format!("add gradient of {}{}", words.span(span), micro_text(micro));
            return (text, words.bytes(span, DType::F32).to_string());
        }
        OpKind::Squares => words.squares_text(),
        OpKind::JoinSquares => "squares of what stays on the device to the others".into(),
        OpKind::ClipNorm if op.lane == Lane::Comm => {
            format!("gradient norm over {} ranks and clip factor", plan.input.mesh.shard)
        }
        OpKind::ClipNorm => "gradient norm and clip factor".into(),
        OpKind::Update { unit, start, end } => {
            let share = plan.input.resident(phase.model, unit, State::Master).1;
            match (start, end) {
                (0, end) if end == share => format!("update {}", words.unit(unit)),
                _ => format!("update {}[{start}..{end}]", words.unit(unit)),
            }
        }
        OpKind::Generate => "generate: new tokens through all units and into the cache, repeated".into(),
    };
    (text, String::new())
}

/// Names for one operation.
struct Words<'a> {
    plan: &'a RunPlan,
    phase: &'a Phase,
    op: &'a Op,
}

impl Words<'_> {
    fn unit(&self, unit: u32) -> String {
        self.plan.input.models[self.phase.model.0 as usize].units[unit as usize].kind.to_string()
    }

    fn span(&self, id: SpanId) -> String {
        let units = &self.plan.input.models[self.phase.model.0 as usize].units;
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
                    (0, end) if end == unit.trainable_elems => format!("{name}'s adapters"),
                    (start, end) => format!("{name}[{start}..{end}]"),
                }
            })
            .collect();
        parts.join(" + ")
    }

    fn bytes(&self, id: SpanId, dtype: DType) -> Bytes {
        Elems(self.phase.schedule.span(id).elems() as u64).bytes(dtype)
    }

    /// Between replicas of sharded gradients only the owner's slice moves.
    fn reduced_bytes(&self, span: SpanId, axis: Axis) -> Bytes {
        let all = self.bytes(span, DType::F32);
        let sliced = axis == Axis::Replicate && self.plan.input.placements.grads == Placement::Shard;
        if sliced { Bytes(all.0.div_ceil(self.plan.input.mesh.shard as u64)) } else { all }
    }

    fn gather_text(&self, span: SpanId) -> String {
        let source = match self.op.lane {
            Lane::Comm => format!("{} ranks", self.plan.input.mesh.shard),
            _ => self.plan.input.placements.params_tier.to_string(),
        };
        format!("gather {} from {source}", self.span(span))
    }

    /// Whether the sum is added to what earlier micro-batches left.
    fn reduce_text(&self, span: SpanId, axis: Axis) -> String {
        let (mesh, adds) =
            (self.plan.input.mesh, matches!(self.op.kind, OpKind::Reduce { fresh: false, .. }));
        let text = match mesh.size(axis) {
            1 => format!("accumulate {}", self.span(span)),
            n if mesh.replicate > 1 => format!("reduce {} over {n} ranks ({axis})", self.span(span)),
            n => format!("reduce {} over {n} ranks", self.span(span)),
        };
        if adds && mesh.world() > 1 { format!("{text}, adding") } else { text }
    }

    /// A copy between tiers: what is copied shows in the resident it reads, or else writes.
    fn copy(&self, verb: &str, span: SpanId) -> (String, String) {
        let input = &self.plan.input;
        let resident = |wanted: Access| {
            let mut touched = self.op.accesses.iter().filter(|(_, access)| *access == wanted);
            touched.find_map(|(id, _)| Some(self.buffer(*id)).filter(|b| b.what.is_resident()))
        };
        if self.op.accesses.iter().any(|(id, _)| matches!(self.buffer(*id).what, What::GradWhole { .. })) {
            let way = if resident(Access::Read).is_some() { "from" } else { "to" };
            let text = format!("{verb} gradient of {} {way} host", self.span(span));
            return (text, self.bytes(span, DType::F32).to_string());
        }
        let (home, read) = match resident(Access::Read) {
            Some(home) => (home, true),
            None => (resident(Access::Update).expect("a copy has a home to come from or go to"), false),
        };
        let SpanPart { unit, start, end } = self.phase.schedule.span(span).parts[0];
        // On the rank that has most of it.
        let share = (end - start).min(input.resident(self.phase.model, unit, State::Master).1);
        let (what, elems, dtype) = match home.what {
            What::State { state: State::Working, .. } if read => ("parameters", home.elems, input.storage),
            What::State { state: State::Working, .. } => ("parameters", share, input.storage),
            _ => ("states", input.optimizer_states(unit).len() * share, DType::F32),
        };
        let way = if read { "from" } else { "to" };
        let text = format!("{verb} {what} of {} {way} {}", self.span(span), home.tier);
        (text, Elems(elems as u64).bytes(dtype).to_string())
    }

    /// Where squares are summed unit by unit, of which.
    fn squares_text(&self) -> String {
        let mut units = self.op.accesses.iter().filter_map(|(id, _)| match self.buffer(*id).what {
            What::State { state: State::Grad, unit, .. } => Some(unit),
            _ => None,
        });
        match (units.next(), units.next()) {
            (Some(unit), None) => format!("squares of {}'s gradient", self.unit(unit)),
            _ => "squares of the gradients".into(),
        }
    }

    fn buffer(&self, id: BufferId) -> &Buffer {
        &self.plan.buffers[id.0 as usize]
    }
}
