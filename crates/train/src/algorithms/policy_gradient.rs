//! The policy's objective in GRPO, RLOO and PPO: it learns from completions that it has generated itself. The advantages
//! say how good they are: relative to other completions of the same prompt, or to a value model.

use std::sync::Arc;

use lockstep_config::{GrpoConfig, PpoConfig, RlooConfig, RunConfig};
use lockstep_data::Batch;
use lockstep_engine::{Coefficients, Outputs};
use lockstep_plan::ModelId;
use lockstep_shape::{Channel, Channels};

use super::policy_loss::{PolicyLoss, RatioLevel, SequenceSums, SequenceTerms};
use crate::objective::{Metrics, Objective, StepCounts};
use crate::rollout::schedule::RolloutSchedule;
use crate::rollout::{Rollout, completion_range};

/// The objective of the policy.
pub(crate) struct PolicyGradient {
    loss: PolicyLoss,
    entropy_coef: f64,
    /// The fraction of tokens, those with the highest entropy, that the loss counts; 1: all.
    top_entropy: f64,
    /// Whether truncated completions are left out of the loss.
    mask_truncated: bool,
    /// Whether the policy that is trained has generated the sequences itself, so that all ratios are 1.
    on_policy: bool,
    /// Whether coefficients are known before the head runs.
    ahead: bool,
    scorers: Vec<ModelId>,
    rollout: Arc<Rollout>,
    /// The sequences of the step, over all ranks.
    rows: Vec<u32>,
    totals: Totals,
    /// For each micro-batch, its log-probabilities and entropies, if the step is scored first.
    scores: Vec<[Vec<f32>; 2]>,
    /// The entropy from which on a token counts.
    entropy_threshold: f32,
    sums: Sums,
}

/// Counts over all sequences of a step, on all ranks.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    sequences: f64,
    /// Tokens of completions that count in the loss.
    tokens: f64,
    /// Those whose entropy is high enough, for the entropy bonus.
    counted: f64,
}

/// Sums over this rank's sequences, and extremes.
#[derive(Clone, Copy, Debug)]
struct Sums {
    loss: f64,
    kl: f64,
    entropy: f64,
    clipped_low: f64,
    clipped_high: f64,
    squared_log_ratio: f64,
    /// The smallest and largest fraction of a sequence's tokens that are clipped.
    low_min: f64,
    high_max: f64,
}

const NO_SUMS: Sums = Sums {
    loss: 0.0,
    kl: 0.0,
    entropy: 0.0,
    clipped_low: 0.0,
    clipped_high: 0.0,
    squared_log_ratio: 0.0,
    low_min: f64::INFINITY,
    high_max: f64::NEG_INFINITY,
};

impl PolicyGradient {
    pub(crate) fn grpo(run: &RunConfig, config: &GrpoConfig) -> PolicyGradient {
        let mut objective =
            PolicyGradient::new(run, PolicyLoss::grpo(config), config.mask_truncated_completions);
        objective.entropy_coef = config.entropy_coef;
        objective.top_entropy = config.top_entropy_quantile;
        if config.top_entropy_quantile < 1.0 {
            // The threshold is a quantile over all tokens of the step.
            objective.scorers = vec![ModelId::FIRST];
        }
        objective
    }

    pub(crate) fn rloo(run: &RunConfig, config: &RlooConfig) -> PolicyGradient {
        PolicyGradient::new(run, PolicyLoss::rloo(config), config.mask_truncated_completions)
    }

    pub(crate) fn ppo(run: &RunConfig, config: &PpoConfig) -> PolicyGradient {
        // The plan has one order of operations for both models, and the value model's coefficients are not known ahead.
        PolicyGradient { ahead: false, ..PolicyGradient::new(run, PolicyLoss::ppo(config), false) }
    }

    fn new(run: &RunConfig, loss: PolicyLoss, mask_truncated: bool) -> PolicyGradient {
        let on_policy = RolloutSchedule::of(run).is_on_policy();
        PolicyGradient {
            ahead: on_policy && loss.is_constant_on_policy(),
            loss,
            entropy_coef: 0.0,
            top_entropy: 1.0,
            mask_truncated,
            on_policy,
            scorers: Vec::new(),
            rollout: Arc::default(),
            rows: Vec::new(),
            totals: Totals::default(),
            scores: Vec::new(),
            entropy_threshold: f32::NEG_INFINITY,
            sums: NO_SUMS,
        }
    }

    /// Sets the rollout and the sequences of the next step.
    pub(crate) fn set_step(&mut self, rollout: Arc<Rollout>, rows: &[u32]) {
        self.rollout = rollout;
        self.rows = rows.to_vec();
    }

    /// The number of a sequence's tokens that count in the loss.
    fn length(&self, sequence: u32) -> usize {
        let sequence = &self.rollout.sequences[sequence as usize];
        if self.mask_truncated && sequence.truncated { 0 } else { sequence.completion().len() }
    }

    /// Calls `each` with every sequence of a batch that counts: its index, and its positions in the batch.
    fn each_sequence(&self, batch: &Batch, mut each: impl FnMut(u32, std::ops::Range<usize>)) {
        for (doc, sequence) in batch.samples.iter().enumerate() {
            if self.length(*sequence) > 0 {
                each(*sequence, completion_range(batch, doc, &self.rollout.sequences[*sequence as usize]));
            }
        }
    }

    /// The loss of a sequence. Adds its slopes with respect to its log-probabilities to `slopes`.
    fn sequence(
        &self,
        sequence: u32,
        log_probs: &[f32],
        entropies: &[f32],
        slopes: &mut [f64],
    ) -> SequenceSums {
        let known = &self.rollout.sequences[sequence as usize];
        let counted: Vec<bool> = entropies.iter().map(|entropy| *entropy >= self.entropy_threshold).collect();
        let terms = SequenceTerms {
            advantage: self.rollout.advantages.of(sequence),
            log_probs,
            old: (!self.on_policy).then_some(&known.log_probs[..]),
            reference: (self.loss.beta != 0.0).then_some(&known.reference[..]),
            counted: (self.top_entropy < 1.0).then_some(&counted[..]),
            weight: self.loss.mean.weight(log_probs.len(), self.totals.sequences, self.totals.tokens),
        };
        self.loss.sequence(&terms, slopes)
    }

    /// Adds a sequence to the metrics.
    fn record(&mut self, sums: &SequenceSums, length: usize) {
        // A ratio of the whole sequence is clipped for all of its tokens or for none.
        let fraction = |tokens: f64| tokens / length as f64;
        let clipped = |tokens: f64| match self.loss.level {
            RatioLevel::Token => tokens,
            _ => fraction(tokens),
        };
        self.sums.loss += sums.loss;
        self.sums.kl += sums.kl;
        self.sums.squared_log_ratio += sums.squared_log_ratio;
        self.sums.clipped_low += clipped(sums.clipped_low);
        self.sums.clipped_high += clipped(sums.clipped_high);
        self.sums.low_min = self.sums.low_min.min(fraction(sums.clipped_low));
        self.sums.high_max = self.sums.high_max.max(fraction(sums.clipped_high));
    }

    fn entropy_weight(&self) -> f64 {
        self.entropy_coef / self.totals.counted.max(1.0)
    }
}

impl Objective for PolicyGradient {
    fn coefficients_ahead(&self) -> bool {
        self.ahead
    }

    fn channels(&self) -> Channels {
        Channels::of(&[Channel::LogProb, Channel::Entropy])
    }

    fn scorers(&self) -> &[ModelId] {
        &self.scorers
    }

    fn exchanges_scores(&self) -> bool {
        !self.scorers.is_empty()
    }

    fn begin(&mut self, _: &StepCounts) {
        let tokens: usize = self.rows.iter().map(|row| self.length(*row)).sum();
        let (sequences, tokens) = (self.rows.len() as f64, tokens as f64);
        self.totals = Totals { sequences, tokens, counted: tokens };
        self.scores.clear();
        self.entropy_threshold = f32::NEG_INFINITY;
        self.sums = NO_SUMS;
    }

    fn scored(&mut self, _: ModelId, _: usize, batch: &Batch, outputs: Outputs<'_>) {
        let all = outputs.get(Channel::Entropy);
        // Tokens that do not count have no entropy.
        let mut entropies = vec![f32::NAN; all.len()];
        self.each_sequence(batch, |_, tokens| entropies[tokens.clone()].copy_from_slice(&all[tokens]));
        self.scores.push([outputs.log_probs().to_vec(), entropies]);
    }

    fn score_exchange(&self) -> Vec<f64> {
        self.scores
            .iter()
            .flat_map(|[_, entropies]| entropies.iter().map(|entropy| f64::from(*entropy)))
            .collect()
    }

    fn scores_done(&mut self, of_ranks: &[Vec<f64>], _: usize) {
        let mut all: Vec<f64> =
            of_ranks.iter().flatten().copied().filter(|entropy| !entropy.is_nan()).collect();
        all.sort_by(f64::total_cmp);
        if let Some(threshold) = quantile(&all, 1.0 - self.top_entropy) {
            self.entropy_threshold = threshold as f32;
            self.totals.counted =
                all.iter().filter(|entropy| **entropy as f32 >= threshold as f32).count() as f64;
        }
    }

    fn coefficients(
        &mut self,
        index: usize,
        batch: &Batch,
        outputs: Option<Outputs<'_>>,
        out: &mut Coefficients<'_>,
    ) {
        let unknown = vec![0f32; batch.num_tokens()];
        let [log_probs, entropies] = match (&outputs, self.scores.get(index)) {
            (Some(outputs), _) => [outputs.log_probs(), outputs.get(Channel::Entropy)],
            (None, Some([log_probs, entropies])) => [&log_probs[..], &entropies[..]],
            // The slopes do not depend on them.
            (None, None) => [&unknown[..], &unknown[..]],
        };
        let mut slopes = vec![0f64; batch.num_tokens()];
        self.each_sequence(batch, |sequence, tokens| {
            let (log_probs, entropies) = (&log_probs[tokens.clone()], &entropies[tokens.clone()]);
            self.sequence(sequence, log_probs, entropies, &mut slopes[tokens]);
        });
        for (out, slope) in out.log_probs().iter_mut().zip(&slopes) {
            *out = *slope as f32;
        }
        if self.entropy_coef != 0.0 {
            let (weight, threshold) = (self.entropy_weight(), self.entropy_threshold);
            let bonus = out.get(Channel::Entropy);
            self.each_sequence(batch, |_, tokens| {
                for token in tokens {
                    bonus[token] = if entropies[token] >= threshold { -weight as f32 } else { 0.0 };
                }
            });
        }
    }

    fn outputs(&mut self, batch: &Batch, outputs: Outputs<'_>) {
        let (log_probs, entropies) = (outputs.log_probs(), outputs.get(Channel::Entropy));
        let mut unused = vec![0f64; batch.num_tokens()];
        let mut found = Vec::new();
        self.each_sequence(batch, |sequence, tokens| {
            let (log_probs, entropies) = (&log_probs[tokens.clone()], &entropies[tokens.clone()]);
            let sums = self.sequence(sequence, log_probs, entropies, &mut unused[tokens]);
            let entropy = |from: f32| {
                let high = entropies.iter().filter(|entropy| **entropy >= from);
                high.map(|entropy| f64::from(*entropy)).sum::<f64>()
            };
            found.push((sums, entropy(f32::NEG_INFINITY), entropy(self.entropy_threshold), log_probs.len()));
        });
        for (sums, entropy, counted_entropy, length) in found {
            self.record(&sums, length);
            self.sums.entropy += entropy;
            self.sums.loss -= self.entropy_weight() * counted_entropy;
        }
    }

    fn sums(&self) -> Vec<f64> {
        let s = &self.sums;
        vec![s.loss, s.kl, s.entropy, s.clipped_low, s.clipped_high, s.squared_log_ratio]
    }

    fn maxima(&self) -> Vec<f64> {
        vec![-self.sums.low_min, self.sums.high_max]
    }

    fn metrics(&self, sums: &[f64], maxima: &[f64]) -> Metrics {
        let tokens = self.totals.tokens.max(1.0);
        let clipped = match self.loss.level {
            RatioLevel::Token => tokens,
            _ => self.totals.sequences,
        };
        let mut others = self.rollout.metrics.clone();
        others.push(("entropy".into(), sums[2] / tokens));
        if self.loss.beta != 0.0 {
            others.push(("kl".into(), sums[1] / tokens));
        }
        if !self.on_policy {
            let finite = |value: f64| if value.is_finite() { value } else { 0.0 };
            others.extend([
                ("clip_ratio/low_mean".into(), sums[3] / clipped),
                ("clip_ratio/low_min".into(), finite(-maxima[0])),
                ("clip_ratio/high_mean".into(), sums[4] / clipped),
                ("clip_ratio/high_max".into(), finite(maxima[1])),
                ("clip_ratio/region_mean".into(), (sums[3] + sums[4]) / clipped),
                ("approx_kl".into(), 0.5 * sums[5] / tokens),
            ]);
        }
        Metrics { loss: sums[0], others }
    }
}

/// The quantile of sorted values, interpolated linearly between neighbours.
fn quantile(sorted: &[f64], q: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let at = q * last as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    Some(sorted[low] + (at - low as f64) * (sorted[high] - sorted[low]))
}
