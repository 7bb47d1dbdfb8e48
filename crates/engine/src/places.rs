//! Addresses of everything a phase touches, looked up once.

use std::path::PathBuf;
use std::sync::Arc;

use lockstep_core::{Bytes, DType, Rank};
use lockstep_device::{Device, Memory, OffloadFile, Queue, View};
use lockstep_plan::{
    Buffer, BufferId, Flight, ModelId, OwnedPart, Phase, PhaseKind, RunPlan, SlotHome, State, Tier,
    UnitLayout, What,
};
use lockstep_shape::{Program, Programs, Slot};

use crate::error::EngineError;

/// One micro-batch is in flight at a time.
const FLIGHT: Flight = Flight::ONLY;

/// The memory of a rank, by tier.
#[derive(Debug)]
pub(crate) struct Memories {
    /// Shared with the carrier, which lends peers a look at it.
    pub(crate) device: Arc<Memory>,
    pub(crate) host: Memory,
    pub(crate) spill: Option<OffloadFile>,
}

impl Memories {
    /// `device`: the plan's arena. The host's part is taken here, and the spill file made.
    pub(crate) fn take(
        plan: &RunPlan,
        device: Arc<Memory>,
        queue: &Queue,
        spill_dir: Option<PathBuf>,
    ) -> Result<Memories, EngineError> {
        assert_eq!(device.bytes(), plan.arena, "the arena is the plan's");
        let spill = match (plan.nvme_bytes, spill_dir) {
            (Bytes::ZERO, _) => None,
            (bytes, Some(dir)) => Some(OffloadFile::create(&dir, bytes)?),
            (bytes, None) => return Err(EngineError::NoSpillDir { bytes }),
        };
        Ok(Memories { device, host: host_memory(plan, queue)?, spill })
    }

    fn spill(&self) -> &OffloadFile {
        self.spill.as_ref().expect("a plan with states on a disk has a spill file")
    }
}

/// Takes the host's part of a plan. What a GPU copies from or to is pinned: all but the states that only the host's
/// cores touch.
fn host_memory(plan: &RunPlan, queue: &Queue) -> Result<Memory, EngineError> {
    let mut memory = Memory::allocate(plan.host_bytes, queue.pool())?;
    let Device::Cuda(gpu) = queue.device() else { return Ok(memory) };
    let residents = &plan.residents[Tier::Host as usize];
    let only_host =
        |what: What| matches!(what, What::State { state: State::Master | State::Optimizer(_), .. });
    let starts = residents.offsets.iter().map(|(_, start)| start.0 as usize);
    let ends = starts.clone().skip(1).chain([residents.bytes.0 as usize]);
    let mut pinned: Vec<(usize, usize)> = Vec::new();
    let all = residents.offsets.iter().zip(starts.zip(ends));
    let crossed =
        all.filter(|((id, _), _)| !only_host(plan.buffers[id.0 as usize].what)).map(|(_, range)| range);
    for (start, end) in crossed.chain([(residents.bytes.0 as usize, plan.host_bytes.0 as usize)]) {
        match pinned.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => pinned.push((start, end)),
        }
    }
    for (start, end) in pinned {
        memory.pin(gpu, start, end)?;
    }
    Ok(memory)
}

/// A buffer's place, or a part of one, in the device's or the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    on_host: bool,
    /// Of the buffer, in bytes, and of the part within it, in elements.
    offset: usize,
    start: usize,
    elems: usize,
    dtype: DType,
}

impl Place {
    pub(crate) fn view<'m>(&self, memories: &'m Memories) -> View<'m> {
        let memory = if self.on_host { &memories.host } else { &*memories.device };
        memory.view(self.offset, self.start + self.elems, self.dtype).slice(self.start, self.elems)
    }

    pub(crate) fn elems(&self) -> usize {
        self.elems
    }

    pub(crate) fn slice(&self, start: usize, elems: usize) -> Place {
        let fits = start <= self.elems && elems <= self.elems - start;
        assert!(fits, "[{start}, +{elems}] of a place of {} elements", self.elems);
        Place { start: self.start + start, elems, ..*self }
    }

    /// A part that starts `bytes` into the buffer, of another type.
    pub(crate) fn at(&self, bytes: Bytes, elems: usize, dtype: DType) -> Place {
        assert_eq!(self.start, 0, "bytes are counted from the buffer's start");
        Place { offset: self.offset + bytes.0 as usize, elems, dtype, ..*self }
    }
}

/// Where a state lives: in memory, or in the spill file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spot {
    Memory(Place),
    File { offset: u64, elems: usize, dtype: DType },
}

impl Spot {
    pub(crate) fn elems(&self) -> usize {
        match self {
            Spot::Memory(place) => place.elems,
            Spot::File { elems, .. } => *elems,
        }
    }

    pub(crate) fn slice(&self, start: usize, elems: usize) -> Spot {
        match self {
            Spot::Memory(place) => Spot::Memory(place.slice(start, elems)),
            Spot::File { offset, elems: all, dtype } => {
                let fits = start <= *all && elems <= *all - start;
                assert!(fits, "[{start}, +{elems}] of a file part of {all} elements");
                Spot::File { offset: offset + (start * dtype.size()) as u64, elems, dtype: *dtype }
            }
        }
    }

    /// The place, of a state that is known to be in memory.
    pub(crate) fn place(&self) -> Place {
        match self {
            Spot::Memory(place) => *place,
            Spot::File { .. } => panic!("a state on a disk is used as if it were in memory"),
        }
    }

    /// Reads all elements, as f32. Between steps.
    pub(crate) fn read_f32(&self, memories: &Memories, out: &mut [f32]) -> Result<(), EngineError> {
        match self {
            Spot::Memory(place) => place.view(memories).read_f32(out)?,
            Spot::File { offset, dtype, .. } => memories.spill().read_f32(*offset, *dtype, out)?,
        }
        Ok(())
    }

    /// Writes all elements, from f32. Between steps.
    pub(crate) fn write_f32(&self, memories: &Memories, values: &[f32]) -> Result<(), EngineError> {
        match self {
            Spot::Memory(place) => place.view(memories).write_f32(values)?,
            Spot::File { offset, dtype, .. } => memories.spill().write_f32(*offset, *dtype, values)?,
        }
        Ok(())
    }

    /// Copies all elements, in the order of `queue`: to or from a GPU the copy is only issued. Where a disk takes
    /// part, it is over when this returns.
    pub(crate) fn copy_to(&self, to: &Spot, memories: &Memories, queue: &Queue) -> Result<(), EngineError> {
        match (self, to) {
            (Spot::Memory(from), Spot::Memory(to)) => {
                let (to, from) = (to.view(memories), from.view(memories));
                match queue.cuda() {
                    Some(cuda) if to.on_gpu() || from.on_gpu() => cuda.copy(to, from),
                    _ => to.copy_from(&from)?,
                }
            }
            (Spot::Memory(from), Spot::File { offset, .. }) => {
                let from = from.view(memories);
                through_host(from, queue, |there| {
                    queue.synchronize()?;
                    if from.on_gpu() {
                        there.copy_from(&from)?;
                    }
                    Ok(memories.spill().write(*offset, there)?)
                })?
            }
            (Spot::File { offset, .. }, Spot::Memory(to)) => {
                let to = to.view(memories);
                through_host(to, queue, |there| {
                    // What was issued before may still read the place.
                    queue.synchronize()?;
                    memories.spill().read(*offset, there)?;
                    if to.on_gpu() {
                        to.copy_from(&there)?;
                    }
                    Ok(())
                })?
            }
            (Spot::File { .. }, Spot::File { .. }) => unreachable!("nothing moves from disk to disk"),
        }
        Ok(())
    }
}

/// Lends memory of the host that is like `view`: itself, or, for one on a GPU, some that is taken for the call.
/// Disks and GPUs do not talk to each other.
fn through_host(
    view: View<'_>,
    queue: &Queue,
    f: impl FnOnce(View<'_>) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    if !view.on_gpu() {
        return f(view);
    }
    let between = Memory::allocate(Bytes(view.bytes() as u64).align_to(64), queue.pool())?;
    f(between.view(0, view.len(), view.dtype()))
}

/// A state of a unit: where this rank keeps its parts.
#[derive(Clone, Debug)]
pub(crate) struct Home {
    pub(crate) spot: Spot,
    pub(crate) owned: Vec<OwnedPart>,
}

impl Home {
    /// Elements `[start, end)` of the unit, which this rank holds.
    pub(crate) fn range(&self, start: usize, end: usize) -> Spot {
        let holds = |p: &&OwnedPart| p.start <= start && end <= p.end;
        let part = self.owned.iter().find(holds).unwrap_or_else(|| {
            panic!("[{start}, {end}) is not on this rank, which holds {:?}", self.owned);
        });
        self.spot.slice(part.at + start - part.start, end - start)
    }

    /// A part of what this rank holds.
    pub(crate) fn part(&self, part: &OwnedPart) -> Spot {
        self.spot.slice(part.at, part.elems())
    }
}

/// Where a unit's states live, from step to step.
#[derive(Clone, Debug)]
pub(crate) struct UnitStates {
    residents: Vec<(State, Home)>,
}

impl UnitStates {
    /// Of all units of a model.
    pub(crate) fn of_model(plan: &RunPlan, model: ModelId, rank: Rank) -> Vec<UnitStates> {
        let units = 0..plan.input.model(model).units.len() as u32;
        units.map(|unit| UnitStates::of(plan, model, unit, rank)).collect()
    }

    fn of(plan: &RunPlan, model: ModelId, unit: u32, rank: Rank) -> UnitStates {
        let states = [State::Working, State::Grad];
        let states = states.into_iter().chain(plan.input.optimizer_states(model, unit));
        let home = |state: State| {
            let id = plan.find(What::State { model, unit, state })?;
            let spot = spot_at(&plan.buffers[id.0 as usize], plan.resident_offset(id)?);
            Some((state, Home { spot, owned: plan.input.owned(model, unit, state, rank) }))
        };
        UnitStates { residents: states.filter_map(home).collect() }
    }

    pub(crate) fn home(&self, state: State) -> Option<&Home> {
        self.residents.iter().find(|(one, _)| *one == state).map(|(_, home)| home)
    }

    pub(crate) fn working(&self) -> &Home {
        self.home(State::Working).expect("every unit has working parameters")
    }
}

fn spot_at(buffer: &Buffer, offset: Bytes) -> Spot {
    let Buffer { elems, dtype, .. } = *buffer;
    let place = |on_host| Place { on_host, offset: offset.0 as usize, start: 0, elems, dtype };
    match buffer.tier {
        Tier::Device => Spot::Memory(place(false)),
        Tier::Host => Spot::Memory(place(true)),
        Tier::Nvme => Spot::File { offset: offset.0, elems, dtype },
    }
}

/// A unit's buffers in a phase.
#[derive(Clone, Debug)]
pub(crate) struct UnitPlaces {
    /// What forward and backward read parameters from: the whole of them.
    pub(crate) params: Place,
    /// Where backward writes: the accumulator itself, or a buffer that is reduced into it.
    pub(crate) grad_target: Option<Place>,
    /// The slots of each program.
    pub(crate) forward: SlotPlaces,
    pub(crate) rebuild: SlotPlaces,
    pub(crate) backward: SlotPlaces,
    pub(crate) fused: SlotPlaces,
    pub(crate) next: SlotPlaces,
}

pub(crate) type SlotPlaces = [Option<Place>; Slot::COUNT];

/// Everything else.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    pub(crate) units: Vec<UnitPlaces>,
    pub(crate) inputs: Place,
    pub(crate) tables: Place,
    /// What the head says of every token: channel after channel, as far apart as the plan's bounds say.
    pub(crate) outputs: Place,
    /// In training alone, likewise.
    pub(crate) coefficients: Option<Place>,
    pub(crate) norm_leaves: Option<Place>,
    /// On a device with memory of its own.
    pub(crate) verdict: Option<Place>,
    pub(crate) port: Option<Place>,
    /// In generation alone.
    pub(crate) cache: Option<Place>,
    pub(crate) workspace: Place,
}

impl Places {
    pub(crate) fn of(plan: &RunPlan, phase: &Phase, residents: &[UnitStates]) -> Places {
        let (finder, id) = (Finder { plan, phase }, phase.model);
        let (model, layouts) = (plan.input.model(id), plan.layouts(id));
        let units = (0..).zip(residents);
        let units = units
            .map(|(u, residents)| finder.unit(u, model.programs(u), &layouts[model.layout_of(u)], residents));
        let units = units.collect();
        let scratch = finder.must(What::Scratch);
        let workspace_offset = plan.workspace_offset(id);
        let workspace = scratch.at(
            workspace_offset,
            scratch.elems - workspace_offset.0 as usize / DType::F32.size(),
            DType::F32,
        );
        // Models share these buffers; each has as much of them as it planned.
        let per_token = model.channels.count() * model.bounds.tokens;
        Places {
            units,
            inputs: finder
                .must(What::Inputs { flight: FLIGHT })
                .slice(0, model.inputs_elems(plan.input.is_separate())),
            tables: finder.must(What::Tables { model: id }),
            outputs: finder.must(What::Outputs { flight: FLIGHT }).slice(0, per_token),
            coefficients: finder
                .find(What::Coefficients { flight: FLIGHT })
                .map(|spot| spot.place().slice(0, per_token)),
            norm_leaves: finder.find(What::NormLeaves { model: id }).map(|spot| spot.place()),
            verdict: finder.find(What::Verdict).map(|spot| spot.place()),
            port: finder.find(What::Port).map(|spot| spot.place()),
            cache: finder.find(What::KvCache { model: id }).map(|spot| spot.place()),
            workspace,
        }
    }
}

/// Looks buffers up in a plan.
pub(crate) struct Finder<'a> {
    pub(crate) plan: &'a RunPlan,
    pub(crate) phase: &'a Phase,
}

impl Finder<'_> {
    pub(crate) fn spot(&self, id: BufferId) -> Option<Spot> {
        Some(spot_at(&self.plan.buffers[id.0 as usize], self.plan.offset(self.phase, id)?))
    }

    fn find(&self, what: What) -> Option<Spot> {
        self.spot(self.plan.find(what)?)
    }

    fn must(&self, what: What) -> Place {
        self.find(what).unwrap_or_else(|| panic!("the plan has no place for {what:?}")).place()
    }

    fn unit(
        &self,
        unit: u32,
        programs: &Programs,
        layout: &UnitLayout,
        residents: &UnitStates,
    ) -> UnitPlaces {
        let model = self.phase.model;
        let gathered = self.find(What::Whole { model, unit });
        let grad = residents.home(State::Grad).map(|home| home.spot);
        let grad_target = self.find(What::GradWhole { model, unit }).or(grad);
        let slots = |program, layout| self.slots(unit, programs, program, layout);
        UnitPlaces {
            params: gathered.unwrap_or(residents.working().spot).place(),
            grad_target: grad_target.map(|spot| spot.place()),
            forward: slots(&programs.forward, &layout.forward),
            rebuild: slots(&programs.rebuild, &layout.rebuild),
            backward: slots(&programs.backward, &layout.backward),
            fused: slots(&programs.fused, &layout.fused),
            next: slots(&programs.next, &layout.next),
        }
    }

    fn slots(
        &self,
        unit: u32,
        programs: &Programs,
        program: &Program,
        layout: &lockstep_plan::ProgramLayout,
    ) -> SlotPlaces {
        let (input, model) = (&self.plan.input, self.phase.model);
        let plan = input.model(model);
        let mut places = [None; Slot::COUNT];
        // While documents grow nothing is kept for a backward: two streams take turns, and all blocks
        // share what the first would keep.
        let grows = self.phase.kind == PhaseKind::Generate;
        let stream = |index: u32| if grows { 2 - index % 2 } else { index };
        let keeper = if grows { 1 } else { unit };
        for slot in program.slots() {
            let spec = programs.spec(slot);
            let dtype = spec.dtype.unwrap_or(input.storage);
            let bytes = spec.bytes(plan.bounds.tokens, plan.head_chunk, input.storage);
            let elems = bytes.0 as usize / dtype.size();
            let (buffer, offset) = match layout.home(slot).expect("every slot has a home") {
                SlotHome::Input => (What::Stream { model, index: stream(unit), flight: FLIGHT }, Bytes::ZERO),
                SlotHome::Output => {
                    (What::Stream { model, index: stream(unit + 1), flight: FLIGHT }, Bytes::ZERO)
                }
                SlotHome::GradStream => (What::GradStream { model, flight: FLIGHT }, Bytes::ZERO),
                SlotHome::Saved(at) => (What::Saved { model, unit: keeper, flight: FLIGHT }, at),
                SlotHome::Rebuilt(at) => (What::Rebuilt { model, unit, flight: FLIGHT }, at),
                SlotHome::Scratch(at) => (What::Scratch, at),
            };
            // A buffer that the phase never touches has no place: its programs do not run there.
            let place = self.find(buffer).map(|spot| spot.place());
            places[slot.index()] = place.map(|place| place.at(offset, elems, dtype));
        }
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a call says when it panics.
    fn refusal(call: impl FnOnce() + std::panic::UnwindSafe) -> String {
        let cause = std::panic::catch_unwind(call).expect_err("the call must be refused");
        *cause.downcast::<String>().expect("a message with numbers in it")
    }

    /// Sums that overflow are no way around a bound.
    #[test]
    fn huge_parts_are_refused_by_name() {
        let place = Place { on_host: false, offset: 64, start: 10, elems: 100, dtype: DType::F32 };
        let file = Spot::File { offset: 64, elems: 100, dtype: DType::F32 };
        for (start, elems) in [(usize::MAX, 2), (usize::MAX - 1, 2), (2, usize::MAX), (101, 0), (100, 1)] {
            let part = format!("[{start}, +{elems}] of a ");
            for spot in [Spot::Memory(place), file] {
                let message = refusal(|| _ = spot.slice(start, elems));
                assert!(message.starts_with(&part), "{message}");
            }
        }
        assert_eq!(place.slice(100, 0).elems(), 0);
        assert_eq!(file.slice(40, 60), Spot::File { offset: 64 + 160, elems: 60, dtype: DType::F32 });
    }
}
