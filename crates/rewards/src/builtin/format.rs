//! `format`: 1 if the completion has the wanted form, else 0.

use super::pattern::compile_whole;
use super::{SampleReward, one_if};
use crate::error::RewardError;

/// 1 if the whole completion matches the pattern, else 0.
///
/// Without a pattern it is TRL's `think_format_reward`: the completion begins with `<think>`, has no second `<think>`,
/// and has `</think>` somewhere after it. What follows is the answer, which may be empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Format {
    pub pattern: Option<String>,
}

impl Format {
    pub(super) fn open(&self, name: &str) -> Result<SampleReward, RewardError> {
        let Some(pattern) = &self.pattern else {
            return Ok(Box::new(|sample| Ok(one_if(has_thoughts(sample.completion)))));
        };
        let pattern = compile_whole(name, "pattern", pattern)?;
        Ok(Box::new(move |sample| Ok(one_if(pattern.is_match(sample.completion)))))
    }
}

/// `^<think>(?!.*<think>)(.*?)</think>.*$` without look-ahead, which the `regex` crate does not have.
fn has_thoughts(completion: &str) -> bool {
    let Some(rest) = completion.strip_prefix("<think>") else { return false };
    !rest.contains("<think>") && rest.contains("</think>")
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::spec::RewardSpec;
    use crate::testing::reward_of;

    fn check(options: Format, cases: &[(&str, f64)]) {
        let spec = RewardSpec::Format(options);
        for (completion, reward) in cases {
            assert_eq!(reward_of(&spec, completion, Value::Null).unwrap(), Some(*reward), "{completion:?}");
        }
    }

    /// The values are those of TRL 1.16.
    #[test]
    fn thoughts_come_first() {
        let cases = [
            ("<think>\nThis is my reasoning.\n</think>\nThis is my answer.", 1.0),
            ("<think>x</think>", 1.0),
            ("<think></think></think> 7\n", 1.0),
            ("<think>\nThis is my reasoning.\nThis is my answer.", 0.0),
            (" <think>x</think> 7", 0.0),
            ("<think>x<think>y</think> 7", 0.0),
            ("<think>x</think> 7 <think>y</think>", 0.0),
            ("</think><think>", 0.0),
            ("", 0.0),
        ];
        check(Format::default(), &cases);
    }

    #[test]
    fn a_pattern_matches_the_whole_completion() {
        let pattern = r"<answer>\n.*\n</answer>".to_owned();
        let cases = [("<answer>\n1\n2\n</answer>", 1.0), ("<answer>\n1\n</answer> ", 0.0), ("1", 0.0)];
        check(Format { pattern: Some(pattern) }, &cases);
    }
}
