//! Errors in a configuration, and their texts.
//!
//! An error is a [`Problem`] with its positions. It prints as the position, the cause, the quoted line with a caret,
//! and a hint:
//!
//! ```text
//! run.yaml:3:1: unknown key `lerning_rate`
//!   |
//! 3 | lerning_rate: 5e-5
//!   | ^^^^^^^^^^^^
//!   hint: did you mean `learning_rate`?
//! ```

use std::borrow::Cow;
use std::fmt;

use lockstep_core::{Fault, FaultClass};

use crate::origin::{Origin, printable};
use crate::references::FileRole;
use crate::sections::AlgorithmName;

/// What is wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The text is not YAML (or JSON), in the words of the parser.
    #[error("invalid YAML: {message}")]
    Syntax { message: String },
    /// The text is not YAML (or JSON), and the mistake is known.
    #[error("{message}")]
    Mistake { message: String },
    /// The text, its depth or its number of values exceeds a limit.
    #[error("{what}")]
    TooLarge { what: &'static str },
    /// A feature of YAML that is not supported.
    #[error("{what}")]
    UnsupportedYaml { what: &'static str },
    /// The same key twice in one map.
    #[error("the key `{}` is given twice; first at {first}", printable(.key))]
    Repeated { key: String, first: Origin },
    /// An override that is not `key=value`.
    #[error("`{}` is not of the form key=value", printable(.text))]
    NotAnOverride { text: String },
    /// A key that neither Lockstep nor another trainer has.
    #[error("unknown key `{}`", printable(.key))]
    UnknownKey { key: String, closest: Option<&'static str> },
    /// A key of another trainer.
    #[error("`{key}` is not implemented yet")]
    KeyNotImplemented { key: String, instead: &'static str },
    /// A value of another trainer.
    #[error("`{key}: {}` is not implemented yet", printable(.value))]
    ValueNotImplemented { key: &'static str, value: String, instead: &'static str },
    /// A value of another trainer's key.
    #[error("`{key}: {}` is not implemented", printable(.value))]
    PeerValueNotImplemented { key: String, value: String, instead: &'static str },
    /// A key without a value.
    #[error("`{key}` has no value")]
    Empty { key: String, default: &'static str },
    /// A value of another type.
    #[error("`{key}` expects {expected}, found {found}")]
    WrongType { key: String, expected: &'static str, found: String },
    /// A word that is not one of the choices.
    #[error("`{key}` cannot be `{}`", printable(.value))]
    UnknownValue { key: &'static str, value: String, allowed: Vec<&'static str> },
    /// A value outside its range.
    #[error("`{key}` must be {rule}, found {}", printable(.value))]
    OutOfRange { key: String, value: String, rule: Cow<'static, str>, hint: Cow<'static, str> },
    /// A key that the algorithm does not use.
    #[error("`{}` is a key of {}, but the algorithm is {algorithm}", printable(.key), listed(.algorithms))]
    OtherAlgorithm { key: String, algorithms: &'static [AlgorithmName], algorithm: AlgorithmName },
    /// An algorithm other than that of the command, such as `lockstep dpo`.
    #[error("`algorithm: {}` contradicts the command `lockstep {}`", printable(.algorithm), printable(.command))]
    OtherCommand { algorithm: String, command: String },
    /// A batch that cannot be divided into equal parts.
    #[error(
        "the {what} of {num_completions} completion{} is not divisible by `{key}`, {divisor}",
        if *.num_completions == 1 { "" } else { "s" }
    )]
    NotDivisible { what: &'static str, num_completions: u64, key: &'static str, divisor: u64, hint: String },
    /// Two settings that contradict each other.
    #[error("{first} contradicts {second} ({at})")]
    Conflict { first: String, second: String, at: Origin, why: &'static str },
    /// An option of a reward function that must be set.
    #[error("`{key}` needs the option `{option}`")]
    OptionMissing { key: String, option: &'static str, example: &'static str },
    /// A required key.
    #[error("`{key}` is missing: {what}")]
    Missing { key: &'static str, what: &'static str },
    /// A total batch that is not the product of its factors.
    #[error(
        "`train_batch_size` is {total}, but {micro} rows x {accumulation} micro-batch{} x {world} rank{} are {}",
        if *.accumulation == 1 { "" } else { "es" },
        if *.world == 1 { "" } else { "s" },
        .micro.saturating_mul(*.accumulation).saturating_mul(*.world)
    )]
    BatchProduct { total: u64, micro: u64, accumulation: u64, world: u64 },
    /// A total batch that cannot be divided.
    #[error("`train_batch_size` of {total} is not divisible by {divisor} ({factors})")]
    BatchNotDivisible { total: u64, divisor: u64, factors: String },
    /// A file that the configuration refers to, whose text was not given.
    #[error("the file `{}` was not found", printable(.path))]
    FileNotGiven { path: String, role: FileRole },
    /// A flag that the program of a launch line does not have.
    #[error("unknown flag `{}` of {program}", printable(.flag))]
    UnknownFlag { flag: String, program: &'static str, closest: Option<String> },
    /// A flag of another launcher.
    #[error("`{}` of {program} is not implemented", printable(.flag))]
    FlagNotImplemented { flag: String, program: &'static str, instead: &'static str },
    /// A flag without its value.
    #[error("`{}` needs a value", printable(.flag))]
    FlagWithoutValue { flag: String },
    /// A command line that starts no training.
    #[error("{what}")]
    NotALaunchLine { what: String, hint: &'static str },
}

impl Problem {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Problem::UnknownKey { closest: Some(closest), .. } => Some(format!("did you mean `{closest}`?")),
            Problem::UnknownValue { value, allowed, .. } => {
                let list = allowed.join(", ");
                Some(match lockstep_core::closest(&value.to_lowercase(), allowed.iter().copied()) {
                    Some(closest) => format!("did you mean `{closest}`? Possible values: {list}."),
                    None => format!("possible values: {list}."),
                })
            }
            Problem::KeyNotImplemented { instead, .. } | Problem::ValueNotImplemented { instead, .. } => {
                (!instead.is_empty()).then(|| (*instead).to_owned())
            }
            Problem::Conflict { why, .. } => Some((*why).to_owned()),
            Problem::OutOfRange { hint, .. } => (!hint.is_empty()).then(|| hint.clone().into_owned()),
            Problem::OtherAlgorithm { algorithms, .. } => {
                let names: Vec<String> = algorithms.iter().map(ToString::to_string).collect();
                Some(format!("remove it, or set `algorithm` to {}.", join(&names, "or")))
            }
            Problem::OtherCommand { .. } => {
                Some("use `lockstep train`, the command of this algorithm, or remove `algorithm`.".into())
            }
            Problem::NotDivisible { hint, .. } => Some(hint.clone()),
            Problem::OptionMissing { example, .. } => Some(format!("write `{example}`, for example.")),
            Problem::Empty { default, .. } => Some(format!("remove the line to use the default, {default}.")),
            Problem::Repeated { .. } => Some("keep one of the two lines.".into()),
            Problem::BatchProduct { total, micro, accumulation, world } => {
                let per_micro_batch = micro.saturating_mul(*world);
                let product = per_micro_batch.saturating_mul(*accumulation);
                Some(match total % per_micro_batch {
                    0 => format!(
                        "set `train_batch_size` to {product}, or `gradient_accumulation_steps` to {}.",
                        total / per_micro_batch
                    ),
                    _ => format!("set `train_batch_size` to {product}, or remove it."),
                })
            }
            Problem::BatchNotDivisible { total, divisor, .. } => {
                let below = total / divisor * divisor;
                let above = below + divisor;
                Some(match below {
                    0 => format!("set it to {above}, for example."),
                    _ => format!("set it to {below} or {above}, for example."),
                })
            }
            Problem::FileNotGiven { role, .. } => Some(format!("give it as well: {role}.")),
            Problem::UnknownFlag { closest: Some(closest), .. } => Some(format!("did you mean `{closest}`?")),
            Problem::FlagNotImplemented { instead, .. }
            | Problem::PeerValueNotImplemented { instead, .. } => {
                (!instead.is_empty()).then(|| (*instead).to_owned())
            }
            Problem::FlagWithoutValue { .. } => Some("write the value after it.".into()),
            Problem::NotALaunchLine { hint, .. } => Some((*hint).to_owned()),
            Problem::NotAnOverride { .. } => Some("write `learning_rate=1e-4`, for example.".into()),
            _ => None,
        }
    }
}

fn listed(algorithms: &[AlgorithmName]) -> String {
    join(&algorithms.iter().map(ToString::to_string).collect::<Vec<_>>(), "and")
}

/// Words in a sentence: "dpo, ppo and grpo".
pub(crate) fn join(words: &[String], conjunction: &str) -> String {
    match words {
        [] => String::new(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} {conjunction} {last}", first.join(", ")),
    }
}

/// A line of the file, and the part of it to underline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Excerpt {
    pub(crate) line: u32,
    pub(crate) text: String,
    /// Characters before the caret, and how many carets.
    pub(crate) skip: usize,
    pub(crate) width: usize,
}

/// The position of a problem, and the quoted line if it is in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) origin: Origin,
    pub(crate) excerpt: Option<Excerpt>,
    /// The index of the file.
    pub(crate) file: Option<usize>,
}

impl Excerpt {
    /// The part of `line_text` around `column` (from 1) that fits a terminal.
    pub(crate) fn new(line: u32, line_text: &str, column: u32, width: u32) -> Self {
        const MAX_CHARS: usize = 96;
        let column = column.saturating_sub(1) as usize;
        let from = if column > MAX_CHARS { column - MAX_CHARS / 2 } else { 0 };
        let shown = line_text.trim_end_matches(['\r', '\n']).chars().skip(from).take(MAX_CHARS);
        // Replace each control character by one space, so that the caret stays in its column.
        let text: String = shown.map(|c| if c.is_control() { ' ' } else { c }).collect();
        let len = text.chars().count();
        let skip = (column - from).min(len);
        let width = (width as usize).clamp(1, (len - skip).max(1));
        Excerpt { line, text: text.trim_end().to_owned(), skip, width }
    }
}

/// A problem and its positions.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigError {
    pub problem: Problem,
    pub(crate) places: Vec<Position>,
}

impl ConfigError {
    pub(crate) fn new(problem: Problem, places: Vec<Position>) -> Self {
        ConfigError { problem, places }
    }

    /// The first position; `None` if a key is missing.
    pub fn origin(&self) -> Option<&Origin> {
        self.places.first().map(|p| &p.origin)
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.origin() {
            Some(origin) => write!(f, "{origin}: {}", self.problem)?,
            None => write!(f, "{}", self.problem)?,
        }
        let mut excerpts: Vec<(&Position, &Excerpt)> =
            self.places.iter().filter_map(|p| p.excerpt.as_ref().map(|e| (p, e))).collect();
        // The file of the first position comes first; within a file, in the order of lines.
        let first = excerpts.first().map(|(p, _)| p.file);
        excerpts.sort_by_key(|(p, e)| (Some(p.file) != first, p.file, e.line));
        let gutter = excerpts.iter().map(|(_, e)| e.line.to_string().len()).max().unwrap_or(0);
        let mut file = None;
        for (position, Excerpt { line, text, skip, width }) in excerpts {
            match file {
                None => write!(f, "\n{:gutter$} |", "")?,
                Some(above) if above != position.file => {
                    write!(f, "\n{:gutter$} ::: {}", "", position.origin)?
                }
                Some(_) => {}
            }
            file = Some(position.file);
            write!(f, "\n{line:gutter$} | {text}\n{:gutter$} | {:skip$}{:^<width$}", "", "", "")?;
        }
        match self.problem.hint() {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for ConfigError {}

/// All errors, in the order of the file, followed by those in overrides.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The first one gets its `error: ` from the caller, like any other error.
        for (idx, error) in self.0.iter().enumerate() {
            if idx > 0 {
                f.write_str("\n\nerror: ")?;
            }
            error.fmt(f)?;
        }
        match self.0.len() {
            0 | 1 => Ok(()),
            count => write!(f, "\n\nerror: the configuration has {count} errors"),
        }
    }
}

impl std::error::Error for ConfigErrors {}

impl Fault for ConfigErrors {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }
}
