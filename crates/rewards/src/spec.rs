//! Reward functions as data: which one, with which options.

use std::ffi::OsString;
use std::fmt;

use crate::builtin::{self, ExactMatch, Format, LengthPenalty, NumericMatch, RegexSearch, RepetitionPenalty};
use crate::error::RewardError;
use crate::function::RewardFunction;
use crate::http::{Http, HttpReward};
use crate::program::{Program, ProgramReward};

/// A reward function and its options.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RewardSpec {
    ExactMatch(ExactMatch),
    NumericMatch(NumericMatch),
    Format(Format),
    Regex(RegexSearch),
    LengthPenalty(LengthPenalty),
    RepetitionPenalty(RepetitionPenalty),
    Program(Program),
    Http(Http),
}

/// What the caller knows and this crate must not look up.
#[derive(Clone, Default)]
pub struct RewardContext {
    /// The environment of this process (`std::env::vars_os`). Programs get a part of it.
    pub environment: Vec<(OsString, OsString)>,
}

impl fmt::Debug for RewardContext {
    /// Values of the environment may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RewardContext").finish_non_exhaustive()
    }
}

impl RewardSpec {
    /// The built-in functions, by the names of the configuration.
    pub const BUILT_INS: [&'static str; 6] =
        ["exact_match", "numeric_match", "format", "regex", "length_penalty", "repetition_penalty"];

    /// The kind's name in the configuration, which is also the function's name where the user gives none.
    pub fn kind(&self) -> &'static str {
        match self {
            RewardSpec::ExactMatch(_) => "exact_match",
            RewardSpec::NumericMatch(_) => "numeric_match",
            RewardSpec::Format(_) => "format",
            RewardSpec::Regex(_) => "regex",
            RewardSpec::LengthPenalty(_) => "length_penalty",
            RewardSpec::RepetitionPenalty(_) => "repetition_penalty",
            RewardSpec::Program(_) => "program",
            RewardSpec::Http(_) => "http",
        }
    }

    /// Checks the options. Starts no program and sends no request.
    pub fn check(&self, name: &str) -> Result<(), RewardError> {
        match self {
            RewardSpec::Program(options) => options.check(name),
            RewardSpec::Http(options) => HttpReward::new(name, options).map(drop),
            built_in => builtin::open(name, built_in).map(drop),
        }
    }
}

/// Opens a reward function: checks its options, compiles its patterns and starts its programs. `name` is what metrics
/// and messages call it.
pub fn open(
    name: &str,
    spec: &RewardSpec,
    context: &RewardContext,
) -> Result<Box<dyn RewardFunction>, RewardError> {
    match spec {
        RewardSpec::Program(options) => Ok(Box::new(ProgramReward::start(name, options, context)?)),
        RewardSpec::Http(options) => Ok(Box::new(HttpReward::new(name, options)?)),
        built_in => builtin::open(name, built_in),
    }
}
