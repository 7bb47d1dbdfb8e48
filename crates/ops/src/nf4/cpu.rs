#[cfg(target_arch = "x86_64")]
use lockstep_device::InstructionSet;
use lockstep_device::{CpuQueue, Isa, Real, View};

use super::{BLOCK_ELEMS, Nf4, SCALES_PER_BLOCK, Scales, VALUES};
use crate::dispatch::with_real;
use crate::quant::dynamic_map::SIGNED;

/// Elements that a pool item writes.
const ELEMS_PER_ITEM: usize = 64 * 1024;

pub(super) fn dequantise(cpu: &CpuQueue, out: View, from: &Nf4, first: usize) {
    with_real!(out.dtype(), R => {
        cpu.pool.run(out.len().div_ceil(ELEMS_PER_ITEM), &|item, _| {
            let start = item * ELEMS_PER_ITEM;
            let part = out.slice(start, ELEMS_PER_ITEM.min(out.len() - start));
            let first = first + start;
            // SAFETY: items write disjoint parts of the output; codes and scales are only read.
            let (out, codes) = unsafe {
                let codes = from.codes.slice(first / 2, part.len().div_ceil(2));
                (part.as_mut::<R>(), codes.as_slice::<u8>())
            };
            cpu.isa.run(#[inline(always)] || {
                let blocks = out.chunks_mut(BLOCK_ELEMS).zip(codes.chunks(BLOCK_ELEMS / 2));
                for (block, (out, codes)) in blocks.enumerate() {
                    dequantise_block(cpu.isa, out, codes, scale(&from.scales, first / BLOCK_ELEMS + block));
                }
            });
        });
    });
}

#[inline(always)]
fn scale(scales: &Scales, block: usize) -> f32 {
    // SAFETY: scales are only read, and there is one for every block.
    unsafe {
        match scales {
            Scales::F32(scales) => scales.as_slice::<f32>()[block],
            Scales::Double { codes, absmax, offset } => {
                let code = usize::from(codes.as_slice::<u8>()[block]);
                SIGNED.values[code] * absmax.as_slice::<f32>()[block / SCALES_PER_BLOCK] + offset
            }
        }
    }
}

/// Rounds the 16 possible weights of the block first, so that each element is a lookup.
#[inline(always)]
fn dequantise_block<R: Real>(isa: Isa, out: &mut [R], codes: &[u8], scale: f32) {
    let mut weights = [R::from_f32(0.0); 16];
    for (weight, value) in weights.iter_mut().zip(VALUES) {
        *weight = R::from_f32(value * scale);
    }
    #[cfg(target_arch = "x86_64")]
    if isa.set() != InstructionSet::Baseline
        && let (Ok(out), Ok(codes)) = (<&mut [R; BLOCK_ELEMS]>::try_from(&mut *out), codes.try_into())
    {
        // SAFETY: both sets have AVX2, and an `Isa` only exists for a set that was detected.
        return unsafe { super::x86::look_up(out, codes, &weights) };
    }
    let _ = isa;
    let weight = |code: u8| weights[usize::from(code & 15)];
    let (pairs, last) = out.as_chunks_mut::<2>();
    for (pair, codes) in pairs.iter_mut().zip(codes) {
        *pair = [weight(codes >> 4), weight(*codes)];
    }
    if let ([last], Some(codes)) = (last, codes.last()) {
        *last = weight(codes >> 4);
    }
}
