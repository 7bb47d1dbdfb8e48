//! The CPU driver: packs B, distributes row blocks of C over threads, and iterates over tiles.
//!
//! B is processed in slabs that fit in the L2 cache. For each slab the pool first packs (an item is a panel, or some
//! rows), then computes (an item is some rows of C against the whole slab).

use std::ops::Range;

use half::bf16;
use lockstep_core::{Bytes, DType};
use lockstep_device::{Amx, CpuQueue, Real, Tiles, View};

use super::kernel::{Tile, tile};
use super::{Accumulate, KC, MR, NR, amx, few_rows, pack};
use crate::Mat;
use crate::dispatch::with_real;

/// Packed B of one slab in the usual case: 1.25 MiB.
const SLAB_ELEMS: usize = 320 << 10;
/// The maximum size of a slab, for an inner dimension that is not divided: 4 MiB.
pub(super) const PACKED_ELEMS: usize = 1 << 20;
/// The maximum number of rows of C in one item.
pub(super) const ROW_BLOCK: usize = 8 * MR;
const ITEMS_PER_THREAD: usize = 16;
/// Panels that a row block processes at a time: a block of C in f32 holds as many.
const PANELS_PER_STEP: usize = 16;
/// Per thread: A of one row block and inner block, widened or packed, and a block of C in f32.
pub(super) const A_ELEMS: usize = ROW_BLOCK * KC;
pub(super) const C_ELEMS: usize = ROW_BLOCK * PANELS_PER_STEP * NR;

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
    Bytes(4 * (PACKED_ELEMS + num_threads * (A_ELEMS + C_ELEMS)) as u64)
}

pub(super) fn matmul(cpu: &CpuQueue, c: Mat, a: A, b: B, accumulate: Accumulate, scratch: View) {
    let (m, n) = (c.rows, c.cols);
    let (a_mat, k) = match a {
        A::Rows(mat) => (mat, mat.cols),
        A::Columns(mat) => (mat, mat.rows),
    };
    let b_mat = match b {
        B::Natural(mat) | B::Transposed(mat) => mat,
    };
    if m == 0 || n == 0 {
        return;
    }
    let num_threads = cpu.pool.num_threads();
    let packed_b = scratch.first(PACKED_ELEMS);
    let per_thread = scratch.slice(PACKED_ELEMS, num_threads * (A_ELEMS + C_ELEMS));

    if k == 0 {
        return initialize(c, accumulate);
    }
    // Decide by types alone, so that every matmul of a pair of types has the same order of summation.
    let amx = cpu.amx.filter(|_| [a_mat, b_mat].iter().all(|mat| mat.view.dtype() == DType::BF16));
    if let (A::Rows(a), B::Transposed(b)) = (a, b)
        && few_rows::applies(m, k)
    {
        return few_rows::matmul(cpu, amx, c, a, b, accumulate, scratch);
    }
    let (slab_depth, slab_cols) = slab_shape(n, k, c.view.dtype(), amx);
    for first_col in (0..n).step_by(slab_cols) {
        let cols = (n - first_col).min(slab_cols);
        for first_k in (0..k).step_by(slab_depth) {
            let slab = Slab { first_k, depth: (k - first_k).min(slab_depth), first_col, cols, amx, packed_b };
            pack_slab(cpu, b, &slab);
            let accumulate = if first_k == 0 { accumulate } else { Accumulate::Add };
            compute_slab(cpu, c, a, accumulate, &slab, per_thread);
        }
    }
}

/// How much of B is packed at a time: what stays in the L2 cache while all rows are multiplied with it.
///
/// All columns and as many whole inner blocks as fit, so that A is prepared once; if not even one block fits, columns
/// are split. A 16-bit C is rounded at the end of each slab, so its slabs cover the whole inner dimension and split
/// columns. If B stays bf16, twice as many elements fit.
fn slab_shape(n: usize, k: usize, c: DType, amx: Option<Amx>) -> (usize, usize) {
    let (slab_elems, step) = if amx.is_some() { (2 * SLAB_ELEMS, amx::STEP) } else { (SLAB_ELEMS, 1) };
    let all_cols = n.next_multiple_of(NR);
    if c != DType::F32 {
        let depth = k.min(PACKED_ELEMS / NR / KC * KC);
        let packed = depth.next_multiple_of(step);
        return (depth, (slab_elems.max(packed * NR) / packed / NR * NR).min(all_cols));
    }
    let cols = (slab_elems / k.next_multiple_of(step).min(KC) / NR * NR).min(all_cols);
    let depth = if k <= KC { k } else { slab_elems / cols / KC * KC };
    (depth, cols)
}

/// The result of a matmul with an inner dimension of zero.
fn initialize(c: Mat, accumulate: Accumulate) {
    for row in 0..c.rows {
        let to = c.view.slice(row * c.stride, c.cols);
        match accumulate {
            Accumulate::Add => {}
            Accumulate::Overwrite => to.zero_host(),
            Accumulate::Residual(r) => with_real!(to.dtype(), R => {
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
    /// Packed for AMX: in pairs of bf16 instead of f32.
    amx: Option<Amx>,
    packed_b: View<'m>,
}

/// Bytes between packed panels. Their lengths are usually multiples of 4 KiB: without a gap the same row of all panels
/// would compete for one set of the L1 cache during packing.
const GAP_BYTES: usize = 64;

impl<'m> Slab<'m> {
    fn panels(&self) -> usize {
        self.cols.div_ceil(NR)
    }

    /// The length of the inner block that starts at `k`.
    fn block(&self, k: usize) -> usize {
        (self.depth - k).min(KC)
    }

    /// The distance from one packed panel of the inner block at `k` to the next, in packed elements.
    fn panel_stride(&self, k: usize) -> usize {
        match self.amx {
            None => self.block(k) * NR + GAP_BYTES / size_of::<f32>(),
            Some(_) => self.block(k).next_multiple_of(amx::STEP) * NR + GAP_BYTES / size_of::<bf16>(),
        }
    }

    /// A panel of the inner block that starts at `k`.
    fn panel(&self, k: usize, panel: usize) -> View<'m> {
        let packed = if self.amx.is_some() { self.packed_b.cast(DType::BF16) } else { self.packed_b };
        let panel_stride = self.panel_stride(k);
        packed.slice(k / KC * self.panels() * self.panel_stride(0) + panel * panel_stride, panel_stride)
    }
}

/// Rows of the inner dimension that a packing item processes.
const PACK_ROWS: usize = 32;
const _: () = assert!(PACK_ROWS == amx::STEP && KC.is_multiple_of(amx::STEP));

fn pack_slab(cpu: &CpuQueue, b: B, slab: &Slab) {
    let Slab { first_k, depth, first_col, cols, .. } = *slab;
    let panels = slab.panels();
    match b {
        B::Natural(mat) => cpu.pool.run(depth.div_ceil(PACK_ROWS), &|item, _| {
            let row = item * PACK_ROWS;
            let k = row / KC * KC;
            let rows = PACK_ROWS.min(depth - row);
            let out = slab.panel(k, 0);
            assert!(
                slab.panel(k, panels - 1).len() == slab.panel_stride(k),
                "the last panel must lie in the scratch"
            );
            if slab.amx.is_some() {
                let source = mat.row_range(first_k + row, rows).columns(first_col, cols);
                // SAFETY: as below.
                return cpu.isa.run(
                    #[inline(always)]
                    || unsafe {
                        amx::natural(source, out.as_ptr::<bf16>().add((row - k) * NR), slab.panel_stride(k));
                    },
                );
            }
            with_real!(mat.view.dtype(), R => {
                // SAFETY: B is an input of this call; nobody writes it during the call. Items write disjoint rows
                // of the panels, which lie in scratch.
                cpu.isa.run(#[inline(always)] || unsafe {
                    let source = &mat.view.as_slice::<R>()[(first_k + row) * mat.stride + first_col..];
                    let out = out.as_ptr::<f32>().add((row - k) * NR);
                    pack::natural(source, mat.stride, rows, cols, out, slab.panel_stride(k));
                })
            });
        }),
        B::Transposed(mat) => cpu.pool.run(panels * depth.div_ceil(KC), &|item, _| {
            let k = item / panels * KC;
            let (block, panel) = (slab.block(k), item % panels);
            let width = (cols - panel * NR).min(NR);
            let out = slab.panel(k, panel);
            if slab.amx.is_some() {
                let source = mat.row_range(first_col + panel * NR, width).columns(first_k + k, block);
                // SAFETY: as below; the machine has AMX.
                return cpu.isa.run(
                    #[inline(always)]
                    || unsafe { amx::transposed(source, NR, out.as_mut()) },
                );
            }
            with_real!(mat.view.dtype(), R => {
                // SAFETY: as above; items write disjoint panels.
                let (source, out) = unsafe { (mat.view.as_slice::<R>(), out.as_mut::<f32>()) };
                let source = &source[(first_col + panel * NR) * mat.stride + first_k + k..];
                cpu.isa.run(
                    #[inline(always)]
                    || pack::transposed::<R, NR>(cpu.isa, source, mat.stride, block, width, out),
                )
            });
        }),
    }
}

/// Computes C over a slab.
fn compute_slab(cpu: &CpuQueue, c: Mat, a: A, accumulate: Accumulate, slab: &Slab, per_thread: View) {
    // Use several items per thread, so that faster threads can take over work from slower ones.
    let unit = if slab.amx.is_some() { amx::SIDE } else { MR };
    let wanted = c.rows.div_ceil(ITEMS_PER_THREAD * cpu.pool.num_threads()).next_multiple_of(unit);
    let row_block = wanted.clamp(2 * MR, ROW_BLOCK).next_multiple_of(unit);
    cpu.pool.run(c.rows.div_ceil(row_block), &|item, worker| {
        let scratch = per_thread.slice(worker * (A_ELEMS + C_ELEMS), A_ELEMS + C_ELEMS);
        let first_row = item * row_block;
        let rows = (c.rows - first_row).min(row_block);
        let block = RowBlock {
            first_row,
            rows,
            tiles: slab.amx.map(Amx::tiles),
            a_scratch: scratch.first(A_ELEMS),
            c_scratch: scratch.slice(A_ELEMS, C_ELEMS),
        };
        if c.view.dtype() == DType::F32 {
            row_block_f32(cpu, c, a, accumulate, slab, &block);
        } else {
            with_real!(c.view.dtype(), R => row_block_narrow::<R>(cpu, c, a, accumulate, slab, &block));
        }
    });
}

/// Some rows of C, with the working thread's scratch, and its tiles if B was packed for AMX.
struct RowBlock<'m> {
    first_row: usize,
    rows: usize,
    tiles: Option<Tiles>,
    a_scratch: View<'m>,
    c_scratch: View<'m>,
}

/// Rows of A over one inner block, prepared for the kernel.
#[derive(Clone, Copy)]
enum PreparedA<'t> {
    /// In f32: element (i, k) of tile t is at `base + t * tile_step + i * row + k * col`.
    Wide { base: *const f32, tile_step: usize, row: usize, col: usize },
    /// In bf16, for AMX.
    Tiled(&'t Tiles, amx::Rows),
}

fn prepare_a<'b>(cpu: &CpuQueue, a: A, block: &'b RowBlock, k: usize, depth: usize) -> PreparedA<'b> {
    if let Some(tiles) = &block.tiles {
        let (first, rows) = (block.first_row, block.rows);
        // SAFETY: the scratch belongs to the working thread for the duration of its item; A is an input of this call,
        // and nobody writes it during the call; the machine has AMX.
        let rows = cpu.isa.run(
            #[inline(always)]
            || unsafe {
                let scratch = block.a_scratch.cast(DType::BF16).as_mut::<bf16>();
                match a {
                    A::Rows(mat) => amx::Rows::of(mat, first, rows, k, depth, scratch),
                    A::Columns(mat) => amx::Rows::transposed(mat, first, rows, k, depth, scratch),
                }
            },
        );
        return PreparedA::Tiled(tiles, rows);
    }
    // SAFETY: the scratch belongs to the working thread for the duration of its item.
    let scratch = unsafe { block.a_scratch.as_mut::<f32>() };
    match a {
        A::Rows(mat) if mat.view.dtype() == DType::F32 => {
            let view = mat.view.slice(block.first_row * mat.stride + k, 0);
            PreparedA::Wide { base: view.as_ptr(), tile_step: MR * mat.stride, row: mat.stride, col: 1 }
        }
        A::Rows(mat) => with_real!(mat.view.dtype(), R => {
            // SAFETY: A is an input of this call; nobody writes it during the call.
            let source = unsafe { mat.view.as_slice::<R>() };
            let source = &source[block.first_row * mat.stride + k..];
            cpu.isa.run(#[inline(always)] || pack::widen_rows(source, mat.stride, block.rows, depth, scratch));
            PreparedA::Wide { base: scratch.as_ptr(), tile_step: MR * depth, row: depth, col: 1 }
        }),
        // Pack one block at a time, so that it stays in the L2 cache: packed as a whole, A would go to memory and back.
        A::Columns(mat) => with_real!(mat.view.dtype(), R => {
            // SAFETY: A is an input of this call; nobody writes it during the call. The scratch holds a row block.
            cpu.isa.run(#[inline(always)] || unsafe {
                let source = &mat.view.as_slice::<R>()[k * mat.stride + block.first_row..];
                pack::a_columns(source, mat.stride, depth, block.rows, scratch.as_mut_ptr(), MR * depth);
            });
            PreparedA::Wide { base: scratch.as_ptr(), tile_step: MR * depth, row: 1, col: MR }
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

/// All tiles of a row block against `panels` over one inner block. The destination's column 0 is column
/// `panels.start * NR` of the slab.
fn tiles(
    cpu: &CpuQueue,
    prepared: &PreparedA,
    all_rows: usize,
    slab: &Slab,
    k: usize,
    panels: Range<usize>,
    to: &Destination,
) {
    let depth = slab.block(k);
    // Panels have a constant stride; no need to compute each one's address for every tile.
    let (first_b, panel_stride) = (slab.panel(k, panels.start), slab.panel_stride(k));
    assert!(panels.end <= slab.panels(), "panels {panels:?} of {}", slab.panels());
    let side = if matches!(prepared, PreparedA::Tiled(..)) { amx::SIDE } else { MR };
    for first_row in (0..all_rows).step_by(side) {
        for panel in panels.clone() {
            let column = (panel - panels.start) * NR;
            let rows = (all_rows - first_row).min(side);
            let cols = (slab.cols - panel * NR).min(NR);
            // SAFETY: rows and columns stay inside this item's block of C, which no other item writes; A and B were
            // checked not to overlap C; the panel was packed before this item started.
            unsafe {
                let init =
                    if to.init.is_null() { to.init } else { to.init.add(first_row * to.init_row + column) };
                let c = to.c.add(first_row * to.row + column);
                let (init_row, c_row) = (to.init_row, to.row);
                match *prepared {
                    PreparedA::Wide { base, tile_step, row, col } => {
                        let a = base.add(first_row / MR * tile_step);
                        let (b, b_row) =
                            (first_b.as_ptr::<f32>().add((panel - panels.start) * panel_stride), NR);
                        let (a_row, a_col) = (row, col);
                        tile(
                            cpu.isa,
                            &Tile { depth, a, a_row, a_col, b, b_row, init, init_row, c, c_row, rows, cols },
                        );
                    }
                    PreparedA::Tiled(tiles, a) => {
                        let (b, b_width) =
                            (first_b.as_ptr::<bf16>().add((panel - panels.start) * panel_stride), NR);
                        amx::block(
                            tiles,
                            &amx::Block {
                                depth,
                                a,
                                first_row,
                                b,
                                b_width,
                                init,
                                init_row,
                                c,
                                c_row,
                                rows,
                                cols,
                            },
                        );
                    }
                }
            }
        }
    }
}

fn row_block_f32(cpu: &CpuQueue, c: Mat, a: A, accumulate: Accumulate, slab: &Slab, block: &RowBlock) {
    let at = |mat: &Mat, column: usize| -> *mut f32 {
        mat.view.slice(block.first_row * mat.stride + slab.first_col + column, 0).as_ptr()
    };
    let all_panels = slab.panels();
    for k in (0..slab.depth).step_by(KC) {
        let prepared = prepare_a(cpu, a, block, slab.first_k + k, slab.block(k));
        for first_panel in (0..all_panels).step_by(PANELS_PER_STEP) {
            let last_panel = (first_panel + PANELS_PER_STEP).min(all_panels);
            let column = first_panel * NR;
            let (init, init_row) = match accumulate {
                _ if k > 0 => (at(&c, column).cast_const(), c.stride),
                Accumulate::Overwrite => (std::ptr::null(), 0),
                Accumulate::Add => (at(&c, column).cast_const(), c.stride),
                Accumulate::Residual(r) => (at(&r, column).cast_const(), r.stride),
            };
            let to = Destination { c: at(&c, column), row: c.stride, init, init_row };
            tiles(cpu, &prepared, block.rows, slab, k, first_panel..last_panel, &to);
        }
    }
}

/// C in bf16 or fp16: a block is summed in f32 and rounded once at the end.
fn row_block_narrow<R: Real>(
    cpu: &CpuQueue,
    c: Mat,
    a: A,
    accumulate: Accumulate,
    slab: &Slab,
    block: &RowBlock,
) {
    // SAFETY: the scratch belongs to the working thread; items write disjoint rows of C; a residual is either C itself,
    // read before it is written, or another matrix that nobody writes.
    let sums = unsafe { block.c_scratch.as_mut::<f32>() };
    let all_panels = slab.panels();
    for first_panel in (0..all_panels).step_by(PANELS_PER_STEP) {
        let last_panel = (first_panel + PANELS_PER_STEP).min(all_panels);
        let column = slab.first_col + first_panel * NR;
        let cols = (slab.cols - first_panel * NR).min(PANELS_PER_STEP * NR);
        let from = match accumulate {
            Accumulate::Overwrite => None,
            Accumulate::Add => Some(c),
            Accumulate::Residual(r) => Some(r),
        };
        if let Some(mat) = from {
            for (i, row) in sums.chunks_mut(cols).take(block.rows).enumerate() {
                let at = (block.first_row + i) * mat.stride + column;
                // SAFETY: see above.
                let source = unsafe { mat.view.slice(at, cols).as_slice::<R>() };
                cpu.isa.run(
                    #[inline(always)]
                    || pack::widen_rows(source, cols, 1, cols, row),
                );
            }
        }
        for k in (0..slab.depth).step_by(KC) {
            let prepared = prepare_a(cpu, a, block, slab.first_k + k, slab.block(k));
            let (sums_at, cols_row) = (sums.as_mut_ptr(), cols);
            let init = if from.is_some() || k > 0 { sums_at.cast_const() } else { std::ptr::null() };
            let to = Destination { c: sums_at, row: cols_row, init, init_row: cols_row };
            tiles(cpu, &prepared, block.rows, slab, k, first_panel..last_panel, &to);
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
