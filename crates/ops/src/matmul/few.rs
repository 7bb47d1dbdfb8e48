//! A·Bᵀ for few rows of A: what generation runs, a token per document.
//!
//! Packing B for a product that uses each of its elements a few times would cost more than the product.
//! So the roles change: rows of B are read where they lie, as the kernel reads A, and the few rows of A
//! are packed as its panel; tiles come out transposed. An element is summed by the same chain in the same
//! order (a product of two numbers does not mind which comes first), so the bits are those of any other
//! number of rows.

use lockstep_core::DType;
use lockstep_device::{CpuQueue, Real, View};

use super::cpu::{A_ELEMS, C_ELEMS, PACKED_B_ELEMS};
use super::kernel::{Tile, prefetch, tile};
use super::{Init, KC, MR, NR, pack};
use crate::Mat;
use crate::dispatch::with_real;

/// From so many rows on, packing B pays.
const FEW: usize = 2 * NR;
/// The most rows of B in one item of work.
const ITEM_ROWS: usize = 8 * MR;
const ITEMS_PER_THREAD: usize = 2;

/// Whether [`product`] is the way for `m` rows over an inner dimension of `k`.
pub(super) fn applies(m: usize, k: usize) -> bool {
    m <= FEW && k > 0 && m.div_ceil(NR) * NR * k <= PACKED_B_ELEMS
}

/// C\[M, N\] = init + A\[M, K\] · B\[N, K\]ᵀ.
pub(super) fn product(cpu: &CpuQueue, c: Mat, a: Mat, b: Mat, init: Init, scratch: View) {
    let (m, n, k) = (c.rows, c.cols, a.cols);
    let panels = m.div_ceil(NR);
    let packed = scratch.first(panels * NR * k);
    let per_thread = A_ELEMS + C_ELEMS;
    let rooms = scratch.slice(PACKED_B_ELEMS, cpu.pool.num_threads() * per_thread);
    // Inner block by inner block, panel by panel.
    let panel = |first_k: usize, depth: usize, p: usize| (first_k * panels + p * depth) * NR;
    for first_k in (0..k).step_by(KC) {
        let depth = (k - first_k).min(KC);
        for p in 0..panels {
            let rows = (m - p * NR).min(NR);
            let out = packed.slice(panel(first_k, depth, p), depth * NR);
            with_real!(a.view.dtype(), R => {
                // SAFETY: A is an input of this call; the panels are scratch.
                let (source, out) = unsafe { (a.view.as_slice::<R>(), out.as_mut::<f32>()) };
                let source = &source[p * NR * a.stride + first_k..];
                cpu.isa.run(#[inline(always)] || pack::transposed(source, a.stride, depth, rows, out))
            });
        }
    }
    let num_threads = cpu.pool.num_threads();
    let wanted = n.div_ceil(ITEMS_PER_THREAD * num_threads).next_multiple_of(MR);
    let item_rows = wanted.min(ITEM_ROWS);
    cpu.pool.run(n.div_ceil(item_rows), &|item, worker| {
        let room = rooms.slice(worker * per_thread, per_thread);
        let (first, rows) = (item * item_rows, item_rows.min(n - item * item_rows));
        // SAFETY: a worker's part of the scratch is its own.
        let (widened, sums) = unsafe { room.as_mut::<f32>() }.split_at_mut(A_ELEMS);
        let sums = &mut sums[..panels * rows * NR];
        let start = match init {
            Init::Zero => None,
            Init::Accumulate => Some(c),
            Init::Residual(residual) => Some(residual),
        };
        if let Some(start) = start {
            with_real!(start.view.dtype(), R => {
                cpu.isa.run(#[inline(always)] || load::<R>(start, first, rows, sums));
            });
        }
        for first_k in (0..k).step_by(KC) {
            let depth = (k - first_k).min(KC);
            let (base, row) = rows_of(cpu, b, first, rows, first_k, depth, widened);
            for at in (0..rows).step_by(MR) {
                // The weights come from far away, each once: the next tile's arrive while this one is computed.
                // Behind the last one, the first of an item that this thread may take next.
                let ahead = if at + MR < rows { at + MR } else { num_threads * item_rows };
                for row_ahead in ahead..ahead + MR {
                    prefetch(base.wrapping_add(row_ahead * row), depth);
                }
                for p in 0..panels {
                    // SAFETY: inside the rows of B, the panel and this item's sums; nothing overlaps.
                    unsafe {
                        let sums = sums.as_mut_ptr().add((p * rows + at) * NR);
                        let added = start.is_some() || first_k > 0;
                        let init = if added { sums.cast_const() } else { std::ptr::null() };
                        let b = packed.as_ptr::<f32>().add(panel(first_k, depth, p));
                        tile(
                            cpu.isa,
                            &Tile {
                                depth,
                                a: base.add(at * row),
                                a_row: row,
                                a_col: 1,
                                b,
                                init,
                                init_row: NR,
                                c: sums,
                                c_row: NR,
                                rows: (rows - at).min(MR),
                                cols: (m - p * NR).min(NR),
                            },
                        );
                    }
                }
            }
        }
        with_real!(c.view.dtype(), R => cpu.isa.run(#[inline(always)] || store::<R>(c, first, rows, sums)));
    });
}

/// Some rows of B over an inner block, in f32: where they lie, or widened. The first element and the
/// distance of rows.
fn rows_of(
    cpu: &CpuQueue,
    b: Mat,
    first: usize,
    rows: usize,
    first_k: usize,
    depth: usize,
    room: &mut [f32],
) -> (*const f32, usize) {
    let start = first * b.stride + first_k;
    if b.view.dtype() == DType::F32 {
        return (b.view.slice(start, 0).as_ptr(), b.stride);
    }
    with_real!(b.view.dtype(), R => {
        // SAFETY: B is an input of this call; nobody writes it meanwhile.
        let source = &unsafe { b.view.as_slice::<R>() }[start..];
        cpu.isa.run(#[inline(always)] || pack::widen_rows(source, b.stride, rows, depth, room));
    });
    (room.as_ptr(), depth)
}

/// Columns `first..first + cols` of the initial values, transposed: \[cols, NR\] for every NR rows.
#[inline(always)]
fn load<R: Real>(start: Mat, first: usize, cols: usize, sums: &mut [f32]) {
    for (p, sums) in sums.chunks_exact_mut(cols * NR).enumerate() {
        let rows = start.row_range(p * NR, NR.min(start.rows - p * NR)).columns(first, cols);
        // SAFETY: nobody writes these columns but this item, later.
        let source = unsafe { rows.view.as_slice::<R>() };
        pack::transposed(source, rows.stride, cols, rows.rows, sums);
    }
}

/// The sums as columns `first..first + cols` of C: turned back NR columns at a time.
#[inline(always)]
fn store<R: Real>(c: Mat, first: usize, cols: usize, sums: &[f32]) {
    let mut turned = [0f32; NR * NR];
    for (p, sums) in sums.chunks_exact(cols * NR).enumerate() {
        let rows = NR.min(c.rows - p * NR);
        for (part, sums) in sums.chunks(NR * NR).enumerate() {
            let width = sums.len() / NR;
            pack::transposed(sums, NR, rows, width, &mut turned);
            for (i, turned) in turned.chunks_exact(NR).take(rows).enumerate() {
                let to = c.view.slice((p * NR + i) * c.stride + first + part * NR, width);
                // SAFETY: the item alone writes these columns.
                for (to, sum) in unsafe { to.as_mut::<R>() }.iter_mut().zip(turned) {
                    *to = R::from_f32(*sum);
                }
            }
        }
    }
}
