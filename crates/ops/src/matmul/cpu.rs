//! The CPU driver: packs B, hands out row blocks of C to threads, walks tiles.
//!
//! B is taken in slabs whose packed form fits [`PACKED_B_ELEMS`]. For each slab the pool
//! first packs (an item is a few panels), then computes (an item is [`ROW_BLOCK`] rows of C against the
//! whole slab). Inside an item, panels of one inner block are taken [`PANELS_IN_CACHE`] at a time, which
//! is what stays in the second-level cache while all row tiles pass over it.

use lockstep_core::{Bytes, DType};
use lockstep_device::{CpuQueue, Real, View};

use super::kernel::{Tile, tile};
use super::{Init, KC, MR, NR, pack};
use crate::Mat;
use crate::dispatch::with_real;

/// Packed B of one slab: 4 MiB.
const PACKED_B_ELEMS: usize = 1 << 20;
/// Rows of C in one item of work.
const ROW_BLOCK: usize = 8 * MR;
/// 16 panels of one inner block: 768 KiB.
const PANELS_IN_CACHE: usize = 16;
/// Per thread: widened or packed A of one row block and inner block, and a block of C in f32.
const A_ELEMS: usize = ROW_BLOCK * KC;
const C_ELEMS: usize = ROW_BLOCK * PANELS_IN_CACHE * NR;

#[derive(Clone, Copy)]
pub(super) enum A<'m> {
    /// A\[M, K\] as stored.
    Rows(Mat<'m>),
    /// Stored as \[K, M\].
    Columns(Mat<'m>),
}

#[derive(Clone, Copy)]
pub(super) enum B<'m> {
    /// B\[K, N\] as stored.
    Natural(Mat<'m>),
    /// Stored as \[N, K\].
    Transposed(Mat<'m>),
}

pub(super) fn scratch_bytes(num_threads: usize) -> Bytes {
    Bytes(4 * (PACKED_B_ELEMS + num_threads * (A_ELEMS + C_ELEMS)) as u64)
}

pub(super) fn product(cpu: &CpuQueue, c: Mat, a: A, b: B, init: Init, scratch: View) {
    let (m, n) = (c.rows, c.cols);
    let (a_mat, k) = match a {
        A::Rows(mat) => (mat, mat.cols),
        A::Columns(mat) => (mat, mat.rows),
    };
    let b_mat = match b {
        B::Natural(mat) | B::Transposed(mat) => mat,
    };
    c.view.assert_apart(&a_mat.view);
    c.view.assert_apart(&b_mat.view);
    for operand in [&c.view, &a_mat.view, &b_mat.view] {
        scratch.assert_apart(operand);
    }
    if let Init::Residual(r) = init {
        assert_eq!((r.rows, r.cols, r.view.dtype()), (m, n, c.view.dtype()), "shape of the residual");
    }
    if m == 0 || n == 0 {
        return;
    }
    let num_threads = cpu.pool.num_threads();
    let packed_b = scratch.first(PACKED_B_ELEMS);
    let per_thread = scratch.slice(PACKED_B_ELEMS, num_threads * (A_ELEMS + C_ELEMS));

    if k == 0 {
        return initialise(c, init);
    }
    // A slab is as many whole inner blocks as fit with all columns, so that A is prepared once; where
    // not even one fits, columns are split too. A narrow C is rounded at the end of each slab, so it
    // takes the whole inner dimension and splits columns first.
    let all_cols = n.next_multiple_of(NR);
    let wanted_depth = if c.view.dtype() == DType::F32 { k.min(KC) } else { k.min(PACKED_B_ELEMS / NR) };
    let slab_cols = (PACKED_B_ELEMS / wanted_depth / NR * NR).min(all_cols);
    let slab_depth = if wanted_depth == k { k } else { PACKED_B_ELEMS / slab_cols / KC * KC };
    for first_col in (0..n).step_by(slab_cols) {
        let cols = (n - first_col).min(slab_cols);
        for first_k in (0..k).step_by(slab_depth) {
            let slab = Slab { first_k, depth: (k - first_k).min(slab_depth), first_col, cols, packed_b };
            pack_slab(cpu, b, &slab);
            let init = if first_k == 0 { init } else { Init::Accumulate };
            compute_slab(cpu, c, a, init, &slab, per_thread);
        }
    }
}

/// A product over nothing.
fn initialise(c: Mat, init: Init) {
    for row in 0..c.rows {
        let to = c.view.slice(row * c.stride, c.cols);
        match init {
            Init::Accumulate => {}
            Init::Zero => to.zero(),
            Init::Residual(r) => with_real!(to.dtype(), R => {
                // SAFETY: residual and C are distinct or the same matrix; `copy` allows both.
                unsafe { std::ptr::copy(r.view.slice(row * r.stride, r.cols).as_ptr::<R>(), to.as_ptr(), c.cols) }
            }),
        }
    }
}

/// A block of B, packed: inner block by inner block, panel by panel.
#[derive(Clone, Copy)]
struct Slab<'m> {
    first_k: usize,
    depth: usize,
    first_col: usize,
    cols: usize,
    packed_b: View<'m>,
}

/// Where panel `panel` of the inner block that starts at `k` lies in the packed slab.
fn panel_start(k: usize, block: usize, panels: usize, panel: usize) -> usize {
    k * panels * NR + panel * block * NR
}

fn pack_slab(cpu: &CpuQueue, b: B, slab: &Slab) {
    let Slab { first_k, depth, first_col, cols, packed_b } = *slab;
    let panels = cols.div_ceil(NR);
    let blocks = depth.div_ceil(KC);
    cpu.pool.run(panels * blocks, &|item, _| {
        let (block_idx, panel) = (item / panels, item % panels);
        let k = block_idx * KC;
        let block = (depth - k).min(KC);
        let width = (cols - panel * NR).min(NR);
        let out = packed_b.slice(panel_start(k, block, panels, panel), block * NR);
        // SAFETY: items write disjoint panels; B is only read, and scratch does not overlap it.
        let out = unsafe { out.as_mut::<f32>() };
        let (row, column) = (first_k + k, first_col + panel * NR);
        match b {
            B::Natural(mat) => with_real!(mat.view.dtype(), R => {
                // SAFETY: B is an input of this call; nobody writes it meanwhile.
                let source = unsafe { mat.view.as_slice::<R>() };
                let source = &source[row * mat.stride + column..];
                cpu.isa.run(#[inline(always)] || pack::natural(source, mat.stride, block, width, out))
            }),
            B::Transposed(mat) => with_real!(mat.view.dtype(), R => {
                // SAFETY: as above.
                let source = unsafe { mat.view.as_slice::<R>() };
                let source = &source[column * mat.stride + row..];
                cpu.isa.run(#[inline(always)] || pack::transposed(source, mat.stride, block, width, out))
            }),
        }
    });
}

fn compute_slab(cpu: &CpuQueue, c: Mat, a: A, init: Init, slab: &Slab, per_thread: View) {
    let row_blocks = c.rows.div_ceil(ROW_BLOCK);
    cpu.pool.run(row_blocks, &|item, worker| {
        let scratch = per_thread.slice(worker * (A_ELEMS + C_ELEMS), A_ELEMS + C_ELEMS);
        let first_row = item * ROW_BLOCK;
        let rows = (c.rows - first_row).min(ROW_BLOCK);
        let block = RowBlock {
            first_row,
            rows,
            a_scratch: scratch.first(A_ELEMS),
            c_scratch: scratch.slice(A_ELEMS, C_ELEMS),
        };
        if c.view.dtype() == DType::F32 {
            row_block_f32(cpu, c, a, init, slab, &block);
        } else {
            with_real!(c.view.dtype(), R => row_block_narrow::<R>(cpu, c, a, init, slab, &block));
        }
    });
}

/// Some rows of C, with the working thread's scratch.
struct RowBlock<'m> {
    first_row: usize,
    rows: usize,
    a_scratch: View<'m>,
    c_scratch: View<'m>,
}

/// Rows of A over one inner block, ready for the kernel: element (i, k) of tile t is at
/// `base + t * tile_step + i * row + k * col`.
struct ReadyA {
    base: *const f32,
    tile_step: usize,
    row: usize,
    col: usize,
}

fn ready_a(cpu: &CpuQueue, a: A, block: &RowBlock, k: usize, depth: usize) -> ReadyA {
    // SAFETY: the scratch belongs to the working thread for the length of its item.
    let scratch = unsafe { block.a_scratch.as_mut::<f32>() };
    match a {
        A::Rows(mat) if mat.view.dtype() == DType::F32 => {
            let view = mat.view.slice(block.first_row * mat.stride + k, 0);
            ReadyA { base: view.as_ptr(), tile_step: MR * mat.stride, row: mat.stride, col: 1 }
        }
        A::Rows(mat) => with_real!(mat.view.dtype(), R => {
            // SAFETY: A is an input of this call; nobody writes it meanwhile.
            let source = unsafe { mat.view.as_slice::<R>() };
            let source = &source[block.first_row * mat.stride + k..];
            cpu.isa.run(#[inline(always)] || pack::widen_rows(source, mat.stride, block.rows, depth, scratch));
            ReadyA { base: scratch.as_ptr(), tile_step: MR * depth, row: depth, col: 1 }
        }),
        A::Columns(mat) => with_real!(mat.view.dtype(), R => {
            // SAFETY: as above.
            let source = unsafe { mat.view.as_slice::<R>() };
            let source = &source[k * mat.stride + block.first_row..];
            cpu.isa.run(#[inline(always)] || pack::a_columns(source, mat.stride, depth, block.rows, scratch));
            ReadyA { base: scratch.as_ptr(), tile_step: MR * depth, row: 1, col: MR }
        }),
    }
}

/// A destination in f32: C itself, or the thread's block of it.
struct Destination {
    c: *mut f32,
    row: usize,
    init: *const f32,
    init_row: usize,
}

/// All tiles of a row block against panels `[first_panel, last_panel)` over one inner block. The
/// destination's column 0 is column `first_panel * NR` of the slab.
fn tiles(
    cpu: &CpuQueue,
    ready: &ReadyA,
    rows: usize,
    slab: &Slab,
    k: usize,
    panels: std::ops::Range<usize>,
    to: &Destination,
) {
    let all_panels = slab.cols.div_ceil(NR);
    let depth = (slab.depth - k).min(KC);
    for first_row in (0..rows).step_by(MR) {
        for panel in panels.clone() {
            let column = (panel - panels.start) * NR;
            let b = panel_start(k, depth, all_panels, panel);
            debug_assert!(b + depth * NR <= slab.packed_b.len());
            // SAFETY: rows and columns stay inside this item's block of C, which no other item writes;
            // A and B were checked to be apart from C; the panel was packed before this item started.
            unsafe {
                let init =
                    if to.init.is_null() { to.init } else { to.init.add(first_row * to.init_row + column) };
                tile(
                    cpu.isa,
                    &Tile {
                        depth,
                        a: ready.base.add(first_row / MR * ready.tile_step),
                        a_row: ready.row,
                        a_col: ready.col,
                        b: slab.packed_b.as_ptr::<f32>().add(b),
                        init,
                        init_row: to.init_row,
                        c: to.c.add(first_row * to.row + column),
                        c_row: to.row,
                        rows: (rows - first_row).min(MR),
                        cols: (slab.cols - panel * NR).min(NR),
                    },
                );
            }
        }
    }
}

fn row_block_f32(cpu: &CpuQueue, c: Mat, a: A, init: Init, slab: &Slab, block: &RowBlock) {
    let at = |mat: &Mat, column: usize| -> *mut f32 {
        mat.view.slice(block.first_row * mat.stride + slab.first_col + column, 0).as_ptr()
    };
    let all_panels = slab.cols.div_ceil(NR);
    for k in (0..slab.depth).step_by(KC) {
        let depth = (slab.depth - k).min(KC);
        let ready = ready_a(cpu, a, block, slab.first_k + k, depth);
        for first_panel in (0..all_panels).step_by(PANELS_IN_CACHE) {
            let last_panel = (first_panel + PANELS_IN_CACHE).min(all_panels);
            let column = first_panel * NR;
            let (init, init_row) = match init {
                _ if k > 0 => (at(&c, column).cast_const(), c.stride),
                Init::Zero => (std::ptr::null(), 0),
                Init::Accumulate => (at(&c, column).cast_const(), c.stride),
                Init::Residual(r) => (at(&r, column).cast_const(), r.stride),
            };
            let to = Destination { c: at(&c, column), row: c.stride, init, init_row };
            tiles(cpu, &ready, block.rows, slab, k, first_panel..last_panel, &to);
        }
    }
}

/// C in bf16 or fp16: a block is summed in f32 and rounded once at the end.
fn row_block_narrow<R: Real>(cpu: &CpuQueue, c: Mat, a: A, init: Init, slab: &Slab, block: &RowBlock) {
    // SAFETY: the scratch belongs to the working thread; items write disjoint rows of C; a residual is
    // either C itself, read before it is written, or another matrix that nobody writes.
    let sums = unsafe { block.c_scratch.as_mut::<f32>() };
    let all_panels = slab.cols.div_ceil(NR);
    for first_panel in (0..all_panels).step_by(PANELS_IN_CACHE) {
        let last_panel = (first_panel + PANELS_IN_CACHE).min(all_panels);
        let column = slab.first_col + first_panel * NR;
        let cols = (slab.cols - first_panel * NR).min(PANELS_IN_CACHE * NR);
        let from = match init {
            Init::Zero => None,
            Init::Accumulate => Some(c),
            Init::Residual(r) => Some(r),
        };
        for (i, row) in sums.chunks_mut(cols).take(block.rows).enumerate() {
            match from {
                None => row.fill(0.0),
                Some(mat) => {
                    let at = (block.first_row + i) * mat.stride + column;
                    // SAFETY: see above.
                    let source = unsafe { mat.view.slice(at, cols).as_slice::<R>() };
                    cpu.isa.run(
                        #[inline(always)]
                        || pack::widen_rows(source, cols, 1, cols, row),
                    );
                }
            }
        }
        for k in (0..slab.depth).step_by(KC) {
            let depth = (slab.depth - k).min(KC);
            let ready = ready_a(cpu, a, block, slab.first_k + k, depth);
            let (sums_at, cols_row) = (sums.as_mut_ptr(), cols);
            let to = Destination { c: sums_at, row: cols_row, init: sums_at, init_row: cols_row };
            tiles(cpu, &ready, block.rows, slab, k, first_panel..last_panel, &to);
        }
        for (i, row) in sums.chunks(cols).take(block.rows).enumerate() {
            let at = (block.first_row + i) * c.stride + column;
            // SAFETY: see above.
            let out = unsafe { c.view.slice(at, cols).as_mut::<R>() };
            cpu.isa.run(
                #[inline(always)]
                || narrow(row, out),
            );
        }
    }
}

#[inline(always)]
fn narrow<R: Real>(values: &[f32], out: &mut [R]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out = R::from_f32(*value);
    }
}
