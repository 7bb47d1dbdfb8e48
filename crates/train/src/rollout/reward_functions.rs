//! The reward functions of a run: from the configuration to rewards of completions.

use lockstep_config::{self as config, AlgorithmConfig, RunConfig};
use lockstep_data::Tokenizer;
use lockstep_rewards::{OnRewardError, RewardContext, RewardEntry, RewardSet, Sample};

use super::prompts::PromptShare;
use super::reward_spec::spec;
use super::sequence::Sequence;
use super::statistics::RewardNames;
use crate::error::TrainError;

/// The name of a reward model in metrics and logs.
const REWARD_MODEL: &str = "reward_model";

/// The reward functions of a run. A reward model is not one of them: the engine scores with it.
pub(crate) struct RewardFunctions {
    set: RewardSet,
    /// Rollouts until a failing function is reported again.
    quiet: u32,
}

/// A function that fails is reported in one of this many rollouts.
const ROLLOUTS_PER_NOTE: u32 = 20;

impl RewardFunctions {
    /// Opens the functions that the configuration names. Also returns the names and weights of all rewards; a reward
    /// model is the last.
    pub(crate) fn open(
        config: &RunConfig,
        environment: &RewardContext,
    ) -> Result<(RewardFunctions, RewardNames), TrainError> {
        let mut names = RewardNames::default();
        let mut entries = Vec::new();
        if let Some(rewards) = config.algorithm.rewards() {
            let on_error = match rewards.on_error {
                config::OnRewardError::Stop => OnRewardError::Stop,
                config::OnRewardError::Zero => OnRewardError::Zero,
                config::OnRewardError::Skip => OnRewardError::Skip,
            };
            for function in &rewards.functions {
                let spec = spec(&function.kind, environment)?;
                let opened = lockstep_rewards::open(&function.name, &spec, environment)?;
                names.names.push(function.name.clone());
                names.weights.push(function.weight);
                entries.push(RewardEntry { function: opened, weight: function.weight, on_error });
            }
        }
        let model_weight = match &config.algorithm {
            AlgorithmConfig::Ppo(_) => Some(1.0),
            other => other.rewards().filter(|r| r.reward_model.is_some()).map(|r| r.reward_model_weight),
        };
        if let Some(weight) = model_weight {
            names.names.push(REWARD_MODEL.into());
            names.weights.push(weight);
        }
        Ok((RewardFunctions { set: RewardSet::new(entries)?, quiet: 0 }, names))
    }

    /// Adds the reward of every function to the sequences of all prompts. Returns notes about functions that failed, if the
    /// configuration tolerates that.
    pub(crate) fn score(
        &mut self,
        sequences: &mut [Sequence],
        prompts: &[PromptShare],
        tokenizer: &Tokenizer,
    ) -> Result<Vec<String>, TrainError> {
        self.quiet = self.quiet.saturating_sub(1);
        if self.set.names().is_empty() || sequences.is_empty() {
            return Ok(Vec::new());
        }
        let decode = |ids: &[u32], skip_special: bool| tokenizer.decode(ids, skip_special);
        let completions: Vec<String> =
            sequences.iter().map(|s| decode(s.completion(), true)).collect::<Result<_, _>>()?;
        let prompt_texts: Vec<String> = prompts
            .iter()
            .map(|p| p.prompt.text(|| decode(&p.prompt.tokens, false).unwrap_or_default()))
            .collect();
        let prompt_of = prompts.iter().enumerate().flat_map(|(i, part)| vec![i; part.completions]);
        let samples: Vec<Sample<'_>> = sequences
            .iter()
            .zip(&completions)
            .zip(prompt_of)
            .map(|((sequence, completion), prompt)| Sample {
                prompt: &prompt_texts[prompt],
                completion,
                completion_ids: sequence.completion(),
                columns: &prompts[prompt].prompt.columns,
                truncated: sequence.truncated,
            })
            .collect();
        let scores = self.set.score(&samples)?;
        for rewards in &scores.rewards {
            for (sequence, reward) in sequences.iter_mut().zip(rewards) {
                sequence.rewards.push(reward.unwrap_or(f64::NAN));
            }
        }
        if scores.warnings.is_empty() || self.quiet > 0 {
            return Ok(Vec::new());
        }
        self.quiet = ROLLOUTS_PER_NOTE;
        Ok(scores.warnings.iter().map(|warning| format!("a reward function failed: {warning}")).collect())
    }
}
