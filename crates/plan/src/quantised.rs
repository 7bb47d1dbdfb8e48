//! Frozen parameters in 4 bits (NF4 with double quantisation): their states, and how these are sharded.
//!
//! A quantised flat parameter has no working copy. It has codes, a byte for two elements, and scale codes, a byte for
//! each block of 64 elements. Each of the two is sharded by itself, in multiples of 256 entries like every state: a
//! shard of codes starts on a multiple of 512 elements, a shard of scale codes on a multiple of 16,384, which is a whole
//! group of 256 blocks. So no shard boundary cuts a block or a group of scales. The scales of the groups, one f32 for
//! 16,384 elements, are replicated.
//!
//! A unit with such parameters is dequantised just before each use ([`crate::OpKind::Dequantise`]), from the resident
//! states or, if they are sharded, from what an all-gather has brought. What is gathered ahead of use has 4 bits, too.

use lockstep_core::{
    Bytes, DType, Elems, NF4_BLOCK_ELEMS, NF4_SCALES_PER_BLOCK, ShardRange, padded_elems, shard_range,
};
use lockstep_shape::{FlatParam, Segment, UnitShape};

use crate::buffer::ParamState;
use crate::input::PlanInput;
use crate::schedule::ModelId;

impl ParamState {
    /// The states of 4-bit parameters.
    pub const QUANTISED: [ParamState; 3] =
        [ParamState::Codes, ParamState::ScaleCodes, ParamState::ScaleTable];

    /// How many elements of a parameter an entry of the state stands for.
    pub const fn elems_per_entry(self) -> usize {
        match self {
            ParamState::Codes => 2,
            ParamState::ScaleCodes => NF4_BLOCK_ELEMS,
            ParamState::ScaleTable => NF4_BLOCK_ELEMS * NF4_SCALES_PER_BLOCK,
            ParamState::Working | ParamState::Master | ParamState::Optimizer(_) | ParamState::Grad => 1,
        }
    }
}

/// The entries of a flat parameter's state in one shard. As in collectives, only the last block of 256 may be short.
pub(crate) fn shard_of(flat: &FlatParam, state: ParamState, num_shards: u32, idx: u32) -> ShardRange {
    let entries = flat.elems() / state.elems_per_entry();
    let padded = shard_range(padded_elems(entries), num_shards, idx);
    ShardRange { start: padded.start.min(entries), end: padded.end.min(entries) }
}

/// Entries of the scale tables of a unit, one table after the other.
pub(crate) fn scale_table_elems(unit: &UnitShape) -> usize {
    unit.segments.iter().filter(|segment| segment.quantised).map(table_entries).sum()
}

fn table_entries(segment: &Segment) -> usize {
    segment.elems().div_ceil(ParamState::ScaleTable.elems_per_entry())
}

impl PlanInput {
    /// Whether some of a unit's parameters have 4 bits.
    pub fn has_quantised(&self, model: ModelId, unit: u32) -> bool {
        self.unit(model, unit).has_quantised()
    }

    /// The first unit with 4-bit parameters. In a generate phase all of them are dequantised into its buffer, one at a
    /// time.
    pub fn first_quantised(&self, model: ModelId) -> Option<u32> {
        let units = self.model(model).units.iter();
        units.zip(0..).find(|(unit, _)| unit.has_quantised()).map(|(_, index)| index)
    }

    /// Elements `[start, end)` of the unit's scale tables: the table of one tensor.
    pub fn scale_table(&self, model: ModelId, unit: u32, segment: &Segment) -> std::ops::Range<usize> {
        let tables = self.unit(model, unit).segments.iter().filter(|other| other.quantised);
        let start = tables.take_while(|other| other.start < segment.start).map(table_entries).sum();
        start..start + table_entries(segment)
    }

    /// The states that a unit with 4-bit parameters is dequantised from and that may be sharded, with the entries and
    /// the type of each if nothing is sharded.
    pub(crate) fn dequantised_from(&self, model: ModelId, unit: u32) -> [(ParamState, usize, DType); 3] {
        [ParamState::Codes, ParamState::ScaleCodes, ParamState::Working].map(|state| {
            let parts = self.whole(model, unit, state);
            let entries = parts.iter().map(|part| part.elems()).sum();
            (state, entries, self.resident(model, unit, state).2)
        })
    }

    /// Bytes of a unit's parameters as they are gathered.
    pub(crate) fn gathered_bytes(&self, model: ModelId, unit: u32) -> Bytes {
        if !self.has_quantised(model, unit) {
            return Elems(self.unit(model, unit).elems as u64).bytes(self.storage);
        }
        let states = self.dequantised_from(model, unit).into_iter();
        states.map(|(_, entries, dtype)| Elems(entries as u64).bytes(dtype)).sum()
    }
}
