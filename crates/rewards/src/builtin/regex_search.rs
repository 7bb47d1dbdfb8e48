//! `regex`: 1 if a pattern is found in the completion, else 0.

use super::pattern::compile;
use super::{SampleReward, one_if};
use crate::error::RewardError;

/// 1 if the pattern is found anywhere in the completion, else 0.
#[derive(Clone, Debug, PartialEq)]
pub struct RegexSearch {
    pub pattern: String,
}

impl RegexSearch {
    pub(super) fn open(&self, name: &str) -> Result<SampleReward, RewardError> {
        let pattern = compile(name, "pattern", &self.pattern)?;
        Ok(Box::new(move |sample| Ok(one_if(pattern.is_match(sample.completion)))))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::spec::RewardSpec;
    use crate::testing::reward_of;

    #[test]
    fn a_pattern_is_found() {
        let spec = RewardSpec::Regex(RegexSearch { pattern: r"\bwords?\b".into() });
        for (completion, reward) in [("two words", 1.0), ("a\nword.", 1.0), ("sword", 0.0), ("", 0.0)] {
            assert_eq!(reward_of(&spec, completion, Value::Null).unwrap(), Some(reward), "{completion}");
        }
    }

    #[test]
    fn hostile_patterns_take_linear_time() {
        let spec = RewardSpec::Regex(RegexSearch { pattern: "(x+x+)+y".into() });
        let start = std::time::Instant::now();
        assert_eq!(reward_of(&spec, &"x".repeat(100_000), Value::Null).unwrap(), Some(0.0));
        assert!(start.elapsed().as_secs() < 5);
    }
}
