//! Memory poisoning for tests on the CPU: fills memory that no operation may read with NaN.
//!
//! Buffers share memory according to the accesses that operations declare. An operation that uses a buffer without
//! declaring it may still find the right bytes there by luck. With poisoning it finds NaN: a buffer is filled before the
//! operation that defines it and after the last operation that uses it.

use lockstep_core::DType;
use lockstep_plan::{Access, BufferId, Phase, RunPlan, last_uses};

use crate::addresses::{Address, BufferLookup, Location, Memories};
use crate::engine::{Engine, Shared};

/// A NaN in every floating-point type.
const POISON: u32 = u32::MAX;

/// For every operation of a phase, the buffers to fill before and after it.
pub(crate) struct Poison {
    before: Vec<Vec<Address>>,
    after: Vec<Vec<Address>>,
}

impl Poison {
    fn of(plan: &RunPlan, phase: &Phase, lookup: &BufferLookup) -> Poison {
        let address = |id: BufferId| match lookup.location(id) {
            Some(Location::Memory(address)) => Some(address),
            Some(Location::File { .. }) | None => None,
        };
        let defined = phase.schedule.ops.iter().map(|op| {
            let defines = op.accesses.iter().filter(|(_, access)| *access == Access::Define);
            defines.filter_map(|(id, _)| address(*id)).collect()
        });
        let ended = last_uses(&phase.schedule, &plan.buffers).into_iter();
        Poison {
            before: defined.collect(),
            after: ended.map(|ids| ids.into_iter().filter_map(address).collect()).collect(),
        }
    }
}

impl Engine {
    /// Turns poisoning on. Results do not change, unless an operation uses a buffer that it does not declare.
    pub fn poison_buffers(&mut self) {
        let shared = &self.shared;
        let phases = shared
            .plan
            .phases
            .iter()
            .map(|phase| Poison::of(&shared.plan, phase, &BufferLookup { plan: &shared.plan, phase }));
        // A second call changes nothing.
        let _ = shared.poison.set(phases.collect());
    }

    /// The number of poisoned words in the device's memory. Call it between steps.
    pub fn poisoned_words(&self) -> usize {
        let memory = &self.shared.memories.device;
        let words = memory.view(0, memory.bytes().0 as usize / size_of::<f32>(), DType::F32);
        lockstep_ops::host::with_slice(words, |words: &[f32]| {
            words.iter().filter(|w| w.to_bits() == POISON).count()
        })
    }
}

impl Shared {
    pub(crate) fn poison_before(&self, op: usize) {
        if let Some(phases) = self.poison.get() {
            fill(&phases[self.current_phase()].before[op], &self.memories);
        }
    }

    pub(crate) fn poison_after(&self, op: usize) {
        if let Some(phases) = self.poison.get() {
            fill(&phases[self.current_phase()].after[op], &self.memories);
        }
    }
}

fn fill(addresses: &[Address], memories: &Memories) {
    for address in addresses {
        let view = address.view(memories);
        let words = view.cast(DType::F32);
        lockstep_ops::host::with_slice_mut(words, |words| words.fill(f32::from_bits(POISON)));
    }
}
