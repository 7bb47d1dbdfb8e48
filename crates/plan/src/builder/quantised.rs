//! Units with 4-bit parameters: they are dequantised just ahead of each use, on the compute lane.

use crate::buffer::{Access, BufferId, BufferKind, ParamState};
use crate::builder::StepBuilder;
use crate::lane::Lane;
use crate::schedule::OpKind;

impl StepBuilder<'_> {
    /// Whether some of a unit's parameters have 4 bits.
    pub(super) fn has_quantised(&self, unit: u32) -> bool {
        self.input.has_quantised(self.model, unit)
    }

    /// Dequantises a unit for the operations that follow. Nothing if it has no 4-bit parameters.
    pub(super) fn dequantise(&mut self, unit: u32) {
        if self.has_quantised(unit) {
            let mut accesses = self.dequantised_from(unit);
            accesses.push((self.unsharded_params(unit), Access::Define));
            self.emit(OpKind::Dequantise { unit }, Lane::Compute, accesses, &[]);
        }
    }

    /// The buffer that a generate phase dequantises every unit into: large enough for each.
    pub(super) fn shared_params(&mut self) -> Option<BufferId> {
        let unit = self.input.first_quantised(self.model)?;
        let quantised = self.plan().units.iter().filter(|unit| unit.has_quantised());
        let elems = quantised.map(|unit| unit.elems).max().unwrap_or_default();
        let kind = BufferKind::UnshardedParams { model: self.model, unit };
        Some(self.device(kind, elems, self.input.storage))
    }

    /// What dequantisation of a unit reads.
    pub(super) fn dequantised_from(&mut self, unit: u32) -> Vec<(BufferId, Access)> {
        let table = self.state(unit, ParamState::ScaleTable);
        let states = match self.needs_gather() {
            true => self.gathered_states(unit),
            false => self.quantised_residents(unit),
        };
        states.into_iter().chain([table]).map(|id| (id, Access::Read)).collect()
    }

    /// The resident states that a gather of a unit with 4-bit parameters reads.
    pub(super) fn quantised_residents(&mut self, unit: u32) -> Vec<BufferId> {
        let states = self.input.dequantised_from(self.model, unit);
        states.into_iter().map(|(state, ..)| self.state(unit, state)).collect()
    }

    /// The buffers that such a gather defines.
    pub(super) fn gathered_states(&mut self, unit: u32) -> Vec<BufferId> {
        assert!(self.gather_counts.contains_key(&unit), "unit {unit} is used before it is gathered");
        let states = self.input.dequantised_from(self.model, unit);
        let model = self.model;
        let buffer = |(state, entries, dtype)| {
            self.device(BufferKind::GatheredState { model, unit, state }, entries, dtype)
        };
        states.map(buffer).into()
    }
}
