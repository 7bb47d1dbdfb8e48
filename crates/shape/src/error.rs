//! Errors in a model's description.

use lockstep_core::{Fault, FaultClass};

use crate::{Architecture, Head};

/// Why a `config.json` cannot be used. Messages name the key.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    #[error("{origin}: not valid JSON: {cause}")]
    NotJson { origin: String, cause: String },
    #[error("{origin}: `{key}` is missing")]
    Missing { origin: String, key: String },
    #[error("{origin}: `{key}` should be {expected}, found {found}")]
    WrongType { origin: String, key: String, expected: &'static str, found: String },
    #[error("{origin}: architecture {name} is not supported")]
    UnknownArchitecture { origin: String, name: String },
    #[error("{origin}: `{key}` = {value} is not supported")]
    Unsupported { origin: String, key: String, value: String },
    #[error("{origin}: `{key}` = {value} is not an option of {family}")]
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
                let known: Vec<_> =
                    Architecture::ALL.iter().map(|a| a.class_name(Head::LanguageModel)).collect();
                Some(format!(
                    "Supported architectures: {}, and ForSequenceClassification of the same families.",
                    known.join(", ")
                ))
            }
            ShapeError::UnknownSize { .. } => {
                let known: Vec<_> = crate::NAMED_SIZES.iter().map(|s| s.name).collect();
                Some(format!("Known sizes: {}. Or give a map of config.json keys.", known.join(", ")))
            }
            ShapeError::Unsupported { .. } => {
                Some("Ignoring it would give wrong results, so the model is rejected.".into())
            }
            ShapeError::NotOfFamily { key, .. } => Some(format!(
                "Remove `{key}` if the model was trained without it, or set the architecture that has it."
            )),
            _ => None,
        }
    }
}
