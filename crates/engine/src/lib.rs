//! Executes a [`RunPlan`](lockstep_plan::RunPlan): takes its arena once, then runs its schedule step by
//! step, operation by operation, in the order of the list.
//!
//! Everything an operation needs is found before the first step; a step allocates nothing. In this
//! build the executor has the compute lane: schedules that need other lanes (collectives, offload) are
//! planned and printed but refused here, by name.

#![forbid(unsafe_code)]

mod driver;
mod engine;
mod error;
mod execute;
mod norm;
mod places;
mod state;

pub use driver::{Driver, MicroBatch, StepReport, Updates};
pub use engine::Engine;
pub use error::EngineError;
