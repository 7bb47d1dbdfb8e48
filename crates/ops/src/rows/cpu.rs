use lockstep_device::{CpuQueue, Real};

use super::RowMap;
use crate::dispatch::with_real;
use crate::{Mat, ROWS_PER_ITEM};

/// The map's tables as slices: row of each position, offsets, positions of each row.
fn tables<'m>(map: &RowMap<'m>) -> [&'m [u32]; 3] {
    // SAFETY: maps are only read.
    unsafe { [map.source.as_slice(), map.offsets.as_slice(), map.entries.as_slice()] }
}

pub(super) fn expand_first(cpu: &CpuQueue, y: Mat, x: Mat, map: &RowMap) {
    let [source, offsets, entries] = tables(map);
    let is_first = |n: usize| {
        let row = source[n] as usize;
        entries[offsets[row] as usize..offsets[row + 1] as usize].first() == Some(&(n as u32))
    };
    with_real!(y.view.dtype(), R => each_row::<R>(cpu, &y, &|n, out| {
        if is_first(n) {
            let row = source[n] as usize;
            // SAFETY: x is only read.
            out.copy_from_slice(unsafe { x.row(row).as_slice::<R>() });
        } else {
            out.fill(R::from_f32(0.0));
        }
    }));
}

pub(super) fn combine(cpu: &CpuQueue, y: Mat, x: Mat, map: &RowMap, only_first: bool) {
    let [_, offsets, entries] = tables(map);
    with_real!(y.view.dtype(), R => each_row::<R>(cpu, &y, &|m, out| {
        let positions = &entries[offsets[m] as usize..offsets[m + 1] as usize];
        // SAFETY: x is only read.
        let row = |n: &u32| unsafe { x.row(*n as usize).as_slice::<R>() };
        match positions {
            [] => out.fill(R::from_f32(0.0)),
            [one] => out.copy_from_slice(row(one)),
            [one, ..] if only_first => out.copy_from_slice(row(one)),
            several => cpu.isa.run(#[inline(always)] || sum_rows(out, several, &row)),
        }
    }));
}

/// Sums in f32, a block of columns at a time.
#[inline(always)]
fn sum_rows<'x, R: Real>(out: &mut [R], positions: &[u32], row: &impl Fn(&u32) -> &'x [R]) {
    const BLOCK: usize = 64;
    for (block, out) in out.chunks_mut(BLOCK).enumerate() {
        let mut sums = [0f32; BLOCK];
        for position in positions {
            let part = &row(position)[block * BLOCK..][..out.len()];
            sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x.to_f32());
        }
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out = R::from_f32(sum));
    }
}

/// Calls `fill` with every row of y and its index.
fn each_row<R: Real>(cpu: &CpuQueue, y: &Mat, fill: &(dyn Fn(usize, &mut [R]) + Sync)) {
    cpu.pool.run(y.rows.div_ceil(ROWS_PER_ITEM), &|item, _| {
        for row in item * ROWS_PER_ITEM..y.rows.min((item + 1) * ROWS_PER_ITEM) {
            // SAFETY: items write disjoint rows of y.
            fill(row, unsafe { y.row(row).as_mut::<R>() });
        }
    });
}
