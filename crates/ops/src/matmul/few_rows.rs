//! A·Bᵀ for few rows of A, as in decode, with one token per document.
//!
//! Packing B for a matmul that uses each of its elements only a few times would cost more than the matmul. So the roles
//! are swapped: rows of B are read in place, as the kernel reads A, and the few rows of A are packed as its panel;
//! tiles come out transposed. Each element is summed by the same chain in the same order, and multiplication is
//! commutative, so the bits are the same as for any other number of rows.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::bf16;
use lockstep_core::DType;
use lockstep_device::{Amx, CpuQueue, Isa, Real, Tiles, View};

use super::cpu::{A_ELEMS, C_ELEMS, PACKED_ELEMS, ROW_BLOCK};
use super::kernel::{Tile, tile_unpacked_a};
use super::{Accumulate, KC, MR, NR, amx, pack};
use crate::Mat;
use crate::dispatch::with_real;

/// With more rows than this, packing B pays off.
const FEW: usize = 2 * NR;
/// Columns of the panel for the fewest rows: one vector of the widest instruction set.
const NARROW: usize = NR / 2;
/// The maximum number of rows of B that a thread processes at a time.
const ROWS_PER_STEP: usize = ROW_BLOCK;

/// Whether [`matmul`] is faster for `m` rows over an inner dimension of `k`.
pub(super) fn applies(m: usize, k: usize) -> bool {
    m <= FEW && k > 0 && m.next_multiple_of(NR) * k <= PACKED_ELEMS
}

/// C\[M, N\] = A\[M, K\] · B\[N, K\]ᵀ, accumulated as `accumulate` says.
pub(super) fn matmul(
    cpu: &CpuQueue,
    amx: Option<Amx>,
    c: Mat,
    a: Mat,
    b: Mat,
    accumulate: Accumulate,
    scratch: View,
) {
    if c.rows <= NARROW {
        matmul_panels::<NARROW>(cpu, amx, c, a, b, accumulate, scratch);
    } else {
        matmul_panels::<NR>(cpu, amx, c, a, b, accumulate, scratch);
    }
}

fn matmul_panels<const WIDTH: usize>(
    cpu: &CpuQueue,
    amx: Option<Amx>,
    c: Mat,
    a: Mat,
    b_mat: Mat,
    accumulate: Accumulate,
    scratch: View,
) {
    let num_threads = cpu.pool.num_threads();
    // Round down to whole cache lines.
    let packed_each = PACKED_ELEMS / num_threads / 16 * 16;
    let scratch_each = A_ELEMS + C_ELEMS;
    let thread_scratch = scratch.slice(PACKED_ELEMS, num_threads * scratch_each);
    let side = if amx.is_some() { amx::TILE } else { MR };
    let tiles = c.cols.div_ceil(side);
    let items = (num_threads * tiles.div_ceil(num_threads * (ROWS_PER_STEP / side))).min(tiles);
    let next = AtomicUsize::new(0);
    // Every thread packs A for itself, if there is enough scratch: cache lines that another core has written, or still
    // holds when they are written again, cost more than the packing.
    let fits_each = c.rows.next_multiple_of(WIDTH) * a.cols.next_multiple_of(amx::STEP) <= packed_each;
    let for_all = (!fits_each).then(|| PackedA::<WIDTH>::new(cpu, amx, a, scratch.first(PACKED_ELEMS)));
    cpu.pool.run(num_threads, &|_, worker| {
        let packed = for_all
            .unwrap_or_else(|| PackedA::new(cpu, amx, a, scratch.slice(worker * packed_each, packed_each)));
        let part = thread_scratch.slice(worker * scratch_each, scratch_each);
        let scratch = ThreadScratch {
            b: part.first(A_ELEMS),
            sums: part.slice(A_ELEMS, C_ELEMS),
            tiles: amx.map(Amx::tiles),
        };
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                break;
            }
            let columns = item * tiles / items * side..((item + 1) * tiles / items * side).min(c.cols);
            packed.multiply_rows(cpu, c, b_mat, accumulate, columns, &scratch);
        }
    });
}

/// A thread's scratch for rows of B and for sums, and its tiles if AMX is used.
struct ThreadScratch<'m> {
    b: View<'m>,
    sums: View<'m>,
    tiles: Option<Tiles>,
}

/// A in panels of WIDTH columns, each a row of A: inner block by inner block, panel by panel. In f32, or in bf16 for
/// AMX.
#[derive(Clone, Copy)]
struct PackedA<'m, const WIDTH: usize> {
    view: View<'m>,
    m: usize,
    k: usize,
}

impl<'m, const WIDTH: usize> PackedA<'m, WIDTH> {
    fn new(cpu: &CpuQueue, amx: Option<Amx>, a: Mat, scratch: View<'m>) -> PackedA<'m, WIDTH> {
        let (m, k) = (a.rows, a.cols);
        let view = if amx.is_some() { scratch.cast(DType::BF16) } else { scratch };
        let packed = PackedA { view, m, k };
        for first_k in (0..k).step_by(KC) {
            for p in 0..packed.panels() {
                let (depth, rows) = ((k - first_k).min(KC), (m - p * WIDTH).min(WIDTH));
                let out = packed.panel(first_k, p);
                if amx.is_some() {
                    let source = a.row_range(p * WIDTH, rows).columns(first_k, depth);
                    // SAFETY: as below, on a machine with AMX.
                    cpu.isa.run(
                        #[inline(always)]
                        || unsafe { amx::transposed(source, WIDTH, out.as_mut()) },
                    );
                    continue;
                }
                with_real!(a.view.dtype(), R => {
                    // SAFETY: A is an input of this call; the scratch belongs to the working thread.
                    let (source, out) = unsafe { (a.view.as_slice::<R>(), out.as_mut::<f32>()) };
                    let source = &source[p * WIDTH * a.stride + first_k..];
                    cpu.isa.run(
                        #[inline(always)]
                        || pack::transposed::<R, WIDTH>(cpu.isa, source, a.stride, depth, rows, out),
                    )
                });
            }
        }
        packed
    }

    fn panels(&self) -> usize {
        self.m.div_ceil(WIDTH)
    }

    fn panel(&self, first_k: usize, p: usize) -> View<'m> {
        let mut depth = (self.k - first_k).min(KC);
        if self.view.dtype() == DType::BF16 {
            depth = depth.next_multiple_of(amx::STEP);
        }
        self.view.slice((first_k * self.panels() + p * depth) * WIDTH, depth * WIDTH)
    }

    /// Some columns of C: A times these rows of B.
    fn multiply_rows(
        &self,
        cpu: &CpuQueue,
        c: Mat,
        b: Mat,
        accumulate: Accumulate,
        columns: Range<usize>,
        scratch: &ThreadScratch,
    ) {
        let (first, rows) = (columns.start, columns.len());
        // Transposed: \[rows, WIDTH\] for every panel.
        // SAFETY: the scratch belongs to the working thread.
        let sums = unsafe { scratch.sums.first(self.panels() * rows * WIDTH).as_mut::<f32>() };
        let start = match accumulate {
            Accumulate::Overwrite => None,
            Accumulate::Add => Some(c),
            Accumulate::Residual(residual) => Some(residual),
        };
        if let Some(start) = start {
            with_real!(start.view.dtype(), R => {
                cpu.isa.run(#[inline(always)] || load::<R, WIDTH>(cpu.isa, start, first, rows, sums));
            });
        }
        for first_k in (0..self.k).step_by(KC) {
            let rows_of_b = b.row_range(first, rows).columns(first_k, (self.k - first_k).min(KC));
            let added = start.is_some() || first_k > 0;
            match &scratch.tiles {
                None => self.inner_block(cpu, rows_of_b, first_k, added, scratch, sums),
                Some(tiles) => self.inner_block_amx(cpu, tiles, rows_of_b, first_k, added, scratch, sums),
            }
        }
        with_real!(c.view.dtype(), R => {
            cpu.isa.run(#[inline(always)] || store::<R, WIDTH>(cpu.isa, c, first, rows, sums))
        });
    }

    /// Sets the sums to the matmul with these rows of B over an inner block, or adds it to them.
    fn inner_block(
        &self,
        cpu: &CpuQueue,
        b: Mat,
        first_k: usize,
        added: bool,
        scratch: &ThreadScratch,
        sums: &mut [f32],
    ) {
        // SAFETY: the scratch belongs to the working thread.
        let (base, row) = in_f32(cpu, b, unsafe { scratch.b.as_mut() });
        for at in (0..b.rows).step_by(MR) {
            for p in 0..self.panels() {
                // SAFETY: inside the rows of B, the panel and these sums; nothing overlaps.
                unsafe {
                    let sums = sums.as_mut_ptr().add((p * b.rows + at) * WIDTH);
                    tile_unpacked_a::<WIDTH>(
                        cpu.isa,
                        &Tile {
                            depth: b.cols,
                            a: base.add(at * row),
                            a_row: row,
                            a_col: 1,
                            b: self.panel(first_k, p).as_ptr(),
                            b_row: WIDTH,
                            init: if added { sums.cast_const() } else { std::ptr::null() },
                            init_row: WIDTH,
                            c: sums,
                            c_row: WIDTH,
                            rows: (b.rows - at).min(MR),
                            cols: (self.m - p * WIDTH).min(WIDTH),
                        },
                    );
                }
            }
        }
    }

    /// The same with AMX.
    fn inner_block_amx(
        &self,
        cpu: &CpuQueue,
        tiles: &Tiles,
        b: Mat,
        first_k: usize,
        added: bool,
        scratch: &ThreadScratch,
        sums: &mut [f32],
    ) {
        // SAFETY: the scratch belongs to the working thread; B is an input of this call, and nobody writes it during
        // the call.
        let a = cpu.isa.run(
            #[inline(always)]
            || unsafe {
                amx::Rows::of(b, 0, b.rows, 0, b.cols, scratch.b.cast(DType::BF16).as_mut::<bf16>())
            },
        );
        for first_row in (0..b.rows).step_by(amx::SIDE) {
            for p in 0..self.panels() {
                // SAFETY: inside the rows of B, the panel and these sums; nothing overlaps.
                unsafe {
                    let sums = sums.as_mut_ptr().add((p * b.rows + first_row) * WIDTH);
                    amx::block(
                        tiles,
                        &amx::Block {
                            depth: b.cols,
                            a,
                            first_row,
                            b: self.panel(first_k, p).as_ptr(),
                            b_width: WIDTH,
                            init: if added { sums.cast_const() } else { std::ptr::null() },
                            init_row: WIDTH,
                            c: sums,
                            c_row: WIDTH,
                            rows: (b.rows - first_row).min(amx::SIDE),
                            // Columns beyond the rows of A are zero, so whole tiles can be written directly.
                            cols: WIDTH,
                        },
                    );
                }
            }
        }
    }
}

/// Rows of B in f32, in place or widened: a pointer to the first element, and the distance between rows.
fn in_f32(cpu: &CpuQueue, b: Mat, scratch: &mut [f32]) -> (*const f32, usize) {
    if b.view.dtype() == DType::F32 {
        return (b.view.as_ptr(), b.stride);
    }
    with_real!(b.view.dtype(), R => {
        // SAFETY: B is an input of this call; nobody writes it during the call.
        let source = unsafe { b.view.as_slice::<R>() };
        cpu.isa.run(#[inline(always)] || pack::widen_rows(source, b.stride, b.rows, b.cols, scratch));
    });
    (scratch.as_ptr(), b.cols)
}

/// Columns `first..first + cols` of the initial values, transposed: \[cols, WIDTH\] for every WIDTH rows.
#[inline(always)]
fn load<R: Real, const WIDTH: usize>(isa: Isa, start: Mat, first: usize, cols: usize, sums: &mut [f32]) {
    for (p, sums) in sums.chunks_exact_mut(cols * WIDTH).enumerate() {
        let rows = start.row_range(p * WIDTH, WIDTH.min(start.rows - p * WIDTH)).columns(first, cols);
        // SAFETY: only this item writes these columns, and it does so later.
        let source = unsafe { rows.view.as_slice::<R>() };
        pack::transposed::<R, WIDTH>(isa, source, rows.stride, cols, rows.rows, sums);
    }
}

/// Writes the sums to columns `first..first + cols` of C, transposing NR columns at a time.
#[inline(always)]
fn store<R: Real, const WIDTH: usize>(isa: Isa, c: Mat, first: usize, cols: usize, sums: &[f32]) {
    let mut turned = [0f32; NR * NR];
    for (p, sums) in sums.chunks_exact(cols * WIDTH).enumerate() {
        let rows = WIDTH.min(c.rows - p * WIDTH);
        for (part, sums) in sums.chunks(NR * WIDTH).enumerate() {
            let width = sums.len() / WIDTH;
            pack::transposed::<f32, NR>(isa, sums, WIDTH, rows, width, &mut turned);
            for (i, turned) in turned.chunks_exact(NR).take(rows).enumerate() {
                let to = c.view.slice((p * WIDTH + i) * c.stride + first + part * NR, width);
                // SAFETY: only this item writes these columns.
                for (to, sum) in unsafe { to.as_mut::<R>() }.iter_mut().zip(turned) {
                    *to = R::from_f32(*sum);
                }
            }
        }
    }
}
