//! Textbook dropout, in f64, for a mask given element by element.

use lockstep_core::rng::{Purpose, RngStream};

use super::{Mask, PER_BLOCK};

/// The factor of one element: 0 or 1 / (1 − p).
pub fn factor(mask: &Mask, sample: u32, head: u32, position: usize, column: usize) -> f64 {
    let site = mask.index();
    let [low, high, ..] = RngStream::new(mask.seed, Purpose::Dropout, mask.step, sample).block(site);
    let seed = u64::from(high) << 32 | u64::from(low);
    let stream = RngStream::new(seed, Purpose::Dropout, position as u32, head);
    let word = stream.block((column / PER_BLOCK) as u32)[column % PER_BLOCK];
    if f64::from(word) < (mask.rate * 4_294_967_296.0).floor() { 0.0 } else { 1.0 / (1.0 - mask.rate) }
}

/// residual + mask · y.
pub fn forward(residual: &[f64], y: &[f64], mask: &[f64]) -> Vec<f64> {
    residual.iter().zip(y).zip(mask).map(|((r, y), m)| r + m * y).collect()
}

/// mask · dy.
pub fn backward(dy: &[f64], mask: &[f64]) -> Vec<f64> {
    dy.iter().zip(mask).map(|(dy, m)| dy * m).collect()
}
