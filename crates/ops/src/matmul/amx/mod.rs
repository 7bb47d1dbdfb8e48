//! Matmul of bf16 matrices with AMX: what differs from the vector kernels. The drivers are the same.
//!
//! One instruction multiplies sixteen rows of A by sixteen columns of B over 32 steps of the inner dimension. For each
//! element it sums the even steps by a chain of fused multiply-adds from 0, the odd ones by another, adds the two, and
//! adds that to the element. A block of [`KC`](super::KC) is twelve such instructions on one tile that starts from 0.
//! This order gives bits of its own. Among matmuls that use it, no bit depends on rows, threads or the driver, nor on
//! which operand is A (`few_rows`). An inner block that is not a multiple of 32 is padded with zeros, which add
//! nothing. Subnormal numbers count as zero.
//!
//! B is packed in panels of words, each two steps of the inner dimension: \[depth / 2, width, 2\]. A is read in place
//! if all its tiles are whole; otherwise it is copied, tile by tile.

mod pack;
#[cfg(test)]
mod tests;

#[cfg(not(target_arch = "x86_64"))]
#[path = "absent.rs"]
mod machine;
#[cfg(target_arch = "x86_64")]
#[path = "x86.rs"]
mod machine;

use half::bf16;
use lockstep_device::Tiles;

use crate::Mat;

pub(super) use pack::{natural, transposed};

/// Rows of a tile; columns of a tile of C.
pub(super) const TILE: usize = Tiles::ROWS;
/// Steps of the inner dimension in a tile.
pub(super) const STEP: usize = Tiles::ROW_BYTES / size_of::<bf16>();
/// The maximum number of rows and columns of one call.
pub(super) const SIDE: usize = 2 * TILE;

/// Rows of A over one inner block, as tiles are loaded from them: tile t of rows starts at `base + t * tile`, its rows
/// are `row` apart, and the tile of the next [`STEP`] steps is `next` further on.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    base: *const bf16,
    tile: usize,
    row: usize,
    next: usize,
}

impl Rows {
    /// Rows `first..first + rows` of A\[M, K\] over an inner block, in place or copied into `scratch`.
    ///
    /// # Safety
    /// Nobody writes A while they are used.
    #[inline(always)]
    pub(super) unsafe fn of(
        mat: Mat,
        first: usize,
        rows: usize,
        k: usize,
        depth: usize,
        scratch: &mut [bf16],
    ) -> Rows {
        let mat = mat.row_range(first, rows).columns(k, depth);
        if rows.is_multiple_of(TILE) && depth.is_multiple_of(STEP) {
            return Rows { base: mat.view.as_ptr(), tile: TILE * mat.stride, row: mat.stride, next: STEP };
        }
        // SAFETY: guaranteed by the caller.
        unsafe { pack::rows(mat, scratch) };
        Rows::copied(depth, scratch)
    }

    /// Columns `first..first + rows` of A stored as \[K, M\], transposed into rows.
    ///
    /// # Safety
    /// Nobody writes A during the call; the machine has AMX.
    #[inline(always)]
    pub(super) unsafe fn transposed(
        mat: Mat,
        first: usize,
        rows: usize,
        k: usize,
        depth: usize,
        scratch: &mut [bf16],
    ) -> Rows {
        // SAFETY: guaranteed by the caller.
        unsafe { pack::columns(mat.row_range(k, depth).columns(first, rows), scratch) };
        Rows::copied(depth, scratch)
    }

    fn copied(depth: usize, scratch: &[bf16]) -> Rows {
        let depth = depth.next_multiple_of(STEP);
        Rows { base: scratch.as_ptr(), tile: TILE * depth, row: STEP, next: TILE * STEP }
    }

    /// The rows from row `row` on, a multiple of [`TILE`].
    fn at_row(&self, row: usize) -> Rows {
        debug_assert!(row.is_multiple_of(TILE));
        Rows { base: self.base.wrapping_add(row / TILE * self.tile), ..*self }
    }
}

/// The operands of one call: C\[rows, cols\] from rows of A and a panel of B, over one inner block.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) depth: usize,
    pub(super) a: Rows,
    /// The first row of A in the block, a multiple of [`TILE`].
    pub(super) first_row: usize,
    pub(super) b: *const bf16,
    /// Columns of the panel: 16 or 32.
    pub(super) b_width: usize,
    /// The initial value, or null for zero; may be `c`.
    pub(super) init: *const f32,
    pub(super) init_row: usize,
    pub(super) c: *mut f32,
    pub(super) c_row: usize,
    /// 1 to [`SIDE`].
    pub(super) rows: usize,
    /// 1 to `b_width`.
    pub(super) cols: usize,
}

/// f32 values of a block of C, contiguous.
#[repr(C, align(64))]
struct Sums([f32; SIDE * SIDE]);

/// Computes a block.
///
/// # Safety
/// The pointers are valid for the rows, columns and depth given, those of A and B for whole tiles; C overlaps neither A
/// nor B.
pub(super) unsafe fn block(_set_up: &Tiles, block: &Block) {
    debug_assert!((1..=SIDE).contains(&block.rows) && (1..=block.b_width).contains(&block.cols));
    let whole = block.rows.is_multiple_of(TILE) && block.cols.is_multiple_of(TILE);
    // SAFETY: guaranteed by the caller; tiles are configured.
    unsafe {
        if whole && block.init.is_null() {
            return machine::multiply(block, block.c, block.c_row);
        }
        let mut sums = std::mem::MaybeUninit::<Sums>::uninit();
        machine::prefetch(block);
        machine::multiply(block, sums.as_mut_ptr().cast(), SIDE);
        machine::add(block, sums.as_ptr().cast());
    }
}
