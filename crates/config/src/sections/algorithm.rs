//! The training algorithm and its settings.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::raw::RawConfig;
use crate::reader::{Later, Reader};
use crate::sections::{
    BatchConfig, DpoConfig, GrpoConfig, PpoConfig, RewardConfig, RewardsConfig, RlooConfig, SamplingConfig,
};
use crate::value::fold;

/// The name of a training algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlgorithmName {
    Sft,
    Clm,
    Reward,
    Dpo,
    Ppo,
    Grpo,
    Rloo,
}

/// The training algorithm and its settings.
#[derive(Clone, Debug, PartialEq)]
pub enum AlgorithmConfig {
    /// Supervised fine-tuning.
    Sft,
    /// Causal language modelling: the same as `Sft`.
    Clm,
    /// A reward model, trained on pairs.
    Reward(RewardConfig),
    Dpo(DpoConfig),
    Ppo(PpoConfig),
    Grpo(GrpoConfig),
    Rloo(RlooConfig),
}

const NAMES: [(&str, AlgorithmName); 7] = [
    ("sft", AlgorithmName::Sft),
    ("clm", AlgorithmName::Clm),
    ("reward", AlgorithmName::Reward),
    ("dpo", AlgorithmName::Dpo),
    ("ppo", AlgorithmName::Ppo),
    ("grpo", AlgorithmName::Grpo),
    ("rloo", AlgorithmName::Rloo),
];

/// Algorithms of TRL and verl.
const OTHERS: Later = Later(
    &[
        "kto",
        "orpo",
        "cpo",
        "simpo",
        "bco",
        "online_dpo",
        "xpo",
        "nash_md",
        "prm",
        "gkd",
        "distillation",
        "async_grpo",
        "gspo",
        "dapo",
        "dr_grpo",
        "reinforce",
        "remax",
    ],
    "for preference pairs use dpo, for rewards use grpo, rloo or ppo. DAPO, Dr. GRPO and GSPO are settings of grpo: \
     `loss_type` and `importance_sampling_level`.",
);

impl AlgorithmName {
    pub const ALL: [AlgorithmName; 7] = [
        AlgorithmName::Sft,
        AlgorithmName::Clm,
        AlgorithmName::Reward,
        AlgorithmName::Dpo,
        AlgorithmName::Ppo,
        AlgorithmName::Grpo,
        AlgorithmName::Rloo,
    ];

    /// The name that configurations and commands use.
    pub fn name(self) -> &'static str {
        NAMES[self as usize].0
    }

    /// Whether the policy generates the sequences that it is trained on.
    pub fn generates(self) -> bool {
        matches!(self, AlgorithmName::Ppo | AlgorithmName::Grpo | AlgorithmName::Rloo)
    }

    /// The algorithm that the configuration sets, or the default. `None`: the value is not one.
    pub(crate) fn of(raw: &RawConfig<'_>) -> Option<AlgorithmName> {
        let Some(given) = raw.given.get("algorithm").filter(|given| !given.node.is_null()) else {
            return Some(AlgorithmName::Sft);
        };
        let word = fold(given.node.text()?);
        NAMES.iter().find(|(name, _)| *name == word).map(|(_, algorithm)| *algorithm)
    }
}

impl fmt::Display for AlgorithmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Whether `word` names a training algorithm, of Lockstep or of another trainer.
pub fn is_algorithm(word: &str) -> bool {
    NAMES.iter().any(|(name, _)| *name == word) || OTHERS.0.contains(&word)
}

impl AlgorithmConfig {
    pub(crate) fn read(r: &mut Reader<'_>, batch: &BatchConfig, world: u32) -> Self {
        match r.word("algorithm", &NAMES, OTHERS).unwrap_or(AlgorithmName::Sft) {
            AlgorithmName::Sft => AlgorithmConfig::Sft,
            AlgorithmName::Clm => AlgorithmConfig::Clm,
            AlgorithmName::Reward => AlgorithmConfig::Reward(RewardConfig::read(r)),
            AlgorithmName::Dpo => AlgorithmConfig::Dpo(DpoConfig::read(r)),
            AlgorithmName::Ppo => AlgorithmConfig::Ppo(PpoConfig::read(r, batch)),
            AlgorithmName::Grpo => AlgorithmConfig::Grpo(GrpoConfig::read(r, batch, world)),
            AlgorithmName::Rloo => AlgorithmConfig::Rloo(RlooConfig::read(r, batch, world)),
        }
    }

    pub fn algorithm(&self) -> AlgorithmName {
        match self {
            AlgorithmConfig::Sft => AlgorithmName::Sft,
            AlgorithmConfig::Clm => AlgorithmName::Clm,
            AlgorithmConfig::Reward(_) => AlgorithmName::Reward,
            AlgorithmConfig::Dpo(_) => AlgorithmName::Dpo,
            AlgorithmConfig::Ppo(_) => AlgorithmName::Ppo,
            AlgorithmConfig::Grpo(_) => AlgorithmName::Grpo,
            AlgorithmConfig::Rloo(_) => AlgorithmName::Rloo,
        }
    }

    /// The name that configurations and commands use.
    pub fn name(&self) -> &'static str {
        self.algorithm().name()
    }

    /// How completions are generated, for algorithms that do.
    pub fn sampling(&self) -> Option<&SamplingConfig> {
        match self {
            AlgorithmConfig::Ppo(ppo) => Some(&ppo.sampling),
            AlgorithmConfig::Grpo(grpo) => Some(&grpo.sampling),
            AlgorithmConfig::Rloo(rloo) => Some(&rloo.sampling),
            _ => None,
        }
    }

    /// The rewards of completions: of grpo and rloo.
    pub fn rewards(&self) -> Option<&RewardsConfig> {
        match self {
            AlgorithmConfig::Grpo(grpo) => Some(&grpo.rewards),
            AlgorithmConfig::Rloo(rloo) => Some(&rloo.rewards),
            _ => None,
        }
    }

    /// Whether the run has a frozen reference model.
    pub fn has_reference(&self) -> bool {
        match self {
            AlgorithmConfig::Sft | AlgorithmConfig::Clm | AlgorithmConfig::Reward(_) => false,
            AlgorithmConfig::Dpo(_) | AlgorithmConfig::Ppo(_) => true,
            AlgorithmConfig::Grpo(grpo) => grpo.beta != 0.0,
            AlgorithmConfig::Rloo(rloo) => rloo.beta != 0.0,
        }
    }

    /// The folder or Hub name of the reference model; `None`: the initial policy, or no reference model.
    pub fn ref_model(&self) -> Option<&Path> {
        match self {
            AlgorithmConfig::Dpo(dpo) => dpo.ref_model.as_deref(),
            AlgorithmConfig::Ppo(ppo) => ppo.ref_model.as_deref(),
            AlgorithmConfig::Grpo(grpo) => grpo.ref_model.as_deref(),
            AlgorithmConfig::Rloo(rloo) => rloo.ref_model.as_deref(),
            _ => None,
        }
    }

    /// The folder or Hub name of the reward model.
    pub fn reward_model(&self) -> Option<&Path> {
        match self {
            AlgorithmConfig::Ppo(ppo) => Some(&ppo.reward_model),
            _ => self.rewards().and_then(|rewards| rewards.reward_model.as_deref()),
        }
    }

    /// The other models of the run that the configuration names, each by its key: a folder, or a name on the Hub.
    pub fn models_mut(&mut self) -> Vec<(&'static str, &mut PathBuf)> {
        let (reference, reward, value) = match self {
            AlgorithmConfig::Sft | AlgorithmConfig::Clm | AlgorithmConfig::Reward(_) => return Vec::new(),
            AlgorithmConfig::Dpo(dpo) => (&mut dpo.ref_model, None, None),
            AlgorithmConfig::Grpo(grpo) => (&mut grpo.ref_model, grpo.rewards.reward_model.as_mut(), None),
            AlgorithmConfig::Rloo(rloo) => (&mut rloo.ref_model, rloo.rewards.reward_model.as_mut(), None),
            AlgorithmConfig::Ppo(ppo) => {
                (&mut ppo.ref_model, Some(&mut ppo.reward_model), ppo.value_model.as_mut())
            }
        };
        let all = [
            ("ref_model_name_or_path", reference.as_mut()),
            ("reward_model_path", reward),
            ("value_model_path", value),
        ];
        all.into_iter().filter_map(|(key, path)| Some((key, path?))).collect()
    }
}
