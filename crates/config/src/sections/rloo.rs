//! REINFORCE with a leave-one-out baseline.

use std::path::PathBuf;

use crate::reader::Reader;
use crate::sections::groups::Groups;
use crate::sections::{BatchConfig, RewardsConfig, SamplingConfig, SyncRefModel, grpo, reference_model};
use crate::yaml::Value;

/// REINFORCE with a leave-one-out baseline. The names are TRL's.
#[derive(Clone, Debug, PartialEq)]
pub struct RlooConfig {
    pub sampling: SamplingConfig,
    pub rewards: RewardsConfig,
    pub groups: Groups,
    /// 0: there is no reference model.
    pub beta: f64,
    pub epsilon: f64,
    /// The value of `epsilon` unless set.
    pub epsilon_high: f64,
    pub normalize_advantages: bool,
    /// The minimum and the maximum; `None`: rewards are not clipped.
    pub reward_clip_range: Option<(f64, f64)>,
    pub mask_truncated_completions: bool,
    pub sync_ref_model: Option<SyncRefModel>,
    /// A folder or Hub name; `None`: the initial policy, if `beta` is not 0.
    pub ref_model: Option<PathBuf>,
}

impl RlooConfig {
    pub(crate) fn read(r: &mut Reader<'_>, batch: &BatchConfig, world: u32) -> Self {
        let groups = Groups::read(r, batch, world);
        let beta = r.float("beta", "at least 0", |x| x >= 0.0).unwrap_or(0.0);
        let (ref_model, sync_ref_model) = reference_model::read(r, beta);
        let (epsilon, epsilon_high) = grpo::read_epsilon(r);
        let sampling = SamplingConfig::read(r);
        RlooConfig {
            sampling,
            rewards: RewardsConfig::read(r),
            groups,
            beta,
            epsilon,
            epsilon_high,
            normalize_advantages: r.bool("normalize_advantages").unwrap_or(false),
            reward_clip_range: read_clip_range(r),
            mask_truncated_completions: r.bool("mask_truncated_completions").unwrap_or(false),
            sync_ref_model,
            ref_model,
        }
    }
}

fn read_clip_range(r: &mut Reader<'_>) -> Option<(f64, f64)> {
    let node = r.node("reward_clip_range")?;
    if !matches!(node.value, Value::Seq(_)) {
        r.wrong_type("reward_clip_range", "a list of two numbers such as `[-1, 1]`", &node);
        return None;
    }
    match r.floats("reward_clip_range")?[..] {
        [min, max] if min < max => Some((min, max)),
        _ => {
            r.out_of_range("reward_clip_range", "two numbers, the smaller one first", &node);
            None
        }
    }
}
