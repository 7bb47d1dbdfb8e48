//! `repetition_penalty`: a penalty for repeated n-grams.

use std::collections::HashSet;

use super::SampleReward;
use crate::error::RewardError;

/// As TRL's `get_repetition_penalty_reward` (appendix C.2 of arXiv:2502.03373): `max_penalty` times the share of the
/// completion's token n-grams that are repetitions, that is 1 - distinct n-grams / n-grams. 0 for completions of fewer
/// than `ngram_size` tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RepetitionPenalty {
    pub ngram_size: usize,
    /// At most 0: the reward of a completion with nothing but repetitions.
    pub max_penalty: f64,
}

/// Hashing costs `ngram_size` per token.
const MAX_NGRAM_SIZE: usize = 256;

impl Default for RepetitionPenalty {
    fn default() -> RepetitionPenalty {
        RepetitionPenalty { ngram_size: 3, max_penalty: -1.0 }
    }
}

impl RepetitionPenalty {
    pub(super) fn open(&self, name: &str) -> Result<SampleReward, RewardError> {
        let RepetitionPenalty { ngram_size, max_penalty } = *self;
        let bad = |option, value: String, why: String| {
            Err(RewardError::BadOption { function: name.to_owned(), option, value, why })
        };
        if ngram_size == 0 || ngram_size > MAX_NGRAM_SIZE {
            let why = format!("it must be from 1 to {MAX_NGRAM_SIZE}");
            return bad("ngram_size", ngram_size.to_string(), why);
        }
        if !max_penalty.is_finite() || max_penalty > 0.0 {
            return bad("max_penalty", max_penalty.to_string(), "it must be 0 or less".into());
        }
        Ok(Box::new(move |sample| {
            let num_ngrams = sample.completion_ids.windows(ngram_size).len();
            let distinct: HashSet<&[u32]> = sample.completion_ids.windows(ngram_size).collect();
            if distinct.len() == num_ngrams {
                return Ok(Some(0.0));
            }
            Ok(Some((1.0 - distinct.len() as f64 / num_ngrams as f64) * max_penalty))
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::RewardSpec;
    use crate::testing::report_of_ids;

    /// The values are those of TRL 1.16.
    #[test]
    fn repeated_ngrams_are_penalised() {
        let spec = RewardSpec::RepetitionPenalty(RepetitionPenalty { ngram_size: 2, max_penalty: -1.0 });
        let report = report_of_ids(&spec, &[&[1, 2, 3, 4], &[5, 5, 5, 5, 5], &[1], &[], &[1, 2, 1, 2]]);
        assert_eq!(report.rewards, [0.0, -0.75, 0.0, 0.0, -(1.0 - 2.0 / 3.0)].map(Some));
        let half =
            RewardSpec::RepetitionPenalty(RepetitionPenalty { max_penalty: -0.5, ..Default::default() });
        assert_eq!(report_of_ids(&half, &[&[7, 7, 7, 7]]).rewards, [Some(-0.25)]);
    }

    #[test]
    fn options_are_checked() {
        for (ngram_size, max_penalty) in [(0, -1.0), (257, -1.0), (3, 0.5), (3, f64::NAN)] {
            let spec = RewardSpec::RepetitionPenalty(RepetitionPenalty { ngram_size, max_penalty });
            assert!(spec.check("repetition").is_err(), "{ngram_size} {max_penalty}");
        }
    }
}
