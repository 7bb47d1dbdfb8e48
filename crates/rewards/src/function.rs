//! What a reward function is, and what it gets and returns.

use serde_json::{Map, Value};

use crate::error::RewardError;

/// One completion, as reward functions see it.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// The prompt as text, with the chat template applied.
    pub prompt: &'a str,
    pub completion: &'a str,
    pub completion_ids: &'a [u32],
    /// All columns of the data set's row, as they were in the file.
    pub columns: &'a Map<String, Value>,
    /// Whether generation stopped at the maximum length, and not at an end-of-sequence token.
    pub truncated: bool,
}

/// A reward function.
pub trait RewardFunction: Send {
    /// The name in metrics and messages.
    fn name(&self) -> &str;

    /// One reward per sample, in order. `None`: this function has no opinion, and the sum ignores it.
    fn score(&mut self, samples: &[Sample<'_>]) -> Result<Vec<Option<f64>>, RewardError>;

    /// As [`RewardFunction::score`], but a failure concerns only the samples that it names. The others keep their
    /// rewards. Without an implementation, a failure concerns all samples.
    fn score_each(&mut self, samples: &[Sample<'_>]) -> ScoreReport {
        match self.score(samples) {
            Ok(rewards) => ScoreReport { rewards, failures: Vec::new() },
            Err(error) => ScoreReport::failed(error, samples.len()),
        }
    }
}

/// The rewards of one batch, and what failed.
#[derive(Debug, Default)]
pub struct ScoreReport {
    /// One per sample. `None`: no opinion, or a failure names the sample.
    pub rewards: Vec<Option<f64>>,
    pub failures: Vec<ScoreFailure>,
}

/// One failure of a reward function.
#[derive(Debug)]
pub struct ScoreFailure {
    pub error: RewardError,
    /// Indices of the samples that got no reward because of it. Empty if the function broke its protocol but answered.
    pub samples: Vec<usize>,
}

impl ScoreReport {
    /// All of `num_samples` failed.
    pub fn failed(error: RewardError, num_samples: usize) -> ScoreReport {
        let failure = ScoreFailure { error, samples: (0..num_samples).collect() };
        ScoreReport { rewards: vec![None; num_samples], failures: vec![failure] }
    }

    /// Rewards computed sample by sample. The first error stands for all failed samples.
    pub(crate) fn from_each(
        samples: &[Sample<'_>],
        mut reward: impl FnMut(&Sample<'_>) -> Result<Option<f64>, RewardError>,
    ) -> ScoreReport {
        let mut report = ScoreReport::default();
        for (index, sample) in samples.iter().enumerate() {
            match reward(sample) {
                Ok(reward) => report.rewards.push(reward),
                Err(error) => {
                    report.rewards.push(None);
                    match report.failures.first_mut() {
                        Some(first) => first.samples.push(index),
                        None => report.failures.push(ScoreFailure { error, samples: vec![index] }),
                    }
                }
            }
        }
        report
    }

    /// All rewards, or the first failure.
    pub fn into_result(mut self) -> Result<Vec<Option<f64>>, RewardError> {
        if self.failures.is_empty() { Ok(self.rewards) } else { Err(self.failures.swap_remove(0).error) }
    }
}
