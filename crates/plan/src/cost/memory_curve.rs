//! The device memory in use over the operations of a phase.

use lockstep_core::Bytes;

use crate::buffer::{Access, BufferId, MemoryTier};
use crate::run_plan::{Phase, PlanData};

/// The memory while one operation runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CurvePoint {
    /// The bytes of residents and of the buffers that are live.
    pub live: Bytes,
    /// Where the last of these buffers ends in the arena.
    pub extent: Bytes,
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
        let none = CurvePoint { live: residents, extent: residents };
        let mut points = vec![none; phase.schedule.ops.len()];
        for (id, offset) in &phase.memory.offsets {
            let bytes = plan.buffers[id.0 as usize].bytes();
            for (first, last) in lifetimes(phase, *id) {
                for point in &mut points[first..=last] {
                    point.live += bytes;
                    point.extent = point.extent.max(residents + *offset + bytes.align_to(4096));
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
