//! What can be wrong with a configuration, and how it is told.
//!
//! An error is a [`Problem`] with the places that make it one. It prints as the place, the cause, the
//! line quoted with a caret, and a hint:
//!
//! ```text
//! run.yaml:3:1: unknown key `lerning_rate`
//!   |
//! 3 | lerning_rate: 5e-5
//!   | ^^^^^^^^^^^^
//!   hint: did you mean `learning_rate`?
//! ```

use std::fmt;

use lockstep_core::{Fault, FaultClass};

use crate::origin::{Origin, printable};

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The text is not YAML (or JSON).
    #[error("cannot read this text: {message}")]
    Syntax { message: String },
    /// The text, its depth or its number of values is beyond the bounds.
    #[error("{what}")]
    TooLarge { what: &'static str },
    /// A feature of YAML that configurations do not use.
    #[error("{what}")]
    UnsupportedYaml { what: &'static str },
    /// The same key twice in one map.
    #[error("the key `{}` is given twice; first at {first}", printable(.key))]
    Repeated { key: String, first: Origin },
    /// An override that is not `key=value`.
    #[error("`{}` is not of the form key=value", printable(.text))]
    NotAnOverride { text: String },
    /// A key nobody knows.
    #[error("unknown key `{}`", printable(.key))]
    UnknownKey { key: String, closest: Option<&'static str> },
    /// A key that other trainers have.
    #[error("`{key}` is known, but not implemented yet")]
    KeyNotImplemented { key: String, instead: &'static str },
    /// A value that other trainers have.
    #[error("`{key}: {}` is known, but not implemented yet", printable(.value))]
    ValueNotImplemented { key: &'static str, value: String, instead: &'static str },
    /// A key without a value.
    #[error("`{key}` has no value")]
    Empty { key: String, default: &'static str },
    /// A value of another type.
    #[error("`{key}` expects {expected}, found {found}")]
    WrongType { key: String, expected: &'static str, found: String },
    /// A word that is none of the choices.
    #[error("`{key}` cannot be `{}`", printable(.value))]
    UnknownValue { key: &'static str, value: String, allowed: Vec<&'static str> },
    /// A value outside its range.
    #[error("`{key}` must be {rule}, found {}", printable(.value))]
    OutOfRange { key: String, value: String, rule: &'static str },
    /// Two places that contradict each other.
    #[error("{first} here contradicts {second} ({at})")]
    Conflict { first: String, second: String, at: Origin, why: &'static str },
    /// A key that must be there.
    #[error("`{key}` is missing: {what}")]
    Missing { key: &'static str, what: &'static str },
}

impl Problem {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Problem::UnknownKey { closest: Some(closest), .. } => Some(format!("did you mean `{closest}`?")),
            Problem::UnknownValue { value, allowed, .. } => {
                let list = allowed.join(", ");
                Some(match lockstep_core::closest(&value.to_lowercase(), allowed.iter().copied()) {
                    Some(closest) => format!("did you mean `{closest}`? It can be {list}."),
                    None => format!("it can be {list}."),
                })
            }
            Problem::KeyNotImplemented { instead, .. } | Problem::ValueNotImplemented { instead, .. } => {
                (!instead.is_empty()).then(|| (*instead).to_owned())
            }
            Problem::Conflict { why, .. } => Some((*why).to_owned()),
            Problem::Empty { default, .. } => Some(format!("without the line it is {default}.")),
            Problem::Repeated { .. } => Some("keep one of the two lines.".into()),
            Problem::NotAnOverride { .. } => Some("write for example `learning_rate=1e-4`.".into()),
            _ => None,
        }
    }
}

/// A line of the file with the part of it that matters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Excerpt {
    pub(crate) line: u32,
    pub(crate) text: String,
    /// Characters before the caret, and how many carets.
    pub(crate) skip: usize,
    pub(crate) width: usize,
}

/// Where a problem stands: its place in words, and the quoted line where there is a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) origin: Origin,
    pub(crate) excerpt: Option<Excerpt>,
}

impl Excerpt {
    /// The part of `line_text` around `column` (from 1) that fits a terminal.
    pub(crate) fn new(line: u32, line_text: &str, column: u32, width: u32) -> Self {
        const MAX_CHARS: usize = 96;
        let column = column.saturating_sub(1) as usize;
        let from = if column > MAX_CHARS { column - MAX_CHARS / 2 } else { 0 };
        let shown = line_text.trim_end_matches(['\r', '\n']).chars().skip(from).take(MAX_CHARS);
        // One character each, so that the caret stays below what it points at.
        let text: String = shown.map(|c| if c.is_control() { ' ' } else { c }).collect();
        let len = text.chars().count();
        let skip = (column - from).min(len);
        let width = (width as usize).clamp(1, (len - skip).max(1));
        Excerpt { line, text: text.trim_end().to_owned(), skip, width }
    }
}

/// One problem and its places.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigError {
    pub problem: Problem,
    pub(crate) places: Vec<Place>,
}

impl ConfigError {
    pub(crate) fn new(problem: Problem, places: Vec<Place>) -> Self {
        ConfigError { problem, places }
    }

    /// Where it is, `None` where something is missing.
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
        let mut excerpts: Vec<&Excerpt> = self.places.iter().filter_map(|p| p.excerpt.as_ref()).collect();
        excerpts.sort_by_key(|e| e.line);
        let gutter = excerpts.iter().map(|e| e.line.to_string().len()).max().unwrap_or(0);
        for (idx, Excerpt { line, text, skip, width }) in excerpts.into_iter().enumerate() {
            if idx == 0 {
                write!(f, "\n{:gutter$} |", "")?;
            }
            write!(f, "\n{line:gutter$} | {text}\n{:gutter$} | {:skip$}{:^<width$}", "", "", "")?;
        }
        match self.problem.hint() {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for ConfigError {}

/// Everything that is wrong, in the order of the text, overrides after files.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (idx, error) in self.0.iter().enumerate() {
            if idx > 0 {
                f.write_str("\n\n")?;
            }
            error.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}

impl Fault for ConfigErrors {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }
}
