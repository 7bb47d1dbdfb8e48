//! Storage types of activations and weights. Arithmetic is always f32.

use half::{bf16, f16};
use lockstep_core::DType;
use lockstep_core::rounding::bf16_ties_away;

/// A float type for storage. Values are converted to f32 for arithmetic.
pub trait Real: Copy + Send + Sync + 'static {
    const DTYPE: DType;
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
    /// Rounds a master parameter to a weight: to nearest, in bf16 with ties away from zero
    /// ([`lockstep_core::rounding`]), in f16 with ties to even.
    #[inline(always)]
    fn weight_from_f32(master: f32) -> Self {
        Self::from_f32(master)
    }
}

impl Real for f32 {
    const DTYPE: DType = DType::F32;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Real for bf16 {
    const DTYPE: DType = DType::BF16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    /// Branch-free integer arithmetic, so that the compiler vectorizes loops over it.
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        bf16::from_bits(if value.is_nan() { quiet_nan } else { rounded } as u16)
    }
    #[inline(always)]
    fn weight_from_f32(master: f32) -> Self {
        bf16::from_bits(bf16_ties_away(master))
    }
}

impl Real for f16 {
    const DTYPE: DType = DType::F16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_like_the_half_crate() {
        let mut bits = 1u32;
        for _ in 0..2_000_000 {
            bits = bits.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            let value = f32::from_bits(bits);
            assert_eq!(
                <bf16 as Real>::from_f32(value).to_bits(),
                bf16::from_f32(value).to_bits(),
                "{value:e}"
            );
        }
        for value in [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, f32::NAN] {
            assert_eq!(<bf16 as Real>::from_f32(value).to_bits(), bf16::from_f32(value).to_bits());
        }
    }
}
