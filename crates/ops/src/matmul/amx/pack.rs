//! Packing for AMX. Operands stay bf16; incomplete tiles are padded with zeros.
//!
//! Meant to be run by [`Isa::run`](lockstep_device::Isa::run), so that its loops are vectorized.

use half::bf16;

use super::{SIDE, STEP, TILE, machine};
use crate::Mat;
use crate::matmul::NR;
use crate::matmul::cpu::ROW_BLOCK;

/// Packs up to [`STEP`] rows of B\[K, N\], the depth of a tile, into panels of NR columns: two rows become one row of
/// words. `out` points to the first word of panel 0; panels are `panel_stride` elements apart.
///
/// # Safety
/// `out` is valid for that many rows in each of the panels, and nobody else accesses them; nobody writes B.
#[inline(always)]
pub(in crate::matmul) unsafe fn natural(mat: Mat, out: *mut bf16, panel_stride: usize) {
    debug_assert!(mat.rows <= STEP);
    // SAFETY: guaranteed by the caller.
    let source = unsafe { mat.view.as_slice::<bf16>() };
    let row = |k: usize| if k < mat.rows { &source[k * mat.stride..][..mat.cols] } else { &[] };
    for word in 0..STEP / 2 {
        let ((even, even_rest), (odd, odd_rest)) =
            (row(2 * word).as_chunks::<NR>(), row(2 * word + 1).as_chunks::<NR>());
        for panel in 0..mat.cols.div_ceil(NR) {
            let part = |whole: &[[bf16; NR]], rest: &[bf16]| match whole.get(panel) {
                Some(part) => *part,
                None => padded(if panel == whole.len() { rest } else { &[] }),
            };
            let (even, odd) = (part(even, even_rest), part(odd, odd_rest));
            let words: [[bf16; 2]; NR] = std::array::from_fn(|j| [even[j], odd[j]]);
            // SAFETY: a row of words of this panel, as the caller guarantees.
            unsafe {
                out.add(panel * panel_stride + word * 2 * NR).cast::<[[bf16; 2]; NR]>().write_unaligned(words)
            };
        }
    }
}

/// Packs a block stored as \[cols, depth\] (rows of a weight are columns of B) into a panel of `width` columns.
///
/// # Safety
/// Nobody writes the block; the machine has AMX.
#[inline(always)]
pub(in crate::matmul) unsafe fn transposed(mat: Mat, width: usize, panel: &mut [bf16]) {
    let (cols, depth) = (mat.rows, mat.cols);
    let panel = &mut panel[..depth.next_multiple_of(STEP) * width];
    debug_assert!(cols <= width && width.is_multiple_of(TILE));
    // SAFETY: guaranteed by the caller.
    let source = unsafe { mat.view.as_slice::<bf16>() };
    for k in (0..depth).step_by(STEP) {
        for col in (0..width).step_by(TILE) {
            let to = &mut panel[k * width + 2 * col..];
            assert!(to.len() >= (TILE - 1) * 2 * width + STEP);
            let (to, to_row) = (to.as_mut_ptr(), 2 * width);
            if col + TILE <= cols && k + STEP <= depth {
                let from = &source[col * mat.stride + k..][..(TILE - 1) * mat.stride + STEP];
                // SAFETY: both hold the square, as was just checked; a machine with AMX has AVX-512.
                unsafe { machine::transpose(from.as_ptr(), mat.stride, to, to_row) };
                continue;
            }
            let mut square = [[bf16::ZERO; STEP]; TILE];
            for (j, row) in square.iter_mut().enumerate().take(cols.saturating_sub(col)) {
                *row = padded(&source[(col + j) * mat.stride + k..][..STEP.min(depth - k)]);
            }
            // SAFETY: as above.
            unsafe { machine::transpose(square.as_flattened().as_ptr(), STEP, to, to_row) };
        }
    }
}

/// Copies rows of A\[M, K\] tile by tile: \[M / 16, K / 32, 16, 32\].
///
/// # Safety
/// Nobody writes A.
#[inline(always)]
pub(super) unsafe fn rows(mat: Mat, scratch: &mut [bf16]) {
    // SAFETY: guaranteed by the caller.
    let source = unsafe { mat.view.as_slice::<bf16>() };
    let steps = mat.cols.div_ceil(STEP);
    let (tiles, _) = scratch.as_chunks_mut::<STEP>();
    for i in 0..mat.rows.next_multiple_of(TILE) {
        let row = if i < mat.rows { &source[i * mat.stride..][..mat.cols] } else { &[] };
        for step in 0..steps {
            let part = row.get(step * STEP..).unwrap_or_default();
            tiles[(i / TILE * steps + step) * TILE + i % TILE] = match part.first_chunk() {
                Some(whole) => *whole,
                None => padded(part),
            };
        }
    }
}

/// Copies A stored as \[K, M\] into tiles of its transpose, in the order of [`rows`].
///
/// # Safety
/// Nobody writes A; the machine has AMX.
#[inline(always)]
pub(super) unsafe fn columns(mat: Mat, scratch: &mut [bf16]) {
    const PANEL: usize = STEP * NR;
    let mut words = [bf16::ZERO; ROW_BLOCK.div_ceil(NR) * PANEL];
    let (tiles, steps) = (mat.cols.div_ceil(TILE), mat.rows.div_ceil(STEP));
    let scratch = &mut scratch[..tiles * steps * TILE * STEP];
    for step in 0..steps {
        let k = step * STEP;
        assert!(mat.cols <= ROW_BLOCK);
        // SAFETY: guaranteed by the caller, and `words` holds as many panels as a row block has columns.
        unsafe { natural(mat.row_range(k, STEP.min(mat.rows - k)), words.as_mut_ptr(), PANEL) };
        for tile in 0..tiles {
            let from = &words[tile * TILE / NR * PANEL + tile * TILE % NR * 2..];
            let to = &mut scratch[(tile * steps + step) * TILE * STEP..][..TILE * STEP];
            assert!(from.len() >= (TILE - 1) * 2 * NR + STEP);
            // SAFETY: both hold the square, as was just checked; a machine with AMX has AVX-512.
            unsafe { machine::transpose(from.as_ptr(), 2 * NR, to.as_mut_ptr(), STEP) };
        }
    }
}

/// The elements of `part`, padded with zeros.
#[inline(always)]
fn padded<const LEN: usize>(part: &[bf16]) -> [bf16; LEN] {
    let mut row = [bf16::ZERO; LEN];
    row[..part.len()].copy_from_slice(part);
    row
}

const _: () = assert!(NR == SIDE);
