//! Parameters in 4 bits: dequantisation of units, and writing and reading of single tensors.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use lockstep_device::Queue;
use lockstep_ops::nf4::{self, Nf4, Quantised, QuantisedScales, Scales};
use lockstep_plan::{BufferKind, ModelId, OwnedPart, ParamState, RunPlan};
use lockstep_shape::Segment;

use crate::addresses::{Address, BufferLookup, Location, ResidentAddress, UnitAddresses, UnitResidents};
use crate::engine::Shared;
use crate::error::EngineError;
use crate::model::{Model, ModelMut};

/// What dequantises a unit: its 4-bit tensors, and copies of its other parameters.
#[derive(Clone, Debug)]
pub(crate) struct UnitDequantisation {
    tensors: Vec<QuantisedTensor>,
    copies: Vec<(Address, Address)>,
}

/// The operands of a 4-bit tensor.
#[derive(Clone, Debug)]
struct QuantisedTensor {
    /// The tensor's index in its unit.
    segment: usize,
    elems: usize,
    codes: Address,
    scale_codes: Address,
    table: Address,
    out: Address,
}

impl UnitDequantisation {
    /// How a phase dequantises a unit: from gathered states if the phase has them, else from the resident ones. `None`
    /// if the unit has no parameters in 4 bits.
    pub(crate) fn of(
        lookup: &BufferLookup,
        unit: u32,
        addresses: &UnitAddresses,
        residents: &UnitResidents,
    ) -> Option<UnitDequantisation> {
        let (input, model) = (&lookup.plan.input, lookup.phase.model);
        if !input.has_quantised(model, unit) {
            return None;
        }
        let shape = &input.model(model).units[unit as usize];
        let resident = |state| residents.resident(state).expect("the plan has all states of a unit").location;
        let source = |state: ParamState| {
            let gathered = lookup.find(BufferKind::GatheredState { model, unit, state });
            (gathered.unwrap_or_else(|| resident(state)).address(), input.whole(model, unit, state))
        };
        let [codes, scale_codes, plain] =
            [ParamState::Codes, ParamState::ScaleCodes, ParamState::Working].map(source);
        let entries_of = |(all, parts): &(Address, Vec<OwnedPart>), entries: Range<usize>| {
            let part = parts.iter().find(|part| part.start <= entries.start && entries.end <= part.end);
            let part = part.expect("a quantised tensor lies in a quantised flat parameter");
            all.slice(part.local_start + entries.start - part.start, entries.len())
        };
        let tables = resident(ParamState::ScaleTable).address();
        let quantised = shape.segments.iter().enumerate().filter(|(_, segment)| segment.quantised);
        let tensors = quantised.map(|(index, segment)| {
            let table = input.scale_table(model, unit, segment);
            QuantisedTensor {
                segment: index,
                elems: segment.elems(),
                codes: entries_of(&codes, entries(segment, ParamState::Codes)),
                scale_codes: entries_of(&scale_codes, entries(segment, ParamState::ScaleCodes)),
                table: tables.slice(table.start, table.len()),
                out: addresses.params.slice(segment.start, segment.elems()),
            }
        });
        let copy = |part: &OwnedPart| {
            let from = plain.0.slice(part.local_start, part.elems());
            (from, addresses.params.slice(part.start, part.elems()))
        };
        Some(UnitDequantisation { tensors: tensors.collect(), copies: plain.1.iter().map(copy).collect() })
    }
}

/// The entries of a tensor in a state of its unit.
fn entries(segment: &Segment, state: ParamState) -> Range<usize> {
    let start = segment.start / state.elems_per_entry();
    start..start + segment.elems().div_ceil(state.elems_per_entry())
}

/// The mean of the scales of each 4-bit tensor, which kernels take as an argument: the bits of an f32 by model, unit and
/// segment.
#[derive(Debug)]
pub(crate) struct ScaleOffsets(Vec<Vec<Vec<AtomicU32>>>);

impl ScaleOffsets {
    pub(crate) fn of(plan: &RunPlan) -> ScaleOffsets {
        let models = plan.input.models.iter();
        let of_unit = |unit: &lockstep_shape::UnitShape| {
            let quantised = if unit.has_quantised() { unit.segments.len() } else { 0 };
            (0..quantised).map(|_| AtomicU32::new(0)).collect()
        };
        ScaleOffsets(models.map(|model| model.units.iter().map(of_unit).collect()).collect())
    }

    fn of_tensor(&self, model: ModelId, unit: usize, segment: usize) -> &AtomicU32 {
        &self.0[model.0 as usize][unit][segment]
    }
}

impl Shared {
    /// Dequantises a unit for the current phase. Nothing if it has no parameters in 4 bits.
    pub(crate) fn dequantise(&self, unit: u32, queue: &Queue) -> Result<(), EngineError> {
        let Some(task) = &self.prepared_phase().dequantisations[unit as usize] else { return Ok(()) };
        for (from, to) in &task.copies {
            Location::Memory(*from).copy_to(&Location::Memory(*to), &self.memories, queue)?;
        }
        let weights = self.plan.input.weights_of(self.schedule_phase().model);
        for tensor in &task.tensors {
            let offset = self.scale_offsets.of_tensor(weights, unit as usize, tensor.segment);
            let scales = Scales::Double {
                codes: tensor.scale_codes.view(&self.memories),
                absmax: tensor.table.view(&self.memories),
                offset: f32::from_bits(offset.load(Ordering::Relaxed)),
            };
            let from = Nf4 { elems: tensor.elems, codes: tensor.codes.view(&self.memories), scales };
            nf4::dequantise(queue, tensor.out.view(&self.memories), &from, 0);
        }
        Ok(())
    }
}

impl Model<'_> {
    /// The bytes of codes of a 4-bit tensor that this rank holds, counted from the tensor's first.
    pub fn owned_codes(&self, unit: usize, segment: &Segment) -> Range<usize> {
        self.owned_entries(unit, segment, ParamState::Codes)
    }

    /// The same for the elements that these codes stand for.
    pub(crate) fn owned_quantised(&self, unit: usize, segment: &Segment) -> Range<usize> {
        let codes = self.owned_codes(unit, segment);
        2 * codes.start..segment.elems().min(2 * codes.end)
    }

    fn owned_entries(&self, unit: usize, segment: &Segment, state: ParamState) -> Range<usize> {
        let (all, owned) = (entries(segment, state), &self.state_of(unit, state).owned);
        let part = owned.iter().find(|p| p.start < all.end && all.start < p.end);
        part.map_or(0..0, |p| p.start.max(all.start) - all.start..p.end.min(all.end) - all.start)
    }

    fn state_of(&self, unit: usize, state: ParamState) -> &ResidentAddress {
        let resident = self.engine.shared.residents(self.id)[unit].resident(state);
        resident.expect("a unit with a 4-bit tensor has its states")
    }

    /// Where this rank has entries of a 4-bit tensor, counted from the tensor's first.
    fn entries_at(&self, unit: usize, segment: &Segment, state: ParamState, part: Range<usize>) -> Address {
        let first = entries(segment, state).start;
        self.state_of(unit, state).range(first + part.start, first + part.end).address()
    }

    fn table_at(&self, unit: usize, segment: &Segment) -> Address {
        let table = self.engine.plan().input.scale_table(self.id, unit as u32, segment);
        self.state_of(unit, ParamState::ScaleTable).location.address().slice(table.start, table.len())
    }

    fn offset_of(&self, unit: usize, segment: &Segment) -> &AtomicU32 {
        let index = self.units()[unit].segments.iter().position(|other| other.name == segment.name);
        let weights = self.engine.plan().input.weights_of(self.id);
        self.engine.shared.scale_offsets.of_tensor(weights, unit, index.expect("a segment of the unit"))
    }

    /// Reads part of a 4-bit tensor, dequantised to the storage type. If `collective`, ranks exchange what they hold;
    /// otherwise this rank must hold all of it.
    pub(crate) fn read_quantised(
        &self,
        unit: usize,
        segment: &Segment,
        part: Range<usize>,
        out: &mut [f32],
        collective: bool,
    ) -> Result<(), EngineError> {
        self.engine.synchronize()?;
        let first = part.start / 2 * 2;
        let codes =
            self.bytes_of(unit, segment, ParamState::Codes, first / 2..part.end.div_ceil(2), collective)?;
        let all = 0..entries(segment, ParamState::ScaleCodes).len();
        let scale_codes = self.bytes_of(unit, segment, ParamState::ScaleCodes, all, collective)?;
        let table = self.table_at(unit, segment).view(&self.engine.shared.memories);
        let mut absmax = vec![0f32; table.len()];
        table.read(&mut absmax)?;
        let offset = f32::from_bits(self.offset_of(unit, segment).load(Ordering::Relaxed));
        let scales = QuantisedScales { codes: scale_codes, absmax, offset };
        let mut values = vec![0f32; part.end - first];
        nf4::dequantise_on_host(self.engine.working_dtype(), &codes, &scales, first, &mut values);
        out[..part.len()].copy_from_slice(&values[part.start - first..]);
        Ok(())
    }

    /// Entries of a 4-bit tensor, each of which is a byte.
    fn bytes_of(
        &self,
        unit: usize,
        segment: &Segment,
        state: ParamState,
        part: Range<usize>,
        collective: bool,
    ) -> Result<Vec<u8>, EngineError> {
        let own = self.owned_entries(unit, segment, state);
        let (start, end) = (own.start.max(part.start), own.end.min(part.end));
        let mut mine = vec![0u8; end.saturating_sub(start)];
        if start < end {
            let at = self.entries_at(unit, segment, state, start..end);
            at.view(&self.engine.shared.memories).read(&mut mine)?;
        }
        let bytes = match self.engine.plan().input.sharded_over(self.id, state) {
            [axis] if collective => {
                let what = format!("reading {}", segment.name);
                self.engine.all_gather_bytes_along(&what, *axis, &mine)?.concat()
            }
            _ => mine,
        };
        assert_eq!(bytes.len(), part.len(), "{} is not on this rank alone", segment.name);
        Ok(bytes)
    }
}

impl<'e> ModelMut<'e> {
    /// Starts to quantise a tensor that the plan stores in 4 bits.
    pub fn quantiser(self, unit: usize, segment: &Segment) -> TensorQuantiser<'e> {
        assert!(segment.quantised, "{} has the storage type", segment.name);
        TensorQuantiser { model: self, unit, segment: segment.clone(), scales: Vec::new(), next: 0 }
    }

    /// Writes codes of a 4-bit tensor from byte `first` on, as far as this rank holds them.
    pub fn write_codes(
        &mut self,
        unit: usize,
        segment: &Segment,
        first: usize,
        codes: &[u8],
    ) -> Result<(), EngineError> {
        self.write_entries(unit, segment, ParamState::Codes, first, codes)
    }

    /// Writes the scales of a 4-bit tensor, as far as this rank holds them.
    pub fn write_scales(
        &mut self,
        unit: usize,
        segment: &Segment,
        scales: &QuantisedScales,
    ) -> Result<(), EngineError> {
        self.write_entries(unit, segment, ParamState::ScaleCodes, 0, &scales.codes)?;
        let model = self.as_ref();
        let table = model.table_at(unit, segment).view(&model.engine.shared.memories);
        assert_eq!(table.len(), scales.absmax.len(), "one scale for every group of scales");
        table.write(&scales.absmax)?;
        model.offset_of(unit, segment).store(scales.offset.to_bits(), Ordering::Relaxed);
        Ok(())
    }

    fn write_entries(
        &mut self,
        unit: usize,
        segment: &Segment,
        state: ParamState,
        first: usize,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        self.engine.synchronize()?;
        let model = self.as_ref();
        let own = model.owned_entries(unit, segment, state);
        let (start, end) = (own.start.max(first), own.end.min(first + bytes.len()));
        if start < end {
            let at = model.entries_at(unit, segment, state, start..end);
            at.view(&model.engine.shared.memories).write(&bytes[start - first..end - first])?;
        }
        Ok(())
    }
}

/// Quantises a tensor from consecutive pieces. Every rank needs the whole tensor, because the 8-bit scales of all blocks
/// are relative to their mean, and keeps its part of the result. Memory is bounded by the size of a piece and one scale
/// for 64 elements.
pub struct TensorQuantiser<'e> {
    model: ModelMut<'e>,
    unit: usize,
    segment: Segment,
    /// The scales of the blocks so far.
    scales: Vec<f32>,
    /// The first element of the next piece.
    next: usize,
}

impl TensorQuantiser<'_> {
    /// Quantises the next piece of the tensor. All but the last have a multiple of 64 elements.
    pub fn push(&mut self, piece: &[f32]) -> Result<(), EngineError> {
        assert!(self.next.is_multiple_of(nf4::BLOCK_ELEMS), "only the last piece may end in a block");
        let (start, end) = (self.next, self.next + piece.len());
        let own = self.model.as_ref().owned_quantised(self.unit, &self.segment);
        let pool = self.model.engine.queue.pool();
        if start < own.end && own.start < end {
            let Quantised { codes, scales } = nf4::quantise(pool, piece);
            self.scales.extend(scales);
            self.model.write_codes(self.unit, &self.segment, start / 2, &codes)?;
        } else {
            self.scales.extend(nf4::block_scales(pool, piece));
        }
        self.next = end;
        Ok(())
    }

    /// Quantises the scales.
    pub fn finish(mut self) -> Result<(), EngineError> {
        assert_eq!(self.next, self.segment.elems(), "{} is incomplete", self.segment.name);
        let scales = Quantised { codes: Vec::new(), scales: self.scales }.quantise_scales();
        self.model.write_scales(self.unit, &self.segment, &scales)
    }
}
