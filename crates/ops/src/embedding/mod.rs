//! Token embedding: a row of the table per token.

mod cpu;
pub mod reference;
#[cfg(test)]
mod tests;

use lockstep_core::DType;
use lockstep_device::{Queue, View};

use crate::Mat;

/// x\[T, D\] = table\[tokens\]. `tokens`\[T\] in u32, each below the table's rows.
pub fn forward(queue: &Queue, x: Mat, table: Mat, tokens: View) {
    assert_eq!((x.rows, x.cols), (tokens.len(), table.cols), "embedding shapes");
    cpu::forward(crate::cpu(queue), x, table, tokens);
}

/// dtable\[tokens\] += dx: rows of the same token are added in order of position.
pub fn backward(queue: &Queue, dtable: Mat, dx: Mat, tokens: View) {
    assert_eq!((dx.rows, dx.cols), (tokens.len(), dtable.cols), "embedding shapes");
    assert_eq!(dtable.view.dtype(), DType::F32, "weight gradients are f32");
    dtable.view.assert_apart(&dx.view);
    cpu::backward(crate::cpu(queue), dtable, dx, tokens);
}
