//! Why a reward could not be computed. Every message names the function, says what failed and why; the hint says what to
//! do. No message contains a token.

use std::error::Error;
use std::fmt;
use std::io;

use lockstep_core::panics::Panic;
use lockstep_core::{Fault, FaultClass, closest};

use crate::fault::{HttpFault, ProgramFault};

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RewardError {
    #[error("reward function `{function}`: `{option}` is {value}: {why}")]
    BadOption { function: String, option: &'static str, value: String, why: String },
    #[error("reward function `{function}`: `{option}` is not a usable regular expression: {why}")]
    BadPattern { function: String, option: &'static str, why: String },
    #[error("two reward functions have the name `{name}`")]
    DuplicateName { name: String },

    #[error(
        "reward function `{function}` needs the column `{column}`, which a row of the data does not have"
    )]
    MissingColumn { function: String, column: String, present: Vec<String> },
    #[error("reward function `{function}`: the column `{column}` of a row has {found}, expected {expected}")]
    BadColumn { function: String, column: String, found: String, expected: &'static str },

    #[error("reward function `{function}`: cannot start the program `{program}`: {cause}")]
    Start { function: String, program: String, cause: io::Error },
    #[error("reward function `{function}`, worker {worker}: the program {fault}{}", Tail(stderr))]
    Program {
        function: String,
        /// Which of the function's processes, from 0.
        worker: usize,
        fault: ProgramFault,
        /// The last lines that the program wrote to stderr.
        stderr: Vec<String>,
    },
    #[error(
        "reward function `{function}`, worker {worker} failed {failures} times in a row; the last time: {last}"
    )]
    GaveUp { function: String, worker: usize, failures: u32, last: Box<RewardError> },

    #[error("reward function `{function}`: {origin} {fault}")]
    Http {
        function: String,
        /// Scheme, host and port: the rest of a URL may contain secrets.
        origin: String,
        fault: HttpFault,
    },

    #[error("reward function `{function}` returned {rewards} rewards for {samples} samples")]
    WrongLength { function: String, samples: usize, rewards: usize },
    #[error("reward function `{function}` returned {value}, which is not a finite number")]
    NotFinite { function: String, value: f64 },
    #[error("reward function `{function}` {panic}")]
    Panicked { function: String, panic: Panic },
    /// For functions of library users.
    #[error("reward function `{function}` failed: {cause}")]
    Custom { function: String, cause: Box<dyn Error + Send + Sync> },
}

/// The last lines of stderr, if there are some.
struct Tail<'a>(&'a [String]);

impl fmt::Display for Tail<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        f.write_str("; the last lines of its stderr:")?;
        self.0.iter().try_for_each(|line| write!(f, "\n  | {line}"))
    }
}

impl RewardError {
    /// Whether the policy for failures does not apply, because the next batch would fail, too.
    pub fn is_permanent(&self) -> bool {
        matches!(
            self,
            RewardError::BadOption { .. }
                | RewardError::BadPattern { .. }
                | RewardError::DuplicateName { .. }
                | RewardError::GaveUp { .. }
                | RewardError::WrongLength { .. }
        )
    }
}

impl Fault for RewardError {
    fn class(&self) -> FaultClass {
        match self {
            RewardError::BadOption { .. }
            | RewardError::BadPattern { .. }
            | RewardError::DuplicateName { .. } => FaultClass::BadConfig,
            RewardError::MissingColumn { .. }
            | RewardError::BadColumn { .. }
            | RewardError::Program { .. }
            | RewardError::WrongLength { .. }
            | RewardError::NotFinite { .. }
            | RewardError::Custom { .. } => FaultClass::BadData,
            RewardError::Start { cause, .. } if cause.kind() == io::ErrorKind::NotFound => {
                FaultClass::InputMissing
            }
            RewardError::Start { .. } => FaultClass::Unavailable,
            RewardError::GaveUp { last, .. } => last.class(),
            RewardError::Http { fault, .. } => fault.class(),
            RewardError::Panicked { .. } => FaultClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        let text = match self {
            RewardError::BadOption { .. } => return None,
            RewardError::BadPattern { .. } => {
                "use the syntax of Rust's `regex` crate, which is Perl's without look-around and backreferences.".into()
            }
            RewardError::DuplicateName { .. } => "give one of them another `name`.".into(),
            RewardError::MissingColumn { column, present, .. } => {
                match closest(column, present.iter().map(String::as_str)) {
                    Some(close) => format!("set `column` to `{close}`."),
                    None => format!("set `column` to one of: {}.", present.join(", ")),
                }
            }
            RewardError::BadColumn { .. } => {
                "correct the data, or set the policy for reward errors to `skip`, which ignores such rows.".into()
            }
            RewardError::Start { cause, program, .. } => match cause.kind() {
                io::ErrorKind::NotFound => {
                    "check the path. A name without a slash is searched in PATH; a script's first line must name an \
                     interpreter that exists."
                        .into()
                }
                io::ErrorKind::PermissionDenied => {
                    format!("make it executable (`chmod +x {program}`), or name the interpreter first: python3 {program}.")
                }
                _ => return None,
            },
            RewardError::Program { fault, .. } => return fault.hint().map(str::to_owned),
            RewardError::GaveUp { last, .. } => return last.hint(),
            RewardError::Http { fault, .. } => return fault.hint().map(str::to_owned),
            RewardError::WrongLength { .. } => "return one reward per sample, in order.".into(),
            RewardError::NotFinite { .. } => {
                "return a finite number, or no reward for samples without an opinion.".into()
            }
            RewardError::Panicked { .. } | RewardError::Custom { .. } => return None,
        };
        Some(text)
    }
}
