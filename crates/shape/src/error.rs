//! What can be wrong with a model's description.

use lockstep_core::{Fault, FaultClass};

use crate::Architecture;

/// A `config.json` that cannot be used. Each variant names the key.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    #[error("{origin}: not valid JSON: {cause}")]
    NotJson { origin: String, cause: String },
    #[error("{origin}: `{key}` is missing")]
    Missing { origin: String, key: String },
    #[error("{origin}: `{key}` should be {expected}, found {found}")]
    WrongType { origin: String, key: String, expected: &'static str, found: String },
    #[error("{origin}: architecture {name} is not implemented")]
    UnknownArchitecture { origin: String, name: String },
    #[error("{origin}: `{key}` = {value} is not implemented")]
    Unsupported { origin: String, key: String, value: String },
    #[error("{origin}: `{key}` = {value} means nothing to {family}")]
    NotOfFamily { origin: String, key: String, value: String, family: &'static str },
    #[error("{origin}: {what}")]
    Inconsistent { origin: String, what: String },
    #[error("`{name}` is not a model size")]
    UnknownSize { name: String },
}

impl Fault for ShapeError {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        match self {
            ShapeError::UnknownArchitecture { .. } => {
                let known: Vec<_> = Architecture::ALL.iter().map(|a| a.class_name()).collect();
                Some(format!("Implemented: {}.", known.join(", ")))
            }
            ShapeError::UnknownSize { .. } => {
                let known: Vec<_> = crate::NAMED_SIZES.iter().map(|s| s.name).collect();
                Some(format!("Known sizes: {}. Or give a map of config.json keys.", known.join(", ")))
            }
            ShapeError::Unsupported { .. } => {
                Some("Using the model without it would compute something else, so it is refused.".into())
            }
            ShapeError::NotOfFamily { key, .. } => Some(format!(
                "Remove `{key}` if the model was trained without it, or name the architecture that has it."
            )),
            _ => None,
        }
    }
}
