//! The output of a run: `metrics.jsonl` for programs, `logs/training.log` for people and their scripts, trackers
//! ([`Trackers`]), a timeline of profiled steps ([`Trace`]), and progress on a terminal or as plain lines.
//!
//! [`RunFiles`] reads what a run has written, also while it is being written; [`History`] keeps its metrics in bounded
//! memory, and [`RunReport`] is a page about it. [`read_log`] reads logs of other programs, [`line_chart`] draws metrics,
//! [`prometheus_text`] has the newest ones for a monitoring system.
//!
//! Nothing is printed here: views write to the writer they are given, and the progress bar draws on stderr only.
//! The crate `dashboard` serves all of it as a web page.
//!
//! The format of the log is a contract with existing parsers: a line that contains `loss` also contains `step
//! <digits>` and `loss: <digits>.<digits>`. Values that do not fit this format, such as NaN, are written with the
//! word `objective` instead.

#![forbid(unsafe_code)]

mod chart;
mod error;
mod history;
mod log_reader;
mod progress;
mod prometheus;
mod protobuf;
mod rank_status;
mod record;
mod report;
mod run_files;
mod run_log;
mod run_state;
mod tensorboard;
mod terminal;
mod text;
mod time;
mod trace;
mod trackers;

pub use chart::{Series, line_chart};
pub use error::ObserveError;
pub use history::{Bucket, Column, History};
pub use log_reader::{LoggedStep, read_log};
pub use progress::{NoProgress, PlainLines, Progress};
pub use prometheus::{ScrapedRun, prometheus_text};
pub use rank_status::{MAX_RANKS as MAX_STATUS_RANKS, RankStatus, RunningOperation};
pub use record::{EvalRecord, NamedMetric, StepCost, StepRecord};
pub use report::{RunReport, report_file};
pub use run_files::{
    Completion, MetricsEvent, MetricsLine, MetricsReader, NewLines, RunFiles, RunInfo, SettingRow,
};
pub use run_log::RunLog;
pub use run_state::{RunSigns, RunState};
pub use tensorboard::TensorBoard;
pub use terminal::TerminalBar;
pub use text::{number, one_line, printable, short_seconds};
pub use time::human_duration;
pub use trace::{Trace, TraceSpan};
pub use trackers::{BadAddress, ServerAddress, TrackedRun, TrackerTarget, Trackers};
