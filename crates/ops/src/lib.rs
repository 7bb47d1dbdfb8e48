//! The operations of a decoder, forward and backward, one folder each.
//!
//! A folder holds the operation's definition and argument checks (`mod.rs`), its CPU and CUDA versions (`kernels.cu`,
//! compiled at run time), a reference implementation in f64, and tests. The tests compare with the reference and with
//! finite differences, and check the row contract: an output row depends only on its own row and its document.
//! `selftest` runs the comparison with the reference on the user's device. Operations allocate nothing; the caller
//! provides scratch memory. On a GPU activations and weights have one storage type; statistics, logits and weight
//! gradients are f32.
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
pub mod nf4;
pub mod optimizer;
pub mod quant;
pub mod reduce;
pub mod rmsnorm;
pub mod rope;
pub mod rows;
pub mod sampling;
pub mod scale;
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
mod sources;
#[cfg(test)]
mod testing;
mod vectors;

pub use mat::Mat;
pub use sources::{
    adapter_kernel_source, all_kernel_sources, dequantise_kernel_source, model_kernel_sources,
    optimizer_kernel_source, score_head_kernel_source,
};

/// Rows that a pool item processes: few enough for load balancing, enough to outweigh the cost of taking an item.
pub(crate) const ROWS_PER_ITEM: usize = 32;
