//! Transposes a square of 16 by 16 words in AVX-512 registers.

use std::arch::x86_64::*;

/// Word j of row i becomes word i of row j.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose_16x16(rows: [__m512i; 16]) -> [__m512i; 16] {
    let mut pairs = rows;
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // Quarter q of fours[4 g + j] holds column 4 q + j of rows 4 g to 4 g + 3.
    let mut fours = rows;
    for g in 0..4 {
        fours[4 * g] = _mm512_unpacklo_epi64(pairs[4 * g], pairs[4 * g + 2]);
        fours[4 * g + 1] = _mm512_unpackhi_epi64(pairs[4 * g], pairs[4 * g + 2]);
        fours[4 * g + 2] = _mm512_unpacklo_epi64(pairs[4 * g + 1], pairs[4 * g + 3]);
        fours[4 * g + 3] = _mm512_unpackhi_epi64(pairs[4 * g + 1], pairs[4 * g + 3]);
    }
    // Combine eighths of the columns, then halves: columns j, j + 4, j + 8 and j + 12.
    let mut columns = rows;
    for j in 0..4 {
        let low = (
            _mm512_shuffle_i32x4::<0x88>(fours[j], fours[4 + j]),
            _mm512_shuffle_i32x4::<0xDD>(fours[j], fours[4 + j]),
        );
        let high = (
            _mm512_shuffle_i32x4::<0x88>(fours[8 + j], fours[12 + j]),
            _mm512_shuffle_i32x4::<0xDD>(fours[8 + j], fours[12 + j]),
        );
        columns[j] = _mm512_shuffle_i32x4::<0x88>(low.0, high.0);
        columns[j + 8] = _mm512_shuffle_i32x4::<0xDD>(low.0, high.0);
        columns[j + 4] = _mm512_shuffle_i32x4::<0x88>(low.1, high.1);
        columns[j + 12] = _mm512_shuffle_i32x4::<0xDD>(low.1, high.1);
    }
    columns
}
