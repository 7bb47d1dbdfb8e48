//! Group relative policy optimization.

use std::path::PathBuf;

use crate::reader::{Later, Reader};
use crate::sections::groups::Groups;
use crate::sections::{BatchConfig, RewardsConfig, SamplingConfig, SyncRefModel, reference_model};

/// Group relative policy optimization. The names are TRL's.
#[derive(Clone, Debug, PartialEq)]
pub struct GrpoConfig {
    pub sampling: SamplingConfig,
    pub rewards: RewardsConfig,
    pub groups: Groups,
    /// 0: there is no reference model.
    pub beta: f64,
    pub epsilon: f64,
    /// The value of `epsilon` unless set.
    pub epsilon_high: f64,
    pub delta: Option<f64>,
    pub importance_sampling_level: ImportanceSamplingLevel,
    pub scale_rewards: ScaleRewards,
    pub loss_type: GrpoLoss,
    pub mask_truncated_completions: bool,
    pub top_entropy_quantile: f64,
    pub entropy_coef: f64,
    pub use_bias_correction_kl: bool,
    pub sapo: SapoTemperatures,
    pub vespo: VespoParams,
    pub sync_ref_model: Option<SyncRefModel>,
    /// A folder or Hub name; `None`: the initial policy, if `beta` is not 0.
    pub ref_model: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImportanceSamplingLevel {
    Token,
    Sequence,
}

/// What advantages are divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleRewards {
    /// The standard deviation of the group's rewards.
    Group,
    /// The standard deviation of the rewards of the generation batch.
    Batch,
    /// Nothing.
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrpoLoss {
    Grpo,
    Bnpo,
    DrGrpo,
    Dapo,
    Cispo,
    Sapo,
    Luspo,
    Vespo,
}

/// Temperatures of [`GrpoLoss::Sapo`] for positive and other advantages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SapoTemperatures {
    pub pos: f64,
    pub neg: f64,
}

/// Parameters of [`GrpoLoss::Vespo`] for positive and negative advantages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VespoParams {
    pub k_pos: f64,
    pub lambda_pos: f64,
    pub k_neg: f64,
    pub lambda_neg: f64,
}

const LOSSES: [(&str, GrpoLoss); 8] = [
    ("grpo", GrpoLoss::Grpo),
    ("bnpo", GrpoLoss::Bnpo),
    ("dr_grpo", GrpoLoss::DrGrpo),
    ("dapo", GrpoLoss::Dapo),
    ("cispo", GrpoLoss::Cispo),
    ("sapo", GrpoLoss::Sapo),
    ("luspo", GrpoLoss::Luspo),
    ("vespo", GrpoLoss::Vespo),
];

const OTHER_LOSSES: Later =
    Later(&["gspo"], "use `importance_sampling_level: sequence` with `loss_type: grpo`.");

impl GrpoLoss {
    /// The name that configurations use.
    pub fn name(self) -> &'static str {
        LOSSES[self as usize].0
    }

    /// Whether the loss clips the probability ratio as PPO does.
    fn clips(self) -> bool {
        use GrpoLoss::*;
        matches!(self, Grpo | Bnpo | DrGrpo | Dapo | Luspo)
    }
}

impl GrpoConfig {
    pub(crate) fn read(r: &mut Reader<'_>, batch: &BatchConfig, world: u32) -> Self {
        let groups = Groups::read(r, batch, world);
        let beta = r.float("beta", "at least 0", |x| x >= 0.0).unwrap_or(0.0);
        let (ref_model, sync_ref_model) = reference_model::read(r, beta);
        let loss_type = r.word("loss_type", &LOSSES, OTHER_LOSSES).unwrap_or(GrpoLoss::Dapo);
        let (epsilon, epsilon_high) = read_epsilon(r);
        let sampling = SamplingConfig::read(r);
        let fraction = |x: f64| (0.0..=1.0).contains(&x);
        let config = GrpoConfig {
            sampling,
            rewards: RewardsConfig::read(r),
            groups,
            beta,
            epsilon,
            epsilon_high,
            delta: r.float("delta", "above 0", |x| x > 0.0),
            importance_sampling_level: read_level(r, loss_type),
            scale_rewards: read_scale(r),
            loss_type,
            mask_truncated_completions: r.bool("mask_truncated_completions").unwrap_or(false),
            top_entropy_quantile: r
                .float("top_entropy_quantile", "at least 0 and at most 1", fraction)
                .unwrap_or(1.0),
            entropy_coef: r.float("entropy_coef", "at least 0", |x| x >= 0.0).unwrap_or(0.0),
            use_bias_correction_kl: r.bool("use_bias_correction_kl").unwrap_or(true),
            sapo: SapoTemperatures {
                pos: positive(r, "sapo_temperature_pos"),
                neg: positive(r, "sapo_temperature_neg"),
            },
            vespo: VespoParams {
                k_pos: positive(r, "vespo_k_pos"),
                lambda_pos: positive(r, "vespo_lambda_pos"),
                k_neg: positive(r, "vespo_k_neg"),
                lambda_neg: positive(r, "vespo_lambda_neg"),
            },
            sync_ref_model,
            ref_model,
        };
        note_loss(r, &config);
        config
    }
}

fn positive(r: &mut Reader<'_>, key: &'static str) -> f64 {
    r.float(key, "above 0", |x| x > 0.0).unwrap_or(1.0)
}

/// Reads `epsilon` and `epsilon_high`, which defaults to it.
pub(crate) fn read_epsilon(r: &mut Reader<'_>) -> (f64, f64) {
    let epsilon = r.float("epsilon", "at least 0 and below 1", |x| (0.0..1.0).contains(&x)).unwrap_or(0.0);
    let high = r.float("epsilon_high", "at least 0", |x| x >= 0.0).unwrap_or_else(|| {
        r.derived("epsilon_high", "epsilon");
        epsilon
    });
    (epsilon, high)
}

fn read_level(r: &mut Reader<'_>, loss: GrpoLoss) -> ImportanceSamplingLevel {
    let levels = [("token", ImportanceSamplingLevel::Token), ("sequence", ImportanceSamplingLevel::Sequence)];
    let Some(node) = r.node("importance_sampling_level") else { return ImportanceSamplingLevel::Token };
    let level = r.word_of("importance_sampling_level", &levels, Later::NONE, &node);
    if let (GrpoLoss::Luspo, Some(ImportanceSamplingLevel::Token)) = (loss, level) {
        let value = "token".to_owned();
        let rule = "sequence with `loss_type: luspo`".into();
        let key = "importance_sampling_level".to_owned();
        let problem = crate::error::Problem::OutOfRange { key, value, rule, hint: "".into() };
        r.fail_at_key(problem, &["importance_sampling_level", "loss_type"]);
    }
    level.unwrap_or(ImportanceSamplingLevel::Token)
}

/// Reads a word, or TRL's `true` and `false`.
fn read_scale(r: &mut Reader<'_>) -> ScaleRewards {
    let scales =
        [("group", ScaleRewards::Group), ("batch", ScaleRewards::Batch), ("none", ScaleRewards::None)];
    let Some(node) = r.node("scale_rewards") else { return ScaleRewards::Group };
    match node.bool() {
        Some(true) => ScaleRewards::Group,
        Some(false) => ScaleRewards::None,
        None => r.word_of("scale_rewards", &scales, Later::NONE, &node).unwrap_or(ScaleRewards::Group),
    }
}

/// Notes about keys that the loss does not use, and about combinations that are rarely meant.
fn note_loss(r: &mut Reader<'_>, config: &GrpoConfig) {
    let loss = config.loss_type;
    if !loss.clips() {
        r.note_no_effect("delta", &format!("`loss_type: {}` does not clip", loss.name()));
    }
    if loss != GrpoLoss::Sapo {
        for key in ["sapo_temperature_pos", "sapo_temperature_neg"] {
            r.note_no_effect(key, "only `loss_type: sapo` uses it");
        }
    }
    if loss != GrpoLoss::Vespo {
        for key in ["vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"] {
            r.note_no_effect(key, "only `loss_type: vespo` uses it");
        }
    }
    if loss == GrpoLoss::Cispo && r.given("epsilon_high").is_none() {
        r.note(format!(
            "`loss_type: cispo` caps probability ratios at `epsilon_high`, which is {}; 5 is the usual value",
            config.epsilon_high
        ));
    }
    let sums_tokens = matches!(loss, GrpoLoss::Bnpo | GrpoLoss::DrGrpo | GrpoLoss::Dapo | GrpoLoss::Cispo);
    if sums_tokens && config.importance_sampling_level == ImportanceSamplingLevel::Sequence {
        r.note(format!(
            "`importance_sampling_level: sequence` with `loss_type: {}` weights each completion by its length; GSPO \
             uses `loss_type: grpo`",
            loss.name()
        ));
    }
}
