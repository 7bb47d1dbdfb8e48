//! Interprets a node of the tree as a number, a boolean, a word or a list.
//!
//! The code that reads a key knows the expected type, so quoting does not matter: `"5e-5"` is a number if a
//! number is expected, and `no` is a boolean or a word.

use crate::origin::printable;
use crate::yaml::{Node, Value};

pub(crate) fn is_null(text: &str) -> bool {
    matches!(text, "" | "~" | "null" | "Null" | "NULL")
}

impl Node {
    /// The text of a scalar.
    pub(crate) fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar { text, .. } => Some(text),
            _ => None,
        }
    }

    pub(crate) fn is_null(&self) -> bool {
        matches!(&self.value, Value::Scalar { text, plain: true } if is_null(text))
    }

    pub(crate) fn bool(&self) -> Option<bool> {
        match self.text()?.to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" => Some(true),
            "false" | "no" | "off" => Some(false),
            _ => None,
        }
    }

    pub(crate) fn float(&self) -> Option<f64> {
        number(self.text()?)
    }

    /// A whole number. A float with an integral value counts, so that `2e8` is accepted.
    pub(crate) fn integer(&self) -> Option<i128> {
        let text = self.text()?;
        if let Ok(integer) = text.parse::<i64>() {
            return Some(integer.into());
        }
        if let Ok(integer) = text.parse::<u64>() {
            return Some(integer.into());
        }
        // Above 2^53 a float cannot represent every whole number.
        let float = number(text)?;
        (float.fract() == 0.0 && float.abs() <= 9_007_199_254_740_992.0).then_some(float as i128)
    }

    /// As JSON, typed by YAML's core schema, for parts that another crate interprets.
    pub(crate) fn json(&self) -> serde_json::Value {
        use serde_json::Value as Json;
        match &self.value {
            Value::Seq(items) => Json::Array(items.iter().map(Node::json).collect()),
            Value::Map(entries) => {
                Json::Object(entries.iter().map(|e| (e.key.clone(), e.node.json())).collect())
            }
            Value::Scalar { text, plain: false } => Json::String(text.clone()),
            Value::Scalar { text, .. } => match text.as_str() {
                null if is_null(null) => Json::Null,
                "true" | "True" | "TRUE" => Json::Bool(true),
                "false" | "False" | "FALSE" => Json::Bool(false),
                text => json_number(text).unwrap_or_else(|| Json::String(text.to_owned())),
            },
        }
    }
}

fn number(text: &str) -> Option<f64> {
    match text.trim_start_matches(['+', '-']) {
        ".inf" | ".Inf" => Some(if text.starts_with('-') { f64::NEG_INFINITY } else { f64::INFINITY }),
        ".nan" | ".NaN" => Some(f64::NAN),
        _ => text.parse().ok(),
    }
}

fn json_number(text: &str) -> Option<serde_json::Value> {
    // Words such as `inf` are strings, not numbers.
    if !text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.')) {
        return None;
    }
    if let Ok(integer) = text.parse::<i64>() {
        return Some(integer.into());
    }
    if let Ok(integer) = text.parse::<u64>() {
        return Some(integer.into());
    }
    serde_json::Number::from_f64(number(text)?).map(serde_json::Value::Number)
}

/// Lower case without dashes and underscores, for comparing words.
pub(crate) fn fold(word: &str) -> String {
    word.chars().filter(|c| !matches!(c, '-' | '_')).flat_map(char::to_lowercase).collect()
}

/// Whether two values are equal. `words`: they are words, whose case does not matter.
pub(crate) fn same(a: &Node, b: &Node, words: bool) -> bool {
    match (&a.value, &b.value) {
        (Value::Scalar { text: x, .. }, Value::Scalar { text: y, .. }) => {
            let numbers = || matches!((a.float(), b.float()), (Some(x), Some(y)) if x == y);
            let bools = || a.bool().is_some() && a.bool() == b.bool();
            x == y || (a.is_null() && b.is_null()) || numbers() || bools() || (words && fold(x) == fold(y))
        }
        (Value::Seq(x), Value::Seq(y)) => {
            x.len() == y.len() && x.iter().zip(y).all(|(x, y)| same(x, y, words))
        }
        (Value::Map(x), Value::Map(y)) => {
            let has =
                |e: &crate::yaml::Entry| y.iter().any(|o| o.key == e.key && same(&e.node, &o.node, words));
            x.len() == y.len() && x.iter().all(has)
        }
        _ => false,
    }
}

/// Describes a value for messages: "found ...".
pub(crate) fn describe(value: &Value) -> String {
    match value {
        Value::Scalar { text, plain: true } if is_null(text) => "nothing".into(),
        Value::Scalar { text, .. } => format!("`{}`", printable(text)),
        Value::Seq(_) => "a list".into(),
        Value::Map(_) => "a map".into(),
    }
}

/// A value on one line, in YAML.
pub(crate) fn brief(node: &Node) -> String {
    match &node.value {
        Value::Scalar { text, plain: true } if is_null(text) => "null".into(),
        Value::Scalar { text, .. } => printable(text),
        Value::Seq(items) => {
            printable(&format!("[{}]", items.iter().map(brief).collect::<Vec<_>>().join(", ")))
        }
        Value::Map(_) => "{...}".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::yaml::{Input, parse};

    fn node(text: &str) -> Node {
        parse(text, Input::File(0)).0.unwrap()
    }

    #[test]
    fn numbers_are_parsed_in_common_notations() {
        assert_eq!(node("5e-5").float(), Some(5e-5));
        assert_eq!(node("\"5e-5\"").float(), Some(5e-5));
        assert_eq!(node("2e8").integer(), Some(200_000_000));
        assert_eq!(node("1e9").integer(), Some(1_000_000_000));
        assert_eq!(node("8.0").integer(), Some(8));
        assert_eq!(node("1.5").integer(), None);
        assert_eq!(node("18446744073709551615").integer(), Some(u64::MAX.into()));
        assert_eq!(node("1e300").integer(), None);
        assert_eq!(node("1b").float(), None);
        assert_eq!(node("[1]").float(), None);
        assert!(node(".nan").float().unwrap().is_nan());
    }

    #[test]
    fn booleans_are_parsed_in_all_spellings() {
        for text in ["true", "True", "yes", "on", "'true'"] {
            assert_eq!(node(text).bool(), Some(true), "{text}");
        }
        for text in ["false", "FALSE", "no", "Off"] {
            assert_eq!(node(text).bool(), Some(false), "{text}");
        }
        assert_eq!(node("1").bool(), None);
    }

    #[test]
    fn maps_become_json() {
        let text = "{a: 1, b: 1e-05, c: True, d: no, e: '1', f: [x, ~], g: inf, h: 500000.0}";
        let expected = serde_json::json!({
            "a": 1, "b": 1e-5, "c": true, "d": "no", "e": "1", "f": ["x", null], "g": "inf", "h": 500000.0
        });
        assert_eq!(node(text).json(), expected);
    }

    #[test]
    fn equality_is_by_value() {
        assert!(same(&node("1.0"), &node("1"), false));
        assert!(same(&node("True"), &node("yes"), false));
        assert!(same(&node("FULL_SHARD"), &node("full-shard"), true));
        assert!(!same(&node("A"), &node("a"), false));
        assert!(same(&node("{a: 1, b: 2}"), &node("{b: 2, a: 1}"), false));
        assert!(!same(&node("[a]"), &node("a"), false));
    }
}
