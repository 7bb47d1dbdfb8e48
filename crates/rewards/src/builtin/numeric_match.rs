//! `numeric_match`: 1 if the completion's number is the answer, else 0.

use super::decimal::Decimal;
use super::numbers::{after_marker, first_number, last_boxed, last_number};
use super::{SampleReward, column, one_if};
use crate::error::RewardError;

/// 1 if the number in the completion differs from the row's answer by at most `tolerance`, else 0. Numbers are compared
/// as decimals, and may have thousands separators: `1,234.50` equals `1234.5`. Rows whose answer is null get no reward.
///
/// The answer is a number, or text with a number: inside the last `\boxed{…}`, else after the last `####` (GSM8K), else
/// the last one. Fractions, units and percent signs are not interpreted.
#[derive(Clone, Debug, PartialEq)]
pub struct NumericMatch {
    pub column: String,
    /// Absolute.
    pub tolerance: f64,
    pub source: NumberSource,
}

/// Which number of a completion counts. A completion without such a number gets 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NumberSource {
    /// The last number.
    #[default]
    Last,
    /// The last number inside the last complete `\boxed{…}`.
    Boxed,
    /// The first number after the last occurrence of this marker, such as `####`.
    After(String),
}

impl Default for NumericMatch {
    fn default() -> NumericMatch {
        NumericMatch { column: "answer".into(), tolerance: 0.0, source: NumberSource::Last }
    }
}

impl NumericMatch {
    pub(super) fn open(&self, name: &str) -> Result<SampleReward, RewardError> {
        let bad = |option, value: String, why: &str| {
            let (function, why) = (name.to_owned(), why.to_owned());
            RewardError::BadOption { function, option, value, why }
        };
        let tolerance = self.tolerance;
        if !tolerance.is_finite() || tolerance < 0.0 {
            return Err(bad("tolerance", tolerance.to_string(), "it must be 0 or a positive number"));
        }
        if self.source == NumberSource::After(String::new()) {
            return Err(bad("marker", "empty".into(), "give the text before the number, such as `####`"));
        }
        let tolerance = Decimal::from_f64(tolerance).expect("a finite number is a decimal");
        let (name, column, source) = (name.to_owned(), self.column.clone(), self.source.clone());
        Ok(Box::new(move |sample| {
            let Some(text) = column::text_of(&name, sample, &column)? else { return Ok(None) };
            let Some(answer) = number_of_answer(&text) else {
                return Err(RewardError::BadColumn {
                    function: name.clone(),
                    column: column.clone(),
                    found: format!("the text {:?}", excerpt(&text)),
                    expected: "a number",
                });
            };
            let found = source.find(sample.completion).and_then(Decimal::parse);
            Ok(one_if(found.is_some_and(|found| found.is_close(&answer, &tolerance))))
        }))
    }
}

impl NumberSource {
    fn find<'a>(&self, completion: &'a str) -> Option<&'a str> {
        match self {
            NumberSource::Last => last_number(completion),
            NumberSource::Boxed => last_boxed(completion).and_then(last_number),
            NumberSource::After(marker) => after_marker(completion, marker).and_then(first_number),
        }
    }
}

fn number_of_answer(text: &str) -> Option<Decimal> {
    let part = last_boxed(text).or_else(|| after_marker(text, "####")).unwrap_or(text);
    last_number(part).and_then(Decimal::parse)
}

fn excerpt(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::spec::RewardSpec;
    use crate::testing::reward_of;

    fn numeric(source: NumberSource, tolerance: f64, completion: &str, answer: Value) -> Option<f64> {
        let options = NumericMatch { source, tolerance, ..NumericMatch::default() };
        reward_of(&RewardSpec::NumericMatch(options), completion, answer).unwrap()
    }

    #[test]
    fn numbers_are_compared_as_decimals() {
        let last = |completion, answer| numeric(NumberSource::Last, 0.0, completion, answer);
        assert_eq!(last("2 + 2 = 4.", json!(4)), Some(1.0));
        assert_eq!(last("That makes $1,234.50", json!("1234.5")), Some(1.0));
        assert_eq!(last("4, or 5", json!(4)), Some(0.0));
        assert_eq!(last("-0.5", json!(-0.5)), Some(1.0));
        assert_eq!(last("18", json!("He has 3 + 15 = 18.\n#### 18")), Some(1.0));
        assert_eq!(last("no idea", json!(4)), Some(0.0));
        assert_eq!(last("4", Value::Null), None);
        assert_eq!(numeric(NumberSource::Last, 0.01, "3.14", json!(3.15)), Some(1.0));
        assert_eq!(numeric(NumberSource::Last, 0.01, "3.14", json!(3.1501)), Some(0.0));
    }

    #[test]
    fn a_marker_decides_which_number_counts() {
        let after = || NumberSource::After("####".into());
        assert_eq!(numeric(after(), 0.0, "3 + 4\n#### 7 apples of 9", json!(7)), Some(1.0));
        assert_eq!(numeric(after(), 0.0, "7", json!(7)), Some(0.0));
        assert_eq!(numeric(NumberSource::Boxed, 0.0, r"so $\boxed{x = 7}$ in 9", json!(7)), Some(1.0));
        assert_eq!(numeric(NumberSource::Boxed, 0.0, "7", json!(7)), Some(0.0));
    }

    #[test]
    fn answers_without_a_number_are_errors() {
        let spec = RewardSpec::NumericMatch(NumericMatch::default());
        let error = reward_of(&spec, "7", json!("seven")).unwrap_err();
        let expected = "reward function `tested`: the column `answer` of a row has the text \"seven\", expected a number";
        assert_eq!(error.to_string(), expected);
        let negative = NumericMatch { tolerance: -1.0, ..NumericMatch::default() };
        assert!(RewardSpec::NumericMatch(negative).check("n").is_err());
    }
}
