//! Decoder families in terms of operations: runs the steps of a unit's program.
//!
//! An operation of the schedule provides a [`Unit`]: the unit's weights, where its gradients go, a view for every slot,
//! and the micro-batch. This crate knows no ranks, no schedule and no addresses.
//!
//! Letters in shapes: T tokens, D model width, H query heads, G key-value heads, h head width,
//! F feed-forward width, V vocabulary.

#![forbid(unsafe_code)]

mod attention;
mod head;
mod steps;
mod unit;

pub use lockstep_ops::attention::KV_PAGE_TOKENS;
pub use steps::run_program;
pub use unit::{
    DecodeInputs, DropoutKey, Inputs, KernelBackend, PerChannel, TiedEmbedding, Unit, fill_rope_tables,
    kernel_sources, kv_page_elems, workspace_bytes,
};
