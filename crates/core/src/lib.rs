//! The types that all other crates share: data types, counted quantities, ranks and meshes, shard ranges, the
//! counter-based random number generator, roundings of weights, fixed orders of summation, and errors with an exit code and a hint.
//!
//! This crate uses no clock, environment, disk or network.

#![forbid(unsafe_code)]

mod dtype;
pub mod failpoint;
mod fault;
pub mod fold;
mod layout;
mod mesh;
pub mod panics;
pub mod proof;
mod quantity;
pub mod rng;
pub mod rounding;
pub mod sum;

pub use dtype::DType;
pub use fault::{Fault, FaultClass, closest};
pub use layout::{ALIGN_ELEMS, NF4_BLOCK_ELEMS, NF4_SCALES_PER_BLOCK, ShardRange, padded_elems, shard_range};
pub use mesh::{Axis, Mesh, Rank};
pub use quantity::{Bytes, Elems, Step};
