//! Proximal policy optimization.

use std::path::PathBuf;

use crate::error::Problem;
use crate::reader::{Later, Reader};
use crate::sections::groups::nearest;
use crate::sections::{BatchConfig, SamplingConfig};

/// Proximal policy optimization. The names are TRL's.
#[derive(Clone, Debug, PartialEq)]
pub struct PpoConfig {
    pub sampling: SamplingConfig,
    /// A folder or Hub name.
    pub reward_model: PathBuf,
    /// A folder or Hub name; `None`: the reward model.
    pub value_model: Option<PathBuf>,
    /// A folder or Hub name; `None`: the initial policy.
    pub ref_model: Option<PathBuf>,
    pub num_ppo_epochs: u32,
    /// Optimizer steps per epoch. Divides the completions of each rank.
    pub num_mini_batches: u32,
    /// The initial coefficient if it is adapted.
    pub kl_coef: f64,
    pub kl_estimator: KlEstimator,
    /// `None`: `kl_coef` stays the same.
    pub adaptive_kl: Option<AdaptiveKl>,
    pub cliprange: f64,
    pub vf_coef: f64,
    pub cliprange_value: f64,
    pub gamma: f64,
    pub lam: f64,
    pub whiten_rewards: bool,
    pub missing_eos_penalty: Option<f64>,
    /// `None`: the learning rate of the policy.
    pub value_learning_rate: Option<f64>,
}

/// The estimator of the KL divergence, in the terms of "Approximating KL Divergence" (Schulman 2020).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KlEstimator {
    K1,
    K3,
}

/// An adaptive KL coefficient (Ziegler et al. 2019).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptiveKl {
    /// Nats per completion.
    pub target: f64,
    /// Completions.
    pub horizon: f64,
}

impl PpoConfig {
    pub(crate) fn read(r: &mut Reader<'_>, batch: &BatchConfig) -> Self {
        let estimators = [("k1", KlEstimator::K1), ("k3", KlEstimator::K3)];
        let unit = |x: f64| (0.0..=1.0).contains(&x);
        let (unit_rule, positive) = ("at least 0 and at most 1", |x: f64| x > 0.0);
        PpoConfig {
            sampling: SamplingConfig::read(r),
            reward_model: read_reward_model(r),
            value_model: r.model_path("value_model_path"),
            ref_model: r.model_path("ref_model_name_or_path"),
            num_ppo_epochs: r.count("num_ppo_epochs", 1).unwrap_or(1),
            num_mini_batches: read_mini_batches(r, batch),
            kl_coef: r.float("kl_coef", "at least 0", |x| x >= 0.0).unwrap_or(0.0),
            kl_estimator: r
                .word("kl_estimator", &estimators, Later(&["k2"], "use k1 or k3."))
                .unwrap_or(KlEstimator::K1),
            adaptive_kl: read_adaptive_kl(r),
            cliprange: r.float("cliprange", "above 0", positive).unwrap_or(0.2),
            vf_coef: r.float("vf_coef", "at least 0", |x| x >= 0.0).unwrap_or(0.0),
            cliprange_value: r.float("cliprange_value", "above 0", positive).unwrap_or(0.2),
            gamma: r.float("gamma", unit_rule, unit).unwrap_or(1.0),
            lam: r.float("lam", unit_rule, unit).unwrap_or(1.0),
            whiten_rewards: r.bool("whiten_rewards").unwrap_or(false),
            missing_eos_penalty: r.float("missing_eos_penalty", "above 0", positive),
            value_learning_rate: r.float("value_learning_rate", "a finite number, at least 0", |x| x >= 0.0),
        }
    }
}

fn read_reward_model(r: &mut Reader<'_>) -> PathBuf {
    let given = r.given("reward_model_path").is_some();
    let path = r.model_path("reward_model_path");
    if !given {
        r.missing(
            "reward_model_path",
            "ppo needs a reward model: set `reward_model_path` to a folder that `lockstep reward` has trained, to any \
             other `…ForSequenceClassification` model with one label, or to its name on the Hub. Reward functions \
             (`reward_funcs`) work with grpo and rloo",
        );
    }
    path.unwrap_or_default()
}

fn read_adaptive_kl(r: &mut Reader<'_>) -> Option<AdaptiveKl> {
    let on = r.bool("adaptive_kl").unwrap_or(false);
    let adaptive = AdaptiveKl {
        target: r.float("kl_target", "above 0", |x| x > 0.0).unwrap_or(1.0),
        horizon: r.float("kl_horizon", "above 0", |x| x > 0.0).unwrap_or(1.0),
    };
    if !on {
        for key in ["kl_target", "kl_horizon"] {
            r.note_no_effect(key, "`adaptive_kl` is off");
        }
    }
    on.then_some(adaptive)
}

/// Reads the number of mini-batches. Every rank has the same share of each.
fn read_mini_batches(r: &mut Reader<'_>, batch: &BatchConfig) -> u32 {
    let num: u32 = r.count("num_mini_batches", 1).unwrap_or(1);
    let (rows, steps) = (batch.per_device_train_batch_size, batch.gradient_accumulation_steps);
    let (of_rank, divisor) = (u64::from(rows) * u64::from(steps), u64::from(num));
    if !of_rank.is_multiple_of(divisor) {
        let nums = nearest(divisor, of_rank, |num| num >= 1 && of_rank.is_multiple_of(num));
        let all_steps = nearest(steps.into(), u64::from(steps) + divisor, |steps| {
            steps >= 1 && (u64::from(rows) * steps).is_multiple_of(divisor)
        });
        let hint = format!(
            "it is `per_device_train_batch_size` ({rows}) times `gradient_accumulation_steps` ({steps}). Set \
             `num_mini_batches` to {nums}, or `gradient_accumulation_steps` to {all_steps}."
        );
        let (what, key) = ("per-rank batch", "num_mini_batches");
        let problem = Problem::NotDivisible { what, num_completions: of_rank, key, divisor, hint };
        r.fail_at_key(problem, &["num_mini_batches"]);
    }
    num
}
