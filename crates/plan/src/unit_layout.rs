//! Where each slot of a unit lives: in the stream, in what is kept, or in the operation's scratch, and at
//! which offset. Scratch slots share bytes when no step needs both.

use lockstep_core::{Bytes, DType};
use lockstep_shape::{Program, Programs, Slot};

/// Offsets keep every slot on a cache line and vectors aligned.
const ALIGN: u64 = 256;

/// The buffer a slot is part of, and its offset there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotBuffer {
    /// The unit's input, output or the stream's gradient.
    Input,
    Output,
    GradStream,
    Saved(Bytes),
    Rebuilt(Bytes),
    Scratch(Bytes),
}

/// Where every slot of one program lives.
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

/// The layouts of a kind of unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitLayout {
    pub forward: ProgramLayout,
    pub recompute_program: ProgramLayout,
    pub backward: ProgramLayout,
    pub fused: ProgramLayout,
    pub next: ProgramLayout,
    pub saved: Bytes,
    pub recomputed: Bytes,
}

/// Row counts and storage that turn widths into bytes.
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
        fixed[Slot::DX.index()] = Some(SlotBuffer::GradStream);
        let mut in_a_row = |slots: &[Slot], home: fn(Bytes) -> SlotBuffer| {
            let mut at = Bytes::ZERO;
            for slot in slots {
                fixed[slot.index()] = Some(home(at));
                at += bytes(*slot);
            }
            at
        };
        let saved = in_a_row(&programs.saved, SlotBuffer::Saved);
        let recomputed = in_a_row(&programs.recomputed, SlotBuffer::Rebuilt);
        // A rebuilt slot is not there yet when forward runs: forward has it in scratch.
        let mut in_forward = fixed.clone();
        for slot in &programs.recomputed {
            in_forward[slot.index()] = None;
        }
        UnitLayout {
            forward: lay_out(&programs.forward, in_forward, &bytes),
            recompute_program: lay_out(&programs.recompute_program, fixed.clone(), &bytes),
            backward: lay_out(&programs.backward, fixed.clone(), &bytes),
            fused: lay_out(&programs.fused, fixed.clone(), &bytes),
            next: lay_out(&programs.next, fixed, &bytes),
            saved,
            recomputed,
        }
    }

    /// The most scratch any of the unit's programs needs.
    pub fn scratch(&self) -> Bytes {
        [&self.forward, &self.recompute_program, &self.backward, &self.fused, &self.next]
            .map(|p| p.scratch)
            .into_iter()
            .max()
            .unwrap()
    }
}

/// Gives scratch offsets to the slots that have no home yet: largest first, each at the lowest offset
/// that no slot alive at the same step occupies.
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
        let touched = |step: &lockstep_shape::ProgramStep| {
            step.reads().contains(&slot) || step.writes().contains(&slot)
        };
        let first = program.steps.iter().position(touched).expect("the slot is touched");
        let last = program.steps.iter().rposition(touched).expect("the slot is touched");
        slots.push((slot, first, last));
    }
    slots.sort_by_key(|(slot, first, _)| (std::cmp::Reverse(bytes(*slot)), *first));
    let mut placed: Vec<Placed> = Vec::new();
    for (slot, first, last) in slots {
        let size = bytes(slot).0;
        let mut together: Vec<&Placed> =
            placed.iter().filter(|p| p.first <= last && first <= p.last).collect();
        together.sort_by_key(|p| p.start);
        let mut start = 0;
        for other in together {
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

    /// Slots alive at the same step never overlap, in any program, and every touched slot has a home.
    #[test]
    fn scratch_slots_alive_together_are_apart() {
        let llama = ModelShape::named("tiny", 300).unwrap();
        let qwen = ModelShape { architecture: Architecture::Qwen3, ..llama.clone() };
        let biases = Biases { qkv: true, out: true, mlp: true };
        let biased = ModelShape { biases, ..llama.clone() };
        let sizes = Sizes { tokens: 512, chunk: 256, storage: DType::F32 };
        for shape in [llama, qwen, biased] {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
                let block = &units(&shape, &Freeze::Nothing, false)[1];
                for programs in [block_programs(&shape, block, recompute), head_programs(&shape)] {
                    let layout = UnitLayout::new(&programs, sizes);
                    for (program, buffers) in [
                        (&programs.forward, &layout.forward),
                        (&programs.recompute_program, &layout.recompute_program),
                        (&programs.backward, &layout.backward),
                        (&programs.fused, &layout.fused),
                        (&programs.next, &layout.next),
                    ] {
                        assert_disjoint(program, buffers, &programs, sizes);
                    }
                }
            }
        }
    }

    fn assert_disjoint(program: &Program, layout: &ProgramLayout, programs: &Programs, sizes: Sizes) {
        let alive = |slot: Slot, at: usize| {
            let touched =
                |s: &lockstep_shape::ProgramStep| s.reads().contains(&slot) || s.writes().contains(&slot);
            program.steps[..=at].iter().any(touched) && program.steps[at..].iter().any(touched)
        };
        for at in 0..program.steps.len() {
            let mut ranges: Vec<(u64, u64)> = program
                .slots()
                .into_iter()
                .filter(|slot| alive(*slot, at))
                .filter_map(|slot| match layout.buffer_of(slot).expect("every slot has a home") {
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
