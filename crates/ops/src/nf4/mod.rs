//! NF4: frozen weights as 4-bit codes, as QLoRA (Dettmers et al. 2023) and bitsandbytes define them.
//!
//! Blocks of 64 elements share a scale, their largest magnitude. A code is the index of the nearest of 16 values between
//! −1 and 1: quantiles of the normal distribution, with 0. A byte holds two codes, the first in its high half.
//!
//! With double quantisation the scales are stored in 8 bits: less their mean (the offset), in blocks of 256, as codes of
//! the signed dynamic map ([`crate::quant::dynamic_map`]). Weights take 4.127 bits per element then, instead of 4.5.
//!
//! A weight is value · scale, rounded once to f32 and then to its type, ties to even. A scale is map value · absmax,
//! rounded, plus offset, rounded. All devices give the same bits.

mod cpu;
pub(crate) mod cuda;
mod quantise;
pub mod reference;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use lockstep_core::DType;
use lockstep_device::{Queue, View};

pub use quantise::{Quantised, QuantisedScales, block_scales, dequantise_on_host, quantise};

use crate::disjoint::assert_disjoint;

/// Elements that share a scale.
pub const BLOCK_ELEMS: usize = lockstep_core::NF4_BLOCK_ELEMS;
/// Scales that share a scale of their own.
pub const SCALES_PER_BLOCK: usize = lockstep_core::NF4_SCALES_PER_BLOCK;
/// Ranges start and end on multiples of this, or end with the tensor: shards do, too.
pub const RANGE_ELEMS: usize = lockstep_core::ALIGN_ELEMS;

/// The values of the codes. They are defined by these digits, not by a formula: the quantiles that they come from depend
/// on a constant that was chosen by search.
pub const VALUES: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The scales of a tensor's blocks.
#[derive(Clone, Copy, Debug)]
pub enum Scales<'m> {
    /// One f32 for each block of 64 elements.
    F32(View<'m>),
    /// One u8 code for each block, one f32 absmax for each 256 of them, and the mean that was subtracted.
    Double { codes: View<'m>, absmax: View<'m>, offset: f32 },
}

/// A quantised tensor of `elems` elements.
#[derive(Clone, Copy, Debug)]
pub struct Nf4<'m> {
    pub elems: usize,
    /// Two codes per byte: ⌈elems / 2⌉ u8.
    pub codes: View<'m>,
    pub scales: Scales<'m>,
}

impl Nf4<'_> {
    #[track_caller]
    fn check(&self) {
        let blocks = self.elems.div_ceil(BLOCK_ELEMS);
        let shape = |view: &View| (view.len(), view.dtype());
        assert_eq!(shape(&self.codes), (self.elems.div_ceil(2), DType::U8), "two NF4 codes per u8");
        match &self.scales {
            Scales::F32(scales) => {
                assert_eq!(shape(scales), (blocks, DType::F32), "one f32 scale per block of {BLOCK_ELEMS}");
            }
            Scales::Double { codes, absmax, .. } => {
                assert_eq!(shape(codes), (blocks, DType::U8), "one u8 scale per block of {BLOCK_ELEMS}");
                let outer = blocks.div_ceil(SCALES_PER_BLOCK);
                assert_eq!(shape(absmax), (outer, DType::F32), "one f32 for {SCALES_PER_BLOCK} scales");
            }
        }
    }

    fn inputs(&self) -> [View<'_>; 3] {
        match self.scales {
            Scales::F32(scales) => [self.codes, scales, View::empty()],
            Scales::Double { codes, absmax, .. } => [self.codes, codes, absmax],
        }
    }
}

/// Writes the elements of a quantised tensor from `first` on to `out`, which is f32, bf16 or f16. The range starts on a
/// multiple of 256 elements, and ends on one or at the tensor's end.
pub fn dequantise(queue: &Queue, out: View, from: &Nf4, first: usize) {
    from.check();
    let end = first.checked_add(out.len()).filter(|end| *end <= from.elems);
    let end = end.unwrap_or_else(|| panic!("[{first}, +{}] of {} quantised elements", out.len(), from.elems));
    assert!(
        first.is_multiple_of(RANGE_ELEMS) && (end.is_multiple_of(RANGE_ELEMS) || end == from.elems),
        "[{first}, {end}) of {} quantised elements is not on multiples of {RANGE_ELEMS}",
        from.elems
    );
    assert_disjoint(&[out], &from.inputs());
    match queue {
        Queue::Cpu(cpu) => cpu::dequantise(cpu, out, from, first),
        Queue::Cuda(cuda) => cuda::dequantise(cuda, out, from, first),
    }
}
