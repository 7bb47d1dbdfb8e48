//! The device memory in use over the operations of a phase.

use lockstep_core::Bytes;

use crate::buffer::{Access, BufferId, BufferKind, MemoryTier};
use crate::run_plan::{Phase, PlanData};

/// What a buffer that lives within a step is counted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransientKind {
    Parameters,
    Gradients,
    Activations,
    Buffers,
}

impl TransientKind {
    pub(crate) const COUNT: usize = 4;

    fn of(kind: BufferKind) -> TransientKind {
        match kind {
            BufferKind::UnshardedParams { .. } | BufferKind::ParamStaging { .. } => TransientKind::Parameters,
            BufferKind::UnshardedGrad { .. } => TransientKind::Gradients,
            BufferKind::Residual { .. }
            | BufferKind::ResidualGrad { .. }
            | BufferKind::SavedActivations { .. }
            | BufferKind::RecomputedActivations { .. } => TransientKind::Activations,
            _ => TransientKind::Buffers,
        }
    }
}

/// The memory while one operation runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CurvePoint {
    /// The bytes of residents and of the buffers that are live.
    pub live: Bytes,
    /// Where the last of these buffers ends in the arena.
    pub extent: Bytes,
    pub(crate) by_kind: [Bytes; TransientKind::COUNT],
}

/// The device memory in use over the operations of a phase, in the order of the schedule. The overhead of the process
/// is not in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryCurve {
    pub phase: String,
    pub residents: Bytes,
    /// One for every operation.
    pub points: Vec<CurvePoint>,
}

impl MemoryCurve {
    pub fn of(plan: &PlanData, phase: &Phase) -> MemoryCurve {
        let residents = plan.residents[MemoryTier::Device as usize].bytes;
        let none = CurvePoint { live: residents, extent: residents, by_kind: Default::default() };
        let mut points = vec![none; phase.schedule.ops.len()];
        for (id, offset) in &phase.memory.offsets {
            let buffer = &plan.buffers[id.0 as usize];
            let bytes = buffer.bytes();
            for (first, last) in lifetimes(phase, *id) {
                for point in &mut points[first..=last] {
                    point.live += bytes;
                    point.extent = point.extent.max(residents + *offset + bytes.align_to(4096));
                    point.by_kind[TransientKind::of(buffer.kind) as usize] += bytes;
                }
            }
        }
        MemoryCurve { phase: phase.name.clone(), residents, points }
    }

    /// The curve of the phase that needs the most memory.
    pub fn of_largest_phase(plan: &PlanData) -> Option<MemoryCurve> {
        let largest = plan.phases.iter().max_by_key(|phase| phase.memory.bytes)?;
        Some(MemoryCurve::of(plan, largest))
    }

    /// The size of the arena that the curve needs: the plan's peak.
    pub fn peak(&self) -> Bytes {
        self.points.iter().map(|point| point.extent).max().unwrap_or(self.residents)
    }

    /// The operation with the most live bytes.
    pub fn peak_op(&self) -> Option<usize> {
        let most = self.points.iter().map(|point| point.live).max()?;
        self.points.iter().position(|point| point.live == most)
    }
}

/// From which operation to which a buffer is live, each time it is defined anew.
fn lifetimes(phase: &Phase, id: BufferId) -> Vec<(usize, usize)> {
    let mut found: Vec<(usize, usize)> = Vec::new();
    for (i, op) in phase.schedule.ops.iter().enumerate() {
        for (_, access) in op.accesses.iter().filter(|(other, _)| *other == id) {
            match found.last_mut() {
                Some(last) if *access != Access::Define => last.1 = i,
                _ => found.push((i, i)),
            }
        }
    }
    found
}
