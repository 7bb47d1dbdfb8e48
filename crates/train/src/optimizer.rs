//! The update rule of the configured optimizer.

use lockstep_config::{OptimConfig, OptimizerName};
use lockstep_engine::UpdateRule;

/// The update rule of the configured optimizer. [`lockstep_plan::optimizer_spec`] defines its states.
pub(crate) fn update_rule(optim: &OptimConfig) -> UpdateRule {
    let betas = (optim.adam_beta1, optim.adam_beta2);
    match optim.optimizer {
        OptimizerName::AdamW => UpdateRule::AdamW { betas, eps: optim.adam_epsilon },
        OptimizerName::Sgd => UpdateRule::Sgd { momentum: optim.momentum, nesterov: optim.nesterov },
        OptimizerName::Lion => UpdateRule::Lion { betas },
    }
}
