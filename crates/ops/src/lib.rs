//! The operations of a decoder, forward and backward, a folder each.
//!
//! A folder holds what the operation means (`mod.rs`), the CPU and the CUDA version (`kernels.cu`, compiled at run
//! time), and tests that judge them by a plain reference in f64, by finite differences and by the row contract: an
//! output row depends on its row and its document alone. `selftest` runs the comparison with the reference on the
//! user's device. Operations allocate nothing; scratch comes from the caller. On a GPU activations and weights have
//! one storage type; statistics, logits and weight gradients are f32.
//!
//! Letters in shapes: T tokens, D model width, H query heads, G key-value heads, h head width, F feed-forward width,
//! V vocabulary.

pub mod adamw;
pub mod attention;
pub mod bench;
pub mod bias;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod host;
pub mod lion;
pub mod matmul;
pub mod reduce;
pub mod rmsnorm;
pub mod rope;
pub mod score_head;
pub mod selftest;
pub mod sgd;
pub mod swiglu;

mod disjoint;
mod dispatch;
mod errors;
#[cfg(test)]
mod invalid_operands;
mod mat;
mod math;
mod operands;
mod optimizer;
mod sources;
#[cfg(test)]
mod testing;
mod vectors;

pub use mat::Mat;
pub use sources::{
    all_kernel_sources, model_kernel_sources, optimizer_kernel_source, score_head_kernel_source,
};

/// Rows of work that a pool item takes: small enough to balance, large enough to be worth a hand-out.
pub(crate) const ROWS_PER_ITEM: usize = 32;
