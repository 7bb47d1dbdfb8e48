//! The algorithms' keys: accepted configurations and their values.

use std::path::{Path, PathBuf};

use super::{accepted, exact_match, reward_function as function, with};
use crate::*;

fn dpo(text: &str) -> DpoConfig {
    match with(AlgorithmName::Dpo, text).algorithm {
        AlgorithmConfig::Dpo(dpo) => dpo,
        other => panic!("{other:?}"),
    }
}

fn grpo(text: &str) -> GrpoConfig {
    match accepted(&format!("algorithm: grpo\n{text}"), &[]).algorithm {
        AlgorithmConfig::Grpo(grpo) => grpo,
        other => panic!("{other:?}"),
    }
}

fn ppo(text: &str) -> PpoConfig {
    match with(AlgorithmName::Ppo, text).algorithm {
        AlgorithmConfig::Ppo(ppo) => ppo,
        other => panic!("{other:?}"),
    }
}

#[test]
fn names_of_algorithms() {
    for algorithm in AlgorithmName::ALL {
        let config = with(algorithm, "");
        assert_eq!((config.algorithm.algorithm(), config.algorithm.name()), (algorithm, algorithm.name()));
        assert_eq!(config.algorithm.sampling().is_some(), algorithm.generates());
        assert!(is_algorithm(algorithm.name()));
    }
    assert!(is_algorithm("kto") && !is_algorithm("train"));
    for loss in DpoLoss::ALL {
        assert_eq!(
            dpo(&format!(
                "loss_type: {loss}\nlabel_smoothing: {}\n",
                if loss == DpoLoss::ExoPair { 0.1 } else { 0.0 }
            ))
            .losses,
            [(loss, 1.0)]
        );
    }
    let losses = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"];
    for name in losses {
        let text = format!("reward_funcs: format\nloss_type: {name}\nimportance_sampling_level: sequence\n");
        assert_eq!(grpo(&text).loss_type.name(), name);
    }
}

#[test]
fn keys_of_dpo() {
    let found = dpo(
        "beta: 0.3\nloss_type: [robust, sft]\nloss_weights: [0.8, 0.2]\nlabel_smoothing: 0.1\nld_alpha: 0.5\n\
         sync_ref_model: true\nref_model_mixup_alpha: 0.9\nref_model_sync_steps: 64\n\
         ref_model: /models/ref\nf_divergence_type: alpha_divergence\nf_alpha_divergence_coef: 0.7\n",
    );
    let expected = DpoConfig {
        beta: 0.3,
        losses: vec![(DpoLoss::Robust, 0.8), (DpoLoss::Sft, 0.2)],
        label_smoothing: 0.1,
        f_divergence: FDivergence::Alpha(0.7),
        ld_alpha: Some(0.5),
        discopop_tau: 0.05,
        precompute_ref_log_probs: false,
        sync_ref_model: Some(SyncRefModel { mixup_alpha: 0.9, steps: 64 }),
        ref_model: Some("/models/ref".into()),
    };
    assert_eq!(found, expected);
    let found =
        dpo("loss_type: discopop\ndiscopop_tau: 0.1\nprecompute_ref_log_probs: yes\nloss_weights: 2\n");
    assert_eq!((found.losses, found.discopop_tau), (vec![(DpoLoss::Discopop, 2.0)], 0.1));
    assert!(found.precompute_ref_log_probs);
    let alpha = "f_divergence_type: alpha_divergence\nf_alpha_divergence_coef: 1.0\n";
    assert_eq!(dpo(alpha).f_divergence, FDivergence::ReverseKl);
    assert_eq!(dpo("f_divergence_type: js_divergence\n").f_divergence, FDivergence::JsDivergence);
    let config = with(
        AlgorithmName::Dpo,
        "label_smoothing: 0.1\nloss_type: [cdpo, sft]\ndiscopop_tau: 1\npacking: bfd\n",
    );
    assert_eq!(config.data.packing, Packing::Bfd);
    assert_eq!(
        config.notes,
        [
            "`label_smoothing` has no effect on the loss sft",
            "`discopop_tau` has no effect: only `loss_type: discopop` uses it"
        ]
    );
}

#[test]
fn keys_of_reward_models() {
    let config =
        with(AlgorithmName::Reward, "center_rewards_coefficient: 0.01\nmetric_for_best_model: accuracy\n");
    assert_eq!(
        config.algorithm,
        AlgorithmConfig::Reward(RewardConfig { center_rewards_coefficient: Some(0.01) })
    );
    assert_eq!((config.eval.metric, config.eval.greater_is_better), (EvalMetric::Accuracy, true));
}

#[test]
fn keys_of_ppo() {
    let found = ppo(
        "value_model: /models/v\nref_model_path: /models/r\nppo_epochs: 2\nnum_mini_batches: 4\ninit_kl_coef: 0.2\n\
         kl_estimator: K3\nadap_kl_ctrl: true\nkl_target: 0.1\nkl_horizon: 1000\nclip_range: 0.1\nvf_coef: 0.5\n\
         cliprange_value: 0.3\ngamma: 0.99\ngae_lambda: 0.9\nwhiten_rewards: true\nmissing_eos_penalty: 1\n\
         value_learning_rate: 1e-5\nresponse_length: 64\nmax_length: 256\nlog_completions: true\n\
         num_completions_to_print: 2\n",
    );
    let sampling = SamplingConfig {
        max_completion_length: 64,
        max_prompt_length: 192,
        temperature: 0.7,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        log_completions: true,
        num_completions_to_print: Some(2),
    };
    let expected = PpoConfig {
        sampling,
        reward_model: "rm".into(),
        value_model: Some("/models/v".into()),
        ref_model: Some("/models/r".into()),
        num_ppo_epochs: 2,
        num_mini_batches: 4,
        kl_coef: 0.2,
        kl_estimator: KlEstimator::K3,
        adaptive_kl: Some(AdaptiveKl { target: 0.1, horizon: 1000.0 }),
        cliprange: 0.1,
        vf_coef: 0.5,
        cliprange_value: 0.3,
        gamma: 0.99,
        lam: 0.9,
        whiten_rewards: true,
        missing_eos_penalty: Some(1.0),
        value_learning_rate: Some(1e-5),
    };
    assert_eq!(found, expected);
}

#[test]
fn keys_of_grpo_and_rloo() {
    let found = grpo(
        "reward_funcs: [format, exact_match]\nreward_weights: [0.5, 2, 1]\nreward_model: org/rm\n\
         reward_on_error: skip\nnum_generations: 4\nnum_generations_eval: 2\nsteps_per_generation: 6\n\
         num_iterations: 2\nbeta: 0.04\nepsilon: 0.1\nepsilon_high: 0.28\ndelta: 1.5\nscale_rewards: false\n\
         loss_type: dr_grpo\nmask_truncated_completions: true\ntop_entropy_quantile: 0.2\nentropy_coef: 0.01\n\
         use_bias_correction_kl: false\nsync_ref_model: true\nref_model: /models/r\ntop_k: 50\ntop_p: 0.9\n\
         min_p: 0.1\nrepetition_penalty: 1.1\ntemperature: 0.6\n",
    );
    assert_eq!(
        (found.groups.num_generations, found.groups.num_generations_eval, found.groups.steps_per_generation),
        (4, Some(2), 6)
    );
    assert_eq!((found.groups.num_iterations, found.beta, found.delta), (2, 0.04, Some(1.5)));
    assert_eq!((found.epsilon, found.epsilon_high), (0.1, 0.28));
    assert_eq!((found.scale_rewards, found.loss_type), (ScaleRewards::None, GrpoLoss::DrGrpo));
    assert!(found.mask_truncated_completions && !found.use_bias_correction_kl);
    assert_eq!((found.top_entropy_quantile, found.entropy_coef), (0.2, 0.01));
    assert_eq!(found.sync_ref_model, Some(SyncRefModel { mixup_alpha: 0.6, steps: 512 }));
    assert_eq!(found.ref_model, Some("/models/r".into()));
    let weights: Vec<_> = found.rewards.functions.iter().map(|f| (f.name.as_str(), f.weight)).collect();
    assert_eq!(weights, [("format", 0.5), ("exact_match", 2.0)]);
    assert_eq!((found.rewards.reward_model, found.rewards.reward_model_weight), (Some("org/rm".into()), 1.0));
    assert_eq!(found.rewards.on_error, OnRewardError::Skip);
    let SamplingConfig { top_k, top_p, min_p, repetition_penalty, temperature, .. } = found.sampling;
    assert_eq!((top_k, top_p, min_p, repetition_penalty, temperature), (50, 0.9, 0.1, 1.1, 0.6));
    let text = "reward_model_path: rm\nloss_type: sapo\nsapo_temperature_pos: 2\nsapo_temperature_neg: 3\n\
                generation_batch_size: 32\nscale_rewards: True\n";
    let found = grpo(text);
    assert_eq!((found.sapo, found.groups.steps_per_generation), (SapoTemperatures { pos: 2.0, neg: 3.0 }, 4));
    assert_eq!((found.scale_rewards, found.rewards.functions.len()), (ScaleRewards::Group, 0));
    let text = "reward_model_path: rm\nloss_type: vespo\nvespo_k_pos: 1\nvespo_lambda_pos: 2\nvespo_k_neg: 3\nvespo_lambda_neg: 4\n";
    let params = VespoParams { k_pos: 1.0, lambda_pos: 2.0, k_neg: 3.0, lambda_neg: 4.0 };
    assert_eq!(grpo(text).vespo, params);
    let config = with(
        AlgorithmName::Rloo,
        "normalize_advantages: true\nreward_clip_range: [-1, 1]\nnum_iterations: 3\n",
    );
    let AlgorithmConfig::Rloo(rloo) = config.algorithm else { panic!("{:?}", config.algorithm) };
    assert!(rloo.normalize_advantages && rloo.groups.num_iterations == 3);
    assert_eq!(rloo.reward_clip_range, Some((-1.0, 1.0)));
}

#[test]
fn lengths_of_prompts_and_completions() {
    let lengths = |text: &str| {
        let config = with(AlgorithmName::Grpo, text);
        let sampling = config.algorithm.sampling().copied().unwrap();
        (sampling.max_prompt_length, sampling.max_completion_length, config.data.max_length)
    };
    assert_eq!(lengths("max_prompt_length: 100\nmax_completion_length: 28\n"), (100, 28, 128));
    assert_eq!(lengths("max_length: 600\n"), (88, 512, 600));
    assert_eq!(lengths("max_length: 600\nmax_completion_length: 200\n"), (400, 200, 600));
    assert_eq!(lengths("max_length: 600\nmax_prompt_length: 50\n"), (50, 512, 600));
    let config = with(AlgorithmName::Grpo, "max_length: 600\n");
    assert_eq!(config.origin("max_prompt_length").to_string(), "derived from max_length");
}

#[test]
fn dropout_is_off_where_trl_turns_it_off() {
    let dropout = |algorithm, text: &str| {
        let model = with(algorithm, text).model;
        (model.attention_dropout, model.resid_dropout)
    };
    assert_eq!(dropout(AlgorithmName::Dpo, ""), (Some(0.0), Some(0.0)));
    assert_eq!(dropout(AlgorithmName::Grpo, ""), (None, None));
    assert_eq!(dropout(AlgorithmName::Sft, "disable_dropout: true\n"), (Some(0.0), Some(0.0)));
    assert_eq!(dropout(AlgorithmName::Reward, "disable_dropout: false\n"), (None, None));
    assert_eq!(dropout(AlgorithmName::Dpo, "attention_dropout: 0.1\n"), (Some(0.1), Some(0.0)));
}

#[test]
fn reward_functions() {
    use RewardFunctionKind::*;
    let functions = |text: &str| grpo(&format!("reward_funcs: {text}\n")).rewards.functions;
    assert_eq!(functions("exact_match"), [function("exact_match", exact_match())]);
    assert_eq!(functions("[Exact-Match]"), [function("exact_match", exact_match())]);
    let text = "[{exact_match: {column: solution, extract: 'a(.*)', ignore_case: true, name: exact}}, \
                {numeric_match: {tolerance: 0.01, source: boxed}}, {numeric_match: {marker: '####', name: gsm8k}}, \
                {format: {pattern: 'a.*'}}, {regex: '^a'}, {regex: {pattern: b, name: b}}, \
                {length_penalty: {max_length: 100, buffer: 30}}, \
                {repetition_penalty: {ngram_size: 2, max_penalty: -0.5}}]";
    let column = || "answer".to_owned();
    let expected = [
        function(
            "exact",
            ExactMatch { column: "solution".into(), extract: Some("a(.*)".into()), ignore_case: true },
        ),
        function(
            "numeric_match",
            NumericMatch { column: column(), tolerance: 0.01, source: NumberSource::Boxed },
        ),
        function(
            "gsm8k",
            NumericMatch { column: column(), tolerance: 0.0, source: NumberSource::After("####".into()) },
        ),
        function("format", Format { pattern: Some("a.*".into()) }),
        function("regex", Regex { pattern: "^a".into() }),
        function("b", Regex { pattern: "b".into() }),
        function("length_penalty", LengthPenalty { max_length: 100, buffer: 30 }),
        function("repetition_penalty", RepetitionPenalty { ngram_size: 2, max_penalty: -0.5 }),
    ];
    assert_eq!(functions(text), expected);
    let expected = [
        function("format", Format { pattern: None }),
        function(
            "numeric_match",
            NumericMatch { column: column(), tolerance: 0.0, source: NumberSource::Last },
        ),
        function("length_penalty", LengthPenalty { max_length: 512, buffer: 102 }),
        function("repetition_penalty", RepetitionPenalty { ngram_size: 3, max_penalty: -1.0 }),
    ];
    assert_eq!(
        functions("[format, numeric_match, {length_penalty: {}}, {repetition_penalty: null}]"),
        expected
    );
}

#[test]
fn reward_programs_and_endpoints() {
    use RewardFunctionKind::{Http, Program};
    let functions = |text: &str| grpo(&format!("reward_funcs: {text}\n")).rewards.functions;
    let program = |command: &[&str]| ProgramReward {
        command: command.iter().map(ToString::to_string).collect(),
        timeout_s: 60.0,
        workers: 1,
        env: vec![],
        max_restarts: 3,
    };
    for text in [
        "{program: 'python3  reward.py'}",
        "[{program: [python3, reward.py]}]",
        "{program: {command: python3 reward.py}}",
    ] {
        assert_eq!(
            functions(text),
            [function("program", Program(program(&["python3", "reward.py"])))],
            "{text}"
        );
    }
    let text = "{program: {command: [python3, 'my reward.py'], timeout: 10, workers: 2, env: [MY_VAR, A=1], max_restarts: 0, name: mine}}";
    let expected = ProgramReward {
        timeout_s: 10.0,
        workers: 2,
        env: vec!["MY_VAR".into(), "A=1".into()],
        max_restarts: 0,
        ..program(&["python3", "my reward.py"])
    };
    assert_eq!(functions(text), [function("mine", Program(expected))]);
    let url = "http://127.0.0.1:8000/reward";
    let http = HttpReward { url: url.into(), timeout_s: 60.0, token_env: None };
    assert_eq!(functions(&format!("{{http: '{url}'}}")), [function("http", Http(http.clone()))]);
    let text = format!("{{http: {{url: '{url}', timeout: 2.5, token_env: REWARD_TOKEN}}}}");
    let expected = HttpReward { timeout_s: 2.5, token_env: Some("REWARD_TOKEN".into()), ..http };
    assert_eq!(functions(&text), [function("http", Http(expected))]);
    let config = accepted(&format!("algorithm: grpo\nreward_funcs: {text}\n"), &[]);
    assert!(config.settings["reward_funcs.http.token_env"].contains("REWARD_TOKEN"), "{:?}", config.settings);
}

#[test]
fn models_of_a_run() {
    let config = with(AlgorithmName::Ppo, "ref_model: r\n");
    let paths = |config: &RunConfig| {
        let owned = |path: Option<&Path>| path.map(PathBuf::from);
        (owned(config.algorithm.ref_model()), owned(config.algorithm.reward_model()))
    };
    assert_eq!(paths(&config), (Some("r".into()), Some("rm".into())));
    assert_eq!(paths(&with(AlgorithmName::Rloo, "reward_model_path: m\n")), (None, Some("m".into())));
    assert_eq!(paths(&with(AlgorithmName::Sft, "")), (None, None));
    assert!(with(AlgorithmName::Grpo, "").algorithm.rewards().is_some());
}

#[test]
fn the_command_sets_the_algorithm() {
    let config = accepted("learning_rate: 1e-5\n", &["command=dpo"]);
    assert_eq!(
        (config.algorithm.name(), config.origin("algorithm").to_string()),
        ("dpo", "argument command=dpo".into())
    );
    assert_eq!(accepted("algorithm: DPO\n", &["command=dpo", "algorithm=dpo"]).algorithm.name(), "dpo");
    assert_eq!(accepted("algorithm: null\n", &["command=reward"]).algorithm.name(), "reward");
    // An override without a command replaces the value of the file.
    assert_eq!(accepted("algorithm: grpo\n", &["algorithm=dpo"]).algorithm.name(), "dpo");
}

/// Files of TRL list every key.
#[test]
fn null_is_accepted_for_keys_of_other_algorithms() {
    assert_eq!(accepted("num_generations: null\nbeta: null\n", &[]).algorithm, AlgorithmConfig::Sft);
}

#[test]
fn keys_of_trl_without_effect() {
    let text = "use_vllm: false\nds3_gather_for_generation: true\npad_to_multiple_of: 8\nrouter_aux_loss_coef: 0.001\n\
                multi_objective_aggregation: sum_then_normalize\nstop_token: eos\n";
    assert_eq!(with(AlgorithmName::Grpo, text).notes.len(), 6);
}
