//! Typed access to the keys of a JSON object, with errors that name the key and its file.

use serde_json::{Map, Value};

use crate::{Architecture, Head, ShapeError};

/// An object of a `config.json`: the top level, or a nested one.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    pub(super) map: &'a Map<String, Value>,
    pub(super) origin: &'a str,
    /// The name of the nested object with a dot; empty at the top level.
    pub(super) within: &'a str,
}

impl<'a> Keys<'a> {
    /// The value of a key, if it is present and not null.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn full_name(&self, key: &str) -> String {
        format!("{}{key}", self.within)
    }

    pub(super) fn wrong(&self, key: &str, expected: &'static str, found: &Value) -> ShapeError {
        let (origin, key) = (self.origin.into(), self.full_name(key));
        ShapeError::WrongType { origin, key, expected, found: found.to_string() }
    }

    pub(super) fn missing(&self, key: &str) -> ShapeError {
        ShapeError::Missing { origin: self.origin.into(), key: self.full_name(key) }
    }

    pub(super) fn unsupported(&self, key: &str, value: &Value) -> ShapeError {
        let (origin, key) = (self.origin.into(), self.full_name(key));
        ShapeError::Unsupported { origin, key, value: value.to_string() }
    }

    pub(super) fn not_of_family(&self, key: &str, value: &Value, family: Architecture) -> ShapeError {
        let (origin, key) = (self.origin.into(), self.full_name(key));
        ShapeError::NotOfFamily {
            origin,
            key,
            value: value.to_string(),
            family: family.class_name(Head::LanguageModel),
        }
    }

    pub(super) fn inconsistent(&self, what: String) -> ShapeError {
        ShapeError::Inconsistent { origin: self.origin.into(), what }
    }

    /// The nested object under a key, if present.
    pub(super) fn object(&self, key: &'a str, within: &'a str) -> Result<Option<Keys<'a>>, ShapeError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Keys { map, origin: self.origin, within })),
            Some(other) => Err(self.wrong(key, "an object", other)),
        }
    }

    /// The family and the kind of head. A family's name alone means a language model.
    pub(super) fn architecture(&self) -> Result<(Architecture, Head), ShapeError> {
        let name = match (self.get("architectures"), self.get("architecture"), self.get("model_type")) {
            (Some(Value::Array(names)), _, _) if names.len() == 1 => names[0].as_str().unwrap_or_default(),
            (None, Some(name), _) | (None, None, Some(name)) => name.as_str().unwrap_or_default(),
            (Some(other), _, _) => return Err(self.wrong("architectures", "a list of one name", other)),
            (None, None, None) => return Err(self.missing("architectures")),
        };
        let heads = |a: Architecture| [(a, Head::LanguageModel), (a, Head::Score)];
        let known = Architecture::ALL.into_iter().flat_map(heads).find(|(architecture, head)| {
            architecture.class_name(*head) == name
                || *head == Head::LanguageModel && architecture.model_type() == name
        });
        known.ok_or_else(|| ShapeError::UnknownArchitecture { origin: self.origin.into(), name: name.into() })
    }

    /// The number of labels of a classification model: `num_labels`, or the length of `id2label`; 2 without either, as
    /// in transformers.
    pub(super) fn num_labels(&self) -> Result<usize, ShapeError> {
        match self.get("id2label") {
            Some(Value::Object(labels)) if self.get("num_labels").is_none() => Ok(labels.len()),
            _ => self.positive_or("num_labels", 2),
        }
    }

    pub(super) fn positive(&self, key: &str) -> Result<usize, ShapeError> {
        let value = self.get(key).ok_or_else(|| self.missing(key))?;
        match value.as_u64() {
            Some(n) if (1..=u64::from(u32::MAX)).contains(&n) => Ok(n as usize),
            _ => Err(self.wrong(key, "a positive integer", value)),
        }
    }

    pub(super) fn positive_or(&self, key: &str, default: usize) -> Result<usize, ShapeError> {
        if self.get(key).is_some() { self.positive(key) } else { Ok(default) }
    }

    pub(super) fn number(&self, key: &str) -> Result<f64, ShapeError> {
        let value = self.get(key).ok_or_else(|| self.missing(key))?;
        match value.as_f64() {
            Some(n) if n.is_finite() && n > 0.0 => Ok(n),
            _ => Err(self.wrong(key, "a positive number", value)),
        }
    }

    pub(super) fn number_or(&self, key: &str, default: f64) -> Result<f64, ShapeError> {
        if self.get(key).is_some() { self.number(key) } else { Ok(default) }
    }

    /// A number in [0, 1); 0 if absent.
    pub(super) fn fraction(&self, key: &str) -> Result<f64, ShapeError> {
        match self.get(key) {
            None => Ok(0.0),
            Some(value) => match value.as_f64() {
                Some(n) if (0.0..1.0).contains(&n) => Ok(n),
                _ => Err(self.wrong(key, "at least 0 and below 1", value)),
            },
        }
    }

    pub(super) fn bool_or(&self, key: &str, default: bool) -> Result<bool, ShapeError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(key, "true or false", value)),
        }
    }

    /// One token id, or the first of a list.
    pub(super) fn token_id(&self, key: &str) -> Result<Option<u32>, ShapeError> {
        let value = match self.get(key) {
            None => return Ok(None),
            Some(Value::Array(ids)) if !ids.is_empty() => &ids[0],
            Some(value) => value,
        };
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.map(Some).ok_or_else(|| self.wrong(key, "a token id", value))
    }
}
