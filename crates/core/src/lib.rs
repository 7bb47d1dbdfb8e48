//! The vocabulary every other crate shares: data types, counted quantities, ranks and meshes, how a
//! flat unit is cut into shards, the counter-based generator, the fixed order of summation, and how an
//! error says what to do about it.
//!
//! Nothing here touches a clock, the environment, a disk or a network.

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
pub mod sum;

pub use dtype::DType;
pub use fault::{Fault, FaultClass, closest};
pub use layout::{ALIGN_ELEMS, ShardRange, padded_elems, shard_range};
pub use mesh::{Axis, Mesh, Rank};
pub use quantity::{Bytes, Elems, Step};
