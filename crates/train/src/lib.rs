//! Training: from a `RunConfig` to a trained model folder.
//!
//! [`prepare`] resolves everything before step one (tokenizer, data, model shape, plan); [`train`] is the
//! loop. Objectives are short files that turn log-probabilities into coefficients.

#![forbid(unsafe_code)]

mod data_spec;
mod error;
mod feed;
mod journal;
mod output_dir;
mod rate;
mod run;
mod save;
mod setup;
mod sft;

pub use data_spec::{prepare_eval, prepare_train};
pub use error::TrainError;
pub use output_dir::Holder;
pub use rate::RateSchedule;
pub use run::{Connect, MemoryUse, Outcome, train};
pub use setup::{
    Prepared, chosen_strategy, load_tokenizer, model_shape, num_threads, plan_for, prepare, strategy_name,
};
pub use sft::Sft;
