//! Addresses of everything a phase touches, looked up once.

use lockstep_core::{Bytes, DType};
use lockstep_device::{Memory, View};
use lockstep_plan::{ModelId, Phase, RunPlan, SlotHome, State, UnitLayout, What};
use lockstep_shape::{Program, Programs, Slot};

/// A buffer's place in the arena.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    offset: usize,
    elems: usize,
    dtype: DType,
}

impl Place {
    pub(crate) fn view<'m>(&self, memory: &'m Memory) -> View<'m> {
        memory.view(self.offset, self.elems, self.dtype)
    }

    pub(crate) fn elems(&self) -> usize {
        self.elems
    }

    /// A part that starts `bytes` into the buffer.
    fn at(&self, bytes: Bytes, elems: usize, dtype: DType) -> Place {
        Place { offset: self.offset + bytes.0 as usize, elems, dtype }
    }
}

/// A unit's buffers.
#[derive(Clone, Debug)]
pub(crate) struct UnitPlaces {
    pub(crate) working: Place,
    pub(crate) master: Option<Place>,
    pub(crate) exp_avg: Option<Place>,
    pub(crate) exp_avg_sq: Option<Place>,
    /// The accumulator that the optimizer reads.
    pub(crate) grad: Option<Place>,
    /// Where backward writes: the accumulator itself, or a buffer that is reduced into it.
    pub(crate) grad_target: Option<Place>,
    /// The slots of each program.
    pub(crate) forward: SlotPlaces,
    pub(crate) rebuild: SlotPlaces,
    pub(crate) backward: SlotPlaces,
    pub(crate) fused: SlotPlaces,
}

pub(crate) type SlotPlaces = [Option<Place>; Slot::COUNT];

/// Everything else.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    pub(crate) units: Vec<UnitPlaces>,
    pub(crate) inputs: Place,
    pub(crate) tables: Place,
    pub(crate) log_probs: Place,
    pub(crate) coefficients: Place,
    pub(crate) norm_leaves: Place,
    pub(crate) workspace: Place,
}

impl Places {
    pub(crate) fn of(plan: &RunPlan, phase: &Phase) -> Places {
        let finder = Finder { plan, phase };
        let model = &plan.input.models[phase.model.0 as usize];
        let layouts = plan.layouts(phase.model);
        let last = model.units.len() - 1;
        let units = (0..=last)
            .map(|u| {
                let layout = match u {
                    0 => &layouts[0],
                    _ if u == last => &layouts[2],
                    _ => &layouts[1],
                };
                finder.unit(phase.model, u as u32, model.programs(u), layout)
            })
            .collect();
        let scratch = finder.must(What::Scratch);
        let workspace_offset = plan.workspace_offset(phase.model);
        let workspace = scratch.at(
            workspace_offset,
            scratch.elems - workspace_offset.0 as usize / DType::F32.size(),
            DType::F32,
        );
        Places {
            units,
            inputs: finder.must(What::Inputs),
            tables: finder.must(What::Tables),
            log_probs: finder.must(What::LogProbs),
            coefficients: finder.must(What::Coefficients),
            norm_leaves: finder.must(What::NormLeaves),
            workspace,
        }
    }
}

struct Finder<'a> {
    plan: &'a RunPlan,
    phase: &'a Phase,
}

impl Finder<'_> {
    fn find(&self, what: What) -> Option<Place> {
        let id = self.plan.find(what)?;
        let buffer = &self.plan.buffers[id.0 as usize];
        let offset = self.plan.offset(self.phase, id)?.0 as usize;
        Some(Place { offset, elems: buffer.elems, dtype: buffer.dtype })
    }

    fn must(&self, what: What) -> Place {
        self.find(what).unwrap_or_else(|| panic!("the plan has no place for {what:?}"))
    }

    fn unit(&self, model: ModelId, unit: u32, programs: &Programs, layout: &UnitLayout) -> UnitPlaces {
        let state = |state| self.find(What::State { model, unit, state });
        let grad = state(State::Grad);
        UnitPlaces {
            working: state(State::Working).expect("every unit has working parameters"),
            master: state(State::Master),
            exp_avg: state(State::ExpAvg),
            exp_avg_sq: state(State::ExpAvgSq),
            grad,
            grad_target: self.find(What::GradWhole { model, unit }).or(grad),
            forward: self.slots(model, unit, programs, &programs.forward, &layout.forward),
            rebuild: self.slots(model, unit, programs, &programs.rebuild, &layout.rebuild),
            backward: self.slots(model, unit, programs, &programs.backward, &layout.backward),
            fused: self.slots(model, unit, programs, &programs.fused, &layout.fused),
        }
    }

    fn slots(
        &self,
        model: ModelId,
        unit: u32,
        programs: &Programs,
        program: &Program,
        layout: &lockstep_plan::ProgramLayout,
    ) -> SlotPlaces {
        let input = &self.plan.input;
        let mut places = [None; Slot::COUNT];
        for slot in program.slots() {
            let spec = programs.spec(slot);
            let dtype = spec.dtype.unwrap_or(input.storage);
            let bytes = spec.bytes(input.bounds.tokens, input.head_chunk, input.storage);
            let elems = bytes.0 as usize / dtype.size();
            let (buffer, offset) = match layout.home(slot).expect("every slot has a home") {
                SlotHome::Input => (What::Stream { model, index: unit }, Bytes::ZERO),
                SlotHome::Output => (What::Stream { model, index: unit + 1 }, Bytes::ZERO),
                SlotHome::GradStream => (What::GradStream { model }, Bytes::ZERO),
                SlotHome::Saved(at) => (What::Saved { model, unit }, at),
                SlotHome::Rebuilt(at) => (What::Rebuilt { model, unit }, at),
                SlotHome::Scratch(at) => (What::Scratch, at),
            };
            places[slot.index()] = Some(self.must(buffer).at(offset, elems, dtype));
        }
        places
    }
}
