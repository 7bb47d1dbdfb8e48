//! Reward models: a scalar head learns to score the chosen sequence of a pair above the rejected one (Bradley–Terry).
//!
//! L = mean over all pairs of the step of −log σ(r_c − r_r − margin) + c·(r_c + r_r)², where r is the head's output at
//! a sequence's last token. The second term keeps rewards centred around zero.

use std::sync::Arc;

use lockstep_config::RewardConfig;
use lockstep_data::{Batch, Dataset};
use lockstep_engine::{Coefficients, Outputs};
use lockstep_shape::{Channel, Channels};

use super::dpo_loss::{log_sigmoid, sigmoid};
use crate::objective::{Metrics, Objective, StepCounts};

/// Trains a reward model.
pub(crate) struct RewardModel {
    center: f64,
    /// The pairs, for their margins.
    dataset: Arc<Dataset>,
    counts: StepCounts,
    sums: Sums,
}

/// Sums over the pairs of this rank, and the extremes of their rewards.
#[derive(Clone, Copy, Debug)]
struct Sums {
    loss: f64,
    correct: f64,
    margin: f64,
    reward: f64,
    min: f64,
    max: f64,
}

const NONE_YET: Sums =
    Sums { loss: 0.0, correct: 0.0, margin: 0.0, reward: 0.0, min: f64::INFINITY, max: f64::NEG_INFINITY };

/// The loss of a pair, and its derivatives with respect to the chosen and the rejected reward.
fn pair_loss(rewards: [f64; 2], margin: f64, center: f64) -> (f64, [f64; 2]) {
    let apart = rewards[0] - rewards[1] - margin;
    let total = rewards[0] + rewards[1];
    let (slope, pull) = (-sigmoid(-apart), 2.0 * center * total);
    (-log_sigmoid(apart) + center * total * total, [slope + pull, -slope + pull])
}

impl RewardModel {
    pub(crate) fn new(config: &RewardConfig, dataset: Arc<Dataset>) -> RewardModel {
        let center = config.center_rewards_coefficient.unwrap_or(0.0);
        RewardModel { center, dataset, counts: StepCounts::default(), sums: NONE_YET }
    }

    /// The margin of the pair that starts at document `doc` of a batch.
    fn margin(&self, batch: &Batch, doc: usize) -> f64 {
        self.dataset.margin(batch.samples[doc] / 2).map_or(0.0, f64::from)
    }

    fn record(&mut self, rewards: [f64; 2], loss: f64) {
        let [chosen, rejected] = rewards;
        self.sums.loss += loss;
        self.sums.correct += f64::from(u8::from(chosen > rejected));
        self.sums.margin += chosen - rejected;
        self.sums.reward += chosen + rejected;
        self.sums.min = self.sums.min.min(chosen).min(rejected);
        self.sums.max = self.sums.max.max(chosen).max(rejected);
    }
}

impl Objective for RewardModel {
    fn channels(&self) -> Channels {
        Channels::VALUE
    }

    fn begin(&mut self, counts: &StepCounts) {
        (self.counts, self.sums) = (*counts, NONE_YET);
    }

    fn coefficients(
        &mut self,
        _: usize,
        batch: &Batch,
        outputs: Option<Outputs<'_>>,
        out: &mut Coefficients<'_>,
    ) {
        let values = outputs.expect("a pair's loss needs its rewards").get(Channel::Value);
        let coefficients = out.get(Channel::Value);
        for doc in (0..batch.num_docs()).step_by(2) {
            let last = [doc + 1, doc + 2].map(|end| batch.cu_seqlens[end] as usize - 1);
            let rewards = last.map(|token| f64::from(values[token]));
            let (loss, slopes) = pair_loss(rewards, self.margin(batch, doc), self.center);
            for (token, slope) in last.into_iter().zip(slopes) {
                coefficients[token] = (slope / self.counts.pairs as f64) as f32;
            }
            self.record(rewards, loss);
        }
    }

    fn outputs(&mut self, _: &Batch, _: Outputs<'_>) {}

    fn sums(&self) -> Vec<f64> {
        vec![self.sums.loss, self.sums.correct, self.sums.margin, self.sums.reward]
    }

    fn maxima(&self) -> Vec<f64> {
        vec![-self.sums.min, self.sums.max]
    }

    fn metrics(&self, sums: &[f64], maxima: &[f64]) -> Metrics {
        let pairs = self.counts.pairs as f64;
        Metrics {
            loss: sums[0] / pairs,
            others: vec![
                ("accuracy".into(), sums[1] / pairs),
                ("margin".into(), sums[2] / pairs),
                ("min_reward".into(), -maxima[0]),
                ("mean_reward".into(), sums[3] / (2.0 * pairs)),
                ("max_reward".into(), maxima[1]),
            ],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_the_derivatives_of_the_loss() {
        for (rewards, margin, center) in
            [([0.3, -0.2], 0.0, 0.0), ([1.5, 2.0], 0.4, 0.01), ([-3.0, 0.1], 1.0, 0.3)]
        {
            let (_, slopes) = pair_loss(rewards, margin, center);
            for side in 0..2 {
                let at = |step: f64| {
                    let mut moved = rewards;
                    moved[side] += step;
                    pair_loss(moved, margin, center).0
                };
                let numeric = (at(1e-6) - at(-1e-6)) / 2e-6;
                assert!((numeric - slopes[side]).abs() < 1e-8, "{numeric} and {}", slopes[side]);
            }
        }
    }
}
