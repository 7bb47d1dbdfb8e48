//! Parameters and optimizer states by tensor: initialisation, loading, saving.

use std::ops::Range;

use lockstep_core::DType;
use lockstep_core::rng::{Purpose, Stream};
use lockstep_device::View;
use lockstep_plan::State;
use lockstep_shape::{Init, Segment, UnitShape};

use crate::engine::Engine;

impl Engine {
    /// The units of the trained model.
    pub fn units(&self) -> &[UnitShape] {
        &self.model().units
    }

    /// A tensor's unit and segment, by its name.
    pub fn find_tensor(&self, name: &str) -> Option<(usize, &Segment)> {
        let mut all =
            self.units().iter().enumerate().flat_map(|(u, unit)| unit.segments.iter().map(move |s| (u, s)));
        all.find(|(_, segment)| segment.name == name)
    }

    /// Fills every tensor from the seed: tensor i of the model draws from its own stream, so the values do
    /// not depend on ranks, layout or storage.
    pub fn initialise(&mut self, seed: u64) {
        let std = self.model().shape.init_std as f32;
        let mut index = 0;
        let mut values = Vec::new();
        for unit in 0..self.units().len() {
            for segment in 0..self.units()[unit].segments.len() {
                let segment = self.units()[unit].segments[segment].clone();
                let stream = Stream::new(seed, Purpose::Init, index, 0);
                index += 1;
                // A bounded part at a time, even lengths so that pairs of normals stay whole.
                const PART: usize = 1 << 16;
                for start in (0..segment.elems()).step_by(PART) {
                    let len = PART.min(segment.elems() - start);
                    values.clear();
                    match segment.init {
                        Init::Zero => values.resize(len, 0.0),
                        Init::One => values.resize(len, 1.0),
                        Init::Normal => {
                            let pairs = (start / 2) as u32..(start + len).div_ceil(2) as u32;
                            values
                                .extend(pairs.flat_map(|i| stream.normal_pair(i)).take(len).map(|x| x * std));
                        }
                    }
                    self.write(unit, &segment, State::Working, start..start + len, &values);
                }
            }
        }
    }

    /// Sets part of a tensor's state. Writing `Working` also sets the master copy, and the other way
    /// round, so that both always agree.
    pub fn write(
        &mut self,
        unit: usize,
        segment: &Segment,
        state: State,
        part: Range<usize>,
        values: &[f32],
    ) {
        let states: &[State] = match state {
            State::Working | State::Master => &[State::Working, State::Master],
            _ => &[state],
        };
        for one in states {
            if let Some(view) = self.tensor(unit, segment, *one) {
                view.slice(part.start, part.len()).write_f32(values);
            }
        }
    }

    /// Reads part of a tensor's state. `Working` reads the master copy where there is one: what the
    /// optimizer keeps is the truth. Returns false if the tensor has no such state.
    pub fn read(
        &self,
        unit: usize,
        segment: &Segment,
        state: State,
        part: Range<usize>,
        out: &mut [f32],
    ) -> bool {
        let view = match state {
            State::Working => self.tensor(unit, segment, State::Master).or(self.tensor(unit, segment, state)),
            _ => self.tensor(unit, segment, state),
        };
        match view {
            Some(view) => view.slice(part.start, part.len()).read_f32(out),
            None => return false,
        }
        true
    }

    fn tensor(&self, unit: usize, segment: &Segment, state: State) -> Option<View<'_>> {
        let places = &self.places.units[unit];
        let place = match state {
            State::Working => Some(places.working),
            State::Master => places.master,
            State::ExpAvg => places.exp_avg,
            State::ExpAvgSq => places.exp_avg_sq,
            State::Grad => places.grad,
        }?;
        let here = state == State::Working || segment.trainable;
        here.then(|| place.view(&self.memory).slice(segment.start, segment.elems()))
    }

    /// The storage type of working parameters.
    pub fn working_dtype(&self) -> DType {
        self.storage()
    }
}
