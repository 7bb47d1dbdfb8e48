//! The defaults of every algorithm, beside those of TRL.

use super::{exact_match, reward_function, with};
use crate::keys::KEYS;
use crate::yaml::{Input, parse};
use crate::*;

/// The defaults of TRL 1.16, and of TRL 1.12 for PPO. Not in TRL: `max_prompt_length`, rewards other than functions, and
/// PPO's adaptive coefficient.
const TRL: &[(AlgorithmName, &[(&str, &str)])] = &[
    (
        AlgorithmName::Reward,
        &[
            ("learning_rate", "1e-4"),
            ("max_length", "1024"),
            ("disable_dropout", "True"),
            ("center_rewards_coefficient", "null"),
        ],
    ),
    (
        AlgorithmName::Dpo,
        &[
            ("learning_rate", "1e-6"),
            ("max_length", "1024"),
            ("truncation", "keep_start"),
            ("disable_dropout", "True"),
            ("precompute_ref_log_probs", "False"),
            ("loss_type", "sigmoid"),
            ("loss_weights", "null"),
            ("ld_alpha", "null"),
            ("f_divergence_type", "reverse_kl"),
            ("f_alpha_divergence_coef", "0.5"),
            ("label_smoothing", "0.0"),
            ("beta", "0.1"),
            ("use_weighting", "False"),
            ("discopop_tau", "0.05"),
            ("sync_ref_model", "False"),
            ("ref_model_mixup_alpha", "0.6"),
            ("ref_model_sync_steps", "512"),
        ],
    ),
    (
        AlgorithmName::Ppo,
        &[
            ("learning_rate", "3e-6"),
            // PPOTrainer turns dropout off in all models.
            ("disable_dropout", "True"),
            ("num_mini_batches", "1"),
            ("max_completion_length", "53"),
            ("temperature", "0.7"),
            ("missing_eos_penalty", "null"),
            ("num_ppo_epochs", "4"),
            ("whiten_rewards", "False"),
            ("kl_coef", "0.05"),
            ("kl_estimator", "k1"),
            ("cliprange", "0.2"),
            ("vf_coef", "0.1"),
            ("cliprange_value", "0.2"),
            ("gamma", "1.0"),
            ("lam", "0.95"),
            // PPOTrainer samples from all tokens.
            ("top_p", "1.0"),
            ("top_k", "0"),
        ],
    ),
    (
        AlgorithmName::Grpo,
        &[
            ("learning_rate", "1e-6"),
            ("disable_dropout", "False"),
            ("num_generations", "8"),
            ("num_generations_eval", "null"),
            ("max_completion_length", "512"),
            ("shuffle", "True"),
            ("generation_batch_size", "null"),
            ("steps_per_generation", "null"),
            ("temperature", "1.0"),
            ("top_p", "1.0"),
            ("top_k", "0"),
            ("min_p", "null"),
            ("repetition_penalty", "1.0"),
            ("beta", "0.0"),
            ("num_iterations", "1"),
            ("epsilon", "0.2"),
            ("epsilon_high", "null"),
            ("delta", "null"),
            ("sapo_temperature_neg", "1.05"),
            ("sapo_temperature_pos", "1.0"),
            ("vespo_k_pos", "2.0"),
            ("vespo_lambda_pos", "3.0"),
            ("vespo_k_neg", "3.0"),
            ("vespo_lambda_neg", "2.0"),
            ("importance_sampling_level", "token"),
            ("reward_weights", "null"),
            ("scale_rewards", "group"),
            ("loss_type", "dapo"),
            ("mask_truncated_completions", "False"),
            ("sync_ref_model", "False"),
            ("ref_model_mixup_alpha", "0.6"),
            ("ref_model_sync_steps", "512"),
            ("top_entropy_quantile", "1.0"),
            ("entropy_coef", "0.0"),
            ("use_bias_correction_kl", "True"),
            ("log_completions", "False"),
            ("num_completions_to_print", "null"),
        ],
    ),
    (
        AlgorithmName::Rloo,
        &[
            ("learning_rate", "1e-6"),
            ("disable_dropout", "False"),
            ("num_generations", "2"),
            ("num_generations_eval", "null"),
            ("max_completion_length", "512"),
            ("shuffle", "True"),
            ("steps_per_generation", "null"),
            ("temperature", "1.0"),
            ("top_p", "1.0"),
            ("top_k", "0"),
            ("min_p", "null"),
            ("repetition_penalty", "1.0"),
            ("beta", "0.05"),
            ("num_iterations", "1"),
            ("epsilon", "0.2"),
            ("epsilon_high", "null"),
            ("reward_weights", "null"),
            ("normalize_advantages", "False"),
            ("reward_clip_range", "null"),
            ("mask_truncated_completions", "False"),
            ("sync_ref_model", "False"),
            ("ref_model_mixup_alpha", "0.6"),
            ("ref_model_sync_steps", "512"),
            ("log_completions", "False"),
            ("num_completions_to_print", "null"),
        ],
    ),
];

#[test]
fn defaults_are_those_of_trl() {
    let node = |text: &str| parse(text, Input::Default).0.unwrap();
    for (algorithm, defaults) in TRL {
        let settings = with(*algorithm, "").settings;
        for (key, expected) in *defaults {
            let found = &settings[*key];
            assert!(crate::value::same(&node(found), &node(expected), false), "{algorithm}: {key}: {found}");
        }
        // Every key that only some algorithms have is in the table, or not in TRL.
        let ours = [
            "max_prompt_length",
            "ref_model_name_or_path",
            "reward_funcs",
            "reward_model_path",
            "reward_on_error",
            "value_model_path",
            "value_learning_rate",
            "adaptive_kl",
            "kl_target",
            "kl_horizon",
        ];
        // TRL's PPO has no such keys.
        let ppo = ["min_p", "repetition_penalty", "log_completions", "num_completions_to_print"];
        for key in KEYS.iter().filter(|key| key.is_for(*algorithm) && !key.is_for(AlgorithmName::Sft)) {
            let known = defaults.iter().any(|(name, _)| *name == key.name)
                || ours.contains(&key.name)
                || key.name == "generation_batch_size"
                || (*algorithm == AlgorithmName::Ppo && ppo.contains(&key.name));
            assert!(known, "{algorithm}: {} is not compared with TRL", key.name);
        }
    }
}

#[test]
fn a_default_of_the_algorithm_is_not_a_change() {
    let changed = |text: &str| -> String {
        let config = with(AlgorithmName::Dpo, text);
        config
            .changed
            .iter()
            .filter(|(key, _)| *key != "model" && *key != "output_dir")
            .map(|(_, y)| y.as_str())
            .collect()
    };
    assert_eq!(changed("learning_rate: 0.000001\nbeta: 1e-1\n"), "algorithm: dpo\n");
    assert_eq!(
        changed("learning_rate: 5e-5\nbeta: 0.2\n"),
        "algorithm: dpo\nbeta: 0.2\nlearning_rate: 5e-5\n"
    );
    let config = with(AlgorithmName::Sft, "learning_rate: 1e-6\n");
    assert!(config.changed.iter().any(|(key, _)| *key == "learning_rate"));
    assert!(!config.settings.contains_key("beta"), "sft has no such key");
}

const SAMPLING: SamplingConfig = SamplingConfig {
    max_completion_length: 512,
    max_prompt_length: 512,
    temperature: 1.0,
    top_p: 1.0,
    top_k: 0,
    min_p: 0.0,
    repetition_penalty: 1.0,
    log_completions: false,
    num_completions_to_print: None,
};

fn rewards() -> RewardsConfig {
    RewardsConfig {
        functions: vec![reward_function("exact_match", exact_match())],
        reward_model: None,
        reward_model_weight: 1.0,
        on_error: OnRewardError::Stop,
    }
}

#[test]
fn resolved_defaults_of_grpo_and_rloo() {
    let config = with(AlgorithmName::Grpo, "gradient_accumulation_steps: 3\n");
    assert_eq!((config.data.max_length, config.data.on_long_row), (1024, OnLongRow::Drop));
    let expected = GrpoConfig {
        sampling: SAMPLING,
        rewards: rewards(),
        groups: Groups {
            num_generations: 8,
            num_generations_eval: None,
            steps_per_generation: 3,
            num_iterations: 1,
        },
        beta: 0.0,
        epsilon: 0.2,
        epsilon_high: 0.2,
        delta: None,
        importance_sampling_level: ImportanceSamplingLevel::Token,
        scale_rewards: ScaleRewards::Group,
        loss_type: GrpoLoss::Dapo,
        mask_truncated_completions: false,
        top_entropy_quantile: 1.0,
        entropy_coef: 0.0,
        use_bias_correction_kl: true,
        sapo: SapoTemperatures { pos: 1.0, neg: 1.05 },
        vespo: VespoParams { k_pos: 2.0, lambda_pos: 3.0, k_neg: 3.0, lambda_neg: 2.0 },
        sync_ref_model: None,
        ref_model: None,
    };
    assert_eq!(config.algorithm, AlgorithmConfig::Grpo(expected));
    assert!(!config.algorithm.has_reference());
    let config = with(AlgorithmName::Rloo, "");
    let expected = RlooConfig {
        sampling: SAMPLING,
        rewards: rewards(),
        groups: Groups {
            num_generations: 2,
            num_generations_eval: None,
            steps_per_generation: 1,
            num_iterations: 1,
        },
        beta: 0.05,
        epsilon: 0.2,
        epsilon_high: 0.2,
        normalize_advantages: false,
        reward_clip_range: None,
        mask_truncated_completions: false,
        sync_ref_model: None,
        ref_model: None,
    };
    assert_eq!(config.algorithm, AlgorithmConfig::Rloo(expected));
    assert!(config.algorithm.has_reference());
}

#[test]
fn resolved_defaults_of_ppo() {
    let config = with(AlgorithmName::Ppo, "");
    assert_eq!((config.data.max_length, config.optim.learning_rate), (565, 3e-6));
    let expected = PpoConfig {
        sampling: SamplingConfig { max_completion_length: 53, temperature: 0.7, ..SAMPLING },
        reward_model: "rm".into(),
        value_model: None,
        ref_model: None,
        num_ppo_epochs: 4,
        num_mini_batches: 1,
        kl_coef: 0.05,
        kl_estimator: KlEstimator::K1,
        adaptive_kl: None,
        cliprange: 0.2,
        vf_coef: 0.1,
        cliprange_value: 0.2,
        gamma: 1.0,
        lam: 0.95,
        whiten_rewards: false,
        missing_eos_penalty: None,
        value_learning_rate: None,
    };
    assert_eq!(config.algorithm, AlgorithmConfig::Ppo(expected));
}

#[test]
fn resolved_defaults_of_reward_and_dpo() {
    let config = with(AlgorithmName::Reward, "");
    assert_eq!(config.algorithm, AlgorithmConfig::Reward(RewardConfig { center_rewards_coefficient: None }));
    assert_eq!((config.optim.learning_rate, config.data.on_long_row), (1e-4, OnLongRow::Drop));
    let expected = DpoConfig {
        beta: 0.1,
        losses: vec![(DpoLoss::Sigmoid, 1.0)],
        label_smoothing: 0.0,
        f_divergence: FDivergence::ReverseKl,
        ld_alpha: None,
        discopop_tau: 0.05,
        precompute_ref_log_probs: false,
        sync_ref_model: None,
        ref_model: None,
    };
    let config = with(AlgorithmName::Dpo, "");
    assert_eq!(config.algorithm, AlgorithmConfig::Dpo(expected));
    assert_eq!((config.optim.learning_rate, config.data.on_long_row), (1e-6, OnLongRow::Truncate));
}
