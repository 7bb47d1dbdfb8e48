//! Resolves the addresses of everything that a phase uses, once.

use std::path::PathBuf;
use std::sync::Arc;

use lockstep_core::rounding::{join, split};
use lockstep_core::{Bytes, DType};
use lockstep_device::{Device, Memory, OffloadFile, Queue, View};
use lockstep_plan::{
    Buffer, BufferId, BufferKind, InFlight, MemoryTier, ModelId, OwnedPart, ParamState, Phase, PhaseKind,
    RunPlan, SlotBuffer, UnitLayout,
};
use lockstep_shape::{Program, Programs, Slot};

use crate::error::EngineError;

/// One micro-batch is in flight at a time.
const FLIGHT: InFlight = InFlight::ONLY;

/// The memory of a rank, by tier.
#[derive(Debug)]
pub(crate) struct Memories {
    /// Shared with the carrier, through which other ranks read it.
    pub(crate) device: Arc<Memory>,
    pub(crate) host: Memory,
    pub(crate) offload_file: Option<OffloadFile>,
}

impl Memories {
    /// `device` is the plan's device arena. This allocates the host arena and creates the NVMe file.
    pub(crate) fn take(
        plan: &RunPlan,
        device: Arc<Memory>,
        queue: &Queue,
        nvme_dir: Option<PathBuf>,
    ) -> Result<Memories, EngineError> {
        assert_eq!(device.bytes(), plan.arena_bytes, "the arena has the planned size");
        let offload_file = match (plan.nvme_bytes, nvme_dir) {
            (Bytes::ZERO, _) => None,
            (bytes, Some(dir)) => Some(OffloadFile::create(&dir, bytes)?),
            (bytes, None) => return Err(EngineError::NoNvmeDir { bytes }),
        };
        Ok(Memories { device, host: host_memory(plan, queue)?, offload_file })
    }

    fn offload_file(&self) -> &OffloadFile {
        self.offload_file.as_ref().expect("a plan with states on NVMe has a file for them")
    }
}

/// Allocates the host arena. Memory that a GPU copies from or to is pinned: everything but the states that only the
/// host's cores use.
fn host_memory(plan: &RunPlan, queue: &Queue) -> Result<Memory, EngineError> {
    let mut memory = Memory::allocate(plan.host_bytes, queue.pool())?;
    let Device::Cuda(gpu) = queue.device() else { return Ok(memory) };
    let residents = &plan.residents[MemoryTier::Host as usize];
    let only_host = |kind: BufferKind| {
        matches!(
            kind,
            BufferKind::ParamState {
                state: ParamState::Master | ParamState::Optimizer(_) | ParamState::Scales(_),
                ..
            }
        )
    };
    let starts = residents.offsets.iter().map(|(_, start)| start.0 as usize);
    let ends = starts.clone().skip(1).chain([residents.bytes.0 as usize]);
    let mut pinned: Vec<(usize, usize)> = Vec::new();
    let all = residents.offsets.iter().zip(starts.zip(ends));
    let crossed =
        all.filter(|((id, _), _)| !only_host(plan.buffers[id.0 as usize].kind)).map(|(_, range)| range);
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

/// The address of a buffer, or of a part of one, in the device's or the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    on_host: bool,
    /// The offset of the buffer, in bytes.
    offset: usize,
    /// The offset of the part in the buffer, in elements.
    start: usize,
    elems: usize,
    dtype: DType,
}

impl Address {
    pub(crate) fn view<'m>(&self, memories: &'m Memories) -> View<'m> {
        let memory = if self.on_host { &memories.host } else { &*memories.device };
        memory.view(self.offset, self.start + self.elems, self.dtype).slice(self.start, self.elems)
    }

    pub(crate) fn elems(&self) -> usize {
        self.elems
    }

    pub(crate) fn slice(&self, start: usize, elems: usize) -> Address {
        let fits = start <= self.elems && elems <= self.elems - start;
        assert!(fits, "[{start}, +{elems}] of an address of {} elements", self.elems);
        Address { start: self.start + start, elems, ..*self }
    }

    /// A part of another type that starts `bytes` into the buffer.
    pub(crate) fn at(&self, bytes: Bytes, elems: usize, dtype: DType) -> Address {
        assert_eq!(self.start, 0, "bytes are counted from the buffer's start");
        Address { offset: self.offset + bytes.0 as usize, elems, dtype, ..*self }
    }
}

/// Where a state lives: in memory, or in the NVMe file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    Memory(Address),
    File { offset: u64, elems: usize, dtype: DType },
}

impl Location {
    pub(crate) fn elems(&self) -> usize {
        match self {
            Location::Memory(address) => address.elems,
            Location::File { elems, .. } => *elems,
        }
    }

    pub(crate) fn slice(&self, start: usize, elems: usize) -> Location {
        match self {
            Location::Memory(address) => Location::Memory(address.slice(start, elems)),
            Location::File { offset, elems: all, dtype } => {
                let fits = start <= *all && elems <= *all - start;
                assert!(fits, "[{start}, +{elems}] of a file part of {all} elements");
                Location::File { offset: offset + (start * dtype.size()) as u64, elems, dtype: *dtype }
            }
        }
    }

    /// The address of a state that must be in memory.
    pub(crate) fn address(&self) -> Address {
        match self {
            Location::Memory(address) => *address,
            Location::File { .. } => panic!("a state on NVMe is used as if it were in memory"),
        }
    }

    /// Reads all elements as f32. Call it between steps.
    pub(crate) fn read_f32(&self, memories: &Memories, out: &mut [f32]) -> Result<(), EngineError> {
        match self {
            Location::Memory(address) => address.view(memories).read_f32(out)?,
            Location::File { offset, dtype, .. } => memories.offload_file().read_f32(*offset, *dtype, out)?,
        }
        Ok(())
    }

    /// Writes all elements from f32. Call it between steps.
    pub(crate) fn write_f32(&self, memories: &Memories, values: &[f32]) -> Result<(), EngineError> {
        match self {
            Location::Memory(address) => address.view(memories).write_f32(values)?,
            Location::File { offset, dtype, .. } => {
                memories.offload_file().write_f32(*offset, *dtype, values)?
            }
        }
        Ok(())
    }

    /// Reads numbers of a two-byte type as they are. Call it between steps.
    fn read_halves(&self, memories: &Memories, out: &mut [u16]) -> Result<(), EngineError> {
        match self {
            Location::Memory(address) => address.view(memories).read(out)?,
            Location::File { offset, .. } => memories.offload_file().read_halves(*offset, out)?,
        }
        Ok(())
    }

    fn write_halves(&self, memories: &Memories, values: &[u16]) -> Result<(), EngineError> {
        match self {
            Location::Memory(address) => address.view(memories).write(values)?,
            Location::File { offset, .. } => memories.offload_file().write_halves(*offset, values)?,
        }
        Ok(())
    }

    /// Reads master parameters from these remainders and their weights. Call it between steps.
    pub(crate) fn read_masters(
        &self,
        weights: &Location,
        memories: &Memories,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        let (mut weight_bits, mut remainders) = (vec![0u16; out.len()], vec![0u16; out.len()]);
        weights.read_halves(memories, &mut weight_bits)?;
        self.read_halves(memories, &mut remainders)?;
        for (out, (weight, remainder)) in out.iter_mut().zip(weight_bits.into_iter().zip(remainders)) {
            *out = join(weight, remainder as i16);
        }
        Ok(())
    }

    /// Writes the remainders of master parameters, whose weights are written separately. Call it between steps.
    pub(crate) fn write_remainders(&self, memories: &Memories, masters: &[f32]) -> Result<(), EngineError> {
        let remainders: Vec<u16> = masters.iter().map(|master| split(*master).1 as u16).collect();
        self.write_halves(memories, &remainders)
    }

    pub(crate) fn dtype(&self) -> DType {
        match self {
            Location::Memory(address) => address.dtype,
            Location::File { dtype, .. } => *dtype,
        }
    }

    /// As [`Location::write_f32`], with master parameters rounded to weights.
    pub(crate) fn write_weights(&self, memories: &Memories, masters: &[f32]) -> Result<(), EngineError> {
        match self {
            Location::Memory(address) => address.view(memories).write_weights(masters)?,
            Location::File { offset, dtype, .. } => {
                memories.offload_file().write_weights(*offset, *dtype, masters)?
            }
        }
        Ok(())
    }

    /// Copies all elements, in the order of `queue`. A copy to or from a GPU is only enqueued; a copy to or from the NVMe
    /// file has finished when this returns.
    pub(crate) fn copy_to(
        &self,
        to: &Location,
        memories: &Memories,
        queue: &Queue,
    ) -> Result<(), EngineError> {
        match (self, to) {
            (Location::Memory(from), Location::Memory(to)) => {
                let (to, from) = (to.view(memories), from.view(memories));
                match queue.cuda() {
                    Some(cuda) if to.on_gpu() || from.on_gpu() => cuda.copy(to, from),
                    _ => to.copy_from(&from)?,
                }
            }
            (Location::Memory(from), Location::File { offset, .. }) => {
                let from = from.view(memories);
                through_host(from, queue, |there| {
                    queue.synchronize()?;
                    if from.on_gpu() {
                        there.copy_from(&from)?;
                    }
                    Ok(memories.offload_file().write(*offset, there)?)
                })?
            }
            (Location::File { offset, .. }, Location::Memory(to)) => {
                let to = to.view(memories);
                through_host(to, queue, |there| {
                    // Work enqueued earlier may still read the destination.
                    queue.synchronize()?;
                    memories.offload_file().read(*offset, there)?;
                    if to.on_gpu() {
                        to.copy_from(&there)?;
                    }
                    Ok(())
                })?
            }
            (Location::File { .. }, Location::File { .. }) => {
                unreachable!("nothing is copied from file to file")
            }
        }
        Ok(())
    }
}

/// Calls `f` with host memory for file I/O: `view` itself, or, if that is on a GPU, a temporary buffer of the same size.
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

/// Where this rank keeps its part of a unit's state.
#[derive(Clone, Debug)]
pub(crate) struct ResidentAddress {
    pub(crate) location: Location,
    pub(crate) owned: Vec<OwnedPart>,
    /// How many parameters share a stored number.
    params_per_number: usize,
}

impl ResidentAddress {
    /// The location of elements `[start, end)` of the unit, which this rank must hold.
    pub(crate) fn range(&self, start: usize, end: usize) -> Location {
        let holds = |p: &&OwnedPart| p.start <= start && end <= p.end;
        let part = self.owned.iter().find(holds).unwrap_or_else(|| {
            panic!("[{start}, {end}) is not on this rank, which holds {:?}", self.owned);
        });
        self.numbers(part.local_start + start - part.start, end - start)
    }

    /// The location of one owned part.
    pub(crate) fn part(&self, part: &OwnedPart) -> Location {
        self.numbers(part.local_start, part.elems())
    }

    /// The numbers of `elems` parameters from `start` on.
    fn numbers(&self, start: usize, elems: usize) -> Location {
        let each = self.params_per_number;
        assert!(start.is_multiple_of(each), "parameter {start} is in the middle of a block of {each}");
        self.location.slice(start / each, elems.div_ceil(each))
    }
}

/// Where a unit's states live, from step to step.
#[derive(Clone, Debug)]
pub(crate) struct UnitResidents {
    residents: Vec<(ParamState, ResidentAddress)>,
}

impl UnitResidents {
    /// The residents of all units of a model.
    pub(crate) fn of_model(plan: &RunPlan, model: ModelId) -> Vec<UnitResidents> {
        let units = 0..plan.input.model(model).units.len() as u32;
        units.map(|unit| UnitResidents::of(plan, model, unit)).collect()
    }

    fn of(plan: &RunPlan, model: ModelId, unit: u32) -> UnitResidents {
        let states = [ParamState::Working, ParamState::Grad].into_iter().chain(ParamState::QUANTISED);
        let states = states.chain(plan.input.optimizer_states(model, unit));
        let resident = |state: ParamState| {
            let id =
                plan.find(BufferKind::ParamState { model: plan.input.weights_of(model), unit, state })?;
            let location = location_at(&plan.buffers[id.0 as usize], plan.resident_offset(id)?);
            let (owned, params_per_number) = (plan.owned(model, unit, state), state.params_per_number());
            Some((state, ResidentAddress { location, owned, params_per_number }))
        };
        UnitResidents { residents: states.filter_map(resident).collect() }
    }

    pub(crate) fn resident(&self, state: ParamState) -> Option<&ResidentAddress> {
        self.residents.iter().find(|(one, _)| *one == state).map(|(_, resident)| resident)
    }

    pub(crate) fn working(&self) -> &ResidentAddress {
        self.resident(ParamState::Working).expect("every unit has working parameters")
    }
}

fn location_at(buffer: &Buffer, offset: Bytes) -> Location {
    let Buffer { elems, dtype, .. } = *buffer;
    let address = |on_host| Address { on_host, offset: offset.0 as usize, start: 0, elems, dtype };
    match buffer.tier {
        MemoryTier::Device => Location::Memory(address(false)),
        MemoryTier::Host => Location::Memory(address(true)),
        MemoryTier::Nvme => Location::File { offset: offset.0, elems, dtype },
    }
}

/// The addresses of a unit's buffers in a phase.
#[derive(Clone, Debug)]
pub(crate) struct UnitAddresses {
    /// The unsharded parameters that forward and backward read.
    pub(crate) params: Address,
    /// The buffer that backward writes: the accumulator itself, or a buffer that is reduced into it.
    pub(crate) grad_target: Option<Address>,
    /// The slots of each program.
    pub(crate) forward: SlotAddresses,
    pub(crate) recompute: SlotAddresses,
    pub(crate) backward: SlotAddresses,
    pub(crate) fused: SlotAddresses,
    pub(crate) decode: SlotAddresses,
}

pub(crate) type SlotAddresses = [Option<Address>; Slot::COUNT];

/// The addresses of all buffers of a phase.
#[derive(Clone, Debug)]
pub(crate) struct Addresses {
    pub(crate) units: Vec<UnitAddresses>,
    pub(crate) inputs: Address,
    pub(crate) rope_tables: Address,
    /// The head's outputs over the window, channel after channel in each micro-batch, with space for the largest one.
    pub(crate) outputs: Address,
    /// The same layout; in training only.
    pub(crate) coefficients: Option<Address>,
    pub(crate) norm_leaves: Option<Address>,
    /// On a device with its own memory only.
    pub(crate) update_decision: Option<Address>,
    pub(crate) io_staging: Option<Address>,
    /// In the generate phase only.
    pub(crate) cache: Option<Address>,
    pub(crate) workspace: Address,
}

impl Addresses {
    pub(crate) fn of(plan: &RunPlan, phase: &Phase, residents: &[UnitResidents]) -> Addresses {
        let (lookup, id) = (BufferLookup { plan, phase }, phase.model);
        let (model, layouts) = (plan.input.model(id), plan.layouts(id));
        let units = (0..).zip(residents);
        let units = units
            .map(|(u, residents)| lookup.unit(u, model.programs(u), &layouts[model.layout_of(u)], residents));
        let units = units.collect();
        let scratch = lookup.must(BufferKind::Scratch);
        let workspace_offset = plan.workspace_offset(id);
        let workspace = scratch.at(
            workspace_offset,
            scratch.elems - workspace_offset.0 as usize / DType::F32.size(),
            DType::F32,
        );
        // Models share these buffers, which have the size of the largest; each uses the part it needs.
        Addresses {
            units,
            inputs: lookup
                .must(BufferKind::Inputs { in_flight: FLIGHT })
                .slice(0, model.inputs_elems(plan.input.has_separate_memory())),
            rope_tables: lookup.must(BufferKind::RopeTables { model: id }),
            outputs: lookup.must(BufferKind::Outputs),
            coefficients: lookup.find(BufferKind::Coefficients).map(|location| location.address()),
            norm_leaves: lookup.find(BufferKind::NormLeaves { model: id }).map(|location| location.address()),
            update_decision: lookup.find(BufferKind::UpdateDecision).map(|location| location.address()),
            io_staging: lookup.find(BufferKind::IoStaging).map(|location| location.address()),
            cache: lookup.find(BufferKind::KvCache { model: id }).map(|location| location.address()),
            workspace,
        }
    }
}

/// Finds the locations of a plan's buffers.
pub(crate) struct BufferLookup<'a> {
    pub(crate) plan: &'a RunPlan,
    pub(crate) phase: &'a Phase,
}

impl BufferLookup<'_> {
    pub(crate) fn location(&self, id: BufferId) -> Option<Location> {
        Some(location_at(&self.plan.buffers[id.0 as usize], self.plan.offset(self.phase, id)?))
    }

    pub(crate) fn find(&self, kind: BufferKind) -> Option<Location> {
        self.location(self.plan.find(kind)?)
    }

    fn must(&self, kind: BufferKind) -> Address {
        self.find(kind).unwrap_or_else(|| panic!("the plan has no buffer {kind:?}")).address()
    }

    fn unit(
        &self,
        unit: u32,
        programs: &Programs,
        layout: &UnitLayout,
        residents: &UnitResidents,
    ) -> UnitAddresses {
        let model = self.phase.model;
        let unsharded = |unit: u32| self.find(BufferKind::UnshardedParams { model, unit });
        // In a generate phase all units with 4-bit parameters are dequantised into the buffer of the first one.
        let input = &self.plan.input;
        let shared = || input.first_quantised(model).filter(|_| input.has_quantised(model, unit));
        let gathered = unsharded(unit).or_else(|| unsharded(shared()?));
        let grad = residents.resident(ParamState::Grad).map(|resident| resident.location);
        let grad_target = self.find(BufferKind::UnshardedGrad { model, unit }).or(grad);
        let slots = |program, layout| self.slots(unit, programs, program, layout);
        UnitAddresses {
            params: gathered.unwrap_or(residents.working().location).address(),
            grad_target: grad_target.map(|location| location.address()),
            forward: slots(&programs.forward, &layout.forward),
            recompute: slots(&programs.recompute, &layout.recompute),
            backward: slots(&programs.backward, &layout.backward),
            fused: slots(&programs.fused, &layout.fused),
            decode: slots(&programs.decode, &layout.decode),
        }
    }

    fn slots(
        &self,
        unit: u32,
        programs: &Programs,
        program: &Program,
        layout: &lockstep_plan::ProgramLayout,
    ) -> SlotAddresses {
        let (input, model) = (&self.plan.input, self.phase.model);
        let plan = input.model(model);
        let mut addresses = [None; Slot::COUNT];
        // Generation saves nothing for backward: two residual buffers alternate, and all blocks share the buffer of the
        // first block's activations.
        let is_generating = self.phase.kind == PhaseKind::Generate;
        let stream = |index: u32| if is_generating { 2 - index % 2 } else { index };
        let saved_unit = if is_generating { 1 } else { unit };
        for slot in program.slots() {
            let spec = programs.spec(slot);
            let dtype = spec.dtype.unwrap_or(input.storage);
            let bytes = spec.bytes(plan.bounds.tokens, plan.head_chunk_tokens, input.storage);
            let elems = bytes.0 as usize / dtype.size();
            let (buffer, offset) = match layout.buffer_of(slot).expect("every slot has a buffer") {
                SlotBuffer::Input => {
                    (BufferKind::Residual { model, index: stream(unit), in_flight: FLIGHT }, Bytes::ZERO)
                }
                SlotBuffer::Output => {
                    (BufferKind::Residual { model, index: stream(unit + 1), in_flight: FLIGHT }, Bytes::ZERO)
                }
                SlotBuffer::ResidualGrad => {
                    (BufferKind::ResidualGrad { model, in_flight: FLIGHT }, Bytes::ZERO)
                }
                SlotBuffer::Saved(at) => {
                    (BufferKind::SavedActivations { model, unit: saved_unit, in_flight: FLIGHT }, at)
                }
                SlotBuffer::Recomputed(at) => {
                    (BufferKind::RecomputedActivations { model, unit, in_flight: FLIGHT }, at)
                }
                SlotBuffer::Scratch(at) => (BufferKind::Scratch, at),
            };
            // A buffer that the phase does not use has no address; the programs that need it do not run in this phase.
            let address = self.find(buffer).map(|location| location.address());
            addresses[slot.index()] = address.map(|address| address.at(offset, elems, dtype));
        }
        addresses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The message of the panic that a call causes.
    fn panic_message(call: impl FnOnce() + std::panic::UnwindSafe) -> String {
        let cause = std::panic::catch_unwind(call).expect_err("the call must panic");
        *cause.downcast::<String>().expect("a message with numbers in it")
    }

    /// An overflowing sum must not pass the bounds check.
    #[test]
    fn out_of_bounds_slices_panic_with_their_range() {
        let address = Address { on_host: false, offset: 64, start: 10, elems: 100, dtype: DType::F32 };
        let file = Location::File { offset: 64, elems: 100, dtype: DType::F32 };
        for (start, elems) in [(usize::MAX, 2), (usize::MAX - 1, 2), (2, usize::MAX), (101, 0), (100, 1)] {
            let part = format!("[{start}, +{elems}] of a");
            for location in [Location::Memory(address), file] {
                let message = panic_message(|| _ = location.slice(start, elems));
                assert!(message.starts_with(&part), "{message}");
            }
        }
        assert_eq!(address.slice(100, 0).elems(), 0);
        assert_eq!(file.slice(40, 60), Location::File { offset: 64 + 160, elems: 60, dtype: DType::F32 });
    }
}
