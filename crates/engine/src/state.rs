//! Parameters and optimizer states by tensor: initialisation, loading, saving.

use std::ops::Range;

use lockstep_core::rng::{Purpose, Stream};
use lockstep_core::{Axis, DType};
use lockstep_plan::State;
use lockstep_shape::{Init, Segment, UnitShape};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::places::Home;

/// Elements that one thread initialises at a time: even, so that pairs of normals stay whole.
const PIECE: usize = 1 << 16;

/// Elements `first..` of a tensor, from its stream; a thread for each piece.
fn fill_normal(values: &mut [f32], first: usize, stream: Stream, std: f32) {
    let fill = |piece: usize, values: &mut [f32]| {
        let start = first + piece * PIECE;
        let pairs = (start / 2) as u32..(start + values.len()).div_ceil(2) as u32;
        let normals = pairs.flat_map(|i| stream.normal_pair(i)).map(|x| x * std);
        values.iter_mut().zip(normals).for_each(|(value, normal)| *value = normal);
    };
    if values.len() <= PIECE {
        return fill(0, values);
    }
    std::thread::scope(|scope| {
        for (piece, values) in values.chunks_mut(PIECE).enumerate() {
            let fill = &fill;
            scope.spawn(move || fill(piece, values));
        }
    });
}

/// Writing one of the copies of the parameters writes both.
fn written_states(state: State) -> &'static [State] {
    match state {
        State::Working | State::Master => &[State::Working, State::Master],
        State::Grad => &[State::Grad],
        State::ExpAvg => &[State::ExpAvg],
        State::ExpAvgSq => &[State::ExpAvgSq],
    }
}

impl Engine {
    /// The units of the trained model.
    pub fn units(&self) -> &[UnitShape] {
        &self.shared.model().units
    }

    /// A tensor's unit and segment, by its name.
    pub fn find_tensor(&self, name: &str) -> Option<(usize, &Segment)> {
        let mut all =
            self.units().iter().enumerate().flat_map(|(u, unit)| unit.segments.iter().map(move |s| (u, s)));
        all.find(|(_, segment)| segment.name == name)
    }

    /// Fills every tensor from the seed. A tensor draws from a stream of its own, which its name decides, so its
    /// values do not depend on ranks, layout or storage, nor on which other tensors the model has.
    pub fn initialise(&mut self, seed: u64) -> Result<(), EngineError> {
        let std = self.shared.model().shape.init_std as f32;
        let units = self.units().to_vec();
        let tensors =
            units.iter().enumerate().flat_map(|(u, unit)| unit.segments.iter().map(move |s| (u, s)));
        let mut values = Vec::new();
        for (unit, segment) in tensors {
            let stream = Stream::named(seed, Purpose::Init, &segment.name);
            let states = [State::Working, State::Master];
            let here: Vec<_> = states.iter().filter_map(|s| self.owned(unit, segment, *s)).collect();
            // A bounded part at a time, a piece for each thread.
            let step = PIECE * self.queue.num_threads();
            for start in (0..segment.elems()).step_by(step) {
                let part = start..(start + step).min(segment.elems());
                if here.iter().all(|own| own.end <= part.start || part.end <= own.start) {
                    continue;
                }
                values.clear();
                match segment.init {
                    Init::Zero => values.resize(part.len(), 0.0),
                    Init::One => values.resize(part.len(), 1.0),
                    Init::Normal => {
                        values.resize(part.len(), 0.0);
                        fill_normal(&mut values, start, stream, std);
                    }
                }
                self.write(unit, segment, State::Working, part, &values)?;
            }
        }
        Ok(())
    }

    /// The elements of a tensor that this rank holds of a state, flat. `None`: the tensor has no such
    /// state. Empty: other ranks hold it.
    pub fn owned(&self, unit: usize, segment: &Segment, state: State) -> Option<Range<usize>> {
        let home = self.home(unit, segment, state)?;
        let (start, end) = (segment.start, segment.start + segment.elems());
        let part = home.owned.iter().find(|p| p.start < end && start < p.end);
        Some(part.map_or(0..0, |p| p.start.max(start) - start..p.end.min(end) - start))
    }

    fn home(&self, unit: usize, segment: &Segment, state: State) -> Option<&Home> {
        let here = state == State::Working || segment.trainable;
        self.shared.at().places.units[unit].home(state).filter(|_| here)
    }

    /// The elements of a tensor that [`Engine::write`] to `state` sets on this rank, flat: apart from each other, in
    /// order, none of them empty.
    pub fn written(&self, unit: usize, segment: &Segment, state: State) -> Vec<Range<usize>> {
        let owned = written_states(state).iter().filter_map(|one| self.owned(unit, segment, *one));
        let mut ranges: Vec<Range<usize>> = owned.filter(|range| !range.is_empty()).collect();
        ranges.sort_by_key(|range| range.start);
        ranges.dedup_by(|next, before| {
            let joins = next.start <= before.end;
            if joins {
                before.end = before.end.max(next.end);
            }
            joins
        });
        ranges
    }

    /// Sets part of a tensor's state, as far as this rank holds it. Writing `Working` also sets the master
    /// copy, and the other way round, so that both always agree.
    pub fn write(
        &mut self,
        unit: usize,
        segment: &Segment,
        state: State,
        part: Range<usize>,
        values: &[f32],
    ) -> Result<(), EngineError> {
        self.settle()?;
        for one in written_states(state) {
            let Some(own) = self.owned(unit, segment, *one) else { continue };
            let (start, end) = (own.start.max(part.start), own.end.min(part.end));
            if start < end {
                let home = self.home(unit, segment, *one).expect("what is owned has a home");
                let spot = home.range(segment.start + start, segment.start + end);
                spot.write_f32(&self.shared.memories, &values[start - part.start..end - part.start])?;
            }
        }
        Ok(())
    }

    /// Reads part of a tensor's state, which this rank must hold. `Working` reads the master copy where
    /// there is one: what the optimizer keeps is the truth. Returns false if the tensor has no such state.
    pub fn read(
        &self,
        unit: usize,
        segment: &Segment,
        state: State,
        part: Range<usize>,
        out: &mut [f32],
    ) -> Result<bool, EngineError> {
        self.settle()?;
        let Some(home) = self.home(unit, segment, self.truth(unit, segment, state)) else { return Ok(false) };
        let spot = home.range(segment.start + part.start, segment.start + part.end);
        spot.read_f32(&self.shared.memories, &mut out[..part.len()])?;
        Ok(true)
    }

    /// The state that `state` is read from.
    pub fn truth(&self, unit: usize, segment: &Segment, state: State) -> State {
        let has_master = self.home(unit, segment, State::Master).is_some();
        if state == State::Working && has_master { State::Master } else { state }
    }

    /// As [`Engine::read`], for any part of the tensor: ranks give each other what they hold. All ranks call
    /// it alike.
    pub fn read_whole(
        &self,
        unit: usize,
        segment: &Segment,
        state: State,
        part: Range<usize>,
        out: &mut [f32],
    ) -> Result<bool, EngineError> {
        let truth = self.truth(unit, segment, state);
        let Some(own) = self.owned(unit, segment, truth) else { return Ok(false) };
        if !self.shared.plan.input.is_sharded(truth) {
            return self.read(unit, segment, state, part, out);
        }
        self.settle()?;
        let (start, end) = (own.start.max(part.start), own.end.min(part.end));
        let mut mine = vec![0f32; end.saturating_sub(start)];
        if start < end {
            self.read(unit, segment, state, start..end, &mut mine)?;
        }
        let bytes: Vec<u8> = mine.iter().flat_map(|v| v.to_le_bytes()).collect();
        drop(mine);
        // Members' parts follow each other, in the order of their ranks.
        let theirs = self.gather_bytes(&format!("reading {}", segment.name), Axis::Shard, &bytes)?;
        let found: usize = theirs.iter().map(Vec::len).sum();
        assert_eq!(found, 4 * part.len(), "the ranks' parts of {} make it up", segment.name);
        for (out, bytes) in out.iter_mut().zip(theirs.iter().flat_map(|bytes| bytes.chunks_exact(4))) {
            *out = f32::from_le_bytes(bytes.try_into().expect("four bytes"));
        }
        Ok(true)
    }

    /// The first tensor whose gradient, as the last step left it, has a number that is not finite: counted
    /// from the head, where backward begins, for what goes wrong there goes wrong in all below. All ranks call
    /// it alike, and hear the same.
    pub fn first_bad_gradient(&self) -> Result<Option<String>, EngineError> {
        let units = self.units().iter().enumerate().rev();
        let tensors: Vec<(usize, &Segment)> =
            units.flat_map(|(u, unit)| unit.segments.iter().rev().map(move |s| (u, s))).collect();
        let mut first = u64::MAX;
        for (index, (unit, segment)) in tensors.iter().enumerate() {
            if self.has_bad_gradient(*unit, segment)? {
                first = index as u64;
                break;
            }
        }
        let all = self.exchange("the first bad gradient", &first.to_le_bytes())?;
        let index = |bytes: &Vec<u8>| u64::from_le_bytes(bytes[..].try_into().expect("eight bytes"));
        let first = all.iter().map(index).min().unwrap_or(u64::MAX);
        Ok(tensors.get(first as usize).map(|(_, segment)| segment.name.clone()))
    }

    /// Of what this rank holds of the gradient.
    fn has_bad_gradient(&self, unit: usize, segment: &Segment) -> Result<bool, EngineError> {
        const PART: usize = 1 << 16;
        let Some(own) = self.owned(unit, segment, State::Grad) else { return Ok(false) };
        let mut values = vec![0f32; PART.min(own.len())];
        for start in own.clone().step_by(PART) {
            let part = start..(start + PART).min(own.end);
            let values = &mut values[..part.len()];
            self.read(unit, segment, State::Grad, part, values)?;
            if !values.iter().all(|v| v.is_finite()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The storage type of working parameters.
    pub fn working_dtype(&self) -> DType {
        self.shared.storage()
    }
}
