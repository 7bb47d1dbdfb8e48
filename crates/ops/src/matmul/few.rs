//! A·Bᵀ for few rows of A: what generation runs, a token per document.
//!
//! Packing B for a product that uses each of its elements a few times would cost more than the product.
//! So the roles change: rows of B are read where they lie, as the kernel reads A, and the few rows of A
//! are packed as its panel; tiles come out transposed. An element is summed by the same chain in the same
//! order (a product of two numbers does not mind which comes first), so the bits are those of any other
//! number of rows.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockstep_core::DType;
use lockstep_device::{CpuQueue, Real, View};

use super::cpu::{A_ELEMS, C_ELEMS, PACKED_ELEMS};
use super::kernel::{Tile, weights};
use super::{Init, KC, MR, NR, pack};
use crate::Mat;
use crate::dispatch::with_real;

/// From so many rows on, packing B pays.
const FEW: usize = 2 * NR;
/// Columns of the panel for the fewest rows: one vector of the widest instruction set.
const NARROW: usize = NR / 2;
/// The most tiles of MR rows of B that a thread takes at a time.
const TILES_AT_A_TIME: usize = 8;

/// Whether [`product`] is the way for `m` rows over an inner dimension of `k`.
pub(super) fn applies(m: usize, k: usize) -> bool {
    m <= FEW && k > 0 && m.next_multiple_of(NR) * k <= PACKED_ELEMS
}

/// C\[M, N\] = init + A\[M, K\] · B\[N, K\]ᵀ.
pub(super) fn product(cpu: &CpuQueue, c: Mat, a: Mat, b: Mat, init: Init, scratch: View) {
    if c.rows <= NARROW {
        in_panels::<NARROW>(cpu, c, a, b, init, scratch);
    } else {
        in_panels::<NR>(cpu, c, a, b, init, scratch);
    }
}

fn in_panels<const WIDTH: usize>(cpu: &CpuQueue, c: Mat, a: Mat, b: Mat, init: Init, scratch: View) {
    let num_threads = cpu.pool.num_threads();
    let packed_each = PACKED_ELEMS / num_threads;
    let room_each = A_ELEMS + C_ELEMS;
    let rooms = scratch.slice(PACKED_ELEMS, num_threads * room_each);
    let tiles = c.cols.div_ceil(MR);
    let items = (num_threads * tiles.div_ceil(num_threads * TILES_AT_A_TIME)).min(tiles);
    let next = AtomicUsize::new(0);
    // Every thread packs A for itself, where there is room: lines that another core has written, or still holds when
    // they are to be written again, cost more than the packing.
    let fits_each = c.rows.next_multiple_of(WIDTH) * a.cols <= packed_each;
    let for_all = (!fits_each).then(|| Packed::<WIDTH>::new(cpu, a, scratch.first(PACKED_ELEMS)));
    cpu.pool.run(num_threads, &|_, worker| {
        let packed =
            for_all.unwrap_or_else(|| Packed::new(cpu, a, scratch.slice(worker * packed_each, packed_each)));
        // SAFETY: a worker's part of the scratch is its own.
        let room = unsafe { rooms.slice(worker * room_each, room_each).as_mut::<f32>() };
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                break;
            }
            let columns = item * tiles / items * MR..((item + 1) * tiles / items * MR).min(c.cols);
            packed.times_rows(cpu, c, b, init, columns, room);
        }
    });
}

/// A in panels of WIDTH columns, each a row of A: inner block by inner block, panel by panel.
#[derive(Clone, Copy)]
struct Packed<'m, const WIDTH: usize> {
    view: View<'m>,
    m: usize,
    k: usize,
}

impl<'m, const WIDTH: usize> Packed<'m, WIDTH> {
    fn new(cpu: &CpuQueue, a: Mat, room: View<'m>) -> Packed<'m, WIDTH> {
        let (m, k) = (a.rows, a.cols);
        let packed = Packed { view: room.first(m.next_multiple_of(WIDTH) * k), m, k };
        for first_k in (0..k).step_by(KC) {
            for p in 0..packed.panels() {
                let (depth, rows) = ((k - first_k).min(KC), (m - p * WIDTH).min(WIDTH));
                let out = packed.view.slice(packed.panel(first_k, depth, p), depth * WIDTH);
                with_real!(a.view.dtype(), R => {
                    // SAFETY: A is an input of this call; the room is the working thread's own.
                    let (source, out) = unsafe { (a.view.as_slice::<R>(), out.as_mut::<f32>()) };
                    let source = &source[p * WIDTH * a.stride + first_k..];
                    cpu.isa.run(
                        #[inline(always)]
                        || pack::transposed::<R, WIDTH>(source, a.stride, depth, rows, out),
                    )
                });
            }
        }
        packed
    }

    fn panels(&self) -> usize {
        self.m.div_ceil(WIDTH)
    }

    fn panel(&self, first_k: usize, depth: usize, p: usize) -> usize {
        (first_k * self.panels() + p * depth) * WIDTH
    }

    /// Some columns of C: A times these rows of B.
    fn times_rows(
        &self,
        cpu: &CpuQueue,
        c: Mat,
        b: Mat,
        init: Init,
        columns: Range<usize>,
        room: &mut [f32],
    ) {
        let (first, rows) = (columns.start, columns.len());
        let (widened, sums) = room.split_at_mut(A_ELEMS);
        // Transposed: \[rows, WIDTH\] for every panel.
        let sums = &mut sums[..self.panels() * rows * WIDTH];
        let start = match init {
            Init::Zero => None,
            Init::Accumulate => Some(c),
            Init::Residual(residual) => Some(residual),
        };
        if let Some(start) = start {
            with_real!(start.view.dtype(), R => {
                cpu.isa.run(#[inline(always)] || load::<R, WIDTH>(start, first, rows, sums));
            });
        }
        for first_k in (0..self.k).step_by(KC) {
            let depth = (self.k - first_k).min(KC);
            let (base, row) = rows_of(cpu, b, first, rows, first_k, depth, widened);
            for at in (0..rows).step_by(MR) {
                for p in 0..self.panels() {
                    // SAFETY: inside the rows of B, the panel and these sums; nothing overlaps.
                    unsafe {
                        let sums = sums.as_mut_ptr().add((p * rows + at) * WIDTH);
                        let added = start.is_some() || first_k > 0;
                        weights::<WIDTH>(
                            cpu.isa,
                            &Tile {
                                depth,
                                a: base.add(at * row),
                                a_row: row,
                                a_col: 1,
                                b: self.view.as_ptr::<f32>().add(self.panel(first_k, depth, p)),
                                b_row: WIDTH,
                                init: if added { sums.cast_const() } else { std::ptr::null() },
                                init_row: WIDTH,
                                c: sums,
                                c_row: WIDTH,
                                rows: (rows - at).min(MR),
                                cols: (self.m - p * WIDTH).min(WIDTH),
                            },
                        );
                    }
                }
            }
        }
        with_real!(c.view.dtype(), R => {
            cpu.isa.run(#[inline(always)] || store::<R, WIDTH>(c, first, rows, sums))
        });
    }
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

/// Columns `first..first + cols` of the initial values, transposed: \[cols, WIDTH\] for every WIDTH rows.
#[inline(always)]
fn load<R: Real, const WIDTH: usize>(start: Mat, first: usize, cols: usize, sums: &mut [f32]) {
    for (p, sums) in sums.chunks_exact_mut(cols * WIDTH).enumerate() {
        let rows = start.row_range(p * WIDTH, WIDTH.min(start.rows - p * WIDTH)).columns(first, cols);
        // SAFETY: nobody writes these columns but this item, later.
        let source = unsafe { rows.view.as_slice::<R>() };
        pack::transposed::<R, WIDTH>(source, rows.stride, cols, rows.rows, sums);
    }
}

/// The sums as columns `first..first + cols` of C: turned back NR columns at a time.
#[inline(always)]
fn store<R: Real, const WIDTH: usize>(c: Mat, first: usize, cols: usize, sums: &[f32]) {
    let mut turned = [0f32; NR * NR];
    for (p, sums) in sums.chunks_exact(cols * WIDTH).enumerate() {
        let rows = WIDTH.min(c.rows - p * WIDTH);
        for (part, sums) in sums.chunks(NR * WIDTH).enumerate() {
            let width = sums.len() / WIDTH;
            pack::transposed::<f32, NR>(sums, WIDTH, rows, width, &mut turned);
            for (i, turned) in turned.chunks_exact(NR).take(rows).enumerate() {
                let to = c.view.slice((p * WIDTH + i) * c.stride + first + part * NR, width);
                // SAFETY: the item alone writes these columns.
                for (to, sum) in unsafe { to.as_mut::<R>() }.iter_mut().zip(turned) {
                    *to = R::from_f32(*sum);
                }
            }
        }
    }
}
