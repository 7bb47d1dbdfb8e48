//! The configurations of the guides, as their readers have them.

pub(super) const ZERO1: &str = r#"{
  "zero_optimization": {
    "stage": 1,
    "allgather_partitions": true,
    "allgather_bucket_size": 2e8,
    "overlap_comm": true,
    "reduce_scatter": true,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": true
  },
  "fp16": {
    "enabled": true,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1
  },
  "optimizer": {
    "type": "AdamW",
    "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}
  },
  "scheduler": {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}
  },
  "gradient_accumulation_steps": 8,
  "gradient_clipping": 1.0,
  "steps_per_print": 10,
  "train_batch_size": 32,
  "train_micro_batch_size_per_gpu": 4,
  "wall_clock_breakdown": false
}
"#;

/// The same with stage 2.
pub(super) fn zero2() -> String {
    ZERO1.replace("\"stage\": 1", "\"stage\": 2")
}

/// The same with a profiler.
pub(super) fn zero2_with_profiling() -> String {
    zero2().replace(
        "\"wall_clock_breakdown\": false",
        "\"wall_clock_breakdown\": true,\n  \"flops_profiler\": {\"enabled\": true, \"profile_step\": 1, \
         \"module_depth\": -1, \"top_modules\": 1, \"detailed\": true, \"output_file\": null}",
    )
}

pub(super) fn zero3() -> String {
    let start = ZERO1.find("    \"stage\": 1").expect("the stage");
    let end = ZERO1.find("  \"fp16\"").expect("the next block");
    let block = r#"    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "cpu", "pin_memory": true},
    "overlap_comm": true,
    "contiguous_gradients": true,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": true
  },
"#;
    format!("{}{block}{}", &ZERO1[..start], &ZERO1[end..])
}

/// The three files of guide 003 for one rank are right; this is the correction for four.
pub(super) fn for_four_ranks(text: &str) -> String {
    text.replace("\"train_batch_size\": 32", "\"train_batch_size\": 128")
}

/// Guide 004's file.
pub(super) const DS_CONFIG: &str = r#"{
  "train_batch_size": "auto",
  "gradient_accumulation_steps": "auto",
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.0}},
  "scheduler": {
    "type": "WarmupDecayLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 1000}
  },
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "cpu", "pin_memory": true},
    "contiguous_gradients": true,
    "overlap_comm": true
  },
  "fp16": {
    "enabled": true,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1
  },
  "bf16": {"enabled": false},
  "gradient_clipping": 1.0,
  "steps_per_print": 50
}
"#;

/// Guide 004's file with the keys that it adds against running out of memory.
pub(super) fn ds_config_for_less_memory() -> String {
    DS_CONFIG.replace(
        "\"steps_per_print\": 50",
        "\"steps_per_print\": 50,\n  \"gradient_checkpointing\": true,\n  \
         \"zero_optimization.reduce_bucket_size\": 5e8,\n  \"zero_optimization.stage3_max_live_parameters\": 1e9",
    )
}

pub(super) const FSDP_YAML: &str =
    "fsdp: True\nsharding_strategy: FULL_SHARD\nworld_size: 4\ncompile: False\n";

pub(super) const USE_FSDP: &str = "training:\n  use_fsdp: true\n  fsdp_sharding_strategy: \"FULL_SHARD\"\n  \
                                   gradient_checkpointing: true\n";

pub(super) const DDP: &str = "training:
  distributed: true
  distributed_strategy: \"ddp\"
  dataloader:
    batch_size: 8
    num_workers: 4
    pin_memory: true
  gradient_accumulation_steps: 4
  mixed_precision: \"fp16\"
  max_grad_norm: 1.0
";

pub(super) const DEEPSPEED: &str = "training:
  distributed: true
  distributed_strategy: \"deepspeed\"
  deepspeed:
    config_path: \"configs/deepspeed/zero2.json\"
  dataloader:
    batch_size: 4
    num_workers: 4
    pin_memory: true
  gradient_accumulation_steps: 8
";

pub(super) const DISTRIBUTED: &str = "training:
  distributed: true
  distributed_backend: \"nccl\"
  find_unused_parameters: false
  ddp_bucket_cap_mb: 25
  ddp_broadcast_buffers: true
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 2
  fp16: false
  bf16: true
  gradient_checkpointing: true
  dataloader_num_workers: 4
  dataloader_pin_memory: true
  dataloader_drop_last: true
";

pub(super) const DEEPSPEED_MEMORY: &str = "training:
  distributed_strategy: \"deepspeed\"
  deepspeed:
    config_path: \"configs/deepspeed/zero3.json\"
  per_device_train_batch_size: 1
  gradient_accumulation_steps: 16
";

pub(super) const DEEPSPEED_RATE: &str = "training:
  distributed_strategy: \"deepspeed\"
  deepspeed:
    config_path: \"configs/deepspeed/zero2.json\"
  learning_rate: 3e-5
  warmup_ratio: 0.1
";
