//! Training: from a `RunConfig` to a trained model folder.
//!
//! [`prepare`] resolves everything before step one (tokenizer, data, model shape, plan); [`train`] is the
//! loop. Objectives are short files that turn log-probabilities into coefficients.

#![forbid(unsafe_code)]

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
mod numbers;
mod objective;
mod open;
mod optimizer;
mod output_dir;
mod position;
mod rate;
mod resume;
mod run;
mod save;
mod scaler;
mod selftest;
mod setup;
mod sft;
mod stop;

pub use bench::{StepSpeed, bench_step};
pub use chat::chat_rows;
pub use data_spec::{prepare_eval, prepare_train};
pub use error::TrainError;
pub use evaluate::evaluate;
pub use export::{Exported, export_checkpoint};
pub use finish::MemoryUse;
pub use lockstep_engine::{Coefficients, Outputs};
pub use lockstep_shape::{Channel, Channels};
pub use numbers::{CudaVersions, Difference, Numbers};
pub use objective::{Metrics, Objective, WindowCounts, objective_needs, train_step};
pub use output_dir::{Holder, belongs_to};
pub use rate::RateSchedule;
pub use run::{Connect, Connection, Outcome, train, train_with};
pub use selftest::selftest_steps;
pub use setup::{
    Prepared, device_memory, load_tokenizer, model_folder, model_shape, num_threads, plan_for, prepare,
    prepare_for,
};
pub use sft::Sft;
pub use stop::StopRequest;
