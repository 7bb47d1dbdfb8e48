//! Rows that stand for several positions, and selections of rows.
//!
//! Documents that begin with the same tokens have equal activations there, so those rows are computed once. Attention
//! works on the positions of every document, and the head on the positions that count. A [`RowMap`] connects N positions
//! to M rows: every position has one row, a row has any number of positions.

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_core::DType;
use lockstep_device::{Queue, View};

use crate::disjoint::assert_disjoint;
use crate::{Mat, embedding};

/// The row of every position, and the positions of every row, in u32.
#[derive(Clone, Copy, Debug)]
pub struct RowMap<'m> {
    /// \[N\]: the row of each position.
    pub source: View<'m>,
    /// \[M + 1\]: where each row's positions begin in `entries`, and the end of the last one's.
    pub offsets: View<'m>,
    /// The positions of each row in ascending order, row by row. Positions that are missing here, which pad a batch, get
    /// values by [`expand`] but have no part in the other operations.
    pub entries: View<'m>,
}

/// y\[N\] = x\[source\].
pub fn expand(queue: &Queue, y: Mat, x: Mat, source: View) {
    embedding::forward(queue, y, x, source);
}

/// y\[n\] = x\[m\] if n is the first position of row m, otherwise 0.
pub fn expand_first(queue: &Queue, y: Mat, x: Mat, map: &RowMap) {
    check(&y, &x, map);
    match queue {
        Queue::Cpu(cpu) => cpu::expand_first(cpu, y, x, map),
        Queue::Cuda(cuda) => cuda::expand_first(cuda, y, x, map),
    }
}

/// y\[m\] = x at the first position of row m; 0 if it has none.
pub fn first(queue: &Queue, y: Mat, x: Mat, map: &RowMap) {
    combine(queue, y, x, map, true);
}

/// y\[m\] = the sum of x over the positions of row m, in ascending order and in f32; 0 if it has none.
pub fn sum(queue: &Queue, y: Mat, x: Mat, map: &RowMap) {
    combine(queue, y, x, map, false);
}

fn combine(queue: &Queue, y: Mat, x: Mat, map: &RowMap, only_first: bool) {
    check(&x, &y, map);
    assert_disjoint(&[y.view], &[x.view]);
    match queue {
        Queue::Cpu(cpu) => cpu::combine(cpu, y, x, map, only_first),
        Queue::Cuda(cuda) => cuda::combine(cuda, y, x, map, only_first),
    }
}

fn check(positions: &Mat, rows: &Mat, map: &RowMap) {
    let RowMap { source, offsets, entries } = *map;
    assert_eq!(
        (positions.rows, rows.rows + 1),
        (source.len(), offsets.len()),
        "shapes of a row map must match"
    );
    assert!(entries.len() <= source.len(), "a position has one row");
    assert_eq!(positions.cols, rows.cols, "rows and positions must have the same width");
    assert_eq!(positions.view.dtype(), rows.view.dtype(), "storage types must match");
    for table in [source, offsets, entries] {
        assert_eq!(table.dtype(), DType::U32, "row maps must be u32");
        assert_disjoint(&[positions.view, rows.view], &[table]);
    }
    assert_disjoint(&[positions.view], &[rows.view]);
}
