//! Keys of Hugging Face, TRL, accelerate and DeepSpeed that are not ours.
//!
//! None is ever ignored in silence. A key that cannot change the result here is accepted with a note
//! ([`INERT`]), if need be only with the values that ask for nothing; every other one is refused as
//! known but not implemented ([`REFUSED`]), with what to do instead.

/// A key that has no effect here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inert {
    /// All spellings.
    pub(crate) names: &'static [&'static str],
    /// The values that have no effect, lower case; empty for any. Others are not implemented.
    pub(crate) only: &'static [&'static str],
    /// Completes "has no effect here: ...".
    pub(crate) why: &'static str,
}

pub(crate) fn inert(name: &str) -> Option<&'static Inert> {
    INERT.iter().find(|i| i.names.contains(&name))
}

/// The refused key that `name` is or lies under, with what to do instead.
pub(crate) fn refused(name: &str) -> Option<(&'static str, &'static str)> {
    let covers =
        |key: &str| name.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    REFUSED.iter().copied().find(|(key, _)| covers(key))
}

const OFF: &[&str] = &["false", "no", "off", "none"];
const ON: &[&str] = &["true", "yes", "on"];

macro_rules! inert {
    ($([$($name:literal),*] $only:expr, $why:literal;)*) => {
        pub(crate) const INERT: &[Inert] = &[$(Inert { names: &[$($name),*], only: $only, why: $why }),*];
    };
}

inert! {
    ["dataloader_pin_memory", "dataloader.pin_memory"] &[], "batches are not copied through pinned memory";
    ["dataloader_persistent_workers"] &[], "workers are threads, and stay";
    ["dataset_num_proc", "preprocessing_num_workers"] &[], "all cores tokenise rows as they are read";
    ["compile", "torch_compile"] OFF, "models are not compiled";
    ["distributed"] &[], "the number of ranks decides";
    ["distributed_backend", "ddp_backend"] &["gloo", "nccl", "auto"], "the carrier follows from the device";
    ["find_unused_parameters", "ddp_find_unused_parameters"] OFF, "every parameter has a gradient";
    ["ddp_broadcast_buffers"] &[], "models here have no buffers to broadcast";
    ["gradient_as_bucket_view"] &[], "gradients always lie in their buckets";
    ["gradient_checkpointing_kwargs"] &[], "`recompute` says all there is to say";
    ["logging_strategy"] &["steps"], "it is always by steps";
    ["logging_first_step"] &[], "`logging_steps` decides";
    ["disable_tqdm"] &[], "the command line decides how progress is shown";
    ["do_train"] ON, "this command trains";
    ["do_eval"] &[], "`eval_strategy` decides";
    ["do_predict"] OFF, "this command trains";
    ["average_tokens_across_devices"] ON, "sums are always over the tokens of all ranks";
    ["label_smoothing_factor"] &["0", "0.0"], "it is off";
    ["group_by_length"] OFF, "it is off";
    ["auto_find_batch_size"] OFF, "memory is planned before the first step";
    ["push_to_hub"] OFF, "nothing is uploaded";
    ["trust_remote_code"] OFF, "no code from files is ever run";
    ["save_safetensors"] ON, "checkpoints are always safetensors";
    ["remove_unused_columns"] &[], "unused columns are never read";
    ["use_cache"] &[], "training keeps no key-value cache";
    ["attn_implementation"] &[], "attention never holds the whole score matrix";
    ["wall_clock_breakdown"] OFF, "it is off";
}

/// Name and what to do instead, as a sentence, or empty.
pub(crate) const REFUSED: &[(&str, &str)] = &[
    ("deepspeed", "write its settings here: `strategy: zero3`, `offload_optimizer: cpu` and so on."),
    ("deepspeed_config", "write its settings here: `strategy: zero3`, `offload_optimizer: cpu` and so on."),
    ("zero_optimization", "write `strategy: zero1`, `zero2` or `zero3`, and `offload_optimizer: cpu`."),
    ("zero_stage", "write `strategy: zero1`, `zero2` or `zero3`."),
    ("optimizer", "write `optim: adamw`, `learning_rate`, `adam_beta1` and so on."),
    ("optim_args", ""),
    ("train_batch_size", "write `per_device_train_batch_size` and `gradient_accumulation_steps`."),
    ("train_batch", "write `per_device_train_batch_size` and `gradient_accumulation_steps`."),
    ("train_micro_batch_size_per_gpu", "write `per_device_train_batch_size`."),
    ("steps_per_print", "write `logging_steps`."),
    ("flops_profiler", ""),
    ("activation_checkpointing", "write `recompute: full`."),
    ("fp16_opt_level", "write `mixed_precision: fp16` or `bf16`."),
    ("fp16_backend", "write `mixed_precision: fp16` or `bf16`."),
    ("torch_dtype", "weights are kept in fp32; write `mixed_precision: bf16` for bf16 compute."),
    ("dtype", "weights are kept in fp32; write `mixed_precision: bf16` for bf16 compute."),
    ("fsdp_config", "write `strategy: full_shard`; units are the model's blocks."),
    ("cpu_offload", "write `offload_param: cpu`."),
    ("eos_token", ""),
    ("pad_token", "rows are never padded."),
    ("padding_free", "rows are never padded; write `packing: bfd` to pack them."),
    ("loss_type", ""),
    ("neftune_noise_alpha", ""),
    ("use_liger_kernel", "the fused head is always used."),
    ("lora_r", "adapters cannot be trained yet; `freeze` names weights that are left alone."),
    ("lora_alpha", "adapters cannot be trained yet; `freeze` names weights that are left alone."),
    ("lora_dropout", ""),
    ("lora_target_modules", "adapters cannot be trained yet; `freeze` names weights that are left alone."),
    ("use_peft", "adapters cannot be trained yet; `freeze` names weights that are left alone."),
    ("load_in_4bit", ""),
    ("load_in_8bit", ""),
    ("quantization", ""),
    ("ignore_data_skip", "a resumed run always continues at the exact row."),
    ("save_only_model", "a checkpoint is always complete."),
    ("hub_model_id", "nothing is uploaded."),
    ("run_name", "write `experiment_name`."),
    ("torch_empty_cache_steps", "memory is planned, so there is no cache to empty."),
    ("full_determinism", "runs on the CPU are always deterministic."),
    ("length_column_name", ""),
    ("accelerator_config", ""),
    ("parallelism_config", ""),
    ("tensor_parallel_size", ""),
    ("pipeline_parallel_size", ""),
    ("context_parallel_size", ""),
    ("sequence_parallel_size", ""),
    ("beta", "this is a setting of DPO and GRPO."),
    ("num_generations", "this is a setting of GRPO."),
    ("kl_coef", "this is a setting of PPO."),
    ("reward_model_path", "this is a setting of PPO."),
    ("ref_model", "this is a setting of DPO and PPO."),
];
