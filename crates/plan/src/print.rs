//! Prints the schedule of a plan.

use std::fmt::Write;

use lockstep_core::{Axis, Bytes, DType, Elems};

use crate::axes::Axes;
use crate::buffer::ParamState;
use crate::lane::Lane;
use crate::run_plan::{Phase, RunPlan};
use crate::schedule::{CopyEnd, CopyPayload, Op, OpKind, ReduceInto, SpanId, SpanPart, Wait};

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
        OpKind::Dequantise { unit } => format!("dequantise {}", operands.unit(unit)),
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
        OpKind::Deliver => "deliver outputs".into(),
        OpKind::Recompute { unit, micro_batch } => {
            format!("recompute {}{}", operands.unit(unit), micro_batch_text(micro_batch))
        }
        OpKind::Backward { unit, micro_batch, .. } => {
            format!("backward {}{}", operands.unit(unit), micro_batch_text(micro_batch))
        }
        OpKind::Gather { span, axes, .. } => {
            let parts = plan.input.gathered_bytes(phase.model, phase.schedule.span(span).parts[0].unit);
            return (operands.gather_text(span, axes), parts.to_string());
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
        OpKind::Round { unit, .. } => {
            format!("round gradient of {} to {}", operands.unit(unit), plan.input.grad_dtype)
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
            1 if input.rounds_grads() => return format!("round gradient of {span} to {}", input.grad_dtype),
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
            CopyPayload::Grad | CopyPayload::RoundedGrad => {
                let bytes = Elems(elems as u64).bytes(input.grad_dtype);
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
