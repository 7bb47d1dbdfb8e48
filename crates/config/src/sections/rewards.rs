//! The rewards of completions: functions, a reward model, and their weights.

use std::path::PathBuf;

use crate::reader::{Later, Reader};
use crate::sections::reward_function::{self, RewardFunctionConfig};
use crate::yaml::Value;

/// The rewards of completions. At least one function or the model is set.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardsConfig {
    pub functions: Vec<RewardFunctionConfig>,
    /// A folder or Hub name.
    pub reward_model: Option<PathBuf>,
    pub reward_model_weight: f64,
    pub on_error: OnRewardError,
}

/// What to do if a reward function fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnRewardError {
    /// End the run with an error.
    Stop,
    /// Use the reward 0.
    Zero,
    /// Leave the function out of the sum for these completions.
    Skip,
}

const NO_REWARD: &str = "grpo and rloo need a reward: set `reward_funcs` to built-in functions (exact_match, \
     numeric_match, format, regex, length_penalty, repetition_penalty), to a program such as \
     `{program: [python3, reward.py]}` or to an endpoint such as `{http: 'http://127.0.0.1:8000/reward'}`, or set \
     `reward_model_path` to a reward model";

impl RewardsConfig {
    pub(crate) fn read(r: &mut Reader<'_>) -> Self {
        let words =
            [("stop", OnRewardError::Stop), ("zero", OnRewardError::Zero), ("skip", OnRewardError::Skip)];
        let (functions, num_listed) = read_functions(r);
        let model_given = r.given("reward_model_path").is_some();
        let mut rewards = RewardsConfig {
            functions,
            reward_model: r.model_path("reward_model_path"),
            reward_model_weight: 1.0,
            on_error: r.word("reward_on_error", &words, Later::NONE).unwrap_or(OnRewardError::Stop),
        };
        if num_listed == 0 && !model_given {
            r.missing("reward_funcs", NO_REWARD);
        }
        if num_listed == 0 {
            r.note_no_effect("reward_on_error", "there are no reward functions");
        }
        rewards.read_weights(r, num_listed + usize::from(model_given));
        rewards
    }

    /// Reads `reward_weights`: one for each function, and the last one for the reward model.
    fn read_weights(&mut self, r: &mut Reader<'_>, num_rewards: usize) {
        let Some((given, weights)) = r.given("reward_weights").zip(r.floats("reward_weights")) else {
            return;
        };
        if num_rewards == 0 {
            return;
        }
        if weights.len() != num_rewards {
            let and_model = if self.reward_model.is_some() { " and one for `reward_model_path`" } else { "" };
            let rule = format!("a number for each of `reward_funcs`{and_model} ({num_rewards})");
            r.out_of_range("reward_weights", rule, &given.node);
            return;
        }
        for (function, weight) in self.functions.iter_mut().zip(&weights) {
            function.weight = *weight;
        }
        if let (Some(_), Some(last)) = (&self.reward_model, weights.last()) {
            self.reward_model_weight = *last;
        }
    }
}

/// The functions that can be read, and how many are listed.
fn read_functions(r: &mut Reader<'_>) -> (Vec<RewardFunctionConfig>, usize) {
    let Some(node) = r.node("reward_funcs") else { return (Vec::new(), 0) };
    let items = match &node.value {
        Value::Seq(items) => items.clone(),
        _ => vec![node],
    };
    let mut functions: Vec<RewardFunctionConfig> = Vec::new();
    for item in &items {
        let Some(function) = reward_function::read(r, item) else { continue };
        if functions.iter().any(|other| other.name == function.name) {
            let hint = "give one of them another name: `{format: {name: second_format}}`, for example.";
            r.out_of_range_with("reward_funcs", "functions with different names", hint, item);
        }
        functions.push(function);
    }
    (functions, items.len())
}
