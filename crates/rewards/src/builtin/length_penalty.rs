//! `length_penalty`: a soft punishment of completions that are too long.

use super::SampleReward;
use crate::error::RewardError;

/// DAPO's soft overlong punishment (equation 13 of arXiv:2503.14476), as TRL's `get_soft_overlong_punishment`. With `n`
/// tokens in the completion: 0 up to `max_length - buffer`, from there linearly down to -1 at `max_length`, and -1
/// beyond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LengthPenalty {
    /// In tokens.
    pub max_length: u32,
    /// In tokens. 0: no soft part.
    pub buffer: u32,
}

impl LengthPenalty {
    pub(super) fn open(&self, name: &str) -> Result<SampleReward, RewardError> {
        let LengthPenalty { max_length, buffer } = *self;
        let bad = |option, value: u32, why: &str| {
            let (function, value) = (name.to_owned(), value.to_string());
            Err(RewardError::BadOption { function, option, value, why: why.to_owned() })
        };
        if max_length == 0 {
            return bad("max_length", max_length, "it must be at least 1");
        }
        if buffer > max_length {
            return bad("buffer", buffer, &format!("it must be at most `max_length` ({max_length})"));
        }
        let (max_length, buffer) = (f64::from(max_length), f64::from(buffer));
        Ok(Box::new(move |sample| {
            let length = sample.completion_ids.len() as f64;
            let free = max_length - buffer;
            Ok(Some(match length {
                _ if length <= free => 0.0,
                _ if length <= max_length => (free - length) / buffer,
                _ => -1.0,
            }))
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::RewardSpec;
    use crate::testing::report_of_ids;

    fn penalties(max_length: u32, buffer: u32, lengths: &[usize]) -> Vec<Option<f64>> {
        let ids: Vec<Vec<u32>> = lengths.iter().map(|length| vec![1; *length]).collect();
        let ids: Vec<&[u32]> = ids.iter().map(Vec::as_slice).collect();
        report_of_ids(&RewardSpec::LengthPenalty(LengthPenalty { max_length, buffer }), &ids).rewards
    }

    /// The values are those of TRL 1.16.
    #[test]
    fn the_penalty_grows_in_the_buffer() {
        let expected = [0.0, 0.0, -0.05, -0.5, -1.0, -1.0].map(Some);
        assert_eq!(penalties(100, 20, &[0, 80, 81, 90, 100, 101]), expected);
        assert_eq!(penalties(4, 0, &[4, 5]), [Some(0.0), Some(-1.0)]);
        assert_eq!(penalties(4, 4, &[0, 1, 4]), [Some(0.0), Some(-0.25), Some(-1.0)]);
    }

    #[test]
    fn options_are_checked() {
        let why = |max_length, buffer| {
            let spec = RewardSpec::LengthPenalty(LengthPenalty { max_length, buffer });
            spec.check("length").unwrap_err().to_string()
        };
        assert_eq!(why(0, 0), "reward function `length`: `max_length` is 0: it must be at least 1");
        assert_eq!(why(4, 5), "reward function `length`: `buffer` is 5: it must be at most `max_length` (4)");
    }
}
