//! The texts of errors of the algorithms' keys. Each snapshot is the whole text that a user sees.

use insta::assert_snapshot;

use super::refused;

fn dpo(text: &str) -> String {
    refused(&format!("algorithm: dpo\n{text}"), &[])
}

fn ppo(text: &str) -> String {
    refused(&format!("algorithm: ppo\nreward_model_path: rm\n{text}"), &[])
}

fn grpo(text: &str) -> String {
    refused(&format!("algorithm: grpo\nreward_funcs: format\n{text}"), &[])
}

#[test]
fn unknown_algorithm() {
    assert_snapshot!(refused("algorithm: gpro\nnum_generations: 4\n", &[]), @r"
    run.yaml:3:12: `algorithm` cannot be `gpro`
      |
    3 | algorithm: gpro
      |            ^^^^
      hint: did you mean `grpo`? Possible values: sft, clm, reward, dpo, ppo, grpo, rloo.
    ");
    assert_snapshot!(refused("algorithm: kto\n", &[]), @r"
    run.yaml:3:12: `algorithm: kto` is not implemented yet
      |
    3 | algorithm: kto
      |            ^^^
      hint: for preference pairs use dpo, for rewards use grpo, rloo or ppo. DAPO, Dr. GRPO and GSPO are settings of grpo: `loss_type` and `importance_sampling_level`.
    ");
    assert_snapshot!(refused("algorithm: online_dpo\n", &[]), @r"
    run.yaml:3:12: `algorithm: online_dpo` is not implemented yet
      |
    3 | algorithm: online_dpo
      |            ^^^^^^^^^^
      hint: for preference pairs use dpo, for rewards use grpo, rloo or ppo. DAPO, Dr. GRPO and GSPO are settings of grpo: `loss_type` and `importance_sampling_level`.
    ");
}

#[test]
fn keys_of_other_algorithms() {
    assert_snapshot!(dpo("num_generations: 4\n"), @r"
    run.yaml:4:1: `num_generations` is a key of grpo and rloo, but the algorithm is dpo
      |
    4 | num_generations: 4
      | ^^^^^^^^^^^^^^^
      hint: remove it, or set `algorithm` to grpo or rloo.
    ");
    assert_snapshot!(refused("", &["command=sft", "response_length=4"]), @r"
    argument response_length=4: `response_length` is a key of ppo, grpo and rloo, but the algorithm is sft
      hint: remove it, or set `algorithm` to ppo, grpo or rloo.
    ");
    assert_snapshot!(grpo("label_smoothing: 0.1\nkl_coef: 0.1\nassistant_only_loss: true\n"), @r"
    run.yaml:5:1: `label_smoothing` is a key of dpo, but the algorithm is grpo
      |
    5 | label_smoothing: 0.1
      | ^^^^^^^^^^^^^^^
      hint: remove it, or set `algorithm` to dpo.

    error: run.yaml:6:1: `kl_coef` is a key of ppo, but the algorithm is grpo
      |
    6 | kl_coef: 0.1
      | ^^^^^^^
      hint: remove it, or set `algorithm` to ppo.

    error: run.yaml:7:1: `assistant_only_loss` is a key of sft and clm, but the algorithm is grpo
      |
    7 | assistant_only_loss: true
      | ^^^^^^^^^^^^^^^^^^^
      hint: remove it, or set `algorithm` to sft or clm.

    error: the configuration has 3 errors
    ");
}

#[test]
fn another_command() {
    assert_snapshot!(refused("algorithm: grpo\n", &["command=dpo"]), @r"
    run.yaml:3:12: `algorithm: grpo` contradicts the command `lockstep dpo`
      |
    3 | algorithm: grpo
      |            ^^^^
      hint: use `lockstep train`, the command of this algorithm, or remove `algorithm`.
    ");
    assert_snapshot!(refused("", &["command=dpo", "algorithm=sft"]), @r"
    argument algorithm=sft: `algorithm: sft` contradicts the command `lockstep dpo`
      hint: use `lockstep train`, the command of this algorithm, or remove `algorithm`.
    ");
    assert_snapshot!(refused("", &["command=kto"]), @r"
    argument command=kto: `algorithm: kto` is not implemented yet
      hint: for preference pairs use dpo, for rewards use grpo, rloo or ppo. DAPO, Dr. GRPO and GSPO are settings of grpo: `loss_type` and `importance_sampling_level`.
    ");
}

#[test]
fn losses_of_dpo() {
    assert_snapshot!(dpo("loss_type: sigmod\n"), @r"
    run.yaml:4:12: `loss_type` cannot be `sigmod`
      |
    4 | loss_type: sigmod
      |            ^^^^^^
      hint: did you mean `sigmoid`? Possible values: sigmoid, cdpo, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down, discopop, sft, sigmoid_norm.
    ");
    assert_snapshot!(dpo("loss_type: [sigmoid, kto_pair]\n"), @r"
    run.yaml:4:22: `loss_type: kto_pair` is not implemented yet
      |
    4 | loss_type: [sigmoid, kto_pair]
      |                      ^^^^^^^^
      hint: use sigmoid or bco_pair.
    ");
    assert_snapshot!(dpo("loss_type: []\n"), @r"
    run.yaml:4:12: `loss_type` must be a list of at least one loss, found []
      |
    4 | loss_type: []
      |            ^
    ");
    assert_snapshot!(dpo("loss_type: [sigmoid, sft]\nloss_weights: [1, 2, 3]\n"), @r"
    run.yaml:5:15: `loss_weights` must be a number for each loss in `loss_type` (2), found [1, 2, 3]
      |
    5 | loss_weights: [1, 2, 3]
      |               ^
    ");
    assert_snapshot!(dpo("loss_type: sigmoid\nloss_weights: [a]\n"), @r"
    run.yaml:5:16: `loss_weights` expects a number, found `a`
      |
    5 | loss_weights: [a]
      |                ^
    ");
}

#[test]
fn label_smoothing() {
    assert_snapshot!(dpo("label_smoothing: 0.1\n"), @r"
    run.yaml:4:1: `label_smoothing` must be 0 with `loss_type: sigmoid`, which does not use it, found 0.1
      |
    4 | label_smoothing: 0.1
      | ^^^^^^^^^^^^^^^
      hint: use `loss_type: cdpo`, which is sigmoid with label smoothing, or robust, exo_pair, aot or aot_unpaired.
    ");
    assert_snapshot!(dpo("loss_type: [ipo, sft]\nlabel_smoothing: 0.1\n"), @r"
    run.yaml:5:1: `label_smoothing` must be 0 with `loss_type: ipo`, which does not use it, found 0.1
      |
    5 | label_smoothing: 0.1
      | ^^^^^^^^^^^^^^^
      hint: use `loss_type: cdpo`, which is sigmoid with label smoothing, or robust, exo_pair, aot or aot_unpaired.
    ");
    assert_snapshot!(dpo("loss_type: robust\nlabel_smoothing: 0.5\n"), @r"
    run.yaml:5:1: `label_smoothing` must be below 0.5 with `loss_type: robust`, found 0.5
      |
    5 | label_smoothing: 0.5
      | ^^^^^^^^^^^^^^^
    ");
    assert_snapshot!(dpo("loss_type: exo_pair\n"), @r"
    run.yaml:4:1: `label_smoothing` must be above 0 with `loss_type: exo_pair`, found 0
      |
    4 | loss_type: exo_pair
      | ^^^^^^^^^
      hint: set `label_smoothing: 1e-3`, for example.
    ");
    assert_snapshot!(dpo("loss_type: cdpo\nlabel_smoothing: 1\n"), @r"
    run.yaml:5:18: `label_smoothing` must be at least 0 and below 1, found 1
      |
    5 | label_smoothing: 1
      |                  ^
    ");
}

#[test]
fn divergences() {
    assert_snapshot!(dpo("f_divergence_type: forward_kl\nloss_type: [sigmoid, bco_pair]\n"), @r"
    run.yaml:4:20: `f_divergence_type` must be reverse_kl with the loss bco_pair, found forward_kl
      |
    4 | f_divergence_type: forward_kl
      |                    ^^^^^^^^^^
      hint: other divergences are defined for the losses sigmoid, cdpo, hinge, ipo, exo_pair, robust, discopop, sft and sigmoid_norm.
    ");
    assert_snapshot!(dpo("f_divergence_type: kl\n"), @r"
    run.yaml:4:20: `f_divergence_type` cannot be `kl`
      |
    4 | f_divergence_type: kl
      |                    ^^
      hint: possible values: reverse_kl, forward_kl, js_divergence, alpha_divergence.
    ");
}

#[test]
fn ranges_of_dpo() {
    assert_snapshot!(dpo("beta: 0\nld_alpha: 2\ndiscopop_tau: 0\n"), @r"
    run.yaml:4:7: `beta` must be above 0, found 0
      |
    4 | beta: 0
      |       ^

    error: run.yaml:5:11: `ld_alpha` must be at least 0 and at most 1, found 2
      |
    5 | ld_alpha: 2
      |           ^

    error: run.yaml:6:15: `discopop_tau` must be above 0, found 0
      |
    6 | discopop_tau: 0
      |               ^

    error: the configuration has 3 errors
    ");
    assert_snapshot!(dpo("use_weighting: true\n"), @r"
    run.yaml:4:16: `use_weighting` must be false, found true
      |
    4 | use_weighting: true
      |                ^^^^
      hint: weighting pairs by the policy's probabilities (WPO) is not implemented yet.
    ");
    assert_snapshot!(dpo("sync_ref_model: true\nprecompute_ref_log_probs: true\nref_model_mixup_alpha: 2\n"), @r"
    run.yaml:4:1: `sync_ref_model: true` contradicts `precompute_ref_log_probs: true` (run.yaml:5:1)
      |
    4 | sync_ref_model: true
      | ^^^^^^^^^^^^^^
    5 | precompute_ref_log_probs: true
      | ^^^^^^^^^^^^^^^^^^^^^^^^
      hint: log-probabilities that are computed once cannot follow the reference model.

    error: run.yaml:6:24: `ref_model_mixup_alpha` must be at least 0 and at most 1, found 2
      |
    6 | ref_model_mixup_alpha: 2
      |                        ^

    error: the configuration has 2 errors
    ");
    assert_snapshot!(refused("algorithm: reward\ncenter_rewards_coefficient: -1\n", &[]), @r"
    run.yaml:4:29: `center_rewards_coefficient` must be at least 0, found -1
      |
    4 | center_rewards_coefficient: -1
      |                             ^^
    ");
}

#[test]
fn data_of_other_algorithms() {
    assert_snapshot!(dpo("packing: wrapped\n"), @r"
    run.yaml:4:10: `packing` must be none or bfd with dpo, because pairs are not split, found wrapped
      |
    4 | packing: wrapped
      |          ^^^^^^^
    ");
    assert_snapshot!(grpo("packing: bfd\non_long_row: truncate\n"), @r"
    run.yaml:5:10: `packing` must be none with grpo, because rows are prompts, found bfd
      |
    5 | packing: bfd
      |          ^^^

    error: run.yaml:6:14: `on_long_row` cannot be `truncate`
      |
    6 | on_long_row: truncate
      |              ^^^^^^^^
      hint: possible values: drop, stop.

    error: the configuration has 2 errors
    ");
    assert_snapshot!(refused("algorithm: reward\ntruncation: keep_end\nmetric_for_best_model: perplexity\n", &[]), @r"
    run.yaml:4:1: `truncation` is a key of sft, clm and dpo, but the algorithm is reward
      |
    4 | truncation: keep_end
      | ^^^^^^^^^^
      hint: remove it, or set `algorithm` to sft, clm or dpo.

    error: run.yaml:5:24: `metric_for_best_model` cannot be `perplexity`
      |
    5 | metric_for_best_model: perplexity
      |                        ^^^^^^^^^^
      hint: possible values: eval_loss, loss, eval_accuracy, accuracy.

    error: the configuration has 2 errors
    ");
    assert_snapshot!(dpo("disable_dropout: true\nattention_dropout: 0.1\n"), @r"
    run.yaml:4:1: `disable_dropout: true` contradicts `attention_dropout: 0.1` (run.yaml:5:1)
      |
    4 | disable_dropout: true
      | ^^^^^^^^^^^^^^^
    5 | attention_dropout: 0.1
      | ^^^^^^^^^^^^^^^^^
      hint: keep one of the two.
    ");
}

#[test]
fn lengths() {
    assert_snapshot!(grpo("max_length: 512\n"), @r"
    run.yaml:5:13: `max_length` must be above `max_completion_length` (512), to leave tokens for the prompt, found 512
      |
    5 | max_length: 512
      |             ^^^
    ");
    assert_snapshot!(grpo("max_length: 512\nmax_prompt_length: 100\n"), @r"
    run.yaml:5:13: `max_length` must be at least 612, the sum of `max_prompt_length` (100) and `max_completion_length` (512), found 512
      |
    5 | max_length: 512
      |             ^^^
      hint: remove it to use the sum.
    ");
    assert_snapshot!(grpo("max_prompt_length: 0\nmax_completion_length: 0\n"), @r"
    run.yaml:5:20: `max_prompt_length` must be at least 1, found 0
      |
    5 | max_prompt_length: 0
      |                    ^

    error: run.yaml:6:24: `max_completion_length` must be at least 1, found 0
      |
    6 | max_completion_length: 0
      |                        ^

    error: the configuration has 2 errors
    ");
}

#[test]
fn ranges_of_generation() {
    assert_snapshot!(grpo("temperature: 0\ntop_p: 0\ntop_k: -1\nmin_p: 2\nrepetition_penalty: 0\n"), @r"
    run.yaml:5:14: `temperature` must be above 0, found 0
      |
    5 | temperature: 0
      |              ^

    error: run.yaml:6:8: `top_p` must be above 0 and at most 1, found 0
      |
    6 | top_p: 0
      |        ^

    error: run.yaml:7:8: `top_k` must be at least 0, found -1
      |
    7 | top_k: -1
      |        ^^

    error: run.yaml:8:8: `min_p` must be at least 0 and at most 1, found 2
      |
    8 | min_p: 2
      |        ^

    error: run.yaml:9:21: `repetition_penalty` must be above 0, found 0
      |
    9 | repetition_penalty: 0
      |                     ^

    error: the configuration has 5 errors
    ");
}

#[test]
fn groups() {
    assert_snapshot!(grpo("num_generations: 1\n"), @r"
    run.yaml:5:18: `num_generations` must be at least 2, found 1
      |
    5 | num_generations: 1
      |                  ^
    ");
    assert_snapshot!(grpo("per_device_train_batch_size: 6\nnum_generations: 4\n"), @r"
    run.yaml:6:1: the generation batch of 6 completions is not divisible by `num_generations`, 4
      |
    6 | num_generations: 4
      | ^^^^^^^^^^^^^^^
      hint: it is `per_device_train_batch_size` (6) times 1 rank times `steps_per_generation` (1). Set `num_generations` to 3 or 6, or `per_device_train_batch_size` to 4 or 8.
    ");
    assert_snapshot!(grpo("per_device_train_batch_size: 2\nnproc_per_node: 3\nsteps_per_generation: 2\n"), @r"
    run.yaml:7:1: the generation batch of 12 completions is not divisible by `num_generations`, 8
      |
    7 | steps_per_generation: 2
      | ^^^^^^^^^^^^^^^^^^^^
      hint: it is `per_device_train_batch_size` (2) times 3 ranks times `steps_per_generation` (2). Set `num_generations` to 6 or 12, or `per_device_train_batch_size` to 4.
    ");
    assert_snapshot!(grpo("per_device_train_batch_size: 1\nnum_generations: 3\n"), @r"
    run.yaml:6:1: the generation batch of 1 completion is not divisible by `num_generations`, 3
      |
    6 | num_generations: 3
      | ^^^^^^^^^^^^^^^
      hint: it is `per_device_train_batch_size` (1) times 1 rank times `steps_per_generation` (1). Set `per_device_train_batch_size` to 3.
    ");
    assert_snapshot!(grpo("generation_batch_size: 20\n"), @r"
    run.yaml:5:24: `generation_batch_size` must be a multiple of 8: `per_device_train_batch_size` (8) times 1 rank, found 20
      |
    5 | generation_batch_size: 20
      |                        ^^
    ");
    assert_snapshot!(grpo("generation_batch_size: 16\nsteps_per_generation: 2\n"), @r"
    run.yaml:5:1: `generation_batch_size: 16` contradicts `steps_per_generation: 2` (run.yaml:6:1)
      |
    5 | generation_batch_size: 16
      | ^^^^^^^^^^^^^^^^^^^^^
    6 | steps_per_generation: 2
      | ^^^^^^^^^^^^^^^^^^^^
      hint: both set the size of a generation batch; keep one.
    ");
}

#[test]
fn ranges_of_grpo() {
    assert_snapshot!(grpo("beta: -1\nepsilon: 1\ndelta: 0\ntop_entropy_quantile: 2\nentropy_coef: -1\n"), @r"
    run.yaml:5:7: `beta` must be at least 0, found -1
      |
    5 | beta: -1
      |       ^^

    error: run.yaml:6:10: `epsilon` must be at least 0 and below 1, found 1
      |
    6 | epsilon: 1
      |          ^

    error: run.yaml:7:8: `delta` must be above 0, found 0
      |
    7 | delta: 0
      |        ^

    error: run.yaml:8:23: `top_entropy_quantile` must be at least 0 and at most 1, found 2
      |
    8 | top_entropy_quantile: 2
      |                       ^

    error: run.yaml:9:15: `entropy_coef` must be at least 0, found -1
      |
    9 | entropy_coef: -1
      |               ^^

    error: the configuration has 5 errors
    ");
    assert_snapshot!(grpo("loss_type: gspo\n"), @r"
    run.yaml:5:12: `loss_type: gspo` is not implemented yet
      |
    5 | loss_type: gspo
      |            ^^^^
      hint: use `importance_sampling_level: sequence` with `loss_type: grpo`.
    ");
    assert_snapshot!(grpo("loss_type: dpao\nscale_rewards: groups\n"), @r"
    run.yaml:5:12: `loss_type` cannot be `dpao`
      |
    5 | loss_type: dpao
      |            ^^^^
      hint: did you mean `dapo`? Possible values: grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo, vespo.

    error: run.yaml:6:16: `scale_rewards` cannot be `groups`
      |
    6 | scale_rewards: groups
      |                ^^^^^^
      hint: did you mean `group`? Possible values: group, batch, none.

    error: the configuration has 2 errors
    ");
    assert_snapshot!(grpo("loss_type: luspo\n"), @r"
    run.yaml:5:1: `importance_sampling_level` must be sequence with `loss_type: luspo`, found token
      |
    5 | loss_type: luspo
      | ^^^^^^^^^
    ");
    assert_snapshot!(grpo("sync_ref_model: true\nref_model: r\n"), @r"
    run.yaml:5:17: `sync_ref_model` must be left out with `beta: 0`, which uses no reference model, found true
      |
    5 | sync_ref_model: true
      |                 ^^^^
      hint: remove it, or set `beta` above 0.

    error: run.yaml:6:12: `ref_model` must be left out with `beta: 0`, which uses no reference model, found r
      |
    6 | ref_model: r
      |            ^
      hint: remove it, or set `beta` above 0.

    error: the configuration has 2 errors
    ");
    let rloo = "algorithm: rloo\nreward_funcs: format\nreward_clip_range: [1, -1]\n";
    assert_snapshot!(refused(rloo, &[]), @r"
    run.yaml:5:20: `reward_clip_range` must be two numbers, the smaller one first, found [1, -1]
      |
    5 | reward_clip_range: [1, -1]
      |                    ^
    ");
    assert_snapshot!(refused(&rloo.replace("[1, -1]", "5"), &[]), @r"
    run.yaml:5:20: `reward_clip_range` expects a list of two numbers such as `[-1, 1]`, found `5`
      |
    5 | reward_clip_range: 5
      |                    ^
    ");
}

#[test]
fn ppo_settings() {
    assert_snapshot!(refused("algorithm: ppo\n", &[]), @r"
    `reward_model_path` is missing: ppo needs a reward model: set `reward_model_path` to a folder that `lockstep reward` has trained, to any other `…ForSequenceClassification` model with one label, or to its name on the Hub. Reward functions (`reward_funcs`) work with grpo and rloo
    ");
    assert_snapshot!(ppo("num_mini_batches: 3\n"), @r"
    run.yaml:5:1: the per-rank batch of 8 completions is not divisible by `num_mini_batches`, 3
      |
    5 | num_mini_batches: 3
      | ^^^^^^^^^^^^^^^^
      hint: it is `per_device_train_batch_size` (8) times `gradient_accumulation_steps` (1). Set `num_mini_batches` to 2 or 4, or `gradient_accumulation_steps` to 3.
    ");
    assert_snapshot!(ppo("kl_estimator: k2\n"), @r"
    run.yaml:5:15: `kl_estimator: k2` is not implemented yet
      |
    5 | kl_estimator: k2
      |               ^^
      hint: use k1 or k3.
    ");
    assert_snapshot!(ppo("cliprange: 0\ngamma: 1.5\nmissing_eos_penalty: -1\nnum_ppo_epochs: 0\n"), @r"
    run.yaml:5:12: `cliprange` must be above 0, found 0
      |
    5 | cliprange: 0
      |            ^

    error: run.yaml:6:8: `gamma` must be at least 0 and at most 1, found 1.5
      |
    6 | gamma: 1.5
      |        ^^^

    error: run.yaml:7:22: `missing_eos_penalty` must be above 0, found -1
      |
    7 | missing_eos_penalty: -1
      |                      ^^

    error: run.yaml:8:17: `num_ppo_epochs` must be at least 1, found 0
      |
    8 | num_ppo_epochs: 0
      |                 ^

    error: the configuration has 4 errors
    ");
    assert_snapshot!(ppo("reward_funcs: format\nmini_batch_size: 4\ntotal_episodes: 100\n"), @r"
    run.yaml:5:1: `reward_funcs` is a key of grpo and rloo, but the algorithm is ppo
      |
    5 | reward_funcs: format
      | ^^^^^^^^^^^^
      hint: remove it, or set `algorithm` to grpo or rloo.

    error: run.yaml:6:1: `mini_batch_size` is not implemented yet
      |
    6 | mini_batch_size: 4
      | ^^^^^^^^^^^^^^^
      hint: use `num_mini_batches`: the completions of a batch divided by those of a mini-batch.

    error: run.yaml:7:1: `total_episodes` is not implemented yet
      |
    7 | total_episodes: 100
      | ^^^^^^^^^^^^^^
      hint: use `max_steps` or `num_train_epochs`.

    error: the configuration has 3 errors
    ");
}

#[test]
fn keys_of_trl_that_are_not_implemented() {
    assert_snapshot!(grpo("use_vllm: true\nvllm_mode: colocate\ngeneration_kwargs: {top_p: 1}\n"), @r"
    run.yaml:5:11: `use_vllm: true` is not implemented yet
      |
    5 | use_vllm: true
      |           ^^^^
      hint: remove it: completions are generated by the training engine, with the weights that are trained.

    error: run.yaml:6:1: `vllm_mode` is not implemented yet
      |
    6 | vllm_mode: colocate
      | ^^^^^^^^^
      hint: remove it: completions are generated by the training engine.

    error: run.yaml:7:1: `generation_kwargs` is not implemented yet
      |
    7 | generation_kwargs: {top_p: 1}
      | ^^^^^^^^^^^^^^^^^
      hint: use `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty`.

    error: the configuration has 3 errors
    ");
    assert_snapshot!(grpo("use_adaptive_entropy: true\nmulti_objective_aggregation: normalize_then_sum\n"), @r"
    run.yaml:5:23: `use_adaptive_entropy: true` is not implemented yet
      |
    5 | use_adaptive_entropy: true
      |                       ^^^^
      hint: use `entropy_coef` for a fixed coefficient.

    error: run.yaml:6:30: `multi_objective_aggregation: normalize_then_sum` is not implemented yet
      |
    6 | multi_objective_aggregation: normalize_then_sum
      |                              ^^^^^^^^^^^^^^^^^^
      hint: only the weighted sum of rewards is normalized.

    error: the configuration has 2 errors
    ");
    assert_snapshot!(dpo("rpo_alpha: 1\ndesirable_weight: 1\n"), @r"
    run.yaml:4:1: `rpo_alpha` is not implemented yet
      |
    4 | rpo_alpha: 1
      | ^^^^^^^^^
      hint: use `loss_type: [sigmoid, sft]` with `loss_weights: [1.0, ALPHA]`.

    error: run.yaml:5:1: `desirable_weight` is not implemented yet
      |
    5 | desirable_weight: 1
      | ^^^^^^^^^^^^^^^^
      hint: KTO is not implemented; use `algorithm: dpo` with pairs.

    error: the configuration has 2 errors
    ");
}
