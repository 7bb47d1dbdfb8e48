//! NF4 by its definition, an element at a time.

use super::{BLOCK_ELEMS, SCALES_PER_BLOCK, VALUES};
use crate::quant::dynamic_map::SIGNED;

/// The index of the nearest value.
pub fn nearest_code(x: f64) -> u8 {
    let off = |code: &u8| (f64::from(VALUES[usize::from(*code)]) - x).abs();
    (0..16).min_by(|a, b| off(a).total_cmp(&off(b))).expect("there are 16 codes")
}

/// The code of element `i`.
pub fn code(codes: &[u8], i: usize) -> u8 {
    if i.is_multiple_of(2) { codes[i / 2] >> 4 } else { codes[i / 2] & 15 }
}

/// Scale `block` of a doubly quantised tensor, in f32.
pub fn scale(codes: &[u8], absmax: &[f32], offset: f32, block: usize) -> f32 {
    SIGNED.values[usize::from(codes[block])] * absmax[block / SCALES_PER_BLOCK] + offset
}

/// All elements in f32, given the scale of each block.
pub fn dequantise(codes: &[u8], scales: &[f32], elems: usize) -> Vec<f32> {
    (0..elems).map(|i| VALUES[usize::from(code(codes, i))] * scales[i / BLOCK_ELEMS]).collect()
}
