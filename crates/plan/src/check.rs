//! Checks the invariants of a schedule, without a device.

use std::collections::{BTreeSet, HashMap};
use std::fmt;

use crate::axes::Axes;
use crate::buffer::{Access, Buffer, BufferId, BufferKind};
use crate::happens_before::HappensBefore;
use crate::input::{AccumulationOrder, PlanInput};
use crate::memory::MemoryPlan;
use crate::run_plan::{Phase, PhaseKind, PlanData};
use crate::schedule::{OpId, OpKind, Schedule, SpanId, Wait};

/// A broken invariant. Ids continue in the second run of a schedule, which may overlap the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// A wait for an operation that comes later in the list, or for itself.
    WaitsForLaterOp {
        op: OpId,
        on: OpId,
    },
    ReadBeforeWritten {
        op: OpId,
        buffer: BufferKind,
    },
    /// Two lanes use a buffer, at least one writes it, and neither waits for the other.
    Race {
        a: OpId,
        b: OpId,
        buffer: BufferKind,
    },
    GatheredTwice {
        op: OpId,
        span: SpanId,
    },
    NeverReleased {
        span: SpanId,
    },
    ReleasedWithoutGather {
        op: OpId,
        span: SpanId,
    },
    /// A trained element of a unit is not reduced exactly once for a micro-batch.
    WrongReduceCount {
        unit: u32,
        micro_batch: u32,
        at: usize,
        times: u32,
        expected: u32,
    },
    /// Two buffers that can be alive together share bytes.
    Overlap {
        a: BufferKind,
        b: BufferKind,
    },
    NotUpdatedExactlyOnce {
        unit: u32,
        times: u32,
    },
    /// A buffer that operations use has no space in its tier's arena.
    NoAddress {
        buffer: BufferKind,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Violation::WaitsForLaterOp { op, on } => {
                write!(f, "operation {op} waits for {on}, which comes later")
            }
            Violation::ReadBeforeWritten { op, buffer } => {
                write!(f, "operation {op} reads {buffer:?} before anything has written it")
            }
            Violation::Race { a, b, buffer } => {
                write!(
                    f,
                    "operations {a} and {b} use {buffer:?} on two lanes, and neither waits for the other"
                )
            }
            Violation::GatheredTwice { op, span } => {
                write!(f, "operation {op} gathers span {}, which is already gathered", span.0)
            }
            Violation::NeverReleased { span } => write!(f, "span {} is gathered and never released", span.0),
            Violation::ReleasedWithoutGather { op, span } => {
                write!(f, "operation {op} releases span {}, which is not gathered", span.0)
            }
            Violation::WrongReduceCount { unit, micro_batch, at, times, expected } => write!(
                f,
                "element {at} of unit {unit}'s gradient is reduced {times} times for micro-batch {micro_batch}, not {expected}"
            ),
            Violation::Overlap { a, b } => write!(f, "{a:?} and {b:?} share bytes while both are in use"),
            Violation::NotUpdatedExactlyOnce { unit, times } => {
                write!(f, "unit {unit} is updated in {times} pieces that do not cover its shard exactly once")
            }
            Violation::NoAddress { buffer } => {
                write!(f, "{buffer:?} is used, but has no address in its arena")
            }
        }
    }
}

/// All violations of a phase.
pub(crate) fn check_phase(plan: &PlanData, phase: &Phase) -> Vec<Violation> {
    let mut found = check(&phase.schedule, &plan.buffers, &phase.memory);
    let order = HappensBefore::of(&phase.schedule);
    check_overlap(&phase.schedule, &plan.buffers, &order, &phase.host, &mut found);
    check_addresses(plan, phase, &mut found);
    if phase.kind == PhaseKind::Train {
        found.extend(check_training(&phase.schedule, &plan.input));
    }
    found
}

/// Checks that every buffer in use lies inside its arena, and that residents do not overlap.
fn check_addresses(plan: &PlanData, phase: &Phase, found: &mut Vec<Violation>) {
    let arenas = [plan.arena_bytes, plan.host_bytes, plan.nvme_bytes];
    let used: BTreeSet<BufferId> =
        phase.schedule.ops.iter().flat_map(|op| op.accesses.iter().map(|(id, _)| *id)).collect();
    for id in used {
        let buffer = &plan.buffers[id.0 as usize];
        let end = plan.offset(phase, id).map(|start| start + buffer.bytes());
        if end.is_none_or(|end| end > arenas[buffer.tier as usize]) {
            found.push(Violation::NoAddress { buffer: buffer.kind });
        }
    }
    for residents in &plan.residents {
        let mut ranges: Vec<_> = residents
            .offsets
            .iter()
            .map(|(id, start)| (*start, *start + plan.buffers[id.0 as usize].bytes(), *id))
            .collect();
        ranges.sort_unstable();
        let kind = |id: BufferId| plan.buffers[id.0 as usize].kind;
        let overlapping = ranges.windows(2).filter(|pair| pair[0].1 > pair[1].0);
        found.extend(overlapping.map(|pair| Violation::Overlap { a: kind(pair[0].2), b: kind(pair[1].2) }));
        let outside = ranges.last().filter(|(_, end, _)| *end > residents.bytes);
        found.extend(outside.map(|(_, _, id)| Violation::NoAddress { buffer: kind(*id) }));
    }
}

/// All violations of a schedule over `buffers`, packed as `memory`.
pub(crate) fn check(schedule: &Schedule, buffers: &[Buffer], memory: &MemoryPlan) -> Vec<Violation> {
    let order = HappensBefore::of(schedule);
    let mut found = Vec::new();
    check_waits(schedule, &mut found);
    check_accesses(schedule, buffers, &order, &mut found);
    check_gathers(schedule, &mut found);
    check_overlap(schedule, buffers, &order, memory, &mut found);
    found
}

fn check_waits(schedule: &Schedule, found: &mut Vec<Violation>) {
    for (i, op) in schedule.ops.iter().enumerate() {
        for wait in &op.waits {
            if let Wait::SameRun(on) = wait
                && on.0 as usize >= i
            {
                found.push(Violation::WaitsForLaterOp { op: OpId(i as u32), on: *on });
            }
        }
    }
}

fn check_accesses(
    schedule: &Schedule,
    buffers: &[Buffer],
    order: &HappensBefore,
    found: &mut Vec<Violation>,
) {
    // Accesses since the last write: an operation ordered after that write is ordered after everything before it.
    let mut history: HashMap<BufferId, Vec<(OpId, Access)>> = HashMap::new();
    for (at, op) in schedule.in_flight() {
        for (buffer, access) in &op.accesses {
            let kind = buffers[buffer.0 as usize].kind;
            let past = history.entry(*buffer).or_default();
            if *access != Access::Define && past.is_empty() && !kind.is_resident() {
                found.push(Violation::ReadBeforeWritten { op: at, buffer: kind });
            }
            for (other, theirs) in past.iter() {
                let conflict = *access != Access::Read || *theirs != Access::Read;
                if conflict && *other != at && !order.before(*other, at) {
                    found.push(Violation::Race { a: *other, b: at, buffer: kind });
                }
            }
            if *access != Access::Read {
                past.clear();
            }
            past.push((at, *access));
        }
    }
}

fn check_gathers(schedule: &Schedule, found: &mut Vec<Violation>) {
    let mut held: HashMap<SpanId, bool> = HashMap::new();
    for (i, op) in schedule.ops.iter().enumerate() {
        let at = OpId(i as u32);
        match op.kind {
            OpKind::Gather { span, .. } => {
                let twice = held.insert(span, true) == Some(true);
                found.extend(twice.then_some(Violation::GatheredTwice { op: at, span }));
            }
            OpKind::Release(span) => {
                let ungathered = held.insert(span, false) != Some(true);
                found.extend(ungathered.then_some(Violation::ReleasedWithoutGather { op: at, span }));
            }
            _ => {}
        }
    }
    let mut kept: Vec<SpanId> = held.into_iter().filter(|(_, held)| *held).map(|(span, _)| span).collect();
    kept.sort();
    found.extend(kept.into_iter().map(|span| Violation::NeverReleased { span }));
}

/// Checks the packing independently of `pack`: compares every pair of buffers that share bytes access by access.
fn check_overlap(
    schedule: &Schedule,
    buffers: &[Buffer],
    order: &HappensBefore,
    memory: &MemoryPlan,
    found: &mut Vec<Violation>,
) {
    let mut touched: HashMap<BufferId, Vec<(OpId, Access)>> = HashMap::new();
    for (at, op) in schedule.in_flight() {
        for (buffer, access) in &op.accesses {
            touched.entry(*buffer).or_default().push((at, *access));
        }
    }
    let range = |(id, start): &(BufferId, lockstep_core::Bytes)| {
        (start.0, start.0 + buffers[id.0 as usize].bytes().0)
    };
    for (i, a) in memory.offsets.iter().enumerate() {
        for b in &memory.offsets[i + 1..] {
            let ((a0, a1), (b0, b1)) = (range(a), range(b));
            if a0 >= b1 || b0 >= a1 {
                continue;
            }
            // An access to B between A's definition and a use of A destroys A. The definition counts as a use:
            // nothing else may write while it does.
            let destroys = |own: &[(OpId, Access)], other: &[(OpId, Access)]| {
                let mut defined = None;
                own.iter().any(|(use_at, access)| {
                    if *access == Access::Define || defined.is_none() {
                        defined = Some(*use_at);
                    }
                    let defined = defined.expect("just set");
                    other.iter().any(|(o, _)| !order.before(*o, defined) && !order.before(*use_at, *o))
                })
            };
            let of = |id: BufferId| touched.get(&id).map_or(&[][..], |list| &list[..]);
            let (of_a, of_b) = (of(a.0), of(b.0));
            if destroys(of_a, of_b) || destroys(of_b, of_a) {
                let kind = |id: BufferId| buffers[id.0 as usize].kind;
                found.push(Violation::Overlap { a: kind(a.0), b: kind(b.0) });
            }
        }
    }
}

/// Checks that every trained element is reduced once along each axis, per micro-batch or per accumulation window, and
/// that every trained unit is updated exactly once.
pub(crate) fn check_training(schedule: &Schedule, input: &PlanInput) -> Vec<Violation> {
    let mut found = Vec::new();
    let reductions_per_window = match input.order {
        AccumulationOrder::Local => 1,
        AccumulationOrder::Reduced => input.num_micro_batches,
    };
    let model = schedule.ops.first().map_or(crate::ModelId(0), |op| op.model);
    for (u, unit) in input.model(model).units.iter().enumerate() {
        let shard_elems = input.optimizer_shard_elems(model, u as u32);
        let mut pieces: Vec<(usize, usize)> = schedule
            .ops
            .iter()
            .filter_map(|op| match op.kind {
                OpKind::Update { unit, start, end, .. } if unit as usize == u => Some((start, end)),
                _ => None,
            })
            .collect();
        pieces.sort_unstable();
        // Each piece begins where the previous one ends.
        let end = pieces.iter().try_fold(0, |at, (start, end)| (*start == at).then_some(*end));
        if end != Some(shard_elems) {
            let times = pieces.len() as u32;
            found.push(Violation::NotUpdatedExactlyOnce { unit: u as u32, times });
        }
        let axes = input.reductions(model, u as u32);
        check_reductions(
            schedule,
            input,
            (u as u32, unit.trained_elems, axes),
            reductions_per_window,
            &mut found,
        );
    }
    found
}

fn check_reductions(
    schedule: &Schedule,
    input: &PlanInput,
    (unit, elems, axes): (u32, usize, Axes),
    windows: u32,
    found: &mut Vec<Violation>,
) {
    for axis in axes.iter().copied() {
        for window in 0..windows {
            let micro_batch = if windows == 1 { input.num_micro_batches - 1 } else { window };
            // The count can only change where a part starts or ends, so it is enough to look there.
            let mut parts: Vec<&crate::schedule::SpanPart> = Vec::new();
            for op in &schedule.ops {
                if let OpKind::Reduce { span, micro_batch: m, axis: a, .. } = op.kind
                    && (m, a) == (micro_batch, axis)
                {
                    parts.extend(schedule.span(span).parts.iter().filter(|p| p.unit == unit));
                }
            }
            let mut cuts: Vec<usize> = parts.iter().flat_map(|p| [p.start, p.end]).chain([0]).collect();
            cuts.retain(|c| *c < elems);
            for at in cuts {
                let times = parts.iter().filter(|p| p.start <= at && at < p.end).count() as u32;
                if times != 1 {
                    found.push(Violation::WrongReduceCount { unit, micro_batch, at, times, expected: 1 });
                }
            }
        }
    }
}
