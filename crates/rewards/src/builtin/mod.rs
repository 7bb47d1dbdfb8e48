//! Reward functions that need nothing outside this process. Each has a file with its options and its definition.

mod column;
mod decimal;
mod exact_match;
mod format;
mod length_penalty;
mod numbers;
mod numeric_match;
mod pattern;
mod regex_search;
mod repetition_penalty;

pub use exact_match::ExactMatch;
pub use format::Format;
pub use length_penalty::LengthPenalty;
pub use numeric_match::{NumberSource, NumericMatch};
pub use regex_search::RegexSearch;
pub use repetition_penalty::RepetitionPenalty;

use crate::error::RewardError;
use crate::function::{RewardFunction, Sample, ScoreReport};
use crate::spec::RewardSpec;

/// A function from one sample to its reward. Built-ins have no state, so a failure concerns one sample only.
type SampleReward = Box<dyn Fn(&Sample<'_>) -> Result<Option<f64>, RewardError> + Send>;

struct BuiltIn {
    name: String,
    reward: SampleReward,
}

impl RewardFunction for BuiltIn {
    fn name(&self) -> &str {
        &self.name
    }

    fn score(&mut self, samples: &[Sample<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        self.score_each(samples).into_result()
    }

    fn score_each(&mut self, samples: &[Sample<'_>]) -> ScoreReport {
        ScoreReport::from_each(samples, &self.reward)
    }
}

pub(crate) fn open(name: &str, spec: &RewardSpec) -> Result<Box<dyn RewardFunction>, RewardError> {
    let reward = match spec {
        RewardSpec::ExactMatch(options) => options.open(name)?,
        RewardSpec::NumericMatch(options) => options.open(name)?,
        RewardSpec::Format(options) => options.open(name)?,
        RewardSpec::Regex(options) => options.open(name)?,
        RewardSpec::LengthPenalty(options) => options.open(name)?,
        RewardSpec::RepetitionPenalty(options) => options.open(name)?,
        RewardSpec::Program(_) | RewardSpec::Http(_) => unreachable!("these are not built-ins"),
    };
    Ok(Box::new(BuiltIn { name: name.to_owned(), reward }))
}

/// 1 for yes, 0 for no.
fn one_if(condition: bool) -> Option<f64> {
    Some(if condition { 1.0 } else { 0.0 })
}
