//! The training of a reward model.

use crate::reader::Reader;

/// The training of a reward model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RewardConfig {
    /// The weight of a term that keeps the mean reward of a pair near zero; `None`: no such term.
    pub center_rewards_coefficient: Option<f64>,
}

impl RewardConfig {
    pub(crate) fn read(r: &mut Reader<'_>) -> Self {
        RewardConfig {
            center_rewards_coefficient: r.float("center_rewards_coefficient", "at least 0", |x| x >= 0.0),
        }
    }
}
