//! Help for tests: goldens made with PyTorch and transformers, plans for small models, engines on them,
//! whole worlds of ranks in one process. A dev-dependency only.

#![forbid(unsafe_code)]

mod cases;
mod golden;
mod setup;
mod window;
mod world;

pub use cases::{CarrierKind, Case, all_cases, pairwise_cases, run_case};
pub use golden::{Golden, golden_dir};
pub use setup::{Setup, engine, plan};
pub use window::{Micro, Window, score};
pub use world::{Batches, Trace, in_world, train_world};
