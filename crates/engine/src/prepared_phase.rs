//! A phase of the plan prepared for this rank: addresses, tasks and events, computed before the first step.

use lockstep_device::Device;
use lockstep_device::cuda::{Event, Gpu};
use lockstep_plan::{LaneProcessor, Phase, RunPlan, Schedule, Wait};

use crate::addresses::{Addresses, BufferLookup, UnitResidents};
use crate::error::EngineError;
use crate::quantised::UnitDequantisation;
use crate::task::{Squares, Task, tasks};

/// The addresses of a phase's buffers, and what its operations do on this rank.
pub(crate) struct PreparedPhase {
    pub(crate) addresses: Addresses,
    pub(crate) tasks: Vec<Task>,
    pub(crate) squares: Vec<Squares>,
    /// For each unit, how its 4-bit parameters are dequantised, if it has some.
    pub(crate) dequantisations: Vec<Option<UnitDequantisation>>,
    /// For each operation that another lane waits for, a CUDA event on its lane's stream. Runs alternate between two
    /// sets.
    pub(crate) events: [Vec<Option<Event>>; 2],
}

impl PreparedPhase {
    pub(crate) fn of(
        plan: &RunPlan,
        phase: &Phase,
        residents: &[UnitResidents],
        device: Device,
    ) -> Result<PreparedPhase, EngineError> {
        let addresses = Addresses::of(plan, phase, residents);
        let tasks = tasks(plan, phase, &addresses, residents);
        let lookup = BufferLookup { plan, phase };
        let units = addresses.units.iter().zip(residents).zip(0..);
        let dequantisations = units
            .map(|((addresses, residents), unit)| UnitDequantisation::of(&lookup, unit, addresses, residents))
            .collect();
        let squares = tasks.iter().filter_map(|task| match task {
            Task::Squares(list) => Some(&list[..]),
            _ => None,
        });
        let squares = squares.flatten().copied().collect();
        let events = match device {
            Device::Cpu => [0, 1].map(|_| phase.schedule.ops.iter().map(|_| None).collect()),
            Device::Cuda(gpu) => [events(&phase.schedule, gpu)?, events(&phase.schedule, gpu)?],
        };
        Ok(PreparedPhase { addresses, tasks, squares, dequantisations, events })
    }
}

/// Events for the operations on streams that another lane waits for. Lanes of the host need none: their operations have
/// finished when they are recorded as finished.
fn events(schedule: &Schedule, gpu: &'static Gpu) -> Result<Vec<Option<Event>>, EngineError> {
    let mut events: Vec<Option<Event>> = schedule.ops.iter().map(|_| None).collect();
    for wait in schedule.ops.iter().flat_map(|op| &op.waits) {
        let (Wait::SameRun(id) | Wait::PreviousRun(id)) = wait;
        let (op, event) = (&schedule.ops[id.0 as usize], &mut events[id.0 as usize]);
        if op.lane.spec().processor == LaneProcessor::Device && event.is_none() {
            *event = Some(Event::new(gpu)?);
        }
    }
    Ok(events)
}
