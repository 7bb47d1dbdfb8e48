//! From weights to codes and scales and back, on the host, when a model is loaded or exported.

use lockstep_core::DType;
use lockstep_device::{Isa, Pool, Real};

use super::{BLOCK_ELEMS, SCALES_PER_BLOCK, VALUES, reference};
use crate::quant::dynamic_map::{SIGNED, absmax};

/// A quantised tensor on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantised {
    /// Two codes per byte, the first in the high half.
    pub codes: Vec<u8>,
    /// The scale of each block of 64 elements, before double quantisation.
    pub scales: Vec<f32>,
}

/// The scales of a tensor in 8 bits.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantisedScales {
    /// One code for each scale.
    pub codes: Vec<u8>,
    /// One for each 256 codes.
    pub absmax: Vec<f32>,
    /// The mean of the scales, which was subtracted from all of them.
    pub offset: f32,
}

/// The midpoints between a value and the next: a number above it has the next code.
const MIDPOINTS: [f32; 15] = {
    let mut midpoints = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        midpoints[i] = (VALUES[i] + VALUES[i + 1]) / 2.0;
        i += 1;
    }
    midpoints
};

const CODE_OF_ZERO: u8 = 7;

/// Blocks that a pool item quantises.
const BLOCKS_PER_ITEM: usize = 256;

/// Quantises a tensor. Widen bf16 weights to f32 first; that is exact.
pub fn quantise(pool: &Pool, weights: &[f32]) -> Quantised {
    let (mut codes, mut scales) =
        (vec![0; weights.len().div_ceil(2)], vec![0.0; weights.len().div_ceil(BLOCK_ELEMS)]);
    let items: Vec<_> = (weights.chunks(BLOCKS_PER_ITEM * BLOCK_ELEMS))
        .zip(codes.chunks_mut(BLOCKS_PER_ITEM * BLOCK_ELEMS / 2))
        .zip(scales.chunks_mut(BLOCKS_PER_ITEM))
        .map(std::sync::Mutex::new)
        .collect();
    let isa = Isa::detect();
    pool.run(items.len(), &|item, _| {
        let mut item = items[item].lock().expect("an item is taken once");
        let ((weights, codes), scales) = &mut *item;
        let blocks = weights.chunks(BLOCK_ELEMS).zip(codes.chunks_mut(BLOCK_ELEMS / 2));
        isa.run(
            #[inline(always)]
            || {
                for ((weights, codes), scale) in blocks.zip(scales.iter_mut()) {
                    *scale = absmax(weights);
                    quantise_block(weights, *scale, codes);
                }
            },
        );
    });
    drop(items);
    Quantised { codes, scales }
}

/// The scales of a tensor, as [`quantise`] computes them, without its codes.
pub fn block_scales(pool: &Pool, weights: &[f32]) -> Vec<f32> {
    let mut scales = vec![0.0; weights.len().div_ceil(BLOCK_ELEMS)];
    let items: Vec<_> = (weights.chunks(BLOCKS_PER_ITEM * BLOCK_ELEMS))
        .zip(scales.chunks_mut(BLOCKS_PER_ITEM))
        .map(std::sync::Mutex::new)
        .collect();
    let isa = Isa::detect();
    pool.run(items.len(), &|item, _| {
        let mut item = items[item].lock().expect("an item is taken once");
        let (weights, scales) = &mut *item;
        isa.run(
            #[inline(always)]
            || {
                for (weights, scale) in weights.chunks(BLOCK_ELEMS).zip(scales.iter_mut()) {
                    *scale = absmax(weights);
                }
            },
        );
    });
    drop(items);
    scales
}

/// The codes of a block. Its numbers are multiplied by 1 / scale, as in bitsandbytes. A block of zeros has the code of
/// zero, and a missing last element, too.
#[inline(always)]
fn quantise_block(weights: &[f32], scale: f32, codes: &mut [u8]) {
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let mut single = [CODE_OF_ZERO; BLOCK_ELEMS];
    for (single, weight) in single.iter_mut().zip(weights) {
        let x = weight * inverse;
        *single = MIDPOINTS.iter().map(|midpoint| u8::from(x > *midpoint)).sum();
    }
    for (codes, pair) in codes.iter_mut().zip(single.as_chunks::<2>().0) {
        *codes = pair[0] << 4 | pair[1];
    }
}

impl Quantised {
    /// Double quantisation: the scales in 8 bits. The mean is summed in f64, in order.
    pub fn quantise_scales(&self) -> QuantisedScales {
        let sum: f64 = self.scales.iter().copied().map(f64::from).sum();
        let offset = (sum / self.scales.len().max(1) as f64) as f32;
        let centred: Vec<f32> = self.scales.iter().map(|scale| scale - offset).collect();
        let mut codes = vec![0; centred.len()];
        let blocks = centred.chunks(SCALES_PER_BLOCK).zip(codes.chunks_mut(SCALES_PER_BLOCK));
        let absmax = blocks.map(|(centred, codes)| SIGNED.encode(centred, codes)).collect();
        QuantisedScales { codes, absmax, offset }
    }
}

/// Elements `first..` of a doubly quantised tensor on the host, as a device would dequantise them to `dtype`. `codes` are
/// those of these elements, from an even one on.
pub fn dequantise_on_host(
    dtype: DType,
    codes: &[u8],
    scales: &QuantisedScales,
    first: usize,
    out: &mut [f32],
) {
    assert!(first.is_multiple_of(2), "a byte holds two codes, so a range starts at an even element");
    let round: fn(f32) -> f32 = match dtype {
        DType::F32 => |weight| weight,
        DType::BF16 => |weight| Real::to_f32(<half::bf16 as Real>::from_f32(weight)),
        DType::F16 => |weight| Real::to_f32(<half::f16 as Real>::from_f32(weight)),
        other => panic!("{other} is not a float storage type"),
    };
    let QuantisedScales { codes: scale_codes, absmax, offset } = scales;
    let (mut scaled_block, mut scale) = (usize::MAX, 0.0);
    for (i, out) in out.iter_mut().enumerate() {
        let block = (first + i) / BLOCK_ELEMS;
        if block != scaled_block {
            (scaled_block, scale) = (block, reference::scale(scale_codes, absmax, *offset, block));
        }
        *out = round(VALUES[usize::from(reference::code(codes, i))] * scale);
    }
}
