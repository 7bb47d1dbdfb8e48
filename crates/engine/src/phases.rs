//! The phases of a plan on this rank: addresses and tasks, worked out before the first step.

use lockstep_core::Rank;
use lockstep_device::Device;
use lockstep_device::cuda::{Event, Gpu};
use lockstep_plan::{Lane, Phase, RunPlan, Schedule, Wait};

use crate::error::EngineError;
use crate::places::{Places, UnitStates};
use crate::task::{Squares, Task, tasks};

/// Where a phase's buffers are, and what its operations come to on this rank.
pub(crate) struct PhasePlaces {
    pub(crate) places: Places,
    pub(crate) tasks: Vec<Task>,
    pub(crate) squares: Vec<Squares>,
    /// For each operation, a mark in its lane's stream, if one of another lane waits for it. Runs take turns with
    /// two of them.
    pub(crate) marks: [Vec<Option<Event>>; 2],
}

impl PhasePlaces {
    pub(crate) fn of(
        plan: &RunPlan,
        phase: &Phase,
        residents: &[UnitStates],
        rank: Rank,
        device: Device,
    ) -> Result<PhasePlaces, EngineError> {
        let places = Places::of(plan, phase, residents);
        let tasks = tasks(plan, phase, &places, residents, rank);
        let squares = tasks.iter().filter_map(|task| match task {
            Task::Squares(list) => Some(&list[..]),
            _ => None,
        });
        let squares = squares.flatten().copied().collect();
        let marks = match device {
            Device::Cpu => [0, 1].map(|_| phase.schedule.ops.iter().map(|_| None).collect()),
            Device::Cuda(gpu) => [marks(&phase.schedule, gpu)?, marks(&phase.schedule, gpu)?],
        };
        Ok(PhasePlaces { places, tasks, squares, marks })
    }
}

/// Marks for the operations of streams that another lane waits for. What the host's cores do needs none: it is
/// done when it is said to be.
fn marks(schedule: &Schedule, gpu: &'static Gpu) -> Result<Vec<Option<Event>>, EngineError> {
    let mut marks: Vec<Option<Event>> = schedule.ops.iter().map(|_| None).collect();
    for wait in schedule.ops.iter().flat_map(|op| &op.waits) {
        let (Wait::This(id) | Wait::Previous(id)) = wait;
        let (op, mark) = (&schedule.ops[id.0 as usize], &mut marks[id.0 as usize]);
        if op.lane != Lane::Host && mark.is_none() {
            *mark = Some(Event::new(gpu)?);
        }
    }
    Ok(marks)
}
