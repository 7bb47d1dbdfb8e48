//! Packing: operands rearranged into the order the tile kernels read them, widened to f32.

use lockstep_device::Real;

use super::{MR, NR};

/// Packs `cols` (at most NR) columns of a \[depth, cols\] block into a panel \[depth, NR\], zero beyond.
/// Row k of the source starts at `k * stride`.
#[inline(always)]
pub(crate) fn natural<R: Real>(source: &[R], stride: usize, depth: usize, cols: usize, panel: &mut [f32]) {
    let panel = &mut panel[..depth * NR];
    if cols == NR {
        for (k, row) in panel.chunks_exact_mut(NR).enumerate() {
            let from = &source[k * stride..k * stride + NR];
            for (to, from) in row.iter_mut().zip(from) {
                *to = from.to_f32();
            }
        }
    } else {
        for (k, row) in panel.chunks_exact_mut(NR).enumerate() {
            let from = &source[k * stride..k * stride + cols];
            let (used, padding) = row.split_at_mut(cols);
            for (to, from) in used.iter_mut().zip(from) {
                *to = from.to_f32();
            }
            padding.fill(0.0);
        }
    }
}

/// Packs a block stored as \[cols, depth\] (rows of a weight are columns of B) into a panel
/// \[depth, NR\]. Column j of the panel is the source's row j, which starts at `j * stride`.
///
/// Works on squares of 16 by 16 held in registers: read along rows, written along columns.
#[inline(always)]
pub(crate) fn transposed<R: Real>(source: &[R], stride: usize, depth: usize, cols: usize, panel: &mut [f32]) {
    const SQUARE: usize = 16;
    let panel = &mut panel[..depth * NR];
    if cols < NR {
        panel.fill(0.0);
    }
    let whole_depth = depth - depth % SQUARE;
    for first_col in (0..cols).step_by(SQUARE) {
        let width = (cols - first_col).min(SQUARE);
        if width == SQUARE {
            for first_k in (0..whole_depth).step_by(SQUARE) {
                let mut square = [[0f32; SQUARE]; SQUARE];
                for (j, row) in square.iter_mut().enumerate() {
                    let from = (first_col + j) * stride + first_k;
                    for (to, from) in row.iter_mut().zip(&source[from..from + SQUARE]) {
                        *to = from.to_f32();
                    }
                }
                for (k, to) in panel[first_k * NR..].chunks_mut(NR).take(SQUARE).enumerate() {
                    for (to, row) in to[first_col..first_col + SQUARE].iter_mut().zip(&square) {
                        *to = row[k];
                    }
                }
            }
        }
        let first_k = if width == SQUARE { whole_depth } else { 0 };
        for j in first_col..first_col + width {
            for k in first_k..depth {
                panel[k * NR + j] = source[j * stride + k].to_f32();
            }
        }
    }
}

/// Packs `rows` columns of a \[depth, rows\] block, to be used as rows of A, into tiles \[depth, MR\].
/// Row k of the source starts at `k * stride` and is read once, across all tiles.
#[inline(always)]
pub(crate) fn a_columns<R: Real>(source: &[R], stride: usize, depth: usize, rows: usize, out: &mut [f32]) {
    let whole_tiles = rows / MR;
    for k in 0..depth {
        let from = &source[k * stride..k * stride + rows];
        for t in 0..whole_tiles {
            let to = &mut out[(t * depth + k) * MR..][..MR];
            for (to, from) in to.iter_mut().zip(&from[t * MR..][..MR]) {
                *to = from.to_f32();
            }
        }
        for (i, from) in from[whole_tiles * MR..].iter().enumerate() {
            out[(whole_tiles * depth + k) * MR + i] = from.to_f32();
        }
    }
}

/// Widens `rows` rows of `depth` elements to f32, row-major and dense.
#[inline(always)]
pub(crate) fn widen_rows<R: Real>(source: &[R], stride: usize, rows: usize, depth: usize, out: &mut [f32]) {
    for (i, to) in out[..rows * depth].chunks_exact_mut(depth).enumerate() {
        for (to, from) in to.iter_mut().zip(&source[i * stride..i * stride + depth]) {
            *to = from.to_f32();
        }
    }
}
