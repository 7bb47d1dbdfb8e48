//! The instructions: tiles, and the vectors around them. Machines with AMX have AVX-512.

use std::arch::asm;
use std::arch::x86_64::*;

use half::bf16;

use super::super::transpose::transpose_16x16;
use super::{Block, SIDE, STEP, TILE};

/// Tiles 0 to 3 are of C, 4 and 5 of A, 6 and 7 of B. This is one block of assembly: nothing stays in tiles between
/// two. Every operand must be named, so where there is no lower tile of C a comment names it.
macro_rules! multiply {
    (
        $call:ident, $to:ident, $to_row:ident,
        zero $($zero:literal)*, step $($step:literal)*, store $($store:literal)*
    ) => {
        asm!(
            $($zero,)*
            "2:",
            $($step,)*
            "add {a}, {next}",
            "add {lower}, {next}",
            "add {b}, {b_next}",
            "dec {steps}",
            "jnz 2b",
            $($store,)*
            a = inout(reg) $call.a.base => _,
            lower = inout(reg) $call.a.base.wrapping_add($call.a.tile) => _,
            a_row = in(reg) 2 * $call.a.row,
            next = in(reg) 2 * $call.a.next,
            b = inout(reg) $call.b => _,
            b_row = in(reg) 4 * $call.b_width,
            b_next = in(reg) 4 * TILE * $call.b_width,
            steps = inout(reg) $call.depth.div_ceil(STEP) => _,
            c = in(reg) $to,
            c_lower = in(reg) $to.wrapping_add(TILE * $to_row),
            c_row = in(reg) 4 * $to_row,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Writes A·B over the inner block, in whole tiles, to rows that are `to_row` apart.
///
/// # Safety
/// As [`super::block`]; this thread's tiles are configured, and `to` is valid for the whole tiles.
pub(super) unsafe fn multiply(block: &Block, to: *mut f32, to_row: usize) {
    let call = &Block { a: block.a.at_row(block.first_row), ..*block };
    // SAFETY: reads as many tiles of A and B as the depth has, and the tiles of C that hold its rows and columns.
    unsafe {
        match (call.rows > TILE, call.cols > TILE) {
            (true, true) => multiply!(call, to, to_row,
                zero "tilezero tmm0" "tilezero tmm1" "tilezero tmm2" "tilezero tmm3",
                step
                    "tileloadd tmm6, [{b} + {b_row}*1]"
                    "tileloadd tmm4, [{a} + {a_row}*1]"
                    "tileloadd tmm7, [{b} + {b_row}*1 + 64]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm5, [{lower} + {a_row}*1]"
                    "tdpbf16ps tmm1, tmm4, tmm7"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tdpbf16ps tmm3, tmm5, tmm7",
                store
                    "tilestored [{c} + {c_row}*1], tmm0"
                    "tilestored [{c} + {c_row}*1 + 64], tmm1"
                    "tilestored [{c_lower} + {c_row}*1], tmm2"
                    "tilestored [{c_lower} + {c_row}*1 + 64], tmm3"
            ),
            (false, true) => multiply!(call, to, to_row,
                zero "tilezero tmm0" "tilezero tmm1",
                step
                    "tileloadd tmm4, [{a} + {a_row}*1]"
                    "tileloadd tmm6, [{b} + {b_row}*1]"
                    "tileloadd tmm7, [{b} + {b_row}*1 + 64]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm1, tmm4, tmm7",
                store
                    "tilestored [{c} + {c_row}*1], tmm0"
                    "tilestored [{c} + {c_row}*1 + 64], tmm1"
                    "/* {c_lower} */"
            ),
            (true, false) => multiply!(call, to, to_row,
                zero "tilezero tmm0" "tilezero tmm2",
                step
                    "tileloadd tmm4, [{a} + {a_row}*1]"
                    "tileloadd tmm5, [{lower} + {a_row}*1]"
                    "tileloadd tmm6, [{b} + {b_row}*1]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm2, tmm5, tmm6",
                store
                    "tilestored [{c} + {c_row}*1], tmm0"
                    "tilestored [{c_lower} + {c_row}*1], tmm2"
            ),
            (false, false) => multiply!(call, to, to_row,
                zero "tilezero tmm0",
                step
                    "tileloadd tmm4, [{a} + {a_row}*1]"
                    "tileloadd tmm6, [{b} + {b_row}*1]"
                    "tdpbf16ps tmm0, tmm4, tmm6",
                store
                    "tilestored [{c} + {c_row}*1], tmm0"
                    "/* {c_lower} */"
            ),
        }
    }
}

/// Prefetches the block of C while it is computed.
///
/// # Safety
/// This thread's tiles are configured.
pub(super) unsafe fn prefetch(block: &Block) {
    for i in 0..block.rows {
        for column in (0..block.cols).step_by(16) {
            let c = block.c.wrapping_add(i * block.c_row + column).cast::<i8>();
            // SAFETY: any address may be prefetched.
            unsafe { _mm_prefetch(c, _MM_HINT_ET0) };
        }
    }
}

/// Adds sums, contiguous in rows of [`SIDE`], to the initial value and writes the block.
///
/// # Safety
/// As [`super::block`]; `sums` is valid for the block's rows and columns.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn add(block: &Block, sums: *const f32) {
    for i in 0..block.rows {
        for column in (0..block.cols).step_by(16) {
            let lanes = (block.cols - column).min(16);
            let mask = ((1u32 << lanes) - 1) as __mmask16;
            // SAFETY: lanes beyond the columns are masked.
            unsafe {
                let mut value = _mm512_maskz_loadu_ps(mask, sums.add(i * SIDE + column));
                if !block.init.is_null() {
                    let init = _mm512_maskz_loadu_ps(mask, block.init.add(i * block.init_row + column));
                    value = _mm512_add_ps(init, value);
                }
                _mm512_mask_storeu_ps(block.c.add(i * block.c_row + column), mask, value);
            }
        }
    }
}

/// Transposes a square of 16 by 16 words: word j of the row at `from + i * from_row` becomes word i of the row at
/// `to + j * to_row`. A word is two bf16; distances are in bf16.
///
/// # Safety
/// Both are valid for the square, on a machine with AVX-512.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn transpose(from: *const bf16, from_row: usize, to: *mut bf16, to_row: usize) {
    // SAFETY: guaranteed by the caller.
    let rows: [__m512i; 16] =
        std::array::from_fn(|i| unsafe { _mm512_loadu_si512(from.add(i * from_row).cast()) });
    for (j, column) in transpose_16x16(rows).into_iter().enumerate() {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_storeu_si512(to.add(j * to_row).cast(), column) };
    }
}
