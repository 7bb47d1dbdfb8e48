//! What a rollout reports: rewards and lengths.

use lockstep_observe::NamedMetric;

use super::sequence::Sequence;
use crate::algorithms::advantages::Moments;

/// The names and weights of the rewards, in the order of [`Sequence::rewards`].
#[derive(Clone, Debug, Default)]
pub(crate) struct RewardNames {
    pub(crate) names: Vec<String>,
    pub(crate) weights: Vec<f64>,
}

impl RewardNames {
    /// The weighted sum of a sequence's rewards. `None`: no function has an opinion.
    pub(crate) fn total(&self, sequence: &Sequence) -> Option<f64> {
        let known = sequence.rewards.iter().zip(&self.weights).filter(|(reward, _)| !reward.is_nan());
        known.clone().next()?;
        Some(known.map(|(reward, weight)| reward * weight).sum())
    }
}

/// The rewards of a rollout, by function and in all.
pub(crate) fn reward_metrics(
    sequences: &[Sequence],
    totals: &[Option<f64>],
    rewards: &RewardNames,
    group: usize,
) -> Vec<NamedMetric> {
    let all = Moments::of(totals.iter().copied());
    // A deviation of 0: the group's advantages are all 0.
    let equal = |group: &[Option<f64>]| Moments::of(group.iter().copied()).std.abs() < 1e-8;
    let groups = totals.chunks(group);
    let num_groups = groups.len().max(1) as f64;
    let mut metrics: Vec<NamedMetric> = vec![
        ("reward".into(), all.mean),
        ("reward_std".into(), all.std),
        ("frac_reward_zero_std".into(), groups.filter(|group| equal(group)).count() as f64 / num_groups),
    ];
    for (i, name) in rewards.names.iter().enumerate() {
        let known = |sequence: &Sequence| Some(sequence.rewards[i]).filter(|reward| !reward.is_nan());
        let own = Moments::of(sequences.iter().map(known));
        metrics.push((format!("rewards/{name}/mean").into(), own.mean));
        metrics.push((format!("rewards/{name}/std").into(), own.std));
    }
    metrics
}

/// The lengths of a rollout's completions.
pub(crate) fn length_metrics(sequences: &[Sequence]) -> Vec<NamedMetric> {
    let lengths = || sequences.iter().map(|sequence| sequence.completion().len() as f64);
    let count = sequences.len().max(1) as f64;
    let truncated = sequences.iter().filter(|sequence| sequence.truncated).count() as f64;
    vec![
        ("completions/mean_length".into(), lengths().sum::<f64>() / count),
        ("completions/min_length".into(), lengths().fold(f64::INFINITY, f64::min)),
        ("completions/max_length".into(), lengths().fold(0.0, f64::max)),
        ("completions/clipped_ratio".into(), truncated / count),
    ]
}
