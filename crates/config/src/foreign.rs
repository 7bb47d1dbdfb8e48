//! Keys of Hugging Face, TRL, accelerate and DeepSpeed that Lockstep does not have.
//!
//! None is ignored silently. A key that cannot change the result is accepted with a note ([`INERT`]), possibly
//! only with values that turn the feature off. Every other key is an error that says what to use instead
//! ([`REFUSED`]).

/// A key without effect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inert {
    /// All spellings of the key.
    pub(crate) names: &'static [&'static str],
    /// The values without effect, in lower case; empty if no value has an effect. Other values are not implemented.
    pub(crate) only: &'static [&'static str],
    /// Completes "has no effect here: ...".
    pub(crate) why: &'static str,
    /// What to use instead of other values, as a sentence; empty if there is no alternative.
    pub(crate) instead: &'static str,
}

pub(crate) fn inert(name: &str) -> Option<&'static Inert> {
    INERT.iter().find(|i| i.names.contains(&name))
}

/// The refused key that `name` is or is part of, and what to use instead.
pub(crate) fn refused(name: &str) -> Option<(&'static str, &'static str)> {
    let covers = |key: &str| match key.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')),
    };
    REFUSED.iter().copied().find(|(key, _)| covers(key))
}

/// The key behind a name that users of other programs type, such as `lr`. It is only a suggestion: a short name does
/// not say whether it counts per rank or in total.
pub(crate) fn common_name(name: &str) -> Option<&'static str> {
    COMMON_NAMES.iter().find(|(names, _)| names.contains(&name)).map(|(_, key)| *key)
}

/// Common names of keys in other programs, and the keys.
pub(crate) const COMMON_NAMES: &[(&[&str], &str)] = &[
    (&["lr", "peak_lr", "max_lr", "base_lr"], "learning_rate"),
    (
        &["bs", "batch_size", "batch", "micro_batch_size", "per_device_batch_size"],
        "per_device_train_batch_size",
    ),
    (&["epochs", "num_epochs", "n_epochs", "epoch", "max_epochs"], "num_train_epochs"),
    (&["steps", "num_steps", "iters", "max_iters", "train_steps", "num_train_steps"], "max_steps"),
    (
        &["grad_accum", "accum", "accumulation_steps", "grad_accum_steps", "gradient_accumulation"],
        "gradient_accumulation_steps",
    ),
    (&["wd"], "weight_decay"),
    (&["warmup", "warmup_iters"], "warmup_steps"),
    (&["lr_scheduler", "lr_schedule", "schedule"], "lr_scheduler_type"),
    (&["clip", "grad_clip", "clip_grad", "clip_grad_norm", "max_norm"], "max_grad_norm"),
    (&["beta1"], "adam_beta1"),
    (&["beta2"], "adam_beta2"),
    (&["eps", "adam_eps"], "adam_epsilon"),
    (&["precision", "amp"], "mixed_precision"),
    (&["seq_len", "seq_length", "sequence_length", "max_len", "context_length", "max_tokens"], "max_length"),
    (&["data", "train_data", "data_path", "train_path"], "train_files"),
    (&["eval_data", "val_data", "val_files", "validation_data"], "eval_files"),
    (&["dataset"], "dataset_name"),
    (&["model_path", "model_name", "model_id", "base_model", "pretrained"], "model_name_or_path"),
    (&["out", "out_dir", "output", "save_dir", "output_path"], "output_dir"),
    (&["name", "run_id", "exp_name"], "experiment_name"),
    (&["resume", "load_checkpoint"], "resume_from_checkpoint"),
    (&["log_every", "log_steps", "log_interval"], "logging_steps"),
    (&["save_every", "save_interval"], "save_steps"),
    (&["eval_every", "eval_interval"], "eval_steps"),
    (&["gpus", "n_gpus", "num_proc", "nprocs"], "nproc_per_node"),
    (&["workers", "num_workers"], "dataloader_num_workers"),
    (&["activation_checkpoint", "grad_checkpointing", "checkpointing"], "gradient_checkpointing"),
];

const OFF: &[&str] = &["false", "no", "off", "none"];
const ON: &[&str] = &["true", "yes", "on"];

macro_rules! inert {
    ($([$($name:literal),*] $only:expr, $why:literal $(, $instead:literal)?;)*) => {
        pub(crate) const INERT: &[Inert] =
            &[$(Inert { names: &[$($name),*], only: $only, why: $why, instead: concat!($($instead)?) }),*];
    };
}

inert! {
    ["dataloader_pin_memory", "dataloader.pin_memory"] &[], "batches are not copied through pinned memory";
    ["dataloader_persistent_workers"] &[], "workers are threads and always persist";
    ["dataset_num_proc", "preprocessing_num_workers"] &[], "tokenization always uses all cores";
    ["compile", "torch_compile"] OFF, "models are not compiled";
    ["distributed"] &[], "it follows from the number of ranks";
    ["distributed_backend", "ddp_backend"] &["gloo", "nccl", "auto"], "the backend follows from the device";
    ["find_unused_parameters", "ddp_find_unused_parameters"] OFF, "every parameter has a gradient";
    ["ddp_broadcast_buffers"] &[], "the models have no buffers to broadcast";
    ["gradient_as_bucket_view"] &[], "gradients are always stored in their buckets";
    ["gradient_checkpointing_kwargs"] &[], "`recompute` configures recomputation";
    ["logging_strategy"] &["steps"], "logging is always by steps";
    ["logging_first_step"] &[], "`logging_steps` determines it";
    ["disable_tqdm"] &[], "command-line flags control how progress is shown";
    ["do_train"] ON, "this command trains";
    ["do_eval"] &[], "`eval_strategy` determines it";
    ["do_predict"] OFF, "this command trains";
    ["average_tokens_across_devices"] ON, "the loss is always averaged over the tokens of all ranks";
    ["label_smoothing_factor"] &["0", "0.0"], "it is off";
    ["group_by_length"] OFF, "it is off";
    ["auto_find_batch_size"] OFF, "memory is planned before the first step";
    ["push_to_hub"] OFF, "nothing is uploaded";
    ["trust_remote_code"] OFF, "code in model folders is never run";
    ["save_safetensors"] ON, "checkpoints are always safetensors";
    ["remove_unused_columns"] &[], "unused columns are never read";
    ["use_cache"] &[], "training uses no KV cache";
    ["attn_implementation"] &[], "attention is always memory-efficient";
    ["wall_clock_breakdown"] &[], "metrics.jsonl records the time of every step";
    ["fp16_opt_level"] &["o1", "o2"], "fp16 is always mixed precision with fp32 master weights", "use `mixed_precision: no` instead of O0; weights are never trained in fp16 alone (O3).";
    ["use_vllm"] OFF, "completions are generated by the training engine", "remove it: completions are generated by the training engine, with the weights that are trained.";
    ["use_transformers_continuous_batching", "use_transformers_paged", "cache_implementation", "transformers_continuous_batching_config"] &[], "completions are always generated in continuous batches with a paged KV cache";
    ["ds3_gather_for_generation"] &[], "the plan determines how weights are gathered";
    ["local_rollout_forward_batch_size", "precompute_ref_batch_size"] &[], "the plan determines the batches of frozen models";
    ["pad_to_multiple_of"] &[], "rows are never padded";
    ["router_aux_loss_coef"] &[], "the models have no experts";
    ["activation_offloading"] OFF, "it is off", "use `recompute: full` to save memory.";
    ["cast_lm_head_to_fp32"] OFF, "it is off";
    ["multi_objective_aggregation"] &["sum_then_normalize"], "rewards are summed, then normalized", "only the weighted sum of rewards is normalized.";
    ["use_adaptive_entropy"] OFF, "it is off", "use `entropy_coef` for a fixed coefficient.";
    ["log_multimodal"] &[], "the models have no images";
    ["log_unique_prompts"] OFF, "it is off";
    ["generate_during_eval"] OFF, "it is off";
    ["reference_free"] OFF, "it is off";
    ["log_level", "log_level_replica", "log_on_each_node"] &[], "command-line flags control what is printed";
    ["logging_nan_inf_filter"] &[], "a loss that is not finite is always reported";
    ["save_on_each_node"] OFF, "a checkpoint is written once, to a folder that all nodes share", "remove it: all nodes write to one shared folder.";
    ["restore_callback_states_from_checkpoint", "skip_memory_metrics", "include_num_input_tokens_seen", "include_tokens_per_second"] &[], "metrics.jsonl always has the tokens and the time of every step";
    ["ddp_static_graph"] &[], "the step is always the same";
    ["past_index"] &["-1"], "it is off";
    ["debug"] &[], "every collective is checked";
    ["prediction_loss_only", "eval_accumulation_steps", "eval_do_concat_batches", "batch_eval_metrics", "eval_use_gather_object", "include_for_metrics", "include_inputs_for_metrics"] &[], "evaluation only keeps sums";
    ["eval_delay"] &["0", "0.0"], "it is off", "remove it: evaluation starts at the first `eval_steps`.";
    ["jit_mode_eval", "use_ipex", "use_mps_device", "use_legacy_prediction_loop"] OFF, "it is off";
    ["half_precision_backend", "fp16_backend"] &["auto", "amp", "cuda_amp", "cpu_amp"], "there is one implementation of fp16", "use `mixed_precision: fp16` or `bf16`.";
    ["tpu_num_cores", "tpu_metrics_debug", "xla"] &["none", "false", "0"], "TPUs are not used", "use `device: cuda` or `cpu`.";
    ["hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision"] &[], "nothing is uploaded";
    ["torch_compile_backend", "torch_compile_mode", "torchdynamo"] &[], "models are not compiled";
    ["ray_scope", "mp_parameters", "deepspeed_plugin", "project", "trackio_space_id"] &[], "it is not used here";
    ["optim_target_modules"] &["none"], "it is off", "remove it: the optimizer treats all weights alike; see `freeze`.";
    ["split_batches", "dispatch_batches"] OFF, "every rank reads its own rows", "remove it: every rank reads its own rows.";
    ["dataset_kwargs", "dataset_batch_size", "num_of_sequences", "chars_per_token"] &[], "rows are tokenized once, in batches of their own";
    ["dataset_streaming", "streaming"] OFF, "it is off", "remove it: data is prepared once and read from disk.";
    ["eval_packing"] &[], "evaluation packs as training does";
    ["gradient_checkpointing_use_reentrant", "ignore_bias_buffers"] &[], "it is not needed here";
    ["load_in_8bit"] OFF, "it is off", "use `load_in_4bit: true`.";
    ["bnb_4bit_quant_storage"] &[], "codes are sharded as bytes";
    ["low_cpu_mem_usage"] &[], "weights are always loaded in pieces";
    ["torch_dtype", "dtype"] &["auto", "float32", "fp32"], "master weights are fp32", "master weights are fp32; use `mixed_precision: bf16` to compute in bf16.";
    ["bf16_backend"] &[], "there is one implementation of bf16";
    ["stop_token"] &["eos"], "completions end at the end-of-sequence token";
}

/// Names, and what to use instead as a sentence; empty if there is no alternative.
pub(crate) const REFUSED: &[(&str, &str)] = &[
    ("zero_stage", "use `strategy: zero1`, `zero2` or `zero3`."),
    ("optimizer", "use `optim: adamw`, `learning_rate`, `adam_beta1` and so on."),
    ("optim_args", ""),
    ("liger_kernel_config", "the LM head and the loss are always fused."),
    ("eval_dataset_name", "use `eval_files` or `dataset_test_split`."),
    ("cpu_offload", "use `offload_param: cpu`."),
    ("eos_token", ""),
    ("pad_token", "rows are never padded."),
    ("padding_free", "rows are never padded; use `packing: bfd` to pack them."),
    ("neftune_noise_alpha", ""),
    ("use_liger_kernel", "the LM head and the loss are always fused."),
    ("quantization", "use `load_in_4bit: true`."),
    ("ignore_data_skip", "a resumed run always continues at the next row; skipping takes no time."),
    ("save_only_model", "a checkpoint is always complete."),
    ("hub_model_id", "nothing is uploaded."),
    ("run_name", "use `experiment_name`."),
    ("torch_empty_cache_steps", "memory is allocated once, so there is no cache to empty."),
    ("full_determinism", "runs are always deterministic."),
    ("length_column_name", ""),
    ("accelerator_config", ""),
    ("parallelism_config", ""),
    ("tensor_parallel_size", ""),
    ("pipeline_parallel_size", ""),
    ("context_parallel_size", ""),
    ("sequence_parallel_size", ""),
    ("vllm_*", "remove it: completions are generated by the training engine."),
    ("generation_kwargs", "use `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty`."),
    ("chat_template_kwargs", "use `chat_template` with the text of a template."),
    ("max_tool_calling_iterations", "completions cannot call tools."),
    ("off_policy_mask_threshold", ""),
    ("entropy_coef_min", "adaptive entropy is not implemented; use `entropy_coef`."),
    ("entropy_coef_max", "adaptive entropy is not implemented; use `entropy_coef`."),
    ("entropy_coef_delta", "adaptive entropy is not implemented; use `entropy_coef`."),
    ("entropy_target", "adaptive entropy is not implemented; use `entropy_coef`."),
    (
        "log_completions_hub_repo",
        "nothing is uploaded; completions.jsonl in the output folder has all completions.",
    ),
    ("num_sample_generations", "use `log_completions` and `num_completions_to_print`."),
    (
        "sft_model_path",
        "use `model_name_or_path`; the reference model is the same unless `ref_model` is set.",
    ),
    (
        "mini_batch_size",
        "use `num_mini_batches`: the completions of a batch divided by those of a mini-batch.",
    ),
    (
        "local_mini_batch_size",
        "use `num_mini_batches`: the completions of a batch divided by those of a mini-batch.",
    ),
    ("local_batch_size", "use `per_device_train_batch_size` and `gradient_accumulation_steps`."),
    ("total_episodes", "use `max_steps` or `num_train_epochs`."),
    ("num_total_batches", "use `max_steps`."),
    ("stop_token_id", "completions end at the end-of-sequence token."),
    ("target_kl", "ppo does not stop early; use `adaptive_kl` and `kl_target` to bound the divergence."),
    ("rpo_alpha", "use `loss_type: [sigmoid, sft]` with `loss_weights: [1.0, ALPHA]`."),
    ("simpo_gamma", "SimPO is not implemented; use `algorithm: dpo`."),
    ("desirable_weight", "KTO is not implemented; use `algorithm: dpo` with pairs."),
    ("undesirable_weight", "KTO is not implemented; use `algorithm: dpo` with pairs."),
    ("use_dora", "only LoRA and rsLoRA are implemented."),
    ("lora_target_parameters", "use `lora_target_modules`."),
    ("model_adapter_name", "use `adapter_name_or_path`."),
    ("ref_adapter_name", "the reference is the model without its adapter."),
    ("reward_processing_classes", "the tokenizer of the reward model must be that of the policy."),
    ("model_init_kwargs", "use `model_revision` and `mixed_precision`."),
];
