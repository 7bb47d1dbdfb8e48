//! Proximal policy optimization: rewards, advantages and returns of a rollout, and the objective of the value model. The
//! policy's objective is [`PolicyGradient`](super::policy_gradient::PolicyGradient).
//!
//! A completion of k tokens has k values, each predicted before its token. A completion that ends before the maximum
//! length has one more, after its end token: the reward model's score arrives there. A completion of maximum length gets
//! the score with its last token.

use std::sync::Arc;

use lockstep_config::{KlEstimator, PpoConfig};
use lockstep_data::Batch;
use lockstep_engine::{Coefficients, Outputs};
use lockstep_observe::NamedMetric;
use lockstep_shape::{Channel, Channels};

use super::advantages::{generalized, whiten};
use crate::objective::{Metrics, Objective, StepCounts};
use crate::rollout::sequence::Sequence;
use crate::rollout::{Advantages, Rollout};

/// The number of values of a completion of `length` tokens.
pub(crate) fn num_values(length: usize, max_length: usize) -> usize {
    if length < max_length { length + 1 } else { length }
}

/// The advantages of all tokens and the returns of all values of a rollout, and what to report about it.
pub(crate) fn estimate(
    config: &PpoConfig,
    kl_coef: f64,
    sequences: &[Sequence],
) -> (Advantages, Vec<NamedMetric>) {
    let max_length = config.sampling.max_completion_length as usize;
    let penalty = config.missing_eos_penalty.unwrap_or(0.0);
    let scores: Vec<f64> =
        sequences.iter().map(|s| s.rewards[0] - if s.truncated { penalty } else { 0.0 }).collect();
    let kls: Vec<Vec<f64>> = sequences.iter().map(|s| kl(config.kl_estimator, s)).collect();
    let mut rewards: Vec<Vec<f64>> = kls
        .iter()
        .zip(&scores)
        .map(|(kl, score)| {
            let mut rewards: Vec<f64> = kl.iter().map(|kl| -kl_coef * kl).collect();
            rewards.resize(num_values(kl.len(), max_length), 0.0);
            if let Some(last) = rewards.last_mut() {
                *last += score;
            }
            rewards
        })
        .collect();
    if config.whiten_rewards {
        whiten(rewards.iter_mut().flatten(), false);
    }
    let (mut advantages, mut returns) = (Vec::new(), Vec::new());
    for (sequence, rewards) in sequences.iter().zip(&rewards) {
        let values: Vec<f64> = sequence.values.iter().map(|value| f64::from(*value)).collect();
        let (mut own, targets) = generalized(rewards, &values, config.gamma, config.lam);
        own.truncate(sequence.completion().len());
        advantages.push(own);
        returns.push(targets);
    }
    whiten(advantages.iter_mut().flatten(), true);
    let count = sequences.len() as f64;
    let mean_score = scores.iter().sum::<f64>() / count;
    let mean_kl = kls.iter().flatten().sum::<f64>() / count;
    let metrics = vec![
        ("reward".into(), mean_score),
        ("objective/kl".into(), mean_kl),
        ("objective/non_score_reward".into(), -kl_coef * mean_kl),
        ("objective/rlhf_reward".into(), mean_score - kl_coef * mean_kl),
        ("kl_coef".into(), kl_coef),
    ];
    (Advantages::Tokens { advantages, returns }, metrics)
}

/// The estimated KL divergence from the reference of each token of a completion.
fn kl(estimator: KlEstimator, sequence: &Sequence) -> Vec<f64> {
    let pairs = sequence.log_probs.iter().zip(&sequence.reference);
    pairs
        .map(|(log_prob, reference)| {
            let apart = f64::from(*reference) - f64::from(*log_prob);
            match estimator {
                KlEstimator::K1 => -apart,
                KlEstimator::K3 => apart.exp() - 1.0 - apart,
            }
        })
        .collect()
}

/// The mean KL divergence of a rollout's completions, which an adaptive coefficient follows.
pub(crate) fn mean_kl(config: &PpoConfig, sequences: &[Sequence]) -> f64 {
    sequences.iter().flat_map(|s| kl(config.kl_estimator, s)).sum::<f64>() / sequences.len() as f64
}

/// The next coefficient of an adaptive KL penalty, after a rollout of `sequences` completions.
pub(crate) fn next_kl_coef(config: &PpoConfig, kl_coef: f64, kl: f64, sequences: usize) -> f64 {
    /// The most that the error counts, so that the coefficient changes slowly.
    const MAX_ERROR: f64 = 0.2;
    match config.adaptive_kl {
        None => kl_coef,
        Some(adaptive) => {
            let error = (kl / adaptive.target - 1.0).clamp(-MAX_ERROR, MAX_ERROR);
            kl_coef * (1.0 + error * sequences as f64 / adaptive.horizon)
        }
    }
}

/// The objective of the value model: the clipped squared error of its predictions of the returns,
/// L = vf_coef · ½ · mean max((v − R)², (clip(v, v_old − ε, v_old + ε) − R)²) over all values of the step.
pub(crate) struct PpoValue {
    coefficient: f64,
    clip: f64,
    rollout: Arc<Rollout>,
    rows: Vec<u32>,
    /// Values of the step, over all ranks.
    num_values: f64,
    loss: f64,
    clipped: f64,
}

impl PpoValue {
    pub(crate) fn new(config: &PpoConfig) -> PpoValue {
        PpoValue {
            coefficient: config.vf_coef,
            clip: config.cliprange_value,
            rollout: Arc::default(),
            rows: Vec::new(),
            num_values: 0.0,
            loss: 0.0,
            clipped: 0.0,
        }
    }

    /// Sets the rollout and the sequences of the next step.
    pub(crate) fn set_step(&mut self, rollout: Arc<Rollout>, rows: &[u32]) {
        self.rollout = rollout;
        self.rows = rows.to_vec();
    }
}

/// Half the larger of the two squared errors, its derivative, and whether clipping decides.
fn value_loss(value: f64, old: f64, target: f64, clip: f64) -> (f64, f64, bool) {
    let clipped = value.clamp(old - clip, old + clip);
    let (free_error, clipped_error) = (value - target, clipped - target);
    match clipped_error.powi(2) > free_error.powi(2) {
        // Where the clipped value is used it does not depend on the model.
        true => (0.5 * clipped_error.powi(2), if clipped == value { clipped_error } else { 0.0 }, true),
        false => (0.5 * free_error.powi(2), free_error, false),
    }
}

impl Objective for PpoValue {
    fn channels(&self) -> Channels {
        Channels::VALUE
    }

    fn begin(&mut self, _: &StepCounts) {
        let returns = self.rows.iter().map(|row| self.rollout.advantages.returns_of(*row).len());
        self.num_values = returns.sum::<usize>() as f64;
        (self.loss, self.clipped) = (0.0, 0.0);
    }

    fn coefficients(
        &mut self,
        _: usize,
        batch: &Batch,
        outputs: Option<Outputs<'_>>,
        out: &mut Coefficients<'_>,
    ) {
        let values = outputs.expect("the value's error needs the value").get(Channel::Value);
        let coefficients = out.get(Channel::Value);
        for (doc, row) in batch.samples.iter().enumerate() {
            let sequence = &self.rollout.sequences[*row as usize];
            let first = batch.cu_seqlens[doc] as usize + sequence.prompt_len as usize - 1;
            let targets = self.rollout.advantages.returns_of(*row);
            for (i, (target, old)) in targets.iter().zip(&sequence.values).enumerate() {
                let (loss, slope, clipped) =
                    value_loss(values[first + i].into(), f64::from(*old), *target, self.clip);
                coefficients[first + i] = (self.coefficient * slope / self.num_values) as f32;
                self.loss += loss;
                self.clipped += f64::from(u8::from(clipped));
            }
        }
    }

    fn outputs(&mut self, _: &Batch, _: Outputs<'_>) {}

    fn sums(&self) -> Vec<f64> {
        vec![self.loss, self.clipped]
    }

    fn metrics(&self, sums: &[f64], _: &[f64]) -> Metrics {
        let [loss, clipped] = [sums[0], sums[1]].map(|sum| sum / self.num_values.max(1.0));
        let others = vec![("value/loss".into(), loss), ("value/clip_fraction".into(), clipped)];
        Metrics { loss: self.coefficient * loss, others }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_loss_and_its_slope() {
        // Inside the clip range both errors are equal.
        let (loss, slope, clipped) = value_loss(1.1, 1.0, 2.0, 0.2);
        assert!((loss - 0.405).abs() < 1e-12 && slope == 1.1 - 2.0 && !clipped);
        // Clipped at 1.2: the error is larger there, and the slope is zero.
        let (loss, slope, clipped) = value_loss(1.5, 1.0, 2.0, 0.2);
        assert!((loss - 0.5 * 0.64).abs() < 1e-12 && slope == 0.0 && clipped);
        // Away from the target the unclipped error is larger.
        assert_eq!(value_loss(0.5, 1.0, 2.0, 0.2), (0.5 * 1.5f64.powi(2), -1.5, false));
    }
}
