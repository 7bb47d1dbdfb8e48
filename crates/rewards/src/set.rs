//! Several reward functions: evaluated at once, with a policy for failures, and added up.

use lockstep_core::panics;

use crate::error::RewardError;
use crate::function::{RewardFunction, Sample, ScoreFailure, ScoreReport};

/// What to do about samples for which a reward function failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnRewardError {
    /// End the run with the error.
    #[default]
    Stop,
    /// Their reward is 0.
    Zero,
    /// They get no reward from this function.
    Skip,
}

/// A function of a [`RewardSet`].
pub struct RewardEntry {
    pub function: Box<dyn RewardFunction>,
    pub weight: f64,
    pub on_error: OnRewardError,
}

/// Reward functions that are evaluated on the same samples.
pub struct RewardSet {
    entries: Vec<RewardEntry>,
}

/// The rewards of all functions.
#[derive(Debug, Default)]
pub struct SetScores {
    /// `[function][sample]`, in the order of the functions.
    pub rewards: Vec<Vec<Option<f64>>>,
    /// Failures that the policy tolerated. The caller decides how often to report them.
    pub warnings: Vec<RewardWarning>,
}

/// A failure that did not end the run.
#[derive(Debug)]
pub struct RewardWarning {
    /// Index of the function.
    pub function: usize,
    pub error: RewardError,
    /// How many samples it concerned.
    pub num_samples: usize,
    pub on_error: OnRewardError,
}

impl std::fmt::Display for RewardWarning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let samples = if self.num_samples == 1 { "sample" } else { "samples" };
        let consequence = match self.on_error {
            OnRewardError::Zero => "reward 0",
            OnRewardError::Skip | OnRewardError::Stop => "no reward",
        };
        write!(f, "{} ({} {samples}: {consequence})", self.error, self.num_samples)
    }
}

impl RewardSet {
    /// Names must differ and weights be finite.
    pub fn new(entries: Vec<RewardEntry>) -> Result<RewardSet, RewardError> {
        for (index, entry) in entries.iter().enumerate() {
            let name = entry.function.name();
            if entries[..index].iter().any(|other| other.function.name() == name) {
                return Err(RewardError::DuplicateName { name: name.to_owned() });
            }
            if !entry.weight.is_finite() {
                return Err(RewardError::BadOption {
                    function: name.to_owned(),
                    option: "weight",
                    value: entry.weight.to_string(),
                    why: "it must be a finite number".into(),
                });
            }
        }
        Ok(RewardSet { entries })
    }

    pub fn names(&self) -> Vec<&str> {
        self.entries.iter().map(|entry| entry.function.name()).collect()
    }

    pub fn weights(&self) -> Vec<f64> {
        self.entries.iter().map(|entry| entry.weight).collect()
    }

    /// Evaluates all functions, each in its own thread, and applies their policies. With several errors that end the run,
    /// the first function's is returned.
    pub fn score(&mut self, samples: &[Sample<'_>]) -> Result<SetScores, RewardError> {
        let reports: Vec<ScoreReport> = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for entry in &mut self.entries {
                let function = &mut entry.function;
                threads.push((function.name().to_owned(), scope.spawn(|| function.score_each(samples))));
            }
            let join = |(function, thread): (String, std::thread::ScopedJoinHandle<'_, ScoreReport>)| {
                thread.join().unwrap_or_else(|payload| {
                    let panic = panics::from_payload(&*payload);
                    ScoreReport::failed(RewardError::Panicked { function, panic }, samples.len())
                })
            };
            threads.into_iter().map(join).collect()
        });
        let mut scores = SetScores::default();
        for (index, (entry, report)) in self.entries.iter().zip(reports).enumerate() {
            let report = checked(entry.function.name(), report, samples.len())?;
            scores.rewards.push(report.rewards);
            for ScoreFailure { error, samples: failed } in report.failures {
                if entry.on_error == OnRewardError::Stop || error.is_permanent() {
                    return Err(error);
                }
                let value = (entry.on_error == OnRewardError::Zero).then_some(0.0);
                failed.iter().for_each(|sample| scores.rewards[index][*sample] = value);
                let (num_samples, on_error) = (failed.len(), entry.on_error);
                scores.warnings.push(RewardWarning { function: index, error, num_samples, on_error });
            }
        }
        Ok(scores)
    }
}

/// Checks what a function returned: library users write some of them.
fn checked(name: &str, mut report: ScoreReport, num_samples: usize) -> Result<ScoreReport, RewardError> {
    let function = || name.to_owned();
    if report.rewards.len() != num_samples {
        let rewards = report.rewards.len();
        return Err(RewardError::WrongLength { function: function(), samples: num_samples, rewards });
    }
    let is_bad = |reward: &Option<f64>| reward.is_some_and(|reward| !reward.is_finite());
    let bad: Vec<usize> = (0..num_samples).filter(|index| is_bad(&report.rewards[*index])).collect();
    if let Some(first) = bad.first() {
        let value = report.rewards[*first].unwrap_or(f64::NAN);
        let error = RewardError::NotFinite { function: function(), value };
        report.failures.push(ScoreFailure { error, samples: bad });
    }
    for failure in &mut report.failures {
        failure.samples.retain(|index| *index < num_samples);
    }
    Ok(report)
}

/// The weighted sum over the functions that have an opinion, per sample, in the order of the functions. `None` if none
/// has one: the sample then has no reward, and its advantage is 0 (TRL's `nansum`).
pub fn combine(weights: &[f64], rewards: &[Vec<Option<f64>>]) -> Vec<Option<f64>> {
    assert_eq!(weights.len(), rewards.len(), "one weight per function");
    let num_samples = rewards.first().map_or(0, Vec::len);
    assert!(rewards.iter().all(|row| row.len() == num_samples), "one reward per sample");
    let sum = |sample: usize| {
        let terms = weights.iter().zip(rewards).filter_map(|(weight, row)| Some(weight * row[sample]?));
        terms.fold(None, |sum, term| Some(sum.unwrap_or(0.0) + term))
    };
    (0..num_samples).map(sum).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::{row, sample};

    type FixedResult = Result<Vec<Option<f64>>, &'static str>;

    /// Returns what it is given: `Err` for a failure, and a panic for an empty list.
    struct Fixed(&'static str, FixedResult);

    impl RewardFunction for Fixed {
        fn name(&self) -> &str {
            self.0
        }

        fn score(&mut self, _samples: &[Sample<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
            assert_ne!(self.1, Ok(vec![]), "nothing to return");
            let failed = |cause: &str| RewardError::Custom { function: self.0.into(), cause: cause.into() };
            self.1.clone().map_err(failed)
        }
    }

    fn set(
        on_error: OnRewardError,
        functions: Vec<(&'static str, FixedResult)>,
    ) -> Result<RewardSet, RewardError> {
        let entry =
            |(name, result)| RewardEntry { function: Box::new(Fixed(name, result)), weight: 1.0, on_error };
        RewardSet::new(functions.into_iter().map(entry).collect())
    }

    fn score(set: &mut RewardSet) -> Result<SetScores, RewardError> {
        let columns = row(json!(1));
        set.score(&[sample("a", &columns), sample("b", &columns)])
    }

    #[test]
    fn policies_apply_to_failed_functions_only() {
        let good = || ("good", Ok(vec![Some(1.0), None]));
        let functions = || vec![good(), ("down", Err("out of tokens"))];
        let zero = score(&mut set(OnRewardError::Zero, functions()).unwrap()).unwrap();
        assert_eq!(zero.rewards, [[Some(1.0), None], [Some(0.0), Some(0.0)]]);
        assert_eq!(
            zero.warnings[0].to_string(),
            "reward function `down` failed: out of tokens (2 samples: reward 0)"
        );
        let skip = score(&mut set(OnRewardError::Skip, functions()).unwrap()).unwrap();
        assert_eq!(skip.rewards, [[Some(1.0), None], [None, None]]);
        assert_eq!((skip.warnings.len(), skip.warnings[0].function), (1, 1));
        let stop = score(&mut set(OnRewardError::Stop, functions()).unwrap()).unwrap_err();
        assert_eq!(stop.to_string(), "reward function `down` failed: out of tokens");
        let fine = score(&mut set(OnRewardError::Stop, vec![good()]).unwrap()).unwrap();
        assert!(fine.warnings.is_empty());
    }

    #[test]
    fn returned_rewards_are_checked() {
        let one = |result| score(&mut set(OnRewardError::Skip, vec![("f", result)]).unwrap());
        let scores = one(Ok(vec![Some(f64::NAN), Some(2.0)])).unwrap();
        assert_eq!(scores.rewards, [[None, Some(2.0)]]);
        assert!(scores.warnings[0].to_string().contains("NaN, which is not a finite number (1 sample:"));
        let error = one(Ok(vec![Some(1.0)])).unwrap_err();
        assert_eq!(error.to_string(), "reward function `f` returned 1 rewards for 2 samples");
        let scores = one(Ok(vec![])).unwrap();
        assert_eq!(scores.rewards, [[None, None]]);
        assert!(scores.warnings[0].to_string().contains("panicked"), "{}", scores.warnings[0]);
    }

    #[test]
    fn names_differ_and_weights_are_finite() {
        let twice = set(OnRewardError::Stop, vec![("a", Err("")), ("a", Err(""))]);
        assert!(matches!(twice, Err(RewardError::DuplicateName { name }) if name == "a"));
        let function = Box::new(Fixed("a", Err("")));
        let entry = RewardEntry { function, weight: f64::INFINITY, on_error: OnRewardError::Stop };
        assert!(RewardSet::new(vec![entry]).is_err());
    }

    #[test]
    fn sums_ignore_functions_without_an_opinion() {
        let rewards = [vec![Some(1.0), None, None, Some(-1.0)], vec![Some(0.5), Some(2.0), None, None]];
        assert_eq!(combine(&[2.0, 3.0], &rewards), [Some(3.5), Some(6.0), None, Some(-2.0)]);
        assert_eq!(combine(&[0.0, 3.0], &rewards)[3], Some(0.0));
        assert_eq!(combine(&[], &[]), []);
    }

    #[test]
    fn an_empty_set_scores_nothing() {
        let mut empty = RewardSet::new(Vec::new()).unwrap();
        let columns = row(Value::Null);
        assert!(empty.score(&[sample("a", &columns)]).unwrap().rewards.is_empty());
    }
}
