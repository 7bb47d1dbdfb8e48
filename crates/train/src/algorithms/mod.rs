//! The training algorithms: objectives, which turn the outputs of models into gradient coefficients, and the formulas they
//! use.

pub(crate) mod advantages;
pub(crate) mod dpo;
pub(crate) mod dpo_loss;
#[cfg(test)]
mod golden_tests;
mod pairs;
pub(crate) mod policy_gradient;
pub(crate) mod policy_loss;
pub(crate) mod ppo;
pub(crate) mod reward;
pub(crate) mod sft;
