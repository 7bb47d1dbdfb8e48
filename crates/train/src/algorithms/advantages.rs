//! Advantages: how much better a completion, or a token, is than expected.
//!
//! GRPO and RLOO compare the completions of one prompt with each other; PPO compares with a value model (GAE). All
//! statistics are over the whole rollout on all ranks. A completion without a reward (`None`) has advantage 0 and does
//! not count in any statistic.

use lockstep_config::ScaleRewards;

/// Added to standard deviations that rewards are divided by.
const STD_EPSILON: f64 = 1e-4;
/// Added to the variance in whitening.
const VARIANCE_EPSILON: f64 = 1e-8;

/// The number, mean and unbiased standard deviation of the values that exist.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Moments {
    pub(crate) count: usize,
    pub(crate) mean: f64,
    /// NaN for fewer than two values.
    pub(crate) std: f64,
}

impl Moments {
    pub(crate) fn of(values: impl Iterator<Item = Option<f64>> + Clone) -> Moments {
        let known = values.flatten();
        let count = known.clone().count();
        let mean = known.clone().sum::<f64>() / count as f64;
        let squares: f64 = known.map(|value| (value - mean) * (value - mean)).sum();
        let std = if count > 1 { (squares / (count - 1) as f64).sqrt() } else { f64::NAN };
        Moments { count, mean, std }
    }
}

/// GRPO: rewards relative to the mean of their group of `group` consecutive completions, divided by a standard
/// deviation.
pub(crate) fn group_relative(rewards: &[Option<f64>], group: usize, scale: ScaleRewards) -> Vec<f64> {
    let batch = Moments::of(rewards.iter().copied());
    let advantages = rewards.chunks(group).flat_map(|rewards| {
        let own = Moments::of(rewards.iter().copied());
        let divisor = match scale {
            ScaleRewards::Group => own.std + STD_EPSILON,
            ScaleRewards::Batch => batch.std + STD_EPSILON,
            ScaleRewards::None => 1.0,
        };
        rewards.iter().map(move |reward| reward.map_or(f64::NAN, |reward| (reward - own.mean) / divisor))
    });
    advantages.map(or_zero).collect()
}

/// RLOO: rewards relative to the mean of the other completions of their group. `normalize`: also to mean 0 and standard
/// deviation 1 over all completions.
pub(crate) fn leave_one_out(rewards: &[Option<f64>], group: usize, normalize: bool) -> Vec<f64> {
    let advantages = rewards.chunks(group).flat_map(|rewards| {
        let known = rewards.iter().flatten();
        let (sum, count) = (known.clone().sum::<f64>(), known.count());
        rewards.iter().map(move |reward| {
            let reward = (*reward)?;
            (count > 1).then(|| reward - (sum - reward) / (count - 1) as f64)
        })
    });
    let advantages: Vec<Option<f64>> = advantages.collect();
    let all = Moments::of(advantages.iter().copied());
    let scaled = |advantage: f64| match normalize {
        true => (advantage - all.mean) / (all.std + STD_EPSILON),
        false => advantage,
    };
    advantages.into_iter().map(|advantage| or_zero(advantage.map_or(f64::NAN, scaled))).collect()
}

fn or_zero(advantage: f64) -> f64 {
    if advantage.is_nan() { 0.0 } else { advantage }
}

/// Generalized advantage estimation of one sequence: δ_t = r_t + γ·V_(t+1) − V_t and A_t = δ_t + γ·λ·A_(t+1), where V is
/// 0 after the last position. Returns the advantages and the returns A + V.
pub(crate) fn generalized(rewards: &[f64], values: &[f64], gamma: f64, lam: f64) -> (Vec<f64>, Vec<f64>) {
    let mut advantages = vec![0.0; rewards.len()];
    let (mut next_value, mut next_advantage) = (0.0, 0.0);
    for t in (0..rewards.len()).rev() {
        let delta = rewards[t] + gamma * next_value - values[t];
        next_advantage = delta + gamma * lam * next_advantage;
        next_value = values[t];
        advantages[t] = next_advantage;
    }
    let returns = advantages.iter().zip(values).map(|(advantage, value)| advantage + value).collect();
    (advantages, returns)
}

/// Scales values to variance 1 over all of them, and with `shift` to mean 0.
pub(crate) fn whiten<'a>(values: impl Iterator<Item = &'a mut f64>, shift: bool) {
    let values: Vec<&mut f64> = values.collect();
    let count = values.len() as f64;
    let mean = values.iter().map(|value| **value).sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (**value - mean) * (**value - mean)).sum();
    let scale = 1.0 / (squares / (count - 1.0) + VARIANCE_EPSILON).sqrt();
    for value in values {
        *value = (*value - mean) * scale + if shift { 0.0 } else { mean };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REWARDS: [Option<f64>; 6] = [Some(1.0), Some(3.0), None, Some(2.0), None, None];

    fn close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (a, b) in found.iter().zip(expected) {
            assert!((a - b).abs() < 1e-12, "{found:?} is not {expected:?}");
        }
    }

    #[test]
    fn groups_are_centred_and_scaled() {
        let std = 2f64.sqrt();
        // The second group has one reward: no deviation is known, and the advantage is 0.
        let scaled = [-1.0 / (std + 1e-4), 1.0 / (std + 1e-4), 0.0, 0.0, 0.0, 0.0];
        close(&group_relative(&REWARDS, 3, ScaleRewards::Group), &scaled);
        close(&group_relative(&REWARDS, 3, ScaleRewards::None), &[-1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        let batch = 1.0 / (1.0 + 1e-4);
        close(&group_relative(&REWARDS, 3, ScaleRewards::Batch), &[-batch, batch, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn leave_one_out_compares_with_the_others() {
        close(&leave_one_out(&REWARDS, 3, false), &[-2.0, 2.0, 0.0, 0.0, 0.0, 0.0]);
        let scale = 1.0 / (8f64.sqrt() + 1e-4);
        close(&leave_one_out(&REWARDS, 3, true), &[-2.0 * scale, 2.0 * scale, 0.0, 0.0, 0.0, 0.0]);
    }

    /// By the definition: A_t = Σ_k (γλ)^k δ_(t+k).
    #[test]
    fn generalized_advantages_match_their_definition() {
        let (rewards, values) = ([0.1, -0.2, 0.0, 1.5], [0.4, 0.3, -0.1, 0.7]);
        let (gamma, lam) = (0.97f64, 0.9f64);
        let delta = |t: usize| rewards[t] + gamma * values.get(t + 1).unwrap_or(&0.0) - values[t];
        let expected: Vec<f64> =
            (0..4).map(|t| (t..4).map(|k| (gamma * lam).powi((k - t) as i32) * delta(k)).sum()).collect();
        let (advantages, returns) = generalized(&rewards, &values, gamma, lam);
        close(&advantages, &expected);
        close(&returns, &expected.iter().zip(values).map(|(a, v)| a + v).collect::<Vec<_>>());
    }

    #[test]
    fn whitening_sets_mean_and_variance() {
        let mut values = [1.0, 2.0, 4.0, 9.0];
        whiten(values.iter_mut(), true);
        let moments = Moments::of(values.iter().map(|v| Some(*v)));
        assert!(moments.mean.abs() < 1e-12 && (moments.std - 1.0).abs() < 1e-8);
        let mut kept = [1.0, 2.0, 4.0, 9.0];
        whiten(kept.iter_mut(), false);
        assert!((Moments::of(kept.iter().map(|v| Some(*v))).mean - 4.0).abs() < 1e-12);
    }
}
