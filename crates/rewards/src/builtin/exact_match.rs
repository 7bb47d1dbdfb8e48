//! `exact_match`: 1 if the completion is the answer, else 0.

use super::pattern::compile;
use super::{SampleReward, column, one_if};
use crate::error::RewardError;

/// 1 if the completion, without surrounding white space, equals the row's answer, else 0. Rows whose answer is null get
/// no reward.
#[derive(Clone, Debug, PartialEq)]
pub struct ExactMatch {
    /// The column with the answer: text, a number or a Boolean.
    pub column: String,
    /// What to compare instead of the whole completion: the first group of the pattern's first match, or the match if
    /// the pattern has no group. A completion without a match gets 0. For the last match, begin the pattern with `.*`.
    pub extract: Option<String>,
    /// Compare without regard to case.
    pub ignore_case: bool,
}

impl Default for ExactMatch {
    fn default() -> ExactMatch {
        ExactMatch { column: "answer".into(), extract: None, ignore_case: false }
    }
}

impl ExactMatch {
    pub(super) fn open(&self, name: &str) -> Result<SampleReward, RewardError> {
        let extract = self.extract.as_ref().map(|pattern| compile(name, "extract", pattern)).transpose()?;
        let (name, column, ignore_case) = (name.to_owned(), self.column.clone(), self.ignore_case);
        Ok(Box::new(move |sample| {
            let Some(answer) = column::text_of(&name, sample, &column)? else { return Ok(None) };
            let found = match &extract {
                None => Some(sample.completion),
                Some(pattern) => pattern.captures(sample.completion).and_then(|captures| {
                    let group = usize::from(captures.len() > 1);
                    captures.get(group).map(|found| found.as_str())
                }),
            };
            let is_equal = |found: &str| match ignore_case {
                true => found.trim().to_lowercase() == answer.to_lowercase(),
                false => found.trim() == answer,
            };
            Ok(one_if(found.is_some_and(is_equal)))
        }))
    }
}

#[cfg(test)]
mod tests {
    use lockstep_core::Fault as _;
    use serde_json::{Value, json};

    use super::*;
    use crate::spec::RewardSpec;
    use crate::testing::reward_of;

    fn exact(options: ExactMatch, completion: &str, answer: Value) -> Option<f64> {
        reward_of(&RewardSpec::ExactMatch(options), completion, answer).unwrap()
    }

    #[test]
    fn completions_equal_the_answer() {
        let plain = |completion, answer| exact(ExactMatch::default(), completion, answer);
        assert_eq!(plain(" Paris\n", json!("Paris ")), Some(1.0));
        assert_eq!(plain("paris", json!("Paris")), Some(0.0));
        assert_eq!(plain("It is Paris", json!("Paris")), Some(0.0));
        assert_eq!(plain("42", json!(42)), Some(1.0));
        assert_eq!(plain("true", json!(true)), Some(1.0));
        assert_eq!(plain("anything", Value::Null), None);
        let ignore_case = ExactMatch { ignore_case: true, ..ExactMatch::default() };
        assert_eq!(exact(ignore_case, "ÄPFEL", json!("Äpfel")), Some(1.0));
    }

    #[test]
    fn answers_are_extracted() {
        let tags = || ExactMatch { extract: Some("<a>(.*?)</a>".into()), ..ExactMatch::default() };
        assert_eq!(exact(tags(), "so <a>\n7 </a> and <a>8</a>", json!("7")), Some(1.0));
        assert_eq!(exact(tags(), "7", json!("7")), Some(0.0));
        let last = ExactMatch { extract: Some(".*<a>(.*?)</a>".into()), ..ExactMatch::default() };
        assert_eq!(exact(last, "so <a>7</a> and\n<a>8</a>", json!("8")), Some(1.0));
        let whole = ExactMatch { extract: Some(r"\d+".into()), ..ExactMatch::default() };
        assert_eq!(exact(whole, "it is 12.", json!("12")), Some(1.0));
    }

    #[test]
    fn a_missing_column_is_named_with_a_suggestion() {
        let spec = RewardSpec::ExactMatch(ExactMatch { column: "anwser".into(), ..ExactMatch::default() });
        let error = reward_of(&spec, "x", json!("x")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "reward function `tested` needs the column `anwser`, which a row of the data does not have"
        );
        assert_eq!(error.hint().unwrap(), "set `column` to `answer`.");
        let error = reward_of(&RewardSpec::ExactMatch(ExactMatch::default()), "x", json!(["x"])).unwrap_err();
        assert!(error.to_string().contains("a list, expected text"), "{error}");
    }
}
