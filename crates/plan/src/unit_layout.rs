//! Which buffer each slot of a unit is in, and at which offset: the residual stream, the saved activations or the
//! operation's scratch. Scratch slots share bytes if no step needs both.

use lockstep_core::{Bytes, DType};
use lockstep_shape::{Program, Programs, Slot};

/// Slots start on multiples of this many bytes, so that cache lines and vectors are aligned.
const ALIGN: u64 = 256;

/// The buffer that a slot is in, and its offset there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotBuffer {
    /// The residual stream before the unit.
    Input,
    /// The residual stream after the unit.
    Output,
    ResidualGrad,
    Saved(Bytes),
    Recomputed(Bytes),
    Scratch(Bytes),
}

/// The buffers of all slots of one program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgramLayout {
    buffers: Vec<Option<SlotBuffer>>,
    pub scratch: Bytes,
}

impl ProgramLayout {
    pub fn buffer_of(&self, slot: Slot) -> Option<SlotBuffer> {
        self.buffers.get(slot.index()).copied().flatten()
    }
}

/// The layouts of a unit's programs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitLayout {
    pub forward: ProgramLayout,
    pub recompute: ProgramLayout,
    pub backward: ProgramLayout,
    pub fused: ProgramLayout,
    pub decode: ProgramLayout,
    pub saved: Bytes,
    pub recomputed: Bytes,
}

/// The row counts and the storage type that slot sizes are computed from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) tokens: usize,
    pub(crate) chunk: usize,
    pub(crate) storage: DType,
}

impl UnitLayout {
    pub(crate) fn new(programs: &Programs, sizes: Sizes) -> UnitLayout {
        let bytes =
            |slot: Slot| programs.spec(slot).bytes(sizes.tokens, sizes.chunk, sizes.storage).align_to(ALIGN);
        let mut fixed = vec![None; Slot::COUNT];
        fixed[Slot::X.index()] = Some(SlotBuffer::Input);
        fixed[Slot::Y.index()] = Some(SlotBuffer::Output);
        fixed[Slot::DX.index()] = Some(SlotBuffer::ResidualGrad);
        let mut contiguous = |slots: &[Slot], buffer: fn(Bytes) -> SlotBuffer| {
            let mut at = Bytes::ZERO;
            for slot in slots {
                fixed[slot.index()] = Some(buffer(at));
                at += bytes(*slot);
            }
            at
        };
        let saved = contiguous(&programs.saved, SlotBuffer::Saved);
        let recomputed = contiguous(&programs.recomputed, SlotBuffer::Recomputed);
        // The buffer of recomputed slots does not exist during forward, which keeps them in scratch.
        let mut in_forward = fixed.clone();
        for slot in &programs.recomputed {
            in_forward[slot.index()] = None;
        }
        UnitLayout {
            forward: lay_out(&programs.forward, in_forward, &bytes),
            recompute: lay_out(&programs.recompute, fixed.clone(), &bytes),
            backward: lay_out(&programs.backward, fixed.clone(), &bytes),
            fused: lay_out(&programs.fused, fixed.clone(), &bytes),
            decode: lay_out(&programs.decode, fixed, &bytes),
            saved,
            recomputed,
        }
    }

    /// The most scratch any of the unit's programs needs.
    pub fn scratch(&self) -> Bytes {
        [&self.forward, &self.recompute, &self.backward, &self.fused, &self.decode]
            .map(|p| p.scratch)
            .into_iter()
            .max()
            .unwrap()
    }
}

/// Assigns scratch offsets to the slots that have no buffer yet: largest first, each at the lowest offset that is not
/// used by a slot that is live at the same time.
fn lay_out(
    program: &Program,
    mut buffers: Vec<Option<SlotBuffer>>,
    bytes: &impl Fn(Slot) -> Bytes,
) -> ProgramLayout {
    struct Placed {
        first: usize,
        last: usize,
        start: u64,
        end: u64,
    }
    let mut slots: Vec<(Slot, usize, usize)> = Vec::new();
    for slot in program.slots().into_iter().filter(|s| buffers[s.index()].is_none()) {
        let uses = |step: &lockstep_shape::ProgramStep| {
            step.reads().contains(&slot) || step.writes().contains(&slot)
        };
        let first = program.steps.iter().position(uses).expect("a slot of the program is used");
        let last = program.steps.iter().rposition(uses).expect("a slot of the program is used");
        slots.push((slot, first, last));
    }
    slots.sort_by_key(|(slot, first, _)| (std::cmp::Reverse(bytes(*slot)), *first));
    let mut placed: Vec<Placed> = Vec::new();
    for (slot, first, last) in slots {
        let size = bytes(slot).0;
        let mut conflicts: Vec<&Placed> =
            placed.iter().filter(|p| p.first <= last && first <= p.last).collect();
        conflicts.sort_by_key(|p| p.start);
        let mut start = 0;
        for other in conflicts {
            if start + size <= other.start {
                break;
            }
            start = start.max(other.end);
        }
        buffers[slot.index()] = Some(SlotBuffer::Scratch(Bytes(start)));
        placed.push(Placed { first, last, start, end: start + size });
    }
    let scratch = Bytes(placed.iter().map(|p| p.end).max().unwrap_or(0));
    ProgramLayout { buffers, scratch }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_shape::{
        Architecture, Biases, Freeze, ModelShape, Recompute, block_programs, head_programs, units,
    };

    /// Slots that are live at the same step do not overlap, in any program, and every slot in use has a buffer.
    #[test]
    fn live_scratch_slots_do_not_overlap() {
        let llama = ModelShape::named("tiny", 300).unwrap();
        let qwen = ModelShape { architecture: Architecture::Qwen3, ..llama.clone() };
        let biases = Biases { qkv: true, out: true, mlp: true };
        let biased = ModelShape { biases, ..llama.clone() };
        let sizes = Sizes { tokens: 512, chunk: 256, storage: DType::F32 };
        for shape in [llama, qwen, biased] {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
                let block = &units(&shape, &Freeze::Nothing, false)[1];
                let blocks = [false, true].map(|shares| block_programs(&shape, block, recompute, shares));
                for programs in blocks.into_iter().chain([head_programs(&shape)]) {
                    let layout = UnitLayout::new(&programs, sizes);
                    for (program, buffers) in [
                        (&programs.forward, &layout.forward),
                        (&programs.recompute, &layout.recompute),
                        (&programs.backward, &layout.backward),
                        (&programs.fused, &layout.fused),
                        (&programs.decode, &layout.decode),
                    ] {
                        assert_no_overlap(program, buffers, &programs, sizes);
                    }
                }
            }
        }
    }

    fn assert_no_overlap(program: &Program, layout: &ProgramLayout, programs: &Programs, sizes: Sizes) {
        let is_live = |slot: Slot, at: usize| {
            let uses =
                |s: &lockstep_shape::ProgramStep| s.reads().contains(&slot) || s.writes().contains(&slot);
            program.steps[..=at].iter().any(uses) && program.steps[at..].iter().any(uses)
        };
        for at in 0..program.steps.len() {
            let mut ranges: Vec<(u64, u64)> = program
                .slots()
                .into_iter()
                .filter(|slot| is_live(*slot, at))
                .filter_map(|slot| match layout.buffer_of(slot).expect("every slot has a buffer") {
                    SlotBuffer::Scratch(start) => {
                        let size = programs.spec(slot).bytes(sizes.tokens, sizes.chunk, sizes.storage);
                        Some((start.0, start.0 + size.0))
                    }
                    _ => None,
                })
                .collect();
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|w| w[0].1 <= w[1].0), "step {at}: {ranges:?}");
            assert!(ranges.iter().all(|r| r.1 <= layout.scratch.0));
        }
    }
}
