//! The plan as people read it: where the bytes go, and the schedule.

use std::collections::BTreeMap;
use std::fmt::Write;

use lockstep_core::{Bytes, Elems};

use crate::buffer::{State, What};
use crate::run_plan::{Phase, RunPlan};
use crate::schedule::{OpKind, Schedule, SpanId, Wait};

/// A table of bytes per rank by what they are for.
pub fn memory_table(plan: &RunPlan) -> String {
    let mut out = String::new();
    let mesh = plan.input.mesh;
    for model in &plan.input.models {
        let trained: usize = model.units.iter().map(|u| u.trainable_elems).sum();
        let frozen = if trained == 0 { ", frozen" } else { "" };
        let _ = writeln!(
            out,
            "model   {} {}, {} parameters{frozen}",
            format!("{:?}", model.role).to_lowercase(),
            model.shape.architecture.class_name(),
            Elems(model.params()),
        );
    }
    let b = plan.input.bounds;
    let _ = writeln!(
        out,
        "ranks   {} ({} replicas x {} shards)   micro-batches {} of {} tokens",
        mesh.world(),
        mesh.replicate,
        mesh.shard,
        plan.input.micros,
        b.tokens
    );
    let _ = writeln!(out, "\n{:<34} {:>12} {:>12} {:>12}", "per rank", "device", "host", "nvme");
    let mut rows: BTreeMap<&'static str, [Bytes; 3]> = BTreeMap::new();
    for buffer in plan.buffers.iter().filter(|b| b.what.is_resident()) {
        let row = rows.entry(row_of(&buffer.what)).or_default();
        row[buffer.tier as usize] += buffer.bytes().align_to(4096);
    }
    for (name, cells) in &rows {
        row(&mut out, &name[2..], *cells);
    }
    row(&mut out, "residents", [plan.resident_bytes, sum(&rows, 1), plan.nvme_bytes]);
    for phase in &plan.phases {
        let name = format!("phase: {}", phase.name);
        row(&mut out, &name, [phase.memory.bytes, phase.host.bytes, Bytes::ZERO]);
        for (what, bytes) in phase_rows(plan, phase) {
            let _ = writeln!(out, "    {what:<30} {bytes:>12}");
        }
    }
    row(&mut out, "arena (residents + largest phase)", [plan.arena, plan.host_bytes, plan.nvme_bytes]);
    row(&mut out, "foreign (process, libraries, data)", [plan.input.needs.foreign, Bytes::ZERO, Bytes::ZERO]);
    row(&mut out, "total", [plan.arena + plan.input.needs.foreign, plan.host_bytes, plan.nvme_bytes]);
    out
}

fn sum(rows: &BTreeMap<&'static str, [Bytes; 3]>, tier: usize) -> Bytes {
    rows.values().map(|r| r[tier]).sum()
}

fn row(out: &mut String, name: &str, cells: [Bytes; 3]) {
    let _ = write!(out, "{name:<34}");
    for cell in cells {
        let text = if cell == Bytes::ZERO { "-".to_string() } else { cell.to_string() };
        let _ = write!(out, " {text:>12}");
    }
    out.push('\n');
}

/// Names sort in the order of the table by their first character, which is not shown.
fn row_of(what: &What) -> &'static str {
    match what {
        What::State { state: State::Working, .. } => "1 parameters",
        What::State { state: State::Master, .. } => "2 master copies (f32)",
        What::State { state: State::Grad, .. } => "3 gradients (f32)",
        What::State { .. } => "4 Adam moments (f32)",
        _ => "5 tables",
    }
}

/// A phase's buffers by kind, at their sum: they share bytes, so the phase's own row is smaller.
fn phase_rows(plan: &RunPlan, phase: &Phase) -> Vec<(&'static str, Bytes)> {
    let mut rows: Vec<(&'static str, Bytes)> = Vec::new();
    for (id, _) in &phase.memory.offsets {
        let buffer = &plan.buffers[id.0 as usize];
        let name = match buffer.what {
            What::Stream { .. } | What::GradStream { .. } => "residual stream",
            What::Saved { .. } => "kept for backward",
            What::Rebuilt { .. } => "recomputed (shared)",
            What::Scratch => "scratch and workspace",
            What::Whole { .. } => "gathered parameters (shared)",
            What::GradWhole { .. } => "whole gradients (shared)",
            What::Staging => "communication staging",
            What::KvCache { .. } => "key-value cache",
            _ => "inputs and outputs",
        };
        match rows.iter_mut().find(|(n, _)| *n == name) {
            Some(row) => row.1 += buffer.bytes(),
            None => rows.push((name, buffer.bytes())),
        }
    }
    rows.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    rows
}

/// A schedule as a numbered list: lane, operation, what it waits for.
pub fn schedule_text(plan: &RunPlan, phase: &Phase) -> String {
    let schedule = &phase.schedule;
    let mut out = format!("phase {}: {} operations\n", phase.name, schedule.ops.len());
    for (i, op) in schedule.ops.iter().enumerate() {
        let waits: Vec<String> = op
            .waits
            .iter()
            .map(|w| match w {
                Wait::This(id) => id.to_string(),
                Wait::Previous(id) => format!("previous {id}"),
            })
            .collect();
        let waits = if waits.is_empty() { String::new() } else { format!("  after {}", waits.join(", ")) };
        let text = op_text(plan, phase, schedule, &op.kind);
        let _ = writeln!(out, "{:>6}  {:<8}{text}{waits}", format!("#{i}"), op.lane);
    }
    out
}

fn op_text(plan: &RunPlan, phase: &Phase, schedule: &Schedule, kind: &OpKind) -> String {
    let units = &plan.input.models[phase.model.0 as usize].units;
    let unit_name = |unit: u32| units[unit as usize].kind.to_string();
    let span_text = |id: SpanId| {
        let span = schedule.span(id);
        let parts: Vec<String> = span
            .parts
            .iter()
            .map(|p| {
                let whole = p.start == 0 && p.end >= units[p.unit as usize].trainable_elems;
                let name = unit_name(p.unit);
                if whole { name } else { format!("{name}[{}..{}]", p.start, p.end) }
            })
            .collect();
        format!("{} ({})", parts.join(" + "), Elems(span.elems() as u64))
    };
    let fresh_text = |fresh: bool| if fresh { "" } else { ", adding" };
    match *kind {
        OpKind::Gather(s) => format!("gather {}", span_text(s)),
        OpKind::Release(s) => format!("release {}", span_text(s)),
        OpKind::Fetch(s) => format!("fetch {}", span_text(s)),
        OpKind::Spill(s) => format!("spill {}", span_text(s)),
        OpKind::Publish(s) => format!("publish {}", span_text(s)),
        OpKind::Forward { unit, micro } => format!("forward {} micro {micro}", unit_name(unit)),
        OpKind::HeadForward { micro } => format!("head forward micro {micro}"),
        OpKind::Objective { micro } => format!("objective micro {micro}"),
        OpKind::HeadBackward { micro, fresh } => format!("head backward micro {micro}{}", fresh_text(fresh)),
        OpKind::HeadStep { micro, fresh } => {
            format!("head forward and backward micro {micro}{}", fresh_text(fresh))
        }
        OpKind::Recompute { unit, micro } => format!("recompute {} micro {micro}", unit_name(unit)),
        OpKind::Backward { unit, micro, fresh } => {
            format!("backward {} micro {micro}{}", unit_name(unit), fresh_text(fresh))
        }
        OpKind::Reduce { span, micro, axis, fresh } => {
            format!("reduce {} over {axis} micro {micro}{}", span_text(span), fresh_text(fresh))
        }
        OpKind::ClipNorm => "norm and clip".into(),
        OpKind::Update { unit } => format!("update {}", unit_name(unit)),
        OpKind::Snapshot { unit } => format!("snapshot {}", unit_name(unit)),
        OpKind::Prefill => "prefill".into(),
        OpKind::Decode => "decode".into(),
    }
}
