//! The texts of errors. Each snapshot is the whole text that a user sees.

use super::{refused, run};

fn whole(text: &str, overrides: &[&str]) -> String {
    run(text, overrides).unwrap_err().to_string()
}

#[test]
fn unknown_key() {
    insta::assert_snapshot!(refused("lerning_rate: 5e-5\n", &[]), @r#"
    run.yaml:3:1: unknown key `lerning_rate`
      |
    3 | lerning_rate: 5e-5
      | ^^^^^^^^^^^^
      hint: did you mean `learning_rate`?
    "#);
}

#[test]
fn unknown_key_without_a_guess() {
    insta::assert_snapshot!(refused("  \nfoo_bar_baz: 1\n", &[]), @r#"
    run.yaml:4:1: unknown key `foo_bar_baz`
      |
    4 | foo_bar_baz: 1
      | ^^^^^^^^^^^
    "#);
}

#[test]
fn unknown_key_on_the_command_line() {
    insta::assert_snapshot!(refused("", &["lerning_rate=5e-5"]), @r"
    argument lerning_rate=5e-5: unknown key `lerning_rate`
      hint: did you mean `learning_rate`?
    ");
}

#[test]
fn not_an_override() {
    insta::assert_snapshot!(refused("", &["learning_rate"]), @r"
    argument learning_rate: `learning_rate` is not of the form key=value
      hint: write `learning_rate=1e-4`, for example.
    ");
}

#[test]
fn all_errors_at_once() {
    insta::assert_snapshot!(refused("sed: 1\nlearning_rate: fast\nmax_length: 1\nadam_beta2: 1.0\n", &["batch=4"]), @r"
    run.yaml:3:1: unknown key `sed`
      |
    3 | sed: 1
      | ^^^
      hint: did you mean `seed`?

    error: run.yaml:4:16: `learning_rate` expects a number, found `fast`
      |
    4 | learning_rate: fast
      |                ^^^^

    error: run.yaml:5:13: `max_length` must be at least 2, found 1
      |
    5 | max_length: 1
      |             ^

    error: run.yaml:6:13: `adam_beta2` must be at least 0 and below 1, found 1.0
      |
    6 | adam_beta2: 1.0
      |             ^^^

    error: argument batch=4: unknown key `batch`
      hint: did you mean `per_device_train_batch_size`?

    error: the configuration has 5 errors
    ");
}

#[test]
fn wrong_type_number() {
    insta::assert_snapshot!(refused("learning_rate: fast\n", &[]), @r#"
    run.yaml:3:16: `learning_rate` expects a number, found `fast`
      |
    3 | learning_rate: fast
      |                ^^^^
    "#);
}

#[test]
fn wrong_type_list() {
    insta::assert_snapshot!(refused("learning_rate: [1e-4]\n", &[]), @r#"
    run.yaml:3:16: `learning_rate` expects a number, found a list
      |
    3 | learning_rate: [1e-4]
      |                ^
    "#);
}

#[test]
fn wrong_type_whole_number() {
    insta::assert_snapshot!(refused("training:\n  seed: 1.5\n", &[]), @r#"
    run.yaml:4:9: `seed` expects a whole number, found `1.5`
      |
    4 |   seed: 1.5
      |         ^^^
    "#);
}

#[test]
fn wrong_type_bool() {
    insta::assert_snapshot!(refused("shuffle: maybe\n", &[]), @r#"
    run.yaml:3:10: `shuffle` expects true or false, found `maybe`
      |
    3 | shuffle: maybe
      |          ^^^^^
    "#);
}

#[test]
fn wrong_type_group() {
    insta::assert_snapshot!(refused("training: 3\n", &[]), @r#"
    run.yaml:3:11: `training` expects a map of keys, found `3`
      |
    3 | training: 3
      |           ^
    "#);
}

#[test]
fn null_where_a_value_is_needed() {
    insta::assert_snapshot!(refused("learning_rate:\n", &[]), @r"
    run.yaml:3:1: `learning_rate` has no value
      |
    3 | learning_rate:
      | ^^^^^^^^^^^^^
      hint: remove the line to use the default, 5e-5.
    ");
}

#[test]
fn range_learning_rate() {
    insta::assert_snapshot!(refused("learning_rate: -1e-4\n", &[]), @r#"
    run.yaml:3:16: `learning_rate` must be a finite number, at least 0, found -1e-4
      |
    3 | learning_rate: -1e-4
      |                ^^^^^
    "#);
}

#[test]
fn range_not_finite() {
    insta::assert_snapshot!(refused("learning_rate: .inf\n", &[]), @r#"
    run.yaml:3:16: `learning_rate` must be a finite number, at least 0, found .inf
      |
    3 | learning_rate: .inf
      |                ^^^^
    "#);
}

#[test]
fn range_batch() {
    insta::assert_snapshot!(refused("per_device_train_batch_size: 0\n", &[]), @r#"
    run.yaml:3:30: `per_device_train_batch_size` must be at least 1, found 0
      |
    3 | per_device_train_batch_size: 0
      |                              ^
    "#);
}

#[test]
fn open_batch_without_a_total() {
    let text = refused("per_device_train_batch_size: auto\n", &[]);
    insta::assert_snapshot!(text, @"`train_batch_size` is missing: `per_device_train_batch_size: auto` divides it into micro-batches");
}

#[test]
fn open_batch_of_rollouts() {
    let text = "algorithm: grpo\nreward_funcs: exact_match\nper_device_train_batch_size: auto\ntrain_batch_size: 8\n";
    insta::assert_snapshot!(refused(text, &[]), @r"
    run.yaml:5:30: `per_device_train_batch_size` must be a number with `algorithm: grpo`, whose rollouts are made of it, found auto
      |
    5 | per_device_train_batch_size: auto
      |                              ^^^^
    ");
}

#[test]
fn range_beta() {
    insta::assert_snapshot!(refused("adam_beta1: 1\n", &[]), @r#"
    run.yaml:3:13: `adam_beta1` must be at least 0 and below 1, found 1
      |
    3 | adam_beta1: 1
      |             ^
    "#);
}

#[test]
fn range_warmup() {
    insta::assert_snapshot!(refused("warmup_ratio: 1.5\n", &[]), @r#"
    run.yaml:3:15: `warmup_ratio` must be at least 0 and below 1, found 1.5
      |
    3 | warmup_ratio: 1.5
      |               ^^^
    "#);
}

#[test]
fn range_warmup_steps() {
    insta::assert_snapshot!(refused("warmup_steps: 1.5\n", &[]), @r#"
    run.yaml:3:15: `warmup_steps` must be a whole number of steps, or a fraction of all steps below 1, found 1.5
      |
    3 | warmup_steps: 1.5
      |               ^^^
    "#);
}

#[test]
fn range_max_steps() {
    insta::assert_snapshot!(refused("max_steps: -2\n", &[]), @r#"
    run.yaml:3:12: `max_steps` must be at least 0, or -1 to use `num_train_epochs`, found -2
      |
    3 | max_steps: -2
      |            ^^
    "#);
}

#[test]
fn range_too_large() {
    insta::assert_snapshot!(refused("threads: 5e9\n", &[]), @r#"
    run.yaml:3:10: `threads` must be a smaller number, found 5e9
      |
    3 | threads: 5e9
      |          ^^^
    "#);
}

#[test]
fn world_size_mismatch() {
    insta::assert_snapshot!(refused("world_size: 4\nnproc_per_node: 2\n", &[]), @r#"
    run.yaml:3:13: `world_size` must be the product of `nodes` and `nproc_per_node`, found 4
      |
    3 | world_size: 4
      |             ^
      hint: 2 ranks are started: remove it, or start 4.
    "#);
}

#[test]
fn unknown_word() {
    insta::assert_snapshot!(refused("lr_scheduler_type: cosin\n", &[]), @r"
    run.yaml:3:20: `lr_scheduler_type` cannot be `cosin`
      |
    3 | lr_scheduler_type: cosin
      |                    ^^^^^
      hint: did you mean `cosine`? Possible values: linear, cosine, constant, constant_with_warmup, cosine_with_min_lr, WarmupLR, WarmupDecayLR, WarmupCosineLR.
    ");
}

#[test]
fn unknown_strategy() {
    insta::assert_snapshot!(refused("strategy: zero4\n", &[]), @r"
    run.yaml:3:11: `strategy` cannot be `zero4`
      |
    3 | strategy: zero4
      |           ^^^^^
      hint: did you mean `zero1`? Possible values: ddp, zero1, zero2, zero3, shard_grad_op, full_shard, hybrid_shard, no_shard, auto.
    ");
}

#[test]
fn schedule_not_implemented() {
    insta::assert_snapshot!(refused("lr_scheduler_type: OneCycle\n", &[]), @r"
    run.yaml:3:20: `lr_scheduler_type: OneCycle` is not implemented yet
      |
    3 | lr_scheduler_type: OneCycle
      |                    ^^^^^^^^
      hint: use linear, cosine or constant.
    ");
}

#[test]
fn optimizer_not_implemented() {
    insta::assert_snapshot!(refused("optim: paged_adamw_8bit\n", &[]), @r"
    run.yaml:3:8: `optim: paged_adamw_8bit` is not implemented yet
      |
    3 | optim: paged_adamw_8bit
      |        ^^^^^^^^^^^^^^^^
      hint: use `optim: adamw`, `adamw_8bit`, `sgd` or `lion`.
    ");
}

#[test]
fn unknown_packing() {
    insta::assert_snapshot!(refused("packing: bdf\npacking_strategy: none\n", &[]), @r"
    run.yaml:3:10: `packing` cannot be `bdf`
      |
    3 | packing: bdf
      |          ^^^
      hint: did you mean `bfd`? Possible values: none, bfd, bfd_split, wrapped.

    error: run.yaml:4:19: `packing_strategy` cannot be `none`
      |
    4 | packing_strategy: none
      |                   ^^^^
      hint: possible values: bfd, bfd_split, wrapped.

    error: the configuration has 2 errors
    ");
}

#[test]
fn unknown_key_in_a_map() {
    insta::assert_snapshot!(refused("fp16: {enabled: true, inital_scale_power: 200}\n", &[]), @r#"
    run.yaml:3:23: unknown key `fp16.inital_scale_power`
      |
    3 | fp16: {enabled: true, inital_scale_power: 200}
      |                       ^^^^^^^^^^^^^^^^^^
      hint: did you mean `initial_scale_power`?
    "#);
}

#[test]
fn range_loss_scale() {
    insta::assert_snapshot!(refused("fp16: {enabled: true, initial_scale_power: 200}\n", &[]), @r#"
    run.yaml:3:44: `fp16.initial_scale_power` must be at most 64, found 200
      |
    3 | fp16: {enabled: true, initial_scale_power: 200}
      |                                            ^^^
    "#);
}

#[test]
fn fp16_and_bf16() {
    insta::assert_snapshot!(refused("fp16: true\nbf16: true\n", &[]), @r"
    run.yaml:3:1: `fp16: true` contradicts `bf16: true` (run.yaml:4:1)
      |
    3 | fp16: true
      | ^^^^
    4 | bf16: true
      | ^^^^
      hint: at most one of `bf16` and `fp16` can be true.
    ");
}

#[test]
fn precision_contradiction() {
    insta::assert_snapshot!(refused("mixed_precision: no\nbf16: true\n", &[]), @r"
    run.yaml:3:1: `mixed_precision: no` contradicts `bf16: true` (run.yaml:4:1)
      |
    3 | mixed_precision: no
      | ^^^^^^^^^^^^^^^
    4 | bf16: true
      | ^^^^
      hint: both set the precision; keep one.
    ");
}

#[test]
fn two_spellings() {
    insta::assert_snapshot!(refused("max_grad_norm: 1.0\nseed: 1\ngradient_clipping: 0.5\n", &[]), @r"
    run.yaml:3:1: `max_grad_norm: 1.0` contradicts `gradient_clipping: 0.5` (run.yaml:5:1)
      |
    3 | max_grad_norm: 1.0
      | ^^^^^^^^^^^^^
    5 | gradient_clipping: 0.5
      | ^^^^^^^^^^^^^^^^^
      hint: they are two spellings of one setting; keep one.
    ");
}

#[test]
fn two_spellings_on_the_command_line() {
    insta::assert_snapshot!(refused("", &["max-grad-norm=1", "gradient_clipping=2"]), @r"
    argument max-grad-norm=1: `max-grad-norm: 1` contradicts `gradient_clipping: 2` (argument gradient_clipping=2)
      hint: they are two spellings of one setting; keep one.
    ");
}

#[test]
fn recompute_contradiction() {
    insta::assert_snapshot!(refused("recompute: full\ngradient_checkpointing: false\n", &[]), @r"
    run.yaml:3:1: `recompute: full` contradicts `gradient_checkpointing: false` (run.yaml:4:1)
      |
    3 | recompute: full
      | ^^^^^^^^^
    4 | gradient_checkpointing: false
      | ^^^^^^^^^^^^^^^^^^^^^^
      hint: keep `recompute` and remove `gradient_checkpointing`.
    ");
}

#[test]
fn fsdp_contradiction() {
    insta::assert_snapshot!(refused("strategy: ddp\nfsdp: true\n", &[]), @r"
    run.yaml:3:1: `strategy: ddp` contradicts `fsdp: true` (run.yaml:4:1)
      |
    3 | strategy: ddp
      | ^^^^^^^^
    4 | fsdp: true
      | ^^^^
      hint: keep `strategy` and remove `fsdp`.
    ");
}

#[test]
fn warmup_contradiction() {
    insta::assert_snapshot!(refused("warmup_steps: 100\nwarmup_ratio: 0.1\n", &[]), @r"
    run.yaml:3:1: `warmup_steps: 100` contradicts `warmup_ratio: 0.1` (run.yaml:4:1)
      |
    3 | warmup_steps: 100
      | ^^^^^^^^^^^^
    4 | warmup_ratio: 0.1
      | ^^^^^^^^^^^^
      hint: both set the length of the warmup; keep one.
    ");
}

#[test]
fn key_not_implemented() {
    insta::assert_snapshot!(refused("neftune_noise_alpha: 5\n", &[]), @r"
    run.yaml:3:1: `neftune_noise_alpha` is not implemented yet
      |
    3 | neftune_noise_alpha: 5
      | ^^^^^^^^^^^^^^^^^^^
    ");
}

#[test]
fn file_not_given() {
    insta::assert_snapshot!(refused("deepspeed:\n  config_path: ds.json\n", &[]), @r"
    run.yaml:4:3: the file `ds.json` was not found
      |
    4 |   config_path: ds.json
      |   ^^^^^^^^^^^
      hint: give it as well: it is the DeepSpeed configuration.
    ");
}

#[test]
fn two_datasets() {
    insta::assert_snapshot!(refused("dataset_name: wikitext\ntrain_files: a.jsonl\n", &[]), @r"
    run.yaml:3:1: `dataset_name: wikitext` contradicts `train_files: a.jsonl` (run.yaml:4:1)
      |
    3 | dataset_name: wikitext
      | ^^^^^^^^^^^^
    4 | train_files: a.jsonl
      | ^^^^^^^^^^^
      hint: both set the training data; keep one.
    ");
}

#[test]
fn columns_must_be_a_map_of_names() {
    insta::assert_snapshot!(refused("columns: text\n", &[]), @r"
    run.yaml:3:10: `columns` expects a map such as `{text: body}`, found `text`
      |
    3 | columns: text
      |          ^^^^
    ");
    insta::assert_snapshot!(refused("columns: {text: [a]}\neval_fraction: 1\n", &[]), @r"
    run.yaml:3:17: `columns.text` expects the name of a column, found a list
      |
    3 | columns: {text: [a]}
      |                 ^

    error: run.yaml:4:16: `eval_fraction` must be above 0 and below 1, found 1
      |
    4 | eval_fraction: 1
      |                ^

    error: the configuration has 2 errors
    ");
}

#[test]
fn schedule_contradictions() {
    insta::assert_snapshot!(refused(
        "lr_scheduler_type: cosine\nscheduler: {type: WarmupLR, params: {warmup_steps: 5}}\n", &[]), @r"
    run.yaml:3:1: `lr_scheduler_type: cosine` contradicts `scheduler: {...}` (run.yaml:4:1)
      |
    3 | lr_scheduler_type: cosine
      | ^^^^^^^^^^^^^^^^^
    4 | scheduler: {type: WarmupLR, params: {warmup_steps: 5}}
      | ^^^^^^^^^
      hint: both set the learning-rate schedule; keep one.

    error: run.yaml:4:38: unknown key `scheduler.params.warmup_steps`
      |
    4 | scheduler: {type: WarmupLR, params: {warmup_steps: 5}}
      |                                      ^^^^^^^^^^^^
      hint: did you mean `warmup_type`?

    error: the configuration has 2 errors
    ");
    insta::assert_snapshot!(refused("lr_scheduler_type: cosine_with_min_lr\n", &[]), @r#"
    `lr_scheduler_kwargs` is missing: cosine_with_min_lr needs `min_lr_rate` or `min_lr`, such as `lr_scheduler_kwargs: {min_lr_rate: 0.1}`
    "#);
    insta::assert_snapshot!(refused(
        "warmup_steps: 3\nscheduler: {type: WarmupLR, params: {warmup_num_steps: 5}}\n", &[]), @r#"
    run.yaml:3:15: `warmup_steps` must be equal to the scheduler's `warmup_num_steps`, 5, found 3
      |
    3 | warmup_steps: 3
      |               ^
      hint: remove one of the two, or write `warmup_num_steps: auto`.
    "#);
}

#[test]
fn best_model_without_evaluation() {
    insta::assert_snapshot!(refused("load_best_model_at_end: true\n", &[]), @r#"
    run.yaml:3:25: `load_best_model_at_end` must be false unless evaluation is enabled (`eval_strategy: steps` or `epoch`), found true
      |
    3 | load_best_model_at_end: true
      |                         ^^^^
    "#);
    insta::assert_snapshot!(refused("eval_steps: 5\nfp16_full_eval: true\n", &[]), @r"
    run.yaml:4:17: `fp16_full_eval: true` is not implemented yet
      |
    4 | fp16_full_eval: true
      |                 ^^^^
      hint: evaluation uses the precision of training; set `mixed_precision: fp16` to use fp16 for both.
    ");
}

#[test]
fn tracker_not_implemented() {
    insta::assert_snapshot!(refused("report_to: [tensorboard, comet]\n", &[]), @r"
    run.yaml:3:26: `report_to: comet` is not implemented yet
      |
    3 | report_to: [tensorboard, comet]
      |                          ^^^^^
      hint: use `tensorboard`, `csv`, `wandb`, `mlflow` or `trackio`; metrics.jsonl in the output folder has all metrics as well.
    ");
}

#[test]
fn profiled_steps_are_a_range() {
    insta::assert_snapshot!(refused("profile_steps: 12:10\n", &[]), @r"
    run.yaml:3:16: `profile_steps` must be a range that begins at 1 or later and does not end before it begins, found 12:10
      |
    3 | profile_steps: 12:10
      |                ^^^^^
    ");
    insta::assert_snapshot!(refused("profile_steps: a few\n", &[]), @r"
    run.yaml:3:16: `profile_steps` expects a step, or the first and the last step as in `10:12`, found `a few`
      |
    3 | profile_steps: a few
      |                ^^^^^
    ");
}

#[test]
fn the_dashboard_needs_an_address() {
    insta::assert_snapshot!(refused("dashboard: host.example:80\n", &[]), @r"
    run.yaml:3:12: `dashboard` expects true, false, a port, or an address and a port such as `127.0.0.1:8420`, found `host.example:80`
      |
    3 | dashboard: host.example:80
      |            ^^^^^^^^^^^^^^^
    ");
}

#[test]
fn backend_not_implemented() {
    insta::assert_snapshot!(refused("distributed_backend: mpi\n", &[]), @r"
    run.yaml:3:22: `distributed_backend: mpi` is not implemented yet
      |
    3 | distributed_backend: mpi
      |                      ^^^
    ");
}

#[test]
fn offload_keys() {
    insta::assert_snapshot!(refused("offload_param: {device: cpu, ratio: 0.5}\n", &["offload_optimizer={device: cpu, ratio: 0}"]), @r"
    run.yaml:3:30: `offload_param.ratio` is not implemented yet
      |
    3 | offload_param: {device: cpu, ratio: 0.5}
      |                              ^^^^^

    error: argument offload_optimizer={device: cpu, ratio: 0}: `offload_optimizer.ratio` must be above 0 and at most 1, found 0

    error: the configuration has 2 errors
    ");
    insta::assert_snapshot!(refused("offload_optimizer: {device: cpu, rato: 0.5}\n", &[]), @r#"
    run.yaml:3:34: unknown key `offload_optimizer.rato`
      |
    3 | offload_optimizer: {device: cpu, rato: 0.5}
      |                                  ^^^^
      hint: did you mean `ratio`?
    "#);
}

#[test]
fn adapter_keys() {
    insta::assert_snapshot!(refused("peft_config: {rr: 8, target_modules: [q_proj]}\n", &[]), @r#"
    run.yaml:3:15: unknown key `peft_config.rr`
      |
    3 | peft_config: {rr: 8, target_modules: [q_proj]}
      |               ^^
      hint: did you mean `r`?
    "#);
    insta::assert_snapshot!(refused("lora: {r: 0, use_dora: true}\n", &[]), @r#"
    run.yaml:3:11: `peft_config.r` must be at least 1, found 0
      |
    3 | lora: {r: 0, use_dora: true}
      |           ^

    error: run.yaml:3:24: `peft_config.use_dora` must be left out: it is not implemented, found true
      |
    3 | lora: {r: 0, use_dora: true}
      |                        ^^^^

    error: the configuration has 2 errors
    "#);
    insta::assert_snapshot!(refused("lora_r: 8\n", &[]), @r#"
    run.yaml:3:9: `lora_r` must be left out unless `use_peft: true` is set: without it no adapter is trained, found 8
      |
    3 | lora_r: 8
      |         ^
    "#);
    insta::assert_snapshot!(refused("lora_r: 8\nadapter_name_or_path: a\n", &[]), @r#"
    run.yaml:3:1: `lora_r: 8` contradicts `adapter_name_or_path: a` (run.yaml:4:1)
      |
    3 | lora_r: 8
      | ^^^^^^
    4 | adapter_name_or_path: a
      | ^^^^^^^^^^^^^^^^^^^^
      hint: both describe the adapter; keep one.
    "#);
    insta::assert_snapshot!(refused("use_peft: false\nlora: {r: 8}\n", &[]), @r#"
    run.yaml:3:1: `use_peft: false` contradicts `lora: {...}` (run.yaml:4:1)
      |
    3 | use_peft: false
      | ^^^^^^^^
    4 | lora: {r: 8}
      | ^^^^
      hint: an adapter is trained only with `use_peft: true`.
    "#);
    insta::assert_snapshot!(refused("use_peft: true\nlora_dropout: 1\nlora_alpha: -2\n", &[]), @r#"
    run.yaml:4:15: `lora_dropout` must be at least 0 and below 1, found 1
      |
    4 | lora_dropout: 1
      |               ^

    error: run.yaml:5:13: `lora_alpha` must be above 0, found -2
      |
    5 | lora_alpha: -2
      |             ^^

    error: the configuration has 2 errors
    "#);
    insta::assert_snapshot!(refused("use_peft: true\nuse_dora: true\n", &[]), @r#"
    run.yaml:4:1: `use_dora` is not implemented yet
      |
    4 | use_dora: true
      | ^^^^^^^^
      hint: only LoRA and rsLoRA are implemented.
    "#);
}

#[test]
fn repeated_key() {
    insta::assert_snapshot!(refused("seed: 1\nseed: 2\n", &[]), @r#"
    run.yaml:4:1: the key `seed` is given twice; first at run.yaml:3:1
      |
    3 | seed: 1
      | ^^^^
    4 | seed: 2
      | ^^^^
      hint: keep one of the two lines.
    "#);
}

#[test]
fn invalid_yaml() {
    insta::assert_snapshot!(refused("seed: [1, 2\nmax_steps: 3\n", &[]), @r"
    run.yaml:3:7: `[` is never closed
      |
    3 | seed: [1, 2
      |       ^
    ");
}

#[test]
fn long_lines_are_shortened() {
    insta::assert_snapshot!(refused("train_files: [xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx, {a: 1}]\n", &[]), @r#"
    run.yaml:3:167: `train_files` expects a path or a list of paths, found a map
      |
    3 | xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx, {a: 1}]
      |                                                 ^
    "#);
}

#[test]
fn strategy_not_implemented() {
    insta::assert_snapshot!(refused("distributed_strategy: deepspeed\n", &[]), @r"
    run.yaml:3:23: `distributed_strategy: deepspeed` is not implemented
      |
    3 | distributed_strategy: deepspeed
      |                       ^^^^^^^^^
      hint: it names no stage: give the DeepSpeed file (`deepspeed: FILE`), or use `strategy: zero1`, `zero2` or `zero3`.
    ");
}

#[test]
fn experiment_name_is_not_a_path() {
    insta::assert_snapshot!(refused("experiment_name: ../x\n", &[]), @r#"
    run.yaml:3:18: `experiment_name` must be a single folder name without separators or a leading dot, found ../x
      |
    3 | experiment_name: ../x
      |                  ^^^^
    "#);
}

#[test]
fn empty_configuration() {
    insta::assert_snapshot!(whole("", &[]), @"`model` is missing: set `model: 15m` (or another size), or set `model_name_or_path` to a model on the Hub or a folder");
}

#[test]
fn file_without_keys() {
    insta::assert_snapshot!(whole("- a\n- b\n", &[]), @r#"
    run.yaml:1:1: `the file` expects lines of `key: value`, found a list
      |
    1 | - a
      | ^
    "#);
}

#[test]
fn two_models() {
    insta::assert_snapshot!(whole("model: 15m\nmodel_name_or_path: /models/llama\noutput_dir: o\n", &[]), @r"
    run.yaml:1:1: `model: 15m` contradicts `model_name_or_path: /models/llama` (run.yaml:2:1)
      |
    1 | model: 15m
      | ^^^^^
    2 | model_name_or_path: /models/llama
      | ^^^^^^^^^^^^^^^^^^
      hint: both set the model; keep one.
    ");
}

#[test]
fn unknown_model() {
    insta::assert_snapshot!(whole("model: 16m\noutput_dir: o\n", &[]), @r"
    run.yaml:1:8: `model` cannot be `16m`
      |
    1 | model: 16m
      |        ^^^
      hint: did you mean `15m`? Possible values: tiny, 15m, 90m, 300m, 1b, 7b.
    ");
}

#[test]
fn model_as_path() {
    insta::assert_snapshot!(whole("model: ./llama\noutput_dir: o\n", &[]), @r#"
    run.yaml:1:8: `model` must be the name of a size (use `model_name_or_path` for a folder), found ./llama
      |
    1 | model: ./llama
      |        ^^^^^^^
    "#);
}

#[test]
fn pretrained_without_folder() {
    insta::assert_snapshot!(whole("model: 15m\ninit: pretrained\noutput_dir: o\n", &[]), @r#"
    run.yaml:2:7: `init` must be `random` without `model_name_or_path`: there are no weights to load, found pretrained
      |
    2 | init: pretrained
      |       ^^^^^^^^^^
    "#);
}

#[test]
fn part_of_a_value_that_is_not_a_map() {
    insta::assert_snapshot!(refused("", &["model.hidden_size=64"]), @r"
    run.yaml:1:1: `model: 15m` contradicts `model.hidden_size` (argument model.hidden_size=64)
      |
    1 | model: 15m
      | ^^^^^
      hint: a part can only be set in a map; give the whole map, or remove one.
    ");
}

#[test]
fn a_revision_needs_a_repository() {
    insta::assert_snapshot!(refused("model_revision: v1\n", &[]), @r"
    run.yaml:3:17: `model_revision` must be left out without `model_name_or_path`, found v1
      |
    3 | model_revision: v1
      |                 ^^
    ");
}
