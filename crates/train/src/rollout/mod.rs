//! Rollouts: the policy completes prompts, models and reward functions score the completions, and several optimizer steps
//! learn from them.
//!
//! Every rank generates and scores its share of the prompts. Then all ranks exchange the sequences, so that each holds
//! the whole rollout (in host memory: a few numbers per token). Advantages are therefore computed over all completions,
//! and any rank can train on any of them. What a rollout contains depends on the weights, the seed and the rollout's
//! number, not on the number of ranks.

mod collect;
mod completions_log;
mod generate;
mod learner;
mod prompts;
mod reward_functions;
mod reward_spec;
pub(crate) mod schedule;
mod score;
pub(crate) mod sequence;
pub(crate) mod statistics;

use std::ops::Range;

use lockstep_config::RunConfig;
use lockstep_data::Batch;
use lockstep_observe::NamedMetric;

use crate::algorithms::policy_loss::Advantage;
use sequence::Sequence;

pub(crate) use generate::wanted_generation;
pub(crate) use learner::RolloutLearner;
#[cfg(test)]
pub(crate) use learner::rloo_rewards;

/// A rollout: sequences that the policy has generated, and what to learn from them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rollout {
    pub(crate) sequences: Vec<Sequence>,
    pub(crate) advantages: Advantages,
    /// What each of its steps reports.
    pub(crate) metrics: Vec<NamedMetric>,
}

/// The advantages of a rollout's sequences.
#[derive(Clone, Debug)]
pub(crate) enum Advantages {
    /// One for each sequence.
    Sequences(Vec<f64>),
    /// For each sequence, one for each token of its completion, and the returns that the value model learns.
    Tokens { advantages: Vec<Vec<f64>>, returns: Vec<Vec<f64>> },
}

impl Default for Advantages {
    fn default() -> Advantages {
        Advantages::Sequences(Vec::new())
    }
}

impl Advantages {
    pub(crate) fn of(&self, sequence: u32) -> Advantage<'_> {
        match self {
            Advantages::Sequences(all) => Advantage::Sequence(all[sequence as usize]),
            Advantages::Tokens { advantages, .. } => Advantage::Tokens(&advantages[sequence as usize]),
        }
    }

    /// What the value model should predict for a sequence: one number for each of its values.
    pub(crate) fn returns_of(&self, sequence: u32) -> &[f64] {
        match self {
            Advantages::Sequences(_) => &[],
            Advantages::Tokens { returns, .. } => &returns[sequence as usize],
        }
    }
}

/// The positions of a document in the next-token layout whose targets are the tokens of its sequence's completion.
pub(crate) fn completion_range(batch: &Batch, doc: usize, sequence: &Sequence) -> Range<usize> {
    let (start, end) = (batch.cu_seqlens[doc] as usize, batch.cu_seqlens[doc + 1] as usize);
    start + sequence.prompt_len as usize - 1..end
}

/// The temperature of the policy's and the reference's distributions.
pub(crate) fn rollout_temperature(config: &RunConfig) -> f32 {
    config.algorithm.sampling().map_or(1.0, |sampling| sampling.temperature as f32)
}
