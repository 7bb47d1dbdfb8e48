//! Executes a [`RunPlan`](lockstep_plan::RunPlan): takes its memory once, then runs its schedule step by
//! step. Each lane runs its operations in the order of the list, on a thread of its own (the compute lane
//! on the caller's); waits between lanes are the schedule's.
//!
//! Everything an operation needs is found before the first step; a step allocates nothing.

#![forbid(unsafe_code)]

mod addresses;
mod driver;
mod engine;
mod error;
mod execute;
mod inputs;
mod lanes;
mod model;
mod norm;
mod phases;

mod collectives;
mod io_staging;
mod poison;
mod run_task;
mod step;
mod task;
mod transport;

pub use driver::{
    Coefficients, DecodeBatch, DecodeDriver, MicroBatch, Outputs, StepDriver, StepReport, UpdateRule,
    UpdateSettings,
};
pub use engine::{Engine, Resources};
pub use error::EngineError;
pub use model::{Model, ModelMut};
pub use transport::Comms;
