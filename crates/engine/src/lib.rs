//! Executes a [`RunPlan`](lockstep_plan::RunPlan): allocates its memory once, then runs its schedules. Each lane runs its
//! operations in the order of the list, on its own thread (the compute lane on the caller's); the schedule says which
//! operations of other lanes it waits for.
//!
//! Everything that an operation needs is computed before the first step; a step does not allocate.

#![forbid(unsafe_code)]

mod addresses;
mod batch_fill;
mod driver;
mod engine;
mod error;
mod execute;
mod inputs;
mod lanes;
mod meter;
mod model;
mod norm;
mod prepared_phase;
mod quantised;

mod collectives;
mod io_staging;
mod poison;
mod run_task;
mod running;
mod step;
mod task;
mod transport;
mod update_range;

pub use collectives::Exchanged;
pub use driver::{
    Coefficients, DecodeBatch, DecodeDriver, MicroBatch, Outputs, StepDriver, StepReport, UpdateRule,
    UpdateSettings,
};
pub use engine::{Engine, Resources};
pub use error::EngineError;
pub use meter::{Activity, LaneSeconds, Measurement, OpSpan};
pub use model::{Model, ModelMut};
pub use quantised::TensorQuantiser;
pub use running::{LaneMonitor, LaneOperation};
pub use transport::{CommUse, Comms};
