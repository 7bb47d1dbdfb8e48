//! Access to one model of an engine: its phases, and its parameters and optimizer states by tensor.

use std::ops::Range;

use lockstep_core::DType;
use lockstep_core::rng::{Purpose, RngStream};
use lockstep_plan::{ModelId, ModelPlan, ParamState, PhaseKind};
use lockstep_shape::{Segment, UnitShape, WeightInit};

use crate::addresses::ResidentAddress;
use crate::driver::{
    Coefficients, DecodeDriver, MicroBatch, Outputs, PhaseDriver, StepDriver, StepReport, UpdateSettings,
};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::step::StepState;

/// Elements that one thread initialises at a time. Even, because normals are drawn in pairs.
const PIECE: usize = 1 << 16;

/// Fills elements `first..` of a tensor with normals from its random stream, one thread per piece.
fn fill_normal(values: &mut [f32], first: usize, stream: RngStream, std: f32) {
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

/// Element `index` of a tensor whose elements are uniform between ±`bound`.
fn uniform(stream: RngStream, index: usize, bound: f32) -> f32 {
    let word = stream.block((index / 4) as u32)[index % 4];
    // The middle of one of 2^24 intervals, so that the distribution is symmetric.
    let unit = ((word >> 8) as f32 + 0.5) / (1u32 << 24) as f32;
    (2.0 * unit - 1.0) * bound
}

/// Sets `values` to the initial values of a part of a tensor.
fn fill_initial(values: &mut Vec<f32>, segment: &Segment, part: Range<usize>, stream: RngStream, std: f32) {
    values.clear();
    match segment.init {
        WeightInit::Zero => values.resize(part.len(), 0.0),
        WeightInit::One => values.resize(part.len(), 1.0),
        WeightInit::Normal => {
            values.resize(part.len(), 0.0);
            fill_normal(values, part.start, stream, std);
        }
        WeightInit::KaimingUniform => {
            let bound = 1.0 / (segment.shape[1] as f32).sqrt();
            values.extend(part.map(|i| uniform(stream, i, bound)));
        }
    }
}

/// The states that a write to `state` sets: both copies of the parameters, so that they always agree.
fn written_states(state: ParamState) -> Vec<ParamState> {
    match state {
        ParamState::Working | ParamState::Master => vec![ParamState::Working, ParamState::Master],
        other => vec![other],
    }
}

/// Read access to one model of an engine.
#[derive(Clone, Copy)]
pub struct Model<'e> {
    pub(crate) engine: &'e Engine,
    pub(crate) id: ModelId,
}

/// Access to one model of an engine, to run its phases and change its states.
pub struct ModelMut<'e> {
    pub(crate) engine: &'e mut Engine,
    pub(crate) id: ModelId,
}

impl Engine {
    pub fn model(&self, id: ModelId) -> Model<'_> {
        self.assert_has(id);
        Model { engine: self, id }
    }

    pub fn model_mut(&mut self, id: ModelId) -> ModelMut<'_> {
        self.assert_has(id);
        ModelMut { engine: self, id }
    }

    fn assert_has(&self, id: ModelId) {
        let models = self.plan().input.models.len();
        assert!((id.0 as usize) < models, "model {} of a plan of {models}", id.0);
    }

    /// The storage type of working parameters.
    pub fn working_dtype(&self) -> DType {
        self.shared.storage()
    }
}

impl<'e> Model<'e> {
    pub fn plan(&self) -> &'e ModelPlan {
        self.engine.plan().input.model(self.id)
    }

    pub fn units(&self) -> &'e [UnitShape] {
        &self.plan().units
    }

    /// Whether this rank writes its part of a state to checkpoints: the first of the ranks that hold the same part.
    pub fn is_writer(&self, state: ParamState) -> bool {
        let (input, rank) = (&self.engine.plan().input, self.engine.rank());
        let same =
            input.summed_over().iter().filter(|axis| !input.sharded_over(self.id, state).contains(axis));
        same.copied().all(|axis| input.mesh.index_along(&[axis], rank) == 0)
    }

    /// Finds a tensor's unit and segment by its name.
    pub fn find_tensor(&self, name: &str) -> Option<(usize, &'e Segment)> {
        let mut all =
            self.units().iter().enumerate().flat_map(|(u, unit)| unit.segments.iter().map(move |s| (u, s)));
        all.find(|(_, segment)| segment.name == name)
    }

    /// The flat range of a tensor's state that this rank holds. `None`: the tensor has no such state. Empty: other ranks
    /// hold it.
    pub fn owned(&self, unit: usize, segment: &Segment, state: ParamState) -> Option<Range<usize>> {
        if segment.quantised && state == ParamState::Working {
            return Some(self.owned_quantised(unit, segment));
        }
        let resident = self.resident(unit, segment, state)?;
        let (start, end) = (segment.start, segment.start + segment.elems());
        let part = resident.owned.iter().find(|p| p.start < end && start < p.end);
        Some(part.map_or(0..0, |p| p.start.max(start) - start..p.end.min(end) - start))
    }

    fn resident(&self, unit: usize, segment: &Segment, state: ParamState) -> Option<&'e ResidentAddress> {
        let here = state == ParamState::Working || segment.is_trained();
        self.engine.shared.residents(self.id)[unit].resident(state).filter(|_| here)
    }

    /// The flat ranges of a tensor that [`ModelMut::write`] to `state` sets on this rank: disjoint, sorted, not empty.
    pub fn written_ranges(&self, unit: usize, segment: &Segment, state: ParamState) -> Vec<Range<usize>> {
        let owned = written_states(state).into_iter().filter_map(|one| self.owned(unit, segment, one));
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

    /// Reads part of a tensor's state, which this rank must hold. `Working` reads the master copy if there is one,
    /// because that is what the optimizer updates; of a tensor in 4 bits it is what the codes stand for. Returns false if
    /// the tensor has no such state.
    pub fn read(
        &self,
        unit: usize,
        segment: &Segment,
        state: ParamState,
        part: Range<usize>,
        out: &mut [f32],
    ) -> Result<bool, EngineError> {
        if segment.quantised && state == ParamState::Working {
            self.read_quantised(unit, segment, part, out, false)?;
            return Ok(true);
        }
        self.engine.synchronize()?;
        let Some(resident) = self.resident(unit, segment, self.authoritative_state(unit, segment, state))
        else {
            return Ok(false);
        };
        let location = resident.range(segment.start + part.start, segment.start + part.end);
        location.read_f32(&self.engine.shared.memories, &mut out[..part.len()])?;
        Ok(true)
    }

    /// The state that a read of `state` returns: the master copy for `Working`, if there is one.
    pub fn authoritative_state(&self, unit: usize, segment: &Segment, state: ParamState) -> ParamState {
        let has_master = self.resident(unit, segment, ParamState::Master).is_some();
        if state == ParamState::Working && has_master { ParamState::Master } else { state }
    }

    /// Like [`Model::read`], for any part of the tensor: ranks exchange what they hold. All ranks must call it with the
    /// same arguments.
    pub fn read_whole(
        &self,
        unit: usize,
        segment: &Segment,
        state: ParamState,
        part: Range<usize>,
        out: &mut [f32],
    ) -> Result<bool, EngineError> {
        if segment.quantised && state == ParamState::Working {
            self.read_quantised(unit, segment, part, out, true)?;
            return Ok(true);
        }
        let truth = self.authoritative_state(unit, segment, state);
        let Some(own) = self.owned(unit, segment, truth) else { return Ok(false) };
        if !self.engine.plan().input.is_sharded(self.id, truth) {
            return self.read(unit, segment, state, part, out);
        }
        self.engine.synchronize()?;
        let (start, end) = (own.start.max(part.start), own.end.min(part.end));
        let mut mine = vec![0f32; end.saturating_sub(start)];
        if start < end {
            self.read(unit, segment, state, start..end, &mut mine)?;
        }
        let bytes: Vec<u8> = mine.iter().flat_map(|v| v.to_le_bytes()).collect();
        drop(mine);
        // The parts of the ranks are contiguous, in rank order.
        let axes = self.engine.plan().input.sharded_over(self.id, truth);
        let [axis] = axes else { panic!("{truth:?} is sharded over {axes:?}") };
        let theirs =
            self.engine.all_gather_bytes_along(&format!("reading {}", segment.name), *axis, &bytes)?;
        let found: usize = theirs.iter().map(Vec::len).sum();
        assert_eq!(found, 4 * part.len(), "the parts of all ranks add up to {}", segment.name);
        for (out, bytes) in out.iter_mut().zip(theirs.iter().flat_map(|bytes| bytes.chunks_exact(4))) {
            *out = f32::from_le_bytes(bytes.try_into().expect("four bytes"));
        }
        Ok(true)
    }

    /// The first tensor whose gradient, after the last step, is not finite. The search starts at the head, where backward
    /// starts, because a bad gradient spreads to all units below. All ranks must call it, and get the same answer.
    pub fn first_non_finite_gradient(&self) -> Result<Option<String>, EngineError> {
        let units = self.units().iter().enumerate().rev();
        let tensors: Vec<(usize, &Segment)> =
            units.flat_map(|(u, unit)| unit.segments.iter().rev().map(move |s| (u, s))).collect();
        let mut first = u64::MAX;
        for (index, (unit, segment)) in tensors.iter().enumerate() {
            if self.has_non_finite_gradient(*unit, segment)? {
                first = index as u64;
                break;
            }
        }
        let all = self.engine.all_gather_bytes("the first bad gradient", &first.to_le_bytes())?;
        let index = |bytes: &Vec<u8>| u64::from_le_bytes(bytes[..].try_into().expect("eight bytes"));
        let first = all.iter().map(index).min().unwrap_or(u64::MAX);
        Ok(tensors.get(first as usize).map(|(_, segment)| segment.name.clone()))
    }

    /// Checks the part of the gradient that this rank holds.
    fn has_non_finite_gradient(&self, unit: usize, segment: &Segment) -> Result<bool, EngineError> {
        const PART_ELEMS: usize = 1 << 16;
        let Some(own) = self.owned(unit, segment, ParamState::Grad) else { return Ok(false) };
        let mut values = vec![0f32; PART_ELEMS.min(own.len())];
        for start in own.clone().step_by(PART_ELEMS) {
            let part = start..(start + PART_ELEMS).min(own.end);
            let values = &mut values[..part.len()];
            self.read(unit, segment, ParamState::Grad, part, values)?;
            if !values.iter().all(|v| v.is_finite()) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl ModelMut<'_> {
    pub fn as_ref(&self) -> Model<'_> {
        Model { engine: self.engine, id: self.id }
    }

    /// Runs one training step: all micro-batches, the gradient norm, the update. Updates on the host may still be running
    /// when this returns.
    pub fn train_step(
        &mut self,
        driver: &mut dyn StepDriver,
        updates: &UpdateSettings,
    ) -> Result<StepReport, EngineError> {
        let planned = self.as_ref().plan().optimizer;
        assert_eq!(updates.rule.spec(), planned, "the plan is for another optimizer");
        let engine = &mut *self.engine;
        let step = StepState::new(*updates, engine.loss_scale);
        let run = engine.run_phase(PhaseKind::Train, self.id, Some(step), &mut PhaseDriver::Step(driver))?;
        engine.shared.read_update_decision(run, &engine.queue)?;
        let state = engine.shared.steps.of(run);
        Ok(StepReport { grad_norm: state.grad_norm, skipped: state.skip })
    }

    /// Computes the head's outputs for every token of a batch. All ranks must call it, each with its own batch, which may
    /// be empty.
    pub fn score(&mut self, batch: MicroBatch, out: &mut dyn FnMut(Outputs<'_>)) -> Result<(), EngineError> {
        struct ScoreDriver<'a> {
            batch: MicroBatch<'a>,
            out: &'a mut dyn FnMut(Outputs<'_>),
        }
        impl StepDriver for ScoreDriver<'_> {
            fn batch(&self, _: u32) -> MicroBatch<'_> {
                self.batch
            }

            fn coefficients(&mut self, _: u32, _: Option<Outputs<'_>>, _: &mut Coefficients<'_>) {
                unreachable!("scoring has no objective")
            }

            fn outputs(&mut self, _: u32, outputs: Outputs<'_>) {
                (self.out)(outputs);
            }
        }
        let mut scored = ScoreDriver { batch, out };
        let caller = &mut PhaseDriver::Step(&mut scored);
        self.engine.run_phase(PhaseKind::Score, self.id, None, caller).map(drop)
    }

    /// Generates until `driver` has no more batches. Ranks generate their own sequences; if parameters are sharded, all
    /// ranks must call it.
    pub fn generate(&mut self, driver: &mut dyn DecodeDriver) -> Result<(), EngineError> {
        self.engine.run_phase(PhaseKind::Generate, self.id, None, &mut PhaseDriver::Decode(driver)).map(drop)
    }

    /// Initialises every tensor from the seed. Each tensor has its own random stream, determined by its name, so its
    /// values do not depend on ranks, layout or storage type, nor on the other tensors of the model.
    pub fn initialise(&mut self, seed: u64) -> Result<(), EngineError> {
        let units = self.as_ref().units().to_vec();
        for (u, unit) in units.iter().enumerate() {
            unit.segments.iter().try_for_each(|segment| self.initialise_tensor(u, segment, seed))?;
        }
        Ok(())
    }

    /// Initialises one tensor, as [`ModelMut::initialise`] does.
    pub fn initialise_tensor(
        &mut self,
        unit: usize,
        segment: &Segment,
        seed: u64,
    ) -> Result<(), EngineError> {
        let std = self.as_ref().plan().shape.init_std as f32;
        let stream = RngStream::named(seed, Purpose::Init, &segment.name);
        // One piece per thread at a time, so that memory is bounded.
        let (step, elems) = (PIECE * self.engine.queue.num_threads(), segment.elems());
        let pieces = (0..elems).step_by(step).map(|start| start..(start + step).min(elems));
        let mut values = Vec::new();
        if segment.quantised {
            let mut quantiser = self.engine.model_mut(self.id).quantiser(unit, segment);
            for part in pieces {
                fill_initial(&mut values, segment, part, stream, std);
                quantiser.push(&values)?;
            }
            return quantiser.finish();
        }
        let states = [ParamState::Working, ParamState::Master];
        let here: Vec<_> = states.iter().filter_map(|s| self.as_ref().owned(unit, segment, *s)).collect();
        for part in pieces {
            if here.iter().any(|own| part.start < own.end && own.start < part.end) {
                fill_initial(&mut values, segment, part.clone(), stream, std);
                self.write(unit, segment, ParamState::Working, part, &values)?;
            }
        }
        Ok(())
    }

    /// Writes part of a tensor's state, as far as this rank holds it. Writing `Working` also writes the master copy and
    /// vice versa, so that both always agree. A tensor in 4 bits is written by [`ModelMut::quantiser`].
    pub fn write(
        &mut self,
        unit: usize,
        segment: &Segment,
        state: ParamState,
        part: Range<usize>,
        values: &[f32],
    ) -> Result<(), EngineError> {
        assert!(!segment.quantised, "{} is stored in 4 bits", segment.name);
        self.engine.synchronize()?;
        for one in written_states(state) {
            let Some(own) = self.as_ref().owned(unit, segment, one) else { continue };
            let (start, end) = (own.start.max(part.start), own.end.min(part.end));
            if start < end {
                let resident =
                    self.as_ref().resident(unit, segment, one).expect("an owned state is resident");
                let location = resident.range(segment.start + start, segment.start + end);
                let (memories, values) =
                    (&self.engine.shared.memories, &values[start - part.start..end - part.start]);
                match one {
                    ParamState::Working => location.write_weights(memories, values)?,
                    _ => location.write_f32(memories, values)?,
                }
            }
        }
        Ok(())
    }
}
