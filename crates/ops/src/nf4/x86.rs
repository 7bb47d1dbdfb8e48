//! Lookups of a whole block with byte shuffles: one shuffle finds one byte of sixteen weights.

use std::arch::x86_64::*;

use lockstep_device::Real;

use super::BLOCK_ELEMS;

/// Writes `weights[code]` for every code of a block. The first code of a byte is in its high half.
///
/// # Safety
/// The machine has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn look_up<R: Real>(
    out: &mut [R; BLOCK_ELEMS],
    codes: &[u8; BLOCK_ELEMS / 2],
    weights: &[R; 16],
) {
    let half = _mm_set1_epi8(15);
    let planes = byte_planes(weights);
    for (i, codes) in codes.as_chunks::<16>().0.iter().enumerate() {
        // SAFETY: reads 16 bytes of an array that has them; unaligned loads may start anywhere.
        let packed = unsafe { _mm_loadu_si128(codes.as_ptr().cast()) };
        let (first, second) = (_mm_and_si128(_mm_srli_epi16::<4>(packed), half), _mm_and_si128(packed, half));
        let pair = [_mm_unpacklo_epi8(first, second), _mm_unpackhi_epi8(first, second)];
        for (j, codes) in pair.into_iter().enumerate() {
            let out = &mut out[32 * i + 16 * j..][..16];
            // SAFETY: this function has the same target features, and there are sixteen weights to write.
            unsafe { store_16(out.as_mut_ptr().cast(), codes, &planes, size_of::<R>()) };
        }
    }
}

/// Byte b of each of the sixteen weights, for every b.
#[inline]
#[target_feature(enable = "avx2")]
fn byte_planes<R: Real>(weights: &[R; 16]) -> [__m128i; 4] {
    let mut bytes = [[0u8; 16]; 4];
    for (i, weight) in weights.iter().enumerate() {
        let bits = weight_bits(*weight);
        for (b, plane) in bytes.iter_mut().enumerate().take(size_of::<R>()) {
            plane[i] = (bits >> (8 * b)) as u8;
        }
    }
    // SAFETY: reads 16 bytes of arrays that have them.
    bytes.map(|plane| unsafe { _mm_loadu_si128(plane.as_ptr().cast()) })
}

/// The bits of a weight.
#[inline(always)]
fn weight_bits<R: Real>(weight: R) -> u32 {
    let at = (&raw const weight).cast::<u8>();
    // SAFETY: storage types are plain numbers of two or four bytes, with the alignment of their size.
    unsafe {
        match size_of::<R>() {
            2 => u32::from(at.cast::<u16>().read()),
            4 => at.cast::<u32>().read(),
            other => panic!("a storage type of {other} bytes"),
        }
    }
}

/// Writes the weights of sixteen codes.
///
/// # Safety
/// `out` has room for sixteen elements of `bytes` bytes, which is 2 or 4.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store_16(out: *mut __m128i, codes: __m128i, planes: &[__m128i; 4], bytes: usize) {
    let [b0, b1, b2, b3] = planes.map(|plane| _mm_shuffle_epi8(plane, codes));
    let low = [_mm_unpacklo_epi8(b0, b1), _mm_unpackhi_epi8(b0, b1)];
    // SAFETY: guaranteed by the caller; unaligned stores may start anywhere.
    unsafe {
        if bytes == 2 {
            _mm_storeu_si128(out, low[0]);
            _mm_storeu_si128(out.add(1), low[1]);
            return;
        }
        let high = [_mm_unpacklo_epi8(b2, b3), _mm_unpackhi_epi8(b2, b3)];
        for i in 0..2 {
            _mm_storeu_si128(out.add(2 * i), _mm_unpacklo_epi16(low[i], high[i]));
            _mm_storeu_si128(out.add(2 * i + 1), _mm_unpackhi_epi16(low[i], high[i]));
        }
    }
}
