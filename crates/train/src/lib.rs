//! Trains a model: from a `RunConfig` to a model folder.
//!
//! [`prepare`] loads and checks everything before the first step: the tokenizer, the data, the model shape and the
//! plan. [`train`] runs the training loop. An [`Objective`] turns the model's outputs into gradient coefficients.

#![forbid(unsafe_code)]

mod adapter;
mod algorithms;
mod bad_step;
mod bench;
mod chat;
mod data_spec;
mod error;
mod evaluate;
mod export;
mod feed;
mod finish;
pub mod generate;
mod inference;
mod journal;
mod learner;
mod learning;
mod lr_schedule;
mod merge;
mod models;
mod numerics;
mod objective;
mod open;
mod optimizer;
mod output_dir;
mod position;
mod profile;
mod quantise;
mod reference;
mod resume;
mod rollout;
mod save;
mod scaler;
mod selftest;
mod setup;
mod status;
mod step_meter;
mod stop;
mod train_state;
mod trainer;

pub use adapter::model_and_adapter;
pub use algorithms::sft::Sft;
pub use bench::{StepSpeed, bench_step};
pub use chat::chat_encoder;
pub use data_spec::{prepare_eval, prepare_train};
pub use error::TrainError;
pub use evaluate::evaluate;
pub use export::{ExportSummary, Merge, export_checkpoint};
pub use finish::MemoryUse;
pub use journal::TrackerAccess;
pub use lockstep_engine::{Coefficients, Outputs};
pub use lockstep_shape::{Channel, Channels};
pub use lr_schedule::LrSchedule;
pub use models::RunModels;
pub use numerics::{CudaVersions, FingerprintDifference, MpiVersion, NumericsFingerprint};
pub use objective::{Metrics, Objective, StepCounts, coefficients_ahead, train_step};
pub use output_dir::{LockHolder, belongs_to};
pub use selftest::selftest_steps;
pub use setup::{
    PreparedRun, device_memory, load_tokenizer, model_folder, model_shape, num_threads, plan_for,
    plan_input_for, prepare, prepare_for,
};
pub use stop::StopRequest;
pub use trainer::{Connect, Connection, TrainOutcome, train, train_with};
