//! Packing: operands rearranged into the order in which the tile kernels read them, widened to f32.

use lockstep_device::{Isa, Real};

use super::{MR, NR};

/// Packs `rows` rows of a matrix whose rows are `stride` apart into panels of NR columns, with zeros beyond `cols`.
/// `out` points to row 0 of panel 0; panels are `panel_elems` apart. Rows are read from end to end, across all panels,
/// which suits the hardware prefetcher.
///
/// # Safety
/// `out` is valid for `rows` rows in each of the panels, and nobody else accesses them.
#[inline(always)]
pub(crate) unsafe fn natural<R: Real>(
    source: &[R],
    stride: usize,
    rows: usize,
    cols: usize,
    out: *mut f32,
    panel_elems: usize,
) {
    for k in 0..rows {
        let from = &source[k * stride..][..cols];
        let (whole, rest) = from.as_chunks::<NR>();
        for (p, part) in whole.iter().enumerate() {
            // Copy a row by value: the compiler cannot know that `out` and `source` do not overlap, and would copy
            // element by element.
            let row = part.map(R::to_f32);
            // SAFETY: row k of panel p, as the caller guarantees.
            unsafe { out.add(p * panel_elems + k * NR).cast::<[f32; NR]>().write_unaligned(row) };
        }
        if !rest.is_empty() {
            let mut row = [0f32; NR];
            for (to, from) in row.iter_mut().zip(rest) {
                *to = from.to_f32();
            }
            // SAFETY: as above; the last panel is padded to NR columns.
            unsafe { out.add(whole.len() * panel_elems + k * NR).cast::<[f32; NR]>().write_unaligned(row) };
        }
    }
}

/// The side of the squares that [`transposed`] processes.
const SQUARE: usize = 16;

/// Packs a block stored as \[cols, depth\] (rows of a weight are columns of B) into a panel \[depth, WIDTH\]. Column j
/// of the panel is the source's row j, which starts at `j * stride`.
///
/// Processes squares of 16 by 16 in registers: reads rows and writes columns.
#[inline(always)]
pub(crate) fn transposed<R: Real, const WIDTH: usize>(
    isa: Isa,
    source: &[R],
    stride: usize,
    depth: usize,
    cols: usize,
    panel: &mut [f32],
) {
    let panel = &mut panel[..depth * WIDTH];
    if cols < WIDTH {
        panel.fill(0.0);
    }
    let whole_depth = depth - depth % SQUARE;
    for first_col in (0..cols).step_by(SQUARE) {
        let width = (cols - first_col).min(SQUARE);
        if width == SQUARE {
            for first_k in (0..whole_depth).step_by(SQUARE) {
                let from = &source[first_col * stride + first_k..][..(SQUARE - 1) * stride + SQUARE];
                let to = &mut panel[first_k * WIDTH + first_col..][..(SQUARE - 1) * WIDTH + SQUARE];
                square(isa, from, stride, to, WIDTH);
            }
        }
        let first_k = if width == SQUARE { whole_depth } else { 0 };
        for j in first_col..first_col + width {
            for k in first_k..depth {
                panel[k * WIDTH + j] = source[j * stride + k].to_f32();
            }
        }
    }
}

/// Transposes one square. Its rows are `from_row` apart in the source and `to_row` apart in the destination.
#[inline(always)]
fn square<R: Real>(isa: Isa, from: &[R], from_row: usize, to: &mut [f32], to_row: usize) {
    #[cfg(target_arch = "x86_64")]
    if isa.set() == lockstep_device::InstructionSet::Avx512 {
        assert!(from.len() > (SQUARE - 1) * from_row + 15 && to.len() > (SQUARE - 1) * to_row + 15);
        // SAFETY: both were just checked to hold the square; the set was detected.
        return unsafe { square_avx512(from.as_ptr(), from_row, to.as_mut_ptr(), to_row) };
    }
    let _ = isa;
    let mut square = [[0f32; SQUARE]; SQUARE];
    for (row, from) in square.iter_mut().zip(from.chunks(from_row)) {
        for (to, from) in row.iter_mut().zip(&from[..SQUARE]) {
            *to = from.to_f32();
        }
    }
    for (k, to) in to.chunks_mut(to_row).enumerate() {
        for (to, row) in to[..SQUARE].iter_mut().zip(&square) {
            *to = row[k];
        }
    }
}

/// # Safety
/// Both are valid for the square, on a machine with AVX-512.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn square_avx512<R: Real>(from: *const R, from_row: usize, to: *mut f32, to_row: usize) {
    use std::arch::x86_64::{__m512i, _mm512_loadu_si512, _mm512_setzero_si512, _mm512_storeu_si512};
    let mut rows = [_mm512_setzero_si512(); SQUARE];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: guaranteed by the caller; sixteen f32 have the size of a vector.
        *row = unsafe {
            let from = from.add(i * from_row);
            if R::DTYPE == lockstep_core::DType::F32 {
                _mm512_loadu_si512(from.cast())
            } else {
                let wide = from.cast::<[R; SQUARE]>().read_unaligned().map(R::to_f32);
                std::mem::transmute::<[f32; SQUARE], __m512i>(wide)
            }
        };
    }
    for (j, column) in super::transpose::transpose_16x16(rows).into_iter().enumerate() {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_storeu_si512(to.add(j * to_row).cast(), column) };
    }
}

/// Packs `rows` rows of a matrix, whose columns become rows of A, into tiles of MR columns. `out` points to row 0 of
/// tile 0; tiles are `tile_elems` apart.
///
/// # Safety
/// As for [`natural`].
#[inline(always)]
pub(crate) unsafe fn a_columns<R: Real>(
    source: &[R],
    stride: usize,
    rows: usize,
    cols: usize,
    out: *mut f32,
    tile_elems: usize,
) {
    for k in 0..rows {
        let from = &source[k * stride..][..cols];
        let (whole, rest) = from.as_chunks::<MR>();
        for (t, part) in whole.iter().enumerate() {
            let row = part.map(R::to_f32);
            // SAFETY: row k of tile t, as the caller guarantees.
            unsafe { out.add(t * tile_elems + k * MR).cast::<[f32; MR]>().write_unaligned(row) };
        }
        for (i, from) in rest.iter().enumerate() {
            // SAFETY: as above; the kernel does not read beyond the columns that exist.
            unsafe { *out.add(whole.len() * tile_elems + k * MR + i) = from.to_f32() };
        }
    }
}

/// Widens `rows` rows of `depth` elements to f32, row-major and contiguous.
#[inline(always)]
pub(crate) fn widen_rows<R: Real>(source: &[R], stride: usize, rows: usize, depth: usize, out: &mut [f32]) {
    for (i, to) in out[..rows * depth].chunks_exact_mut(depth).enumerate() {
        for (to, from) in to.iter_mut().zip(&source[i * stride..i * stride + depth]) {
            *to = from.to_f32();
        }
    }
}
