//! What a run tells: `metrics.jsonl` for programs, `logs/training.log` for people and their scripts, and
//! progress on a terminal or as plain lines, and TensorBoard's event files.
//!
//! Nothing is printed here: views write to what they are handed, and the terminal bar draws on stderr
//! alone. Left out so far: other trackers, the ledger, the dashboard.
//!
//! The log's grammar is a contract with the parsers people have: a line that contains `loss` also
//! contains `step <digits>` and `loss: <digits>.<digits>`. Whatever cannot be said so, such as a value
//! that is not a number, is said with the word `objective`.

#![forbid(unsafe_code)]

mod error;
mod progress;
mod record;
mod run_log;
mod tensorboard;
mod terminal;
mod time;

pub use error::ObserveError;
pub use progress::{PlainLines, Progress, Silent};
pub use record::{EvalRecord, StepRecord};
pub use run_log::RunLog;
pub use tensorboard::TensorBoard;
pub use terminal::TerminalBar;
