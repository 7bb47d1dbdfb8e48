//! The tile kernels: up to MR rows by one panel, over one block of the inner dimension.
//!
//! All of them compute, for each element, `sum = fma(a[k], b[k], sum)` for k in order, starting with `sum = 0`, and
//! then `c = init + sum`. Vectors run along columns, so the instruction set does not change any bit.

use lockstep_device::{InstructionSet, Isa};

use super::{MR, NR};

/// The operands of one call: a tile of C\[rows, cols\] from A\[rows, depth\] and a panel of B\[depth, NR\].
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub(crate) depth: usize,
    /// Element (i, k) of A is at `a + i * a_row + k * a_col`.
    pub(crate) a: *const f32,
    pub(crate) a_row: usize,
    pub(crate) a_col: usize,
    pub(crate) b: *const f32,
    /// Elements from one row of the panel to the next: NR if it is packed. A row's length is the number of columns,
    /// rounded up to a multiple of 16.
    pub(crate) b_row: usize,
    /// The initial value, or null for zero; may be `c`.
    pub(crate) init: *const f32,
    pub(crate) init_row: usize,
    pub(crate) c: *mut f32,
    pub(crate) c_row: usize,
    /// 1 to MR.
    pub(crate) rows: usize,
    /// 1 to NR. Further columns of the panel are read and ignored.
    pub(crate) cols: usize,
}

/// Computes one tile.
///
/// # Safety
/// The pointers are valid for the rows, columns and depth given; C overlaps neither A nor B.
#[inline(always)]
pub(crate) unsafe fn tile(isa: Isa, t: &Tile) {
    debug_assert!((1..=MR).contains(&t.rows) && (1..=NR).contains(&t.cols));
    // SAFETY: guaranteed by the caller; the set was detected (`Isa` is the proof).
    unsafe {
        match isa.set() {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => x86::tile_avx512(t),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => x86::tile_avx2(t),
            _ => tile_portable(t),
        }
    }
}

/// As [`tile`], for rows of A that are not packed: `a_col` is 1 and the panel has WIDTH columns.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
pub(crate) unsafe fn tile_unpacked_a<const WIDTH: usize>(isa: Isa, t: &Tile) {
    debug_assert!(t.a_col == 1 && t.b_row == WIDTH);
    // SAFETY: guaranteed by the caller; the set was detected.
    unsafe {
        match isa.set() {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 if t.rows == MR && WIDTH == 16 => x86::tile_unpacked_a_avx512::<1>(t),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 if t.rows == MR && WIDTH == 32 => x86::tile_unpacked_a_avx512::<2>(t),
            _ => tile(isa, t),
        }
    }
}

/// One row of A against as many panels as its columns need, `panel_stride` elements apart; `t.cols` may be any number.
/// With a single panel, each step would wait for the sums of the step before; several panels are independent.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
pub(crate) unsafe fn row(isa: Isa, t: &Tile, panel_stride: usize) {
    debug_assert!(t.rows == 1 && t.cols >= 1);
    const AT_A_TIME: usize = 2 * NR;
    for first_col in (0..t.cols).step_by(AT_A_TIME) {
        let cols = (t.cols - first_col).min(AT_A_TIME);
        // SAFETY: guaranteed by the caller; offsets stay inside the row and its panels.
        unsafe {
            let init = if t.init.is_null() { t.init } else { t.init.add(first_col) };
            let part =
                Tile { b: t.b.add(first_col / NR * panel_stride), init, c: t.c.add(first_col), cols, ..*t };
            match isa.set() {
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx512 => x86::row_avx512(&part, panel_stride),
                _ => {
                    tile(isa, &Tile { cols: cols.min(NR), ..part });
                    if cols > NR {
                        let init = if part.init.is_null() { part.init } else { part.init.add(NR) };
                        let (b, c) = (part.b.add(panel_stride), part.c.add(NR));
                        tile(isa, &Tile { b, init, c, cols: cols - NR, ..part });
                    }
                }
            }
        }
    }
}

/// Row by row, sixteen columns at a time, so that the compiler vectorizes it for NEON or SSE.
unsafe fn tile_portable(t: &Tile) {
    const LANES: usize = 16;
    for i in 0..t.rows {
        for first_col in (0..t.cols).step_by(LANES) {
            let mut acc = [0f32; LANES];
            for k in 0..t.depth {
                // SAFETY: i < rows and k < depth; the panel's rows are padded to a multiple of 16.
                let (a, b) = unsafe {
                    let b = t.b.add(k * t.b_row + first_col).cast::<[f32; LANES]>();
                    (*t.a.add(i * t.a_row + k * t.a_col), &*b)
                };
                for (sum, b) in acc.iter_mut().zip(b) {
                    *sum = a.mul_add(*b, *sum);
                }
            }
            for (j, sum) in (first_col..t.cols).zip(acc) {
                // SAFETY: i < rows and j < cols.
                unsafe {
                    let init = if t.init.is_null() { 0.0 } else { *t.init.add(i * t.init_row + j) };
                    *t.c.add(i * t.c_row + j) = init + sum;
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{MR, Tile};

    /// Rows of the panel that are prefetched: the panel streams from the L2 cache.
    const AHEAD: usize = 12;

    /// Rows of A that are addressed from one pointer.
    const GROUP: usize = 3;

    /// A pointer for every three rows. From a single pointer the compiler would generate a chain of additions, one per
    /// row, that takes longer than the multiplications. The `black_box` hides that the pointers are related.
    #[inline(always)]
    fn row_groups<const GROUPS: usize>(t: &Tile, rows: usize) -> [*const f32; GROUPS] {
        std::array::from_fn(|group| {
            let first = (group * GROUP).min(rows - 1);
            std::hint::black_box(t.a.wrapping_add(first * t.a_row))
        })
    }

    /// Dispatches on the number of rows, so that each count has its accumulators in registers.
    macro_rules! by_rows {
        ($kernel:ident, $t:expr, $vectors:literal; $($rows:literal)*) => {
            match $t.rows { $($rows => $kernel::<$rows, $vectors>($t),)* rows => unreachable!("{rows} rows") }
        };
    }

    /// # Safety
    /// As [`super::tile`], on a machine with AVX-512.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn tile_avx512(t: &Tile) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if t.cols > 16 {
                by_rows!(rows_avx512, t, 2; 1 2 3 4 5 6 7 8 9 10 11 12)
            } else {
                by_rows!(rows_avx512, t, 1; 1 2 3 4 5 6 7 8 9 10 11 12)
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn rows_avx512<const ROWS: usize, const VECTORS: usize>(t: &Tile) {
        // Prefetch the tile's lines of C, and of the initial value, while the sums are computed.
        for i in 0..ROWS {
            for v in 0..VECTORS {
                _mm_prefetch(t.c.wrapping_add(i * t.c_row + 16 * v).cast::<i8>(), _MM_HINT_ET0);
                if !t.init.is_null() && !std::ptr::eq(t.init, t.c) {
                    _mm_prefetch(t.init.wrapping_add(i * t.init_row + 16 * v).cast::<i8>(), _MM_HINT_T0);
                }
            }
        }
        let mut acc = [[_mm512_setzero_ps(); VECTORS]; ROWS];
        let (mut a, mut b) = (row_groups::<4>(t, ROWS), t.b);
        let (a_row, a_col, b_row) = (t.a_row, t.a_col, t.b_row);
        // SAFETY: `depth` steps of `a_col` along A's rows and of `b_row` along the panel stay inside both, and lanes
        // beyond `cols` are masked for C and the initial value.
        unsafe {
            for _ in 0..t.depth {
                let mut columns = [_mm512_setzero_ps(); VECTORS];
                for (v, column) in columns.iter_mut().enumerate() {
                    *column = _mm512_loadu_ps(b.add(16 * v));
                    _mm_prefetch(b.wrapping_add(AHEAD * b_row + 16 * v).cast::<i8>(), _MM_HINT_T0);
                }
                for (i, sums) in acc.iter_mut().enumerate() {
                    let row = _mm512_set1_ps(*a[i / GROUP].add(i % GROUP * a_row));
                    for (sum, column) in sums.iter_mut().zip(columns) {
                        *sum = _mm512_fmadd_ps(row, column, *sum);
                    }
                }
                a = a.map(|rows| rows.wrapping_add(a_col));
                b = b.add(b_row);
            }
            store_avx512(t, &acc);
        }
    }

    /// MR rows against a panel of VECTORS vectors.
    ///
    /// # Safety
    /// As [`super::tile_unpacked_a`], on a machine with AVX-512.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn tile_unpacked_a_avx512<const VECTORS: usize>(t: &Tile) {
        /// Steps per addition to the pointers: each step's loads are at a fixed offset.
        const STEPS: usize = 4;
        /// Cache lines of A that this many steps use.
        const LINES: usize = MR * STEPS / 16;
        let mut acc = [[_mm512_setzero_ps(); VECTORS]; MR];
        let (mut a, mut b) = (row_groups::<4>(t, MR), t.b);
        let a_row = t.a_row;
        // SAFETY: as in `rows_avx512`; columns of A are contiguous, and rows of the panel are whole vectors.
        unsafe {
            let mut steps = |acc: &mut [[__m512; VECTORS]; MR], count: usize| {
                for step in 0..count {
                    let columns: [__m512; VECTORS] =
                        std::array::from_fn(|v| _mm512_loadu_ps(b.add((step * VECTORS + v) * 16)));
                    for (i, sums) in acc.iter_mut().enumerate() {
                        let row = _mm512_set1_ps(*a[i / GROUP].add(i % GROUP * a_row + step));
                        for (sum, column) in sums.iter_mut().zip(columns) {
                            *sum = _mm512_fmadd_ps(row, column, *sum);
                        }
                    }
                }
                a = a.map(|rows| rows.wrapping_add(count));
                b = b.add(count * VECTORS * 16);
            };
            // Prefetch the next tile's rows from memory while this tile is computed, LINES at a time.
            let mut ahead = t.a.wrapping_add(MR * a_row);
            let rounds = t.depth / (MR * STEPS);
            for _ in 0..MR {
                for round in 0..rounds {
                    for line in 0..LINES {
                        let at = ahead.wrapping_add((round * LINES + line) * 16);
                        _mm_prefetch(at.cast::<i8>(), _MM_HINT_T1);
                    }
                    steps(&mut acc, STEPS);
                }
                ahead = ahead.wrapping_add(a_row);
            }
            for _ in 0..t.depth % (MR * STEPS) {
                steps(&mut acc, 1);
            }
            store_avx512(t, &acc);
        }
    }

    /// Adds the initial value and writes the tile; lanes beyond the columns are masked.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store_avx512<const ROWS: usize, const VECTORS: usize>(
        t: &Tile,
        acc: &[[__m512; VECTORS]; ROWS],
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            for (i, sums) in acc.iter().enumerate() {
                for (v, sum) in sums.iter().enumerate() {
                    let lanes = t.cols.saturating_sub(16 * v).min(16);
                    let mask = ((1u32 << lanes) - 1) as __mmask16;
                    let mut value = *sum;
                    if !t.init.is_null() {
                        let init = _mm512_maskz_loadu_ps(mask, t.init.add(i * t.init_row + 16 * v));
                        value = _mm512_add_ps(init, value);
                    }
                    _mm512_mask_storeu_ps(t.c.add(i * t.c_row + 16 * v), mask, value);
                }
            }
        }
    }

    /// # Safety
    /// As [`super::row`], for at most two panels, on a machine with AVX-512.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn row_avx512(t: &Tile, panel_stride: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match t.cols.div_ceil(16) {
                1 => vectors_avx512::<1>(t, panel_stride),
                2 => vectors_avx512::<2>(t, panel_stride),
                3 => vectors_avx512::<3>(t, panel_stride),
                _ => vectors_avx512::<4>(t, panel_stride),
            }
        }
    }

    /// Two vectors per panel.
    #[target_feature(enable = "avx512f")]
    unsafe fn vectors_avx512<const VECTORS: usize>(t: &Tile, panel_stride: usize) {
        let mut acc = [_mm512_setzero_ps(); VECTORS];
        let (mut a, mut b) = (t.a, t.b);
        // SAFETY: as in `rows_avx512`; vector v is half of panel v / 2.
        unsafe {
            for _ in 0..t.depth {
                let row = _mm512_set1_ps(*a);
                for (v, sum) in acc.iter_mut().enumerate() {
                    let column = b.add(v / 2 * panel_stride + v % 2 * 16);
                    _mm_prefetch(column.wrapping_add(AHEAD * t.b_row).cast::<i8>(), _MM_HINT_T0);
                    *sum = _mm512_fmadd_ps(row, _mm512_loadu_ps(column), *sum);
                }
                a = a.wrapping_add(t.a_col);
                b = b.wrapping_add(t.b_row);
            }
            for (v, sum) in acc.iter().enumerate() {
                let lanes = t.cols.saturating_sub(16 * v).min(16);
                let mask = ((1u32 << lanes) - 1) as __mmask16;
                let mut value = *sum;
                if !t.init.is_null() {
                    value = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, t.init.add(16 * v)), value);
                }
                _mm512_mask_storeu_ps(t.c.add(16 * v), mask, value);
            }
        }
    }

    /// A panel is two halves of 16 columns; each is processed 6 rows at a time (12 accumulators).
    ///
    /// # Safety
    /// As [`super::tile`], on a machine with AVX2 and FMA.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn tile_avx2(t: &Tile) {
        for first_col in (0..t.cols).step_by(16) {
            for first_row in (0..t.rows).step_by(6) {
                // SAFETY: offsets stay inside the tile, which the caller guarantees to be valid.
                unsafe {
                    let init = if t.init.is_null() {
                        t.init
                    } else {
                        t.init.add(first_row * t.init_row + first_col)
                    };
                    let part = Tile {
                        a: t.a.add(first_row * t.a_row),
                        b: t.b.add(first_col),
                        init,
                        c: t.c.add(first_row * t.c_row + first_col),
                        rows: (t.rows - first_row).min(6),
                        cols: (t.cols - first_col).min(16),
                        ..*t
                    };
                    if part.cols > 8 {
                        by_rows!(rows_avx2, &part, 2; 1 2 3 4 5 6)
                    } else {
                        by_rows!(rows_avx2, &part, 1; 1 2 3 4 5 6)
                    }
                }
            }
        }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn rows_avx2<const ROWS: usize, const VECTORS: usize>(t: &Tile) {
        let mut acc = [[_mm256_setzero_ps(); VECTORS]; ROWS];
        let (mut a, mut b) = (row_groups::<2>(t, ROWS), t.b);
        let (a_row, a_col, b_row) = (t.a_row, t.a_col, t.b_row);
        // SAFETY: as in `rows_avx512`.
        unsafe {
            for _ in 0..t.depth {
                let mut columns = [_mm256_setzero_ps(); VECTORS];
                for (v, column) in columns.iter_mut().enumerate() {
                    *column = _mm256_loadu_ps(b.add(8 * v));
                }
                for (i, sums) in acc.iter_mut().enumerate() {
                    let row = _mm256_set1_ps(*a[i / GROUP].add(i % GROUP * a_row));
                    for (sum, column) in sums.iter_mut().zip(columns) {
                        *sum = _mm256_fmadd_ps(row, column, *sum);
                    }
                }
                a = a.map(|rows| rows.wrapping_add(a_col));
                b = b.add(b_row);
            }
            for (i, sums) in acc.iter().enumerate() {
                for (v, sum) in sums.iter().enumerate() {
                    let lanes = t.cols.saturating_sub(8 * v).min(8);
                    let mask = lane_mask(lanes);
                    let mut value = *sum;
                    if !t.init.is_null() {
                        let init = _mm256_maskload_ps(t.init.add(i * t.init_row + 8 * v), mask);
                        value = _mm256_add_ps(init, value);
                    }
                    _mm256_maskstore_ps(t.c.add(i * t.c_row + 8 * v), mask, value);
                }
            }
        }
    }

    #[target_feature(enable = "avx2")]
    fn lane_mask(lanes: usize) -> __m256i {
        let index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes as i32), index)
    }
}
