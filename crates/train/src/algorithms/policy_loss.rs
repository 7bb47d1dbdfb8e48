//! The losses of GRPO and its relatives, RLOO and PPO for one sequence.
//!
//! ρ is the ratio π/π_old of a token, or of a whole sequence; A is the sequence's advantage. Every loss is a sum over
//! the sequence's tokens, multiplied by a weight that depends on the kind of mean ([`TokenMean`]). Slopes are the
//! derivatives with respect to the tokens' log-probabilities.

use lockstep_config::{GrpoConfig, GrpoLoss, ImportanceSamplingLevel, PpoConfig, RlooConfig};

use super::dpo_loss::sigmoid;

/// Whose probability ratio a token's loss uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RatioLevel {
    /// The token's own.
    Token,
    /// The geometric mean over the sequence's tokens.
    SequenceMean,
    /// The sequence's: the product over its tokens.
    SequenceProduct,
}

/// How a step's tokens are averaged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum TokenMean {
    /// The mean over sequences of the mean over their tokens.
    PerSequence,
    /// The mean over all tokens of the step.
    PerToken,
    /// The sum over all tokens divided by sequences times this length.
    PerLength(f64),
    /// The mean over sequences of the sum over their tokens.
    SumPerSequence,
}

impl TokenMean {
    /// The weight of a token of a sequence of `length` tokens, in a step of `sequences` and `tokens`.
    pub(crate) fn weight(self, length: usize, sequences: f64, tokens: f64) -> f64 {
        match self {
            TokenMean::PerSequence => 1.0 / (sequences * length.max(1) as f64),
            TokenMean::PerToken => 1.0 / tokens.max(1.0),
            TokenMean::PerLength(max) => 1.0 / (sequences * max),
            TokenMean::SumPerSequence => 1.0 / sequences,
        }
    }
}

/// How a token's loss follows from the ratio.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Surrogate {
    /// −min(ρ·A, clip(ρ, 1 − low, 1 + high)·A), ρ at most `max`.
    Clipped { low: f64, high: f64, max: Option<f64> },
    /// −sg(min(ρ, max))·A·log π.
    TruncatedWeight { max: f64 },
    /// −(4/τ)·σ(τ(ρ − 1))·A, with one τ for positive advantages and another for the others.
    Soft { positive: f64, negative: f64 },
    /// −φ(w)·A·log π, φ(w) = e^λ·w^k·e^(−λw) of the sequence's ratio w, with (k, λ) by the advantage's sign.
    Gamma { positive: (f64, f64), negative: (f64, f64) },
}

/// The settings of a policy loss.
#[derive(Clone, Debug)]
pub(crate) struct PolicyLoss {
    surrogate: Surrogate,
    pub(crate) level: RatioLevel,
    pub(crate) mean: TokenMean,
    /// The coefficient of the KL divergence from the reference in the loss.
    pub(crate) beta: f64,
    /// Whether the KL term is multiplied by the ratio.
    kl_times_ratio: bool,
}

impl PolicyLoss {
    pub(crate) fn grpo(config: &GrpoConfig) -> PolicyLoss {
        let max_length = f64::from(config.sampling.max_completion_length);
        PolicyLoss {
            surrogate: match config.loss_type {
                GrpoLoss::Cispo => Surrogate::TruncatedWeight { max: config.epsilon_high },
                GrpoLoss::Sapo => Surrogate::Soft { positive: config.sapo.pos, negative: config.sapo.neg },
                GrpoLoss::Vespo => Surrogate::Gamma {
                    positive: (config.vespo.k_pos, config.vespo.lambda_pos),
                    negative: (config.vespo.k_neg, config.vespo.lambda_neg),
                },
                _ => Surrogate::Clipped { low: config.epsilon, high: config.epsilon_high, max: config.delta },
            },
            level: match config.importance_sampling_level {
                ImportanceSamplingLevel::Token => RatioLevel::Token,
                ImportanceSamplingLevel::Sequence => RatioLevel::SequenceMean,
            },
            mean: match config.loss_type {
                GrpoLoss::Grpo | GrpoLoss::Sapo => TokenMean::PerSequence,
                GrpoLoss::Bnpo | GrpoLoss::Dapo | GrpoLoss::Cispo | GrpoLoss::Vespo => TokenMean::PerToken,
                GrpoLoss::DrGrpo => TokenMean::PerLength(max_length),
                GrpoLoss::Luspo => TokenMean::SumPerSequence,
            },
            beta: config.beta,
            kl_times_ratio: config.use_bias_correction_kl,
        }
    }

    /// RLOO: the clipped loss of whole sequences. Its KL term is part of the reward.
    pub(crate) fn rloo(config: &RlooConfig) -> PolicyLoss {
        PolicyLoss {
            surrogate: Surrogate::Clipped { low: config.epsilon, high: config.epsilon_high, max: None },
            level: RatioLevel::SequenceProduct,
            mean: TokenMean::PerSequence,
            beta: 0.0,
            kl_times_ratio: false,
        }
    }

    /// PPO: the clipped loss of single tokens, each with its own advantage.
    pub(crate) fn ppo(config: &PpoConfig) -> PolicyLoss {
        let (low, high) = (config.cliprange, config.cliprange);
        PolicyLoss {
            surrogate: Surrogate::Clipped { low, high, max: None },
            level: RatioLevel::Token,
            mean: TokenMean::PerToken,
            beta: 0.0,
            kl_times_ratio: false,
        }
    }

    /// Whether the slopes of a sequence that the current policy generated are known before its log-probabilities.
    pub(crate) fn is_constant_on_policy(&self) -> bool {
        self.beta == 0.0
    }
}

/// The advantage of a sequence, or of each of its tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Advantage<'a> {
    Sequence(f64),
    Tokens(&'a [f64]),
}

impl Advantage<'_> {
    fn at(&self, t: usize) -> f64 {
        match self {
            Advantage::Sequence(advantage) => *advantage,
            Advantage::Tokens(advantages) => advantages[t],
        }
    }
}

/// A sequence's tokens, as the loss sees them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SequenceTerms<'a> {
    pub(crate) advantage: Advantage<'a>,
    pub(crate) log_probs: &'a [f32],
    /// The log-probabilities when the sequence was generated; `None`: the current ones.
    pub(crate) old: Option<&'a [f32]>,
    /// Those of the reference, if the loss has a KL term.
    pub(crate) reference: Option<&'a [f32]>,
    /// Which tokens count in the surrogate, not in the KL term; `None`: all.
    pub(crate) counted: Option<&'a [bool]>,
    /// The weight of a token.
    pub(crate) weight: f64,
}

/// Sums over a sequence's tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct SequenceSums {
    /// The sequence's part of the loss.
    pub(crate) loss: f64,
    pub(crate) kl: f64,
    /// Tokens whose ratio is below, and above, the clip range on the side where clipping acts.
    pub(crate) clipped_low: f64,
    pub(crate) clipped_high: f64,
    /// The squares of the tokens' log-ratios.
    pub(crate) squared_log_ratio: f64,
}

impl SequenceTerms<'_> {
    fn log_ratio(&self, t: usize) -> f64 {
        self.old.map_or(0.0, |old| f64::from(self.log_probs[t]) - f64::from(old[t]))
    }

    fn counts(&self, t: usize) -> f64 {
        f64::from(u8::from(self.counted.is_none_or(|counted| counted[t])))
    }
}

impl PolicyLoss {
    /// Adds the slopes of a sequence to `slopes`, one per token, and returns its sums.
    pub(crate) fn sequence(&self, terms: &SequenceTerms<'_>, slopes: &mut [f64]) -> SequenceSums {
        let n = terms.log_probs.len();
        let total: f64 = (0..n).map(|t| terms.log_ratio(t)).sum();
        let shared = match self.level {
            RatioLevel::Token => None,
            RatioLevel::SequenceMean => Some((total / n.max(1) as f64, 1.0 / n.max(1) as f64)),
            RatioLevel::SequenceProduct => Some((total, 1.0)),
        };
        let mut sums = SequenceSums::default();
        // The derivative of the loss with respect to the sequence's log-ratio.
        let mut shared_slope = 0.0;
        for (t, slope) in slopes[..n].iter_mut().enumerate() {
            let ratio = shared.map_or_else(|| terms.log_ratio(t), |(log_ratio, _)| log_ratio).exp();
            let one = self.token(terms, t, ratio, total);
            let weight = terms.weight * terms.counts(t);
            sums.loss += weight * one.loss;
            *slope += weight * one.direct_slope;
            let kl = self.kl(terms, t, ratio);
            sums.loss += terms.weight * self.beta * kl.value;
            *slope += terms.weight * self.beta * kl.direct_slope;
            sums.kl += kl.value;
            let through_ratio = weight * one.ratio_slope + terms.weight * self.beta * kl.ratio_slope;
            match shared {
                None => *slope += through_ratio,
                Some(_) => shared_slope += through_ratio,
            }
            sums.squared_log_ratio += terms.log_ratio(t).powi(2);
            sums.clipped_low += one.clipped_low;
            sums.clipped_high += one.clipped_high;
        }
        if let Some((_, per_token)) = shared {
            slopes[..n].iter_mut().for_each(|slope| *slope += shared_slope * per_token);
        }
        sums
    }

    /// The surrogate of one token. `total` is the sum of the sequence's log-ratios.
    fn token(&self, terms: &SequenceTerms<'_>, t: usize, ratio: f64, total: f64) -> TokenLoss {
        let (advantage, log_prob) = (terms.advantage.at(t), f64::from(terms.log_probs[t]));
        let mut found = TokenLoss::default();
        match self.surrogate {
            Surrogate::Clipped { low, high, max } => {
                let (free, clipped) =
                    (ratio.min(max.unwrap_or(f64::INFINITY)), ratio.clamp(1.0 - low, 1.0 + high));
                let [free_slope, clipped_slope] =
                    [free, clipped].map(|used| if used == ratio { ratio * advantage } else { 0.0 });
                let (value, slope) = match (free * advantage).total_cmp(&(clipped * advantage)) {
                    std::cmp::Ordering::Less => (free * advantage, free_slope),
                    std::cmp::Ordering::Greater => (clipped * advantage, clipped_slope),
                    std::cmp::Ordering::Equal => (free * advantage, 0.5 * (free_slope + clipped_slope)),
                };
                (found.loss, found.ratio_slope) = (-value, -slope);
                found.clipped_low = f64::from(u8::from(free < 1.0 - low && advantage < 0.0));
                found.clipped_high = f64::from(u8::from(free > 1.0 + high && advantage > 0.0));
            }
            Surrogate::TruncatedWeight { max } => {
                let weight = ratio.min(max) * advantage;
                (found.loss, found.direct_slope) = (-weight * log_prob, -weight);
                found.clipped_high = f64::from(u8::from(ratio > max && advantage > 0.0));
            }
            Surrogate::Soft { positive, negative } => {
                let temperature = if advantage > 0.0 { positive } else { negative };
                let x = temperature * (ratio - 1.0);
                found.loss = -4.0 / temperature * sigmoid(x) * advantage;
                found.ratio_slope = -4.0 * sigmoid(x) * sigmoid(-x) * ratio * advantage;
            }
            Surrogate::Gamma { positive, negative } => {
                let (k, lambda) = if advantage >= 0.0 { positive } else { negative };
                let weight = gamma_weight(terms, total, k, lambda.max(1e-4)) * advantage;
                (found.loss, found.direct_slope) = (-weight * log_prob, -weight);
            }
        }
        found
    }

    /// The KL divergence from the reference, estimated as e^(r − l) − (r − l) − 1 for log-probabilities l and r.
    fn kl(&self, terms: &SequenceTerms<'_>, t: usize, ratio: f64) -> KlTerm {
        let Some(reference) = terms.reference else { return KlTerm::default() };
        let apart = f64::from(reference[t]) - f64::from(terms.log_probs[t]);
        let (value, slope) = (apart.exp() - apart - 1.0, 1.0 - apart.exp());
        match self.kl_times_ratio {
            true => KlTerm { value: value * ratio, direct_slope: slope * ratio, ratio_slope: value * ratio },
            false => KlTerm { value, direct_slope: slope, ratio_slope: 0.0 },
        }
    }
}

/// A token's surrogate, and its derivatives: with respect to the log-probability where it appears directly, and with
/// respect to the logarithm of the ratio.
#[derive(Clone, Copy, Debug, Default)]
struct TokenLoss {
    loss: f64,
    direct_slope: f64,
    ratio_slope: f64,
    clipped_low: f64,
    clipped_high: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct KlTerm {
    value: f64,
    direct_slope: f64,
    ratio_slope: f64,
}

/// φ(w) of a sequence's ratio, in log space and within the bounds of the original implementation.
fn gamma_weight(terms: &SequenceTerms<'_>, total: f64, k: f64, lambda: f64) -> f64 {
    let bounded = |t: usize| terms.log_ratio(t).clamp(-20.0, 20.0);
    let inside = (0..terms.log_probs.len()).all(|t| bounded(t) == terms.log_ratio(t));
    let total = if inside { total } else { (0..terms.log_probs.len()).map(bounded).sum() };
    let log_ratio = total.clamp((1e-8f64).ln(), 20.0);
    let weight = (lambda + k * log_ratio - lambda * log_ratio.exp()).exp();
    if weight.is_finite() { weight } else { 0.0 }
}
