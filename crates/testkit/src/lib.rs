//! Help for tests: goldens made with PyTorch and transformers, plans for small models, engines on them.
//! A dev-dependency only.

#![forbid(unsafe_code)]

mod golden;
mod setup;
mod window;

pub use golden::{Golden, golden_dir};
pub use setup::{Setup, engine, plan};
pub use window::{Micro, Window};
