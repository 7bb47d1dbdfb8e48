//! Configurations in the documented formats of DeepSpeed, accelerate and TRL, as their users have them: what resolves,
//! and what is refused by name.

use super::load_with;

struct Sample {
    what: &'static str,
    file: (&'static str, &'static str),
    line: &'static str,
    /// The text of the error, if it is refused.
    refused: Option<&'static str>,
}

const fn sample(
    what: &'static str,
    file: (&'static str, &'static str),
    line: &'static str,
    refused: Option<&'static str>,
) -> Sample {
    Sample { what, file, line, refused }
}

const TRAIN: &str = "deepspeed --num_gpus 8 train.py --deepspeed ds.json";
const LAUNCH: &str = "accelerate launch --config_file acc.yaml train.py";

const SAMPLES: &[Sample] = &[
    sample(
        "ZeRO-1 for the Trainer",
        (
            "ds.json",
            r#"{"fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}, "bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}, "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false}"#,
        ),
        TRAIN,
        None,
    ),
    sample(
        "ZeRO-2 with CPU offload",
        (
            "ds.json",
            r#"{"bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "allgather_partitions": true, "allgather_bucket_size": 2e8, "overlap_comm": true, "reduce_scatter": true, "reduce_bucket_size": 2e8, "contiguous_gradients": true}, "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}"#,
        ),
        TRAIN,
        None,
    ),
    sample(
        "ZeRO-3 with CPU offload",
        (
            "ds.json",
            r#"{"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "cpu", "pin_memory": true}, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true}, "gradient_accumulation_steps": "auto", "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}"#,
        ),
        TRAIN,
        None,
    ),
    sample(
        "ZeRO-3 with NVMe offload",
        (
            "ds.json",
            r#"{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 4, "fast_init": false}, "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9}}, "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": false, "overlap_events": true}, "bf16": {"enabled": true}}"#,
        ),
        TRAIN,
        None,
    ),
    sample(
        "no ZeRO, fp16",
        (
            "ds.json",
            r#"{"train_batch_size": 16, "steps_per_print": 2000, "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}}, "gradient_clipping": 1.0, "prescale_gradients": false, "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15}, "wall_clock_breakdown": false, "zero_optimization": {"stage": 0, "allgather_partitions": true, "reduce_scatter": true, "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000, "overlap_comm": true, "contiguous_gradients": true, "cpu_offload": false}}"#,
        ),
        TRAIN,
        None,
    ),
    sample(
        "pre-training with profiler and logger",
        (
            "ds.json",
            r#"{"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}, "flops_profiler": {"enabled": true, "profile_step": 5, "module_depth": -1, "top_modules": 3, "detailed": true}, "comms_logger": {"enabled": true, "verbose": false, "prof_all": true, "debug": false}, "tensorboard": {"enabled": true, "output_path": "logs/", "job_name": "run"}, "zero_allow_untested_optimizer": true, "wall_clock_breakdown": true}"#,
        ),
        TRAIN,
        None,
    ),
    sample(
        "cosine schedule and activation checkpointing",
        (
            "ds.json",
            r#"{"train_micro_batch_size_per_gpu": 1, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10000, "warmup_num_steps": 100, "warmup_min_ratio": 0.01, "cos_min_ratio": 0.1}}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}, "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": false, "contiguous_memory_optimization": false, "number_checkpoints": null, "synchronize_checkpoint_boundary": false, "profile": false}, "zero_optimization": {"stage": 2, "round_robin_gradients": true}}"#,
        ),
        TRAIN,
        None,
    ),
    sample(
        "offload of a part",
        (
            "ds.json",
            r#"{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}, "zero_force_ds_cpu_optimizer": false, "communication_data_type": "fp32"}"#,
        ),
        TRAIN,
        None,
    ),
    sample(
        "communication with a bf16 type",
        ("ds.json", r#"{"zero_optimization": {"stage": 2}, "communication_data_type": "bf16"}"#),
        TRAIN,
        Some("`communication_data_type: bf16` is not implemented"),
    ),
    sample(
        "one-bit Adam",
        ("ds.json", r#"{"optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23000}}}"#),
        TRAIN,
        Some("`optimizer.type: OneBitAdam` is not implemented"),
    ),
    sample(
        "ZeRO++",
        (
            "ds.json",
            r#"{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 16, "zero_quantized_gradients": true}}"#,
        ),
        TRAIN,
        Some("use `strategy: hybrid_shard`"),
    ),
    sample(
        "ZeRO-2 for SFT scripts",
        (
            "ds.json",
            r#"{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2, "overlap_comm": false, "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto"}, "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 1e5, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false}"#,
        ),
        TRAIN,
        None,
    ),
    sample(
        "ZeRO-3 without offload",
        (
            "ds.json",
            r#"{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bfloat16": {"enabled": true}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}, "stage3_max_live_parameters": 3e7, "stage3_prefetch_bucket_size": 3e7, "stage3_param_persistence_threshold": 1e4, "memory_efficient_linear": false}, "gradient_clipping": 1.0, "prescale_gradients": false, "wall_clock_breakdown": false, "hybrid_engine": {"enabled": false}}"#,
        ),
        TRAIN,
        None,
    ),
    sample(
        "Lion with monitors",
        (
            "ds.json",
            r#"{"train_batch_size": 64, "optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.1}}, "csv_monitor": {"enabled": true, "output_path": "csv", "job_name": "a"}, "wandb": {"enabled": false}, "checkpoint": {"load_universal": true}}"#,
        ),
        TRAIN,
        None,
    ),
    sample(
        "accelerate: DeepSpeed plugin, ZeRO-1",
        (
            "acc.yaml",
            "compute_environment: LOCAL_MACHINE\ndeepspeed_config:\n  zero_stage: 1\n  zero3_init_flag: false\ndistributed_type: DEEPSPEED\nmixed_precision: fp16\nmachine_rank: 0\nnum_machines: 1\nnum_processes: 2\n",
        ),
        LAUNCH,
        None,
    ),
    sample(
        "accelerate: one GPU",
        (
            "acc.yaml",
            "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: 'NO'\ndowncast_bf16: 'no'\ngpu_ids: all\nmachine_rank: 0\nmain_training_function: main\nmixed_precision: 'bf16'\nnum_machines: 1\nnum_processes: 1\nrdzv_backend: static\nsame_network: true\ntpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: false\n",
        ),
        LAUNCH,
        None,
    ),
    sample(
        "accelerate: several GPUs",
        (
            "acc.yaml",
            "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: MULTI_GPU\ndowncast_bf16: 'no'\ngpu_ids: all\nmachine_rank: 0\nmain_training_function: main\nmixed_precision: 'bf16'\nnum_machines: 1\nnum_processes: 8\nrdzv_backend: static\nsame_network: true\ntpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: false\n",
        ),
        LAUNCH,
        None,
    ),
    sample(
        "accelerate: two nodes",
        (
            "acc.yaml",
            "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmachine_rank: 1\nmain_process_ip: 10.0.0.2\nmain_process_port: 29500\nmain_training_function: main\nmixed_precision: fp16\nnum_machines: 2\nnum_processes: 16\nrdzv_backend: static\nsame_network: true\nuse_cpu: false\n",
        ),
        LAUNCH,
        None,
    ),
    sample(
        "accelerate: several CPU processes",
        (
            "acc.yaml",
            "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nmachine_rank: 0\nmixed_precision: 'no'\nnum_machines: 1\nnum_processes: 2\nuse_cpu: true\nipex_config: {ipex: false}\n",
        ),
        LAUNCH,
        None,
    ),
    sample(
        "accelerate: FSDP 1",
        (
            "acc.yaml",
            "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\ndowncast_bf16: 'no'\nenable_cpu_affinity: false\nfsdp_config:\n  fsdp_activation_checkpointing: false\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_backward_prefetch: BACKWARD_PRE\n  fsdp_cpu_ram_efficient_loading: true\n  fsdp_forward_prefetch: true\n  fsdp_offload_params: false\n  fsdp_reshard_after_forward: FULL_SHARD\n  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_sync_module_states: true\n  fsdp_use_orig_params: true\n  fsdp_version: 1\nmachine_rank: 0\nmain_training_function: main\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\nrdzv_backend: static\nsame_network: true\nuse_cpu: false\n",
        ),
        LAUNCH,
        None,
    ),
    sample(
        "accelerate: FSDP 2",
        (
            "acc.yaml",
            "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_activation_checkpointing: true\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_cpu_ram_efficient_loading: true\n  fsdp_offload_params: true\n  fsdp_reshard_after_forward: true\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n  fsdp_version: 2\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 4\nmachine_rank: 0\n",
        ),
        LAUNCH,
        None,
    ),
    sample(
        "accelerate: DeepSpeed plugin, ZeRO-2",
        (
            "acc.yaml",
            "compute_environment: LOCAL_MACHINE\ndebug: false\ndeepspeed_config:\n  deepspeed_multinode_launcher: standard\n  gradient_accumulation_steps: 1\n  gradient_clipping: 1.0\n  offload_optimizer_device: none\n  offload_param_device: none\n  zero3_init_flag: false\n  zero_stage: 2\ndistributed_type: DEEPSPEED\nmixed_precision: 'bf16'\nnum_machines: 1\nnum_processes: 8\nmachine_rank: 0\n",
        ),
        LAUNCH,
        None,
    ),
    sample(
        "accelerate: DeepSpeed plugin, ZeRO-3 with offload",
        (
            "acc.yaml",
            "compute_environment: LOCAL_MACHINE\ndeepspeed_config:\n  deepspeed_multinode_launcher: standard\n  offload_optimizer_device: cpu\n  offload_param_device: cpu\n  zero3_init_flag: true\n  zero3_save_16bit_model: true\n  zero_stage: 3\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\nmachine_rank: 0\n",
        ),
        LAUNCH,
        None,
    ),
    sample(
        "accelerate: Megatron",
        (
            "acc.yaml",
            "compute_environment: LOCAL_MACHINE\ndistributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degree: 2}\nnum_processes: 8\n",
        ),
        LAUNCH,
        Some("`megatron_lm_config` is not implemented"),
    ),
    sample(
        "accelerate: fp8",
        (
            "acc.yaml",
            "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: fp8\nfp8_config: {backend: TE}\nnum_processes: 8\n",
        ),
        LAUNCH,
        Some("`mixed_precision: fp8` is not implemented"),
    ),
    sample(
        "TRL: SFT",
        (
            "sft.yaml",
            "model_name_or_path: org/model\ndataset_name: org/data\nlearning_rate: 2.0e-05\nnum_train_epochs: 1\npacking: true\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 8\ngradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: false}\nbf16: true\nlogging_steps: 25\neval_strategy: steps\neval_steps: 100\noutput_dir: out\nreport_to: [tensorboard]\nlr_scheduler_type: cosine\nwarmup_ratio: 0.1\nmax_length: 2048\nattn_implementation: flash_attention_2\nremove_unused_columns: false\nlog_level: info\npush_to_hub: false\nsave_total_limit: 1\n",
        ),
        "trl sft --config sft.yaml",
        None,
    ),
    sample(
        "TRL: DPO",
        (
            "dpo.yaml",
            "model_name_or_path: org/model\ndataset_name: org/data\nbeta: 0.1\nlearning_rate: 5.0e-07\nloss_type: sigmoid\nmax_length: 1024\nnum_train_epochs: 1\noutput_dir: out\noptim: adamw_torch\n",
        ),
        "trl dpo --config dpo.yaml",
        None,
    ),
    sample(
        "TRL: GRPO",
        (
            "grpo.yaml",
            "model_name_or_path: org/model\ndataset_name: org/data\nreward_funcs: [exact_match]\nnum_generations: 8\nmax_completion_length: 256\ntemperature: 0.9\nuse_vllm: false\noutput_dir: out\n",
        ),
        "trl grpo --config grpo.yaml --accelerate_config zero2 --num_processes 8",
        None,
    ),
    sample(
        "TRL: LoRA",
        (
            "sft.yaml",
            "model_name_or_path: org/model\ndataset_name: org/data\nuse_peft: true\nlora_r: 16\noutput_dir: out\n",
        ),
        "trl sft --config sft.yaml",
        None,
    ),
    sample(
        "Trainer: run_clm",
        ("ds.json", "{\"zero_optimization\": {\"stage\": 2}}"),
        "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path org/model --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 --do_train --do_eval --per_device_train_batch_size 8 --per_device_eval_batch_size 8 --block_size 512 --output_dir out --overwrite_output_dir --bf16 True --evaluation_strategy no --save_strategy steps --save_steps 2000 --save_total_limit 1 --weight_decay 0. --warmup_ratio 0.03 --lr_scheduler_type cosine --logging_steps 1 --tf32 True --ddp_timeout 3600 --preprocessing_num_workers 16 --deepspeed ds.json",
        None,
    ),
    sample(
        "Trainer: FSDP flags",
        ("run.yaml", "seed: 1\n"),
        "torchrun --nproc_per_node=4 --master_port=9000 train.py --config run.yaml --model_name_or_path org/model --train_files d.json --bf16 True --output_dir out --num_train_epochs 3 --gradient_accumulation_steps 8 --evaluation_strategy no --fsdp \"full_shard auto_wrap\" --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer --tf32 True",
        None,
    ),
];

#[test]
fn at_least_four_in_five_resolve_and_the_rest_give_a_reason() {
    let mut resolved = 0;
    for Sample { what, file, line, refused } in SAMPLES {
        let has_model = file.1.contains("model_name_or_path") || line.contains("model_name_or_path");
        let overrides: &[&str] = if has_model { &[] } else { &["model=tiny"] };
        match (load_with(&[*file], line, overrides), refused) {
            (Ok(_), None) => resolved += 1,
            (Err(errors), Some(text)) => {
                assert!(errors.to_string().contains(text), "{what}: {errors}");
            }
            (Ok(_), Some(text)) => panic!("{what} is not refused with {text}"),
            (Err(errors), None) => panic!("{what}: {errors}"),
        }
    }
    assert!(resolved * 5 >= SAMPLES.len() * 4, "{resolved} of {}", SAMPLES.len());
}
