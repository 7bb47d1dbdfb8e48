//! The output of a run: `metrics.jsonl` for programs, `logs/training.log` for people and their scripts, TensorBoard
//! event files, and progress on a terminal or as plain lines.
//!
//! Nothing is printed here: views write to the writer they are given, and the progress bar draws on stderr only.
//! Not implemented: other trackers, the ledger, the dashboard.
//!
//! The format of the log is a contract with existing parsers: a line that contains `loss` also contains `step
//! <digits>` and `loss: <digits>.<digits>`. Values that do not fit this format, such as NaN, are written with the
//! word `objective` instead.

#![forbid(unsafe_code)]

mod error;
mod progress;
mod record;
mod run_log;
mod tensorboard;
mod terminal;
mod time;

pub use error::ObserveError;
pub use progress::{NoProgress, PlainLines, Progress};
pub use record::{EvalRecord, NamedMetric, StepRecord};
pub use run_log::RunLog;
pub use tensorboard::TensorBoard;
pub use terminal::TerminalBar;
