//! Decoder families over operations: runs the steps of a unit's program.
//!
//! A [`Unit`] is what one operation of the schedule hands over: the unit's weights, where gradients go,
//! a view for every slot, and the micro-batch. This crate knows no ranks, no schedule and no addresses.
//!
//! Letters in shapes: T tokens, D model width, H query heads, G key-value heads, h head width,
//! F feed-forward width, V vocabulary.

#![forbid(unsafe_code)]

mod head;
mod steps;
mod unit;

pub use steps::run;
pub use unit::{
    DecodeInputs, DropoutKey, Inputs, KernelBackend, PerChannel, TiedEmbedding, Unit, fill_rope_tables,
    kernel_sources, kv_cache_elems, workspace_bytes,
};
