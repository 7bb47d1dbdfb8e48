//! Help for tests: goldens made with PyTorch and transformers, plans for small models, engines on them,
//! whole worlds of ranks in one process. A dev-dependency only.

#![forbid(unsafe_code)]

mod cases;
mod golden;
mod setup;
mod window;
mod world;

pub use cases::{CarrierKind, Case, Trained, all_cases, pairwise_cases, run_case, run_case_of};
pub use golden::{Golden, golden_dir};
pub use setup::{Setup, engine, input, model, plan};
pub use window::{Micro, Window, score, score_with};
pub use world::{Batches, Trace, in_world, in_world_of, train_world};
