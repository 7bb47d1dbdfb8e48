//! Parameters and states of every format, for tests and the selftest.

use lockstep_core::DType;
use lockstep_core::rounding::{RoundingBits, join, split};
use lockstep_device::View;

use super::{ParamFormat, Params, RangeRounding, State, StateFormat};
use crate::operands::Operands;
use crate::quant::dynamic_map::{BLOCK_ELEMS, DynamicMap};

/// Random bits for a range that starts in the middle of a tensor.
pub(crate) const ROUNDING_SEED: u64 = 11;

pub(crate) fn rounding(update: u64, first_elem: usize) -> Option<RangeRounding> {
    Some(RangeRounding { bits: RoundingBits::new(ROUNDING_SEED, update, "weight"), first_elem })
}

/// Parameters with these values, as far as the format has them. `offset` elements of memory come first.
pub(crate) fn params<'o>(
    operands: &'o impl Operands,
    values: &[f32],
    format: ParamFormat,
    offset: usize,
) -> Params<'o> {
    let values = with_offset(values, offset);
    let part = |view: View<'o>| view.slice(offset, values.len() - offset);
    match format {
        ParamFormat::Master { working } => Params::Master {
            master: part(operands.input(&values, DType::F32)),
            working: (working != DType::F32).then(|| part(operands.weights(&values, working))),
        },
        ParamFormat::Split => {
            let (weights, remainders): (Vec<u16>, Vec<i16>) = values.iter().map(|p| split(*p)).unzip();
            Params::Split {
                weight: part(operands.input_raw(&weights, DType::BF16)),
                remainder: part(operands.input_raw(&remainders, DType::I16)),
            }
        }
        ParamFormat::Stochastic => {
            Params::Stochastic { weight: part(operands.weights(&values, DType::BF16)) }
        }
    }
}

/// The parameters as f32.
pub(crate) fn param_values(operands: &impl Operands, params: Params) -> Vec<f32> {
    match params {
        Params::Master { master: view, .. } | Params::Stochastic { weight: view } => floats(operands, view),
        Params::Split { weight, remainder } => {
            let (weights, remainders) = (raw::<u16>(operands, weight), raw::<i16>(operands, remainder));
            weights.into_iter().zip(remainders).map(|(weight, remainder)| join(weight, remainder)).collect()
        }
    }
}

/// A state with these values, rounded to the format.
pub(crate) fn state<'o>(
    operands: &'o impl Operands,
    values: &[f32],
    format: StateFormat,
    map: &DynamicMap,
    offset: usize,
) -> State<'o> {
    let part = |view: View<'o>| view.slice(offset, values.len());
    let float = |dtype| State::Float(part(operands.input(&with_offset(values, offset), dtype)));
    match format {
        StateFormat::F32 => float(DType::F32),
        StateFormat::Bf16 => float(DType::BF16),
        StateFormat::Blockwise => {
            let mut codes = vec![0; values.len()];
            let blocks = values.chunks(BLOCK_ELEMS).zip(codes.chunks_mut(BLOCK_ELEMS));
            let absmax: Vec<f32> = blocks.map(|(values, codes)| map.encode(values, codes)).collect();
            State::Blockwise {
                codes: part(operands.input_raw(&with_offset(&codes, offset), DType::U8)),
                absmax: operands.input(&absmax, DType::F32),
            }
        }
    }
}

/// A state as f32.
pub(crate) fn state_values(operands: &impl Operands, state: State, map: &DynamicMap) -> Vec<f32> {
    match state {
        State::Float(view) => floats(operands, view),
        State::Blockwise { codes, absmax } => {
            let (codes, absmax) = (raw::<u8>(operands, codes), floats(operands, absmax));
            let mut values = vec![0.0; codes.len()];
            let blocks = values.chunks_mut(BLOCK_ELEMS).zip(codes.chunks(BLOCK_ELEMS));
            blocks.zip(absmax).for_each(|((values, codes), absmax)| map.decode(codes, absmax, values));
            values
        }
    }
}

fn with_offset<T: Copy + Default>(values: &[T], offset: usize) -> Vec<T> {
    [vec![T::default(); offset], values.to_vec()].concat()
}

pub(crate) fn floats(operands: &impl Operands, view: View) -> Vec<f32> {
    let mut out = vec![0f32; view.len()];
    operands.check_device(view.read_f32(&mut out));
    out
}

pub(crate) fn raw<T: Copy + Default>(operands: &impl Operands, view: View) -> Vec<T> {
    let mut out = vec![T::default(); view.len()];
    operands.check_device(view.read(&mut out));
    out
}
