//! The losses of direct preference optimization, for one pair or for all pairs of a step.
//!
//! Notation: c and r are the log-ratios log π(y) − log π_ref(y) of the chosen and the rejected completion, s_c and s_r
//! their scores under the f-divergence (the log-ratios themselves for reverse KL), d = s_c − s_r, β the temperature,
//! ε the label smoothing, σ the logistic function. Every function returns the loss and its slopes, the derivatives
//! with respect to log π(chosen) and log π(rejected).

use lockstep_config::{DpoConfig, DpoLoss, FDivergence};

/// The log-probabilities of a pair's completions, each as \[chosen, rejected\].
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairLogProbs {
    pub(crate) policy: [f64; 2],
    pub(crate) reference: [f64; 2],
    /// Tokens of the completions.
    pub(crate) lengths: [f64; 2],
}

impl PairLogProbs {
    /// log π − log π_ref of the chosen and the rejected completion.
    pub(crate) fn ratios(&self) -> [f64; 2] {
        [self.policy[0] - self.reference[0], self.policy[1] - self.reference[1]]
    }
}

/// A loss and its derivatives with respect to the policy's log-probabilities, \[chosen, rejected\].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PairLoss {
    pub(crate) loss: f64,
    pub(crate) slopes: [f64; 2],
}

impl PairLoss {
    pub(crate) fn add(&mut self, other: &PairLoss, weight: f64) {
        self.loss += weight * other.loss;
        self.slopes.iter_mut().zip(other.slopes).for_each(|(total, slope)| *total += weight * slope);
    }
}

/// 1 / (1 + e^−x).
pub(crate) fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 { 1.0 / (1.0 + (-x).exp()) } else { x.exp() / (1.0 + x.exp()) }
}

/// log σ(x), without overflow.
pub(crate) fn log_sigmoid(x: f64) -> f64 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

/// σ′(x).
fn sigmoid_slope(x: f64) -> f64 {
    sigmoid(x) * sigmoid(-x)
}

/// Whether a loss couples all pairs of a step, so that no pair's loss is known before all are scored.
pub(crate) fn is_coupled(loss: DpoLoss) -> bool {
    matches!(loss, DpoLoss::Aot | DpoLoss::AotUnpaired)
}

/// The score of a log-ratio under the f-divergence, and its derivative.
fn score(divergence: FDivergence, ratio: f64) -> (f64, f64) {
    /// e^x beyond this is not representable in f32, where peers compute it.
    const MAX_EXPONENT: f64 = 80.0;
    match divergence {
        FDivergence::ReverseKl => (ratio, 1.0),
        FDivergence::ForwardKl => (1.0 - (-ratio).exp(), (-ratio).exp()),
        FDivergence::JsDivergence => (std::f64::consts::LN_2 + log_sigmoid(ratio), sigmoid(-ratio)),
        FDivergence::Alpha(alpha) if (alpha - 1.0).abs() < 1e-6 => (ratio, 1.0),
        FDivergence::Alpha(alpha) => {
            let exponent = (alpha - 1.0) * ratio;
            let power = exponent.min(MAX_EXPONENT).exp();
            let slope = if exponent < MAX_EXPONENT { power } else { 0.0 };
            ((power - 1.0) / (alpha - 1.0), slope)
        }
    }
}

/// The loss of one pair. Not for losses that couple pairs ([`coupled_losses`]), nor for `sft`, which is a loss of the
/// tokens.
pub(crate) fn pair_loss(loss: DpoLoss, config: &DpoConfig, pair: &PairLogProbs) -> PairLoss {
    let (beta, eps) = (config.beta, config.label_smoothing);
    let [c, r] = pair.ratios();
    let [(s_c, g_c), (s_r, g_r)] = [score(config.f_divergence, c), score(config.f_divergence, r)];
    // A function of x = β·d with value `loss` and derivative `slope`.
    let of_x = |loss: f64, slope: f64| PairLoss { loss, slopes: [slope * beta * g_c, -slope * beta * g_r] };
    // A function of d/|y|, the difference of scores per token.
    let [n_c, n_r] = pair.lengths.map(|n| n.max(1.0));
    let mean_d = s_c / n_c - s_r / n_r;
    let of_mean_d =
        |loss: f64, slope: f64| PairLoss { loss, slopes: [slope * g_c / n_c, -slope * g_r / n_r] };
    let x = beta * (s_c - s_r);
    match loss {
        DpoLoss::Sigmoid => of_x(-log_sigmoid(x), -sigmoid(-x)),
        DpoLoss::Cdpo => smoothed(x, eps, of_x),
        DpoLoss::Hinge => of_x((1.0 - x).max(0.0), if x < 1.0 { -1.0 } else { 0.0 }),
        DpoLoss::Ipo => {
            let error = mean_d - 1.0 / (2.0 * beta);
            of_mean_d(error * error, 2.0 * error)
        }
        DpoLoss::ExoPair => {
            let [log_won, log_lost] = [log_sigmoid(x) - (-eps).ln_1p(), log_sigmoid(-x) - eps.ln()];
            of_x(sigmoid(x) * log_won + sigmoid(-x) * log_lost, sigmoid_slope(x) * (log_won - log_lost))
        }
        DpoLoss::Robust => {
            let scale = 1.0 / (1.0 - 2.0 * eps);
            let loss = -(1.0 - eps) * log_sigmoid(x) + eps * log_sigmoid(-x);
            of_x(loss * scale, (-(1.0 - eps) * sigmoid(-x) - eps * sigmoid(x)) * scale)
        }
        DpoLoss::NcaPair => PairLoss {
            loss: -log_sigmoid(beta * c) - 0.5 * (log_sigmoid(-beta * c) + log_sigmoid(-beta * r)),
            slopes: [beta * (0.5 * sigmoid(beta * c) - sigmoid(-beta * c)), 0.5 * beta * sigmoid(beta * r)],
        },
        DpoLoss::BcoPair => PairLoss {
            loss: -log_sigmoid(beta * c) - log_sigmoid(-beta * r),
            slopes: [-beta * sigmoid(-beta * c), beta * sigmoid(beta * r)],
        },
        DpoLoss::SppoHard => {
            let [chosen, rejected] = [c - 0.5 / beta, r + 0.5 / beta];
            PairLoss { loss: chosen * chosen + rejected * rejected, slopes: [2.0 * chosen, 2.0 * rejected] }
        }
        DpoLoss::ApoZero => PairLoss {
            loss: sigmoid(-beta * c) + sigmoid(beta * r),
            slopes: [-beta * sigmoid_slope(beta * c), beta * sigmoid_slope(beta * r)],
        },
        DpoLoss::ApoDown => {
            let apart = beta * sigmoid_slope(beta * (c - r));
            PairLoss {
                loss: sigmoid(beta * c) + sigmoid(-beta * (c - r)),
                slopes: [beta * sigmoid_slope(beta * c) - apart, apart],
            }
        }
        DpoLoss::Discopop => {
            let share = sigmoid(x / config.discopop_tau);
            let share_slope = share * (1.0 - share) / config.discopop_tau;
            let (logistic, exponential) = (-log_sigmoid(x), (-x).exp());
            of_x(
                logistic * (1.0 - share) + exponential * share,
                -sigmoid(-x) * (1.0 - share) - exponential * share + (exponential - logistic) * share_slope,
            )
        }
        DpoLoss::SigmoidNorm => {
            let x = beta * mean_d;
            of_mean_d(-log_sigmoid(x), -beta * sigmoid(-x))
        }
        DpoLoss::Sft | DpoLoss::Aot | DpoLoss::AotUnpaired => {
            unreachable!("{loss:?} is not a loss of a pair")
        }
    }
}

/// −(1 − ε)·log σ(x) − ε·log σ(−x), as a function of x.
fn smoothed<R>(x: f64, eps: f64, of_x: impl Fn(f64, f64) -> R) -> R {
    let loss = -(1.0 - eps) * log_sigmoid(x) - eps * log_sigmoid(-x);
    of_x(loss, -(1.0 - eps) * sigmoid(-x) + eps * sigmoid(x))
}

/// The losses of all pairs of a step for a loss that couples them by sorting: `aot` compares the k-th smallest
/// log-odds of the policy with the k-th smallest of the reference, `aot_unpaired` the k-th smallest log-ratio of the
/// chosen completions with the k-th smallest of the rejected ones.
pub(crate) fn coupled_losses(loss: DpoLoss, config: &DpoConfig, pairs: &[PairLogProbs]) -> Vec<PairLoss> {
    let (beta, eps) = (config.beta, config.label_smoothing);
    let sides = |pair: &PairLogProbs| match loss {
        DpoLoss::Aot => (pair.policy[0] - pair.policy[1], pair.reference[0] - pair.reference[1]),
        _ => (pair.ratios()[0], pair.ratios()[1]),
    };
    let left = sorted(pairs.iter().map(|pair| sides(pair).0));
    let right = sorted(pairs.iter().map(|pair| sides(pair).1));
    let mut losses = vec![PairLoss::default(); pairs.len()];
    for ((value, at), (other, other_at)) in left.into_iter().zip(right) {
        let (loss_value, slope) = smoothed(beta * (value - other), eps, |loss, slope| (loss, beta * slope));
        losses[at].loss = loss_value;
        losses[at].slopes[0] += slope;
        match loss {
            DpoLoss::Aot => losses[at].slopes[1] -= slope,
            _ => losses[other_at].slopes[1] -= slope,
        }
    }
    losses
}

/// The values in ascending order, each with its index.
fn sorted(values: impl Iterator<Item = f64>) -> Vec<(f64, usize)> {
    let mut all: Vec<(f64, usize)> = values.enumerate().map(|(i, value)| (value, i)).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    all
}
