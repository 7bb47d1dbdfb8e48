//! What an external program or an HTTP endpoint did wrong.

use std::fmt;
use std::io;

use lockstep_core::FaultClass;

/// What a reward program did wrong. The texts continue "the program …".
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProgramFault {
    #[error("gave {answered} of {expected} answers in {timeout_s} s")]
    Timeout { answered: usize, expected: usize, timeout_s: f64 },
    #[error("{exit} {}", When(*answered, *expected))]
    Ended { exit: ProgramExit, answered: usize, expected: usize },
    #[error("closed its stdout {}", When(*answered, *expected))]
    ClosedOutput { answered: usize, expected: usize },
    #[error("wrote a line that is not an answer ({why}): {line}")]
    NotAnAnswer { line: String, why: String },
    #[error("wrote a line of more than {limit_bytes} bytes")]
    LineTooLong { limit_bytes: usize },
    #[error("answered sample {id}, which is not in this batch")]
    UnknownId { id: u64 },
    #[error("answered sample {id} twice")]
    RepeatedId { id: u64 },
    #[error("wrote more than one answer per sample: {line}")]
    ExtraOutput { line: String },
    #[error("gave sample {id} the reward {found}, which is not a finite number")]
    NotFinite { id: u64, found: String },
    #[error("gave sample {id} {found} as its reward, expected a number or null")]
    WrongType { id: u64, found: String },
    #[error("cannot be reached through its pipes: {cause}")]
    Pipe { cause: io::Error },
}

/// How many answers a process had given. It may also end while it has no samples.
struct When(usize, usize);

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            When(_, 0) => f.write_str("before it got a batch"),
            When(answered, expected) => write!(f, "after {answered} of {expected} answers"),
        }
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramExit {
    Code(i32),
    Signal(i32),
}

impl fmt::Display for ProgramExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProgramExit::Code(code) => write!(f, "exited with code {code}"),
            ProgramExit::Signal(signal) => write!(f, "was ended by signal {signal}"),
        }
    }
}

impl ProgramFault {
    pub(crate) fn hint(&self) -> Option<&'static str> {
        Some(match self {
            ProgramFault::Timeout { .. } => {
                "let the program flush its stdout after each answer, raise `timeout_s`, or use more `workers`. The time \
                 that the program needs to start counts."
            }
            ProgramFault::Ended { exit: ProgramExit::Code(0), .. } => {
                "the program must read samples until its stdin ends, and answer each with one line."
            }
            ProgramFault::Ended { .. } | ProgramFault::Pipe { .. } => return None,
            ProgramFault::ClosedOutput { .. } => "keep stdout open until stdin ends.",
            ProgramFault::NotAnAnswer { .. } | ProgramFault::LineTooLong { .. } => {
                "write answers such as {\"id\": 0, \"reward\": 1.0} to stdout, one per line, and everything else to stderr."
            }
            ProgramFault::UnknownId { .. }
            | ProgramFault::RepeatedId { .. }
            | ProgramFault::ExtraOutput { .. } => "answer each sample once, with the `id` of its line.",
            ProgramFault::NotFinite { .. } | ProgramFault::WrongType { .. } => {
                "answer with a finite number, or with null for a sample without an opinion."
            }
        })
    }
}

/// What an HTTP endpoint did wrong. The texts continue "http://host:port …".
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpFault {
    #[error("did not answer in {timeout_s} s")]
    Timeout { timeout_s: f64 },
    #[error("cannot be reached: {cause}")]
    Connection { cause: String },
    #[error("answered with status {status}{}", Reason(message))]
    Status { status: u16, message: String },
    #[error("answered with more than {limit_bytes} bytes")]
    TooLarge { limit_bytes: u64 },
    #[error("answered with something else than rewards ({why}): {text}")]
    NotAnAnswer { text: String, why: String },
    #[error("answered with {rewards} rewards for {samples} samples")]
    WrongLength { samples: usize, rewards: usize },
    #[error("answered with a reward that is not a finite number: {found}")]
    NotFinite { found: String },
    #[error("answered with {found} as a reward, expected a number or null")]
    WrongType { found: String },
}

struct Reason<'a>(&'a str);

impl fmt::Display for Reason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, ": {}", self.0) }
    }
}

impl HttpFault {
    pub(crate) fn class(&self) -> FaultClass {
        match self {
            HttpFault::Timeout { .. } | HttpFault::Connection { .. } => FaultClass::Unavailable,
            HttpFault::Status { status: 401 | 403, .. } => FaultClass::NotAuthorised,
            HttpFault::Status { .. } => FaultClass::Unavailable,
            _ => FaultClass::BadData,
        }
    }

    /// Whether the same request may succeed a moment later.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, HttpFault::Connection { .. } | HttpFault::Status { status: 429 | 502..=504, .. })
    }

    pub(crate) fn hint(&self) -> Option<&'static str> {
        Some(match self {
            HttpFault::Timeout { .. } => "raise `timeout_s`, or make the endpoint faster.",
            HttpFault::Connection { .. } => "check the URL, and that the server runs.",
            HttpFault::Status { status: 401 | 403, .. } => {
                "set the environment variable that the configuration names to a token that the endpoint accepts."
            }
            HttpFault::Status { status: 300..=399, .. } => "use the URL to which the endpoint redirects.",
            HttpFault::Status { .. } => return None,
            HttpFault::TooLarge { .. }
            | HttpFault::NotAnAnswer { .. }
            | HttpFault::WrongLength { .. }
            | HttpFault::NotFinite { .. }
            | HttpFault::WrongType { .. } => {
                "answer with {\"rewards\": [1.0, null]}: one finite number or null per sample, in order."
            }
        })
    }
}
