//! Help for tests: goldens made with PyTorch and transformers, plans for small models, engines on them.
//! A dev-dependency only.

#![forbid(unsafe_code)]

mod golden;
mod setup;
mod window;
mod world;

pub use golden::{Golden, golden_dir};
pub use setup::{Setup, engine, plan};
pub use window::{Micro, Window};
pub use world::{Batches, Trace, rank_engine, run_rank, train_world};
