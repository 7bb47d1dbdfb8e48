//! Roundings of f32 to bf16, on bit patterns: those of weights, and stochastic rounding with counted random bits.
//!
//! A master parameter is kept as its bf16 weight and a signed 16-bit remainder, 4 bytes instead of 6:
//! `bits(master) = (bits(weight) << 16) + remainder`. The weight is the master rounded to nearest. Ties must round away
//! from zero: then every remainder is in [−32768, 32767]. With ties to even, half of the ties would have the remainder
//! +32768, which does not fit.
//!
//! The functions are branch-free, so that the compiler vectorizes loops over them. A bf16 is a `u16` here.

use crate::rng::{Purpose, RngStream};

/// Rounds to nearest, ties away from zero. This is the rounding of a master parameter to its bf16 weight; activations
/// round ties to even. NaN stays NaN.
#[inline(always)]
pub const fn bf16_ties_away(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x8000) >> 16;
    if value.is_nan() { quiet_nan(bits) } else { rounded as u16 }
}

/// A master parameter as its weight in bf16 and its remainder. [`join`] rebuilds it, bit for bit unless it is NaN.
#[inline(always)]
pub const fn split(master: f32) -> (u16, i16) {
    let weight = bf16_ties_away(master);
    // The difference fits in 16 bits, so the low half of the master is all of it.
    let remainder = master.to_bits() as u16 as i16;
    (weight, if master.is_nan() { 0 } else { remainder })
}

/// The master parameter of a weight and its remainder. A NaN weight has the remainder 0 and is a NaN master.
#[inline(always)]
pub const fn join(weight: u16, remainder: i16) -> f32 {
    f32::from_bits(((weight as u32) << 16).wrapping_add(remainder as i32 as u32))
}

/// Rounds up in magnitude with a probability equal to the discarded fraction, given 16 random bits. Values that bf16
/// represents do not change. NaN stays NaN. As when rounding to nearest, a value beyond the largest bf16 may become
/// infinite.
#[inline(always)]
pub const fn bf16_stochastic(value: f32, random: u16) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(random as u32) >> 16;
    if value.is_nan() { quiet_nan(bits) } else { rounded as u16 }
}

#[inline(always)]
const fn quiet_nan(bits: u32) -> u16 {
    (bits >> 16) as u16 | 0x40
}

/// The random bits that round one tensor in one update. They are a pure function of (seed, update, tensor, slot, index),
/// so they do not depend on shards, ranks or threads.
///
/// One block of the counter-based generator gives the key of each slot. An element's bits are a keyed hash of its index:
/// two multiplications, many times cheaper than a block of the generator per element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundingBits {
    keys: [RoundingKey; RoundingBits::SLOTS],
}

/// The key of one slot of a tensor in one update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundingKey(pub [u32; 2]);

impl RoundingBits {
    /// What is rounded for each element: the parameter (slot 0) and up to two optimizer states.
    pub const SLOTS: usize = 3;

    /// `update` is the number of applied updates, this one included.
    pub fn new(seed: u64, update: u64, tensor: &str) -> RoundingBits {
        let stream = RngStream::named(seed, Purpose::Rounding, tensor);
        // No run has 2^30 updates, so indices of the stream do not repeat.
        let first = update.wrapping_mul(RoundingBits::SLOTS as u64) as u32;
        let keys = std::array::from_fn(|slot| {
            let [low, high, ..] = stream.block(first.wrapping_add(slot as u32));
            RoundingKey([low, high])
        });
        RoundingBits { keys }
    }

    pub const fn key(&self, slot: usize) -> RoundingKey {
        self.keys[slot]
    }
}

impl RoundingKey {
    /// The random bits of the element at `index` in its tensor. `rounding_bits` in the kernels.
    #[inline(always)]
    pub const fn bits(self, index: u32) -> u16 {
        let RoundingKey([low, high]) = self;
        let mut hash = index.wrapping_add(low);
        hash = (hash ^ (hash >> 16)).wrapping_mul(0x85EB_CA6B);
        hash = (hash ^ (hash >> 13) ^ high).wrapping_mul(0xC2B2_AE35);
        // The upper bits of a product depend on all bits of its factor.
        (hash >> 16) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1 + n · 2⁻⁸: odd multiples are ties of bf16.
    fn halves(n: u32) -> f32 {
        f32::from_bits(0x3F80_0000 + n * 0x8000)
    }

    #[test]
    fn ties_round_away_from_zero() {
        for (n, want) in [(0, 0x3F80), (1, 0x3F81), (2, 0x3F81), (3, 0x3F82)] {
            assert_eq!(bf16_ties_away(halves(n)), want);
            assert_eq!(bf16_ties_away(-halves(n)), want | 0x8000);
        }
        assert_eq!(split(halves(1)), (0x3F81, i16::MIN));
        assert_eq!(split(f32::from_bits(0x3F80_7FFF)), (0x3F80, i16::MAX));
    }

    /// The tests of `ops::optimizer` check all 2³² masters; here are the special ones.
    #[test]
    fn masters_are_rebuilt_from_weight_and_remainder() {
        let special = [0.0, f32::MAX, f32::INFINITY, f32::MIN_POSITIVE, 1e-45, 1.0 / 3.0];
        for value in special.into_iter().flat_map(|x| [x, -x]) {
            let (weight, remainder) = split(value);
            assert_eq!(join(weight, remainder).to_bits(), value.to_bits(), "{value:e}");
        }
        // The weight of the largest master is infinite, and yet the master is finite.
        assert_eq!(split(f32::MAX), (0x7F80, -1));
        for bits in [0x7F80_0001, 0x7FFF_FFFF, 0xFFFF_8000, 0xFFC0_0000] {
            let (weight, remainder) = split(f32::from_bits(bits));
            assert!(join(weight, 0).is_nan() && join(weight, remainder).is_nan(), "{bits:x}");
        }
    }

    #[test]
    fn stochastic_rounding_is_exact_where_it_can_be_and_keeps_nan() {
        for random in [0, 1, 0x8000, 0xFFFF] {
            for bits in [0u16, 0x8000, 0x3F80, 0x7F7F, 0x7F80, 0xFF80, 1] {
                assert_eq!(bf16_stochastic(f32::from_bits(u32::from(bits) << 16), random), bits);
            }
            for nan in [0x7F80_0001u32, 0x7FFF_FFFF, 0xFFFF_FFFF] {
                assert!(join(bf16_stochastic(f32::from_bits(nan), random), 0).is_nan());
            }
        }
        // A quarter of all random numbers round this one up.
        let value = f32::from_bits(0x3F80_4000);
        let up = (0..=u16::MAX).filter(|random| bf16_stochastic(value, *random) == 0x3F81).count();
        assert_eq!(up, 0x4000);
    }

    /// New runs with stochastic rounding depend on these numbers.
    #[test]
    fn rounding_bits_depend_on_everything_in_their_key() {
        let words = |seed, update, tensor, slot: usize| {
            let key = RoundingBits::new(seed, update, tensor).key(slot);
            (0..64).map(|i| key.bits(i)).collect::<Vec<_>>()
        };
        let all = [
            words(1, 1, "a", 0),
            words(2, 1, "a", 0),
            words(1, 2, "a", 0),
            words(1, 1, "b", 0),
            words(1, 1, "a", 1),
            words(1, 1, "a", 2),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b), "bits {i} repeat");
        }
        assert_eq!(all[0], words(1, 1, "a", 0));
    }

    /// Uniform, and independent between neighbours, updates and slots, as far as a correlation and a χ² test can tell.
    #[test]
    fn rounding_bits_are_uniform_and_uncorrelated() {
        const COUNT: usize = 1 << 16;
        let words = |update: u64, slot: usize| -> Vec<f64> {
            let key = RoundingBits::new(7, update, "model.embed_tokens.weight").key(slot);
            (0..COUNT as u32 + 256).map(|i| (f64::from(key.bits(i)) + 0.5) / 65536.0 - 0.5).collect()
        };
        let correlation =
            |a: &[f64], b: &[f64]| 12.0 * a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>() / a.len() as f64;
        // Five standard deviations.
        let limit = 5.0 / (COUNT as f64).sqrt();
        let base = words(1, 0);
        for update in 1..6 {
            for slot in 0..RoundingBits::SLOTS {
                let all = words(update, slot);
                let mean = all[..COUNT].iter().sum::<f64>() / COUNT as f64;
                assert!(mean.abs() < limit / 12f64.sqrt(), "mean {mean} in update {update}, slot {slot}");
                for lag in [1, 2, 3, 4, 16, 255, 256] {
                    let with = correlation(&all[..COUNT], &all[lag..][..COUNT]);
                    assert!(with.abs() < limit, "neighbours at {lag}: {with}");
                }
                if (update, slot) != (1, 0) {
                    let with = correlation(&all[..COUNT], &base[..COUNT]);
                    assert!(with.abs() < limit, "update {update}, slot {slot}: {with}");
                }
                let mut counts = [0u32; 256];
                all[..COUNT].iter().for_each(|x| counts[((x + 0.5) * 256.0) as usize] += 1);
                let expected = COUNT as f64 / 256.0;
                let chi2: f64 = counts.iter().map(|c| (f64::from(*c) - expected).powi(2) / expected).sum();
                // 255 degrees of freedom: a standard deviation is 22.6.
                assert!((chi2 - 255.0).abs() < 5.0 * 22.6, "χ² {chi2} in update {update}, slot {slot}");
            }
        }
    }
}
