//! Reward functions of GRPO, RLOO and PPO: built-ins, external programs and HTTP endpoints; the policy for functions that
//! fail; and the weighted sum of several functions.
//!
//! [`open`] makes a [`RewardFunction`] of a [`RewardSpec`]. A [`RewardSet`] evaluates several functions at once, applies
//! [`OnRewardError`], and [`combine`] adds the rewards up. `docs/rewards.md` describes the functions and the protocols.
//!
//! External programs and endpoints are not trusted: every wait has a deadline, every answer a maximum size, and a program
//! gets no secrets in its environment. This crate neither prints nor reads the environment: the caller passes it in
//! ([`RewardContext`]). Reward models are not here; the engine runs them.
//!
//! # A reward function in Rust
//!
//! Library users implement [`RewardFunction`] and put it into the set beside the others:
//!
//! ```
//! use lockstep_rewards::{
//!     LengthPenalty, OnRewardError, RewardContext, RewardEntry, RewardError, RewardFunction, RewardSet, RewardSpec,
//!     Sample, combine, open,
//! };
//!
//! /// 1 for a completion that ends with a full stop, 0 for others, no opinion about truncated ones.
//! struct FullStop;
//!
//! impl RewardFunction for FullStop {
//!     fn name(&self) -> &str {
//!         "full_stop"
//!     }
//!
//!     fn score(&mut self, samples: &[Sample<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
//!         let reward = |sample: &Sample<'_>| {
//!             (!sample.truncated).then(|| f64::from(u8::from(sample.completion.ends_with('.'))))
//!         };
//!         Ok(samples.iter().map(reward).collect())
//!     }
//! }
//!
//! # fn main() -> Result<(), RewardError> {
//! let spec = RewardSpec::LengthPenalty(LengthPenalty { max_length: 4, buffer: 2 });
//! let length = open("length", &spec, &RewardContext::default())?;
//! let mut rewards = RewardSet::new(vec![
//!     RewardEntry { function: Box::new(FullStop), weight: 1.0, on_error: OnRewardError::Stop },
//!     RewardEntry { function: length, weight: 0.5, on_error: OnRewardError::Stop },
//! ])?;
//! let columns = serde_json::Map::new();
//! let sample = Sample {
//!     prompt: "2 + 2 = ", completion: "Four.", completion_ids: &[7, 8, 9], columns: &columns, truncated: false,
//! };
//! let scores = rewards.score(&[sample])?;
//! assert_eq!(scores.rewards, [[Some(1.0)], [Some(-0.5)]]);
//! assert_eq!(combine(&rewards.weights(), &scores.rewards), [Some(0.75)]);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod builtin;
mod error;
mod fault;
mod function;
mod http;
mod program;
mod set;
mod spec;
#[cfg(test)]
mod testing;
mod token;
mod wire;

pub use builtin::{
    ExactMatch, Format, LengthPenalty, NumberSource, NumericMatch, RegexSearch, RepetitionPenalty,
};
pub use error::RewardError;
pub use fault::{HttpFault, ProgramExit, ProgramFault};
pub use function::{RewardFunction, Sample, ScoreFailure, ScoreReport};
pub use http::Http;
pub use program::{EnvVar, Program};
pub use set::{OnRewardError, RewardEntry, RewardSet, RewardWarning, SetScores, combine};
pub use spec::{RewardContext, RewardSpec, open};
pub use token::RewardToken;
