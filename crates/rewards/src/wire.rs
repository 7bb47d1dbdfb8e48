//! The JSON of the two protocols, version 1: samples that go out, rewards that come back.

use std::sync::LazyLock;

use regex::{NoExpand, Regex};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::function::Sample;

/// Longer texts of programs and servers are cut in messages.
const MAX_EXCERPT_CHARS: usize = 200;

/// A sample, as programs and endpoints get it. Columns have an object of their own, so that a column named `id` or
/// `completion` hides nothing.
#[derive(Serialize)]
pub(crate) struct SampleMessage<'a> {
    /// The program's answer repeats it. Endpoints answer in order and get none.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u64>,
    /// Whether the program gets no more samples before it answers: it may score several at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    last: Option<bool>,
    prompt: &'a str,
    completion: &'a str,
    completion_ids: &'a [u32],
    truncated: bool,
    columns: &'a Map<String, Value>,
}

impl<'a> SampleMessage<'a> {
    /// As endpoints get it.
    pub(crate) fn new(sample: &Sample<'a>) -> SampleMessage<'a> {
        let Sample { prompt, completion, completion_ids, columns, truncated } = *sample;
        SampleMessage { id: None, last: None, prompt, completion, completion_ids, truncated, columns }
    }

    /// As programs get it.
    pub(crate) fn with_id(sample: &Sample<'a>, id: u64, last: bool) -> SampleMessage<'a> {
        SampleMessage { id: Some(id), last: Some(last), ..SampleMessage::new(sample) }
    }
}

/// A reward that cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BadReward {
    NotFinite(String),
    WrongType(String),
}

/// What a protocol's answer contains: a JSON value, in which [`STAND_IN`] stands for numbers that JSON does not have.
pub(crate) struct Answer {
    pub(crate) value: Value,
    /// The first number that is NaN or infinite, as it was written.
    not_finite: Option<String>,
}

/// The largest f64: it needs no quotes, which would end a string that contains the word, and is no sensible reward.
const STAND_IN: &str = "1.7976931348623157e308";

/// `NaN` and `Infinity` as Python's `json` writes them, `nan` and `inf` as C does, and numbers beyond f64.
static NOT_FINITE: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"-?\b(?i:nan|inf|infinity)\b|-?\b\d[\d.]*[eE]\+?\d{3,}\b").expect("the pattern is valid")
});

impl Answer {
    /// Parses an answer. JSON has no NaN and no infinity, but programs write them, and the message must name them.
    pub(crate) fn parse(text: &[u8]) -> Result<Answer, serde_json::Error> {
        let error = match serde_json::from_slice(text) {
            Ok(value) => return Ok(Answer { value, not_finite: None }),
            Err(error) => error,
        };
        let text = String::from_utf8_lossy(text);
        let Some(found) = NOT_FINITE.find(&text) else { return Err(error) };
        // The text is parsed for the sake of the other fields only. What else this replaces, inside of strings, is
        // never used.
        match serde_json::from_str(&NOT_FINITE.replace_all(&text, NoExpand(STAND_IN))) {
            Ok(value) => Ok(Answer { value, not_finite: Some(found.as_str().to_owned()) }),
            Err(_) => Err(error),
        }
    }

    /// The reward in a value of this answer. `Ok(None)`: the sample has none.
    pub(crate) fn reward(&self, value: &Value) -> Result<Option<f64>, BadReward> {
        match value {
            Value::Null => Ok(None),
            Value::Number(number) => match (number.as_f64(), &self.not_finite) {
                (Some(f64::MAX), Some(found)) => Err(BadReward::NotFinite(found.clone())),
                (Some(reward), _) if reward.is_finite() => Ok(Some(reward)),
                _ => Err(BadReward::NotFinite(number.to_string())),
            },
            Value::String(_) => Err(BadReward::WrongType(format!("the text {}", excerpt_of(value)))),
            Value::Bool(_) => Err(BadReward::WrongType(value.to_string())),
            Value::Array(_) => Err(BadReward::WrongType("a list".into())),
            Value::Object(_) => Err(BadReward::WrongType("an object".into())),
        }
    }
}

fn excerpt_of(value: &Value) -> String {
    excerpt(value.to_string().as_bytes())
}

/// The beginning of a text that a message quotes, without control characters.
pub(crate) fn excerpt(text: &[u8]) -> String {
    // Four bytes per character at most; a longer prefix need not be decoded.
    let prefix = &text[..text.len().min(4 * MAX_EXCERPT_CHARS + 4)];
    let decoded = String::from_utf8_lossy(prefix);
    let mut chars = decoded.trim().chars().filter(|c| !c.is_control());
    let mut cut: String = chars.by_ref().take(MAX_EXCERPT_CHARS).collect();
    if chars.next().is_some() || prefix.len() < text.len() {
        cut.push('…');
    }
    cut
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::{row, sample};

    #[test]
    fn a_sample_is_one_line() {
        let columns = row(json!(7));
        let sample = Sample { truncated: true, ..sample("a\nb", &columns) };
        let line = serde_json::to_string(&SampleMessage::with_id(&sample, 3, true)).unwrap();
        let expected = json!({
            "id": 3, "last": true, "prompt": "What is it?", "completion": "a\nb", "completion_ids": [1, 2, 3],
            "truncated": true, "columns": { "answer": 7, "question": "?" },
        });
        assert_eq!(serde_json::from_str::<serde_json::Value>(&line).unwrap(), expected);
        assert!(!line.contains('\n'), "{line}");
    }

    #[test]
    fn numbers_that_json_does_not_have_are_named() {
        let reward = |text: &str| {
            let answer = Answer::parse(text.as_bytes()).unwrap();
            assert_eq!(answer.value["id"], json!(4), "{text}");
            answer.reward(&answer.value["reward"])
        };
        for found in ["NaN", "-Infinity", "nan", "-inf", "1e999", "-2.5E+400"] {
            let expected = Err(BadReward::NotFinite(found.into()));
            assert_eq!(reward(&format!(r#"{{"id": 4, "reward": {found}}}"#)), expected, "{found}");
        }
        assert_eq!(reward(r#"{"id": 4, "reward": -1}"#), Ok(Some(-1.0)));
        assert_eq!(reward(r#"{"id": 4, "reward": null}"#), Ok(None));
        assert_eq!(reward(r#"{"id": 4, "reward": true}"#), Err(BadReward::WrongType("true".into())));
        assert_eq!(reward(r#"{"id": 4, "reward": "1"}"#), Err(BadReward::WrongType("the text \"1\"".into())));
        let mixed = Answer::parse(br#"["inf", NaN, null, 2]"#).unwrap();
        let rewards: Vec<_> = (1..4).map(|index| mixed.reward(&mixed.value[index]).ok()).collect();
        assert_eq!(rewards, [None, Some(None), Some(Some(2.0))]);
        assert!(Answer::parse(b"NaN, NaN").is_err());
    }

    #[test]
    fn excerpts_are_short_and_printable() {
        assert_eq!(excerpt(b" a\x1b[31m\r\nb\xff "), "a[31mb\u{fffd}");
        assert_eq!(excerpt(&[b'x'; 5000]).chars().count(), MAX_EXCERPT_CHARS + 1);
    }
}
