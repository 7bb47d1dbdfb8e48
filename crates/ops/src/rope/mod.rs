//! Rotary position embedding (RoPE) in the half-split layout of Hugging Face models: for a head of width h,
//! (x₁, x₂) = (x\[..h/2\], x\[h/2..\]) becomes (x₁·cos − x₂·sin, x₂·cos + x₁·sin), in place.

mod cpu;
pub(crate) mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_core::DType;
use lockstep_device::cuda::GpuError;
use lockstep_device::{Queue, View};

use crate::Mat;
use crate::disjoint::assert_disjoint;

/// The direction of the rotation. Backward is the transpose of forward: the inverse rotation with the same scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Forward,
    Backward,
}

/// Angles by position: cos and sin, each \[positions, h/2\] in f32.
#[derive(Clone, Copy, Debug)]
pub struct Table<'m> {
    pub cos: View<'m>,
    pub sin: View<'m>,
    pub half: usize,
}

impl Table<'_> {
    /// The number of positions in the table.
    pub fn positions(&self) -> usize {
        self.cos.len() / self.half
    }
}

/// Rotates every head of x\[T, heads·h\]. `positions`\[T\] in u32, each below the table's number of positions.
pub fn apply(queue: &Queue, x: Mat, positions: View, table: Table, direction: Direction) {
    check(&x, positions, &table);
    match queue {
        Queue::Cpu(cpu) => cpu::apply(cpu, x, positions, table, direction),
        Queue::Cuda(cuda) => cuda::apply(cuda, x, positions, table, direction),
    }
}

fn check(x: &Mat, positions: View, table: &Table) {
    let Table { cos, sin, half } = *table;
    assert!(half > 0 && x.cols.is_multiple_of(2 * half), "{} columns in heads of {}", x.cols, 2 * half);
    assert_eq!((positions.len(), positions.dtype()), (x.rows, DType::U32), "one position per token");
    let angles = (table.positions() * half, DType::F32);
    assert_eq!(
        [(cos.len(), cos.dtype()), (sin.len(), sin.dtype())],
        [angles; 2],
        "cos and sin must cover every position"
    );
    assert_disjoint(&[x.view], &[positions, cos, sin]);
}

/// Positions that are written to the table at once.
const FILL_ROWS: usize = 1024;

/// Fills the table for `cos.len() / half` positions from the inverse frequencies, in f64. `scale` multiplies cosines
/// and sines.
pub fn fill(table: Table, inverse_frequencies: &[f64], scale: f64) -> Result<(), GpuError> {
    assert_eq!(inverse_frequencies.len(), table.half, "one frequency per pair");
    let positions = table.positions();
    // Write many rows at a time: each write to a GPU is a copy. This runs once, before training.
    for first in (0..positions).step_by(FILL_ROWS) {
        let rows = FILL_ROWS.min(positions - first);
        let angles =
            (first..first + rows).flat_map(|row| inverse_frequencies.iter().map(move |f| row as f64 * f));
        let (cos, sin): (Vec<f32>, Vec<f32>) =
            angles.map(|a| ((scale * a.cos()) as f32, (scale * a.sin()) as f32)).unzip();
        table.cos.slice(first * table.half, rows * table.half).write(&cos)?;
        table.sin.slice(first * table.half, rows * table.half).write(&sin)?;
    }
    Ok(())
}
