//! What the keys of other trainers' files result in.

use lockstep_core::DType;

use super::accepted;
use super::guide_configs::{DS_CONFIG, ZERO1, ds_config_for_less_memory, zero3};
use crate::{
    FileRole, LaunchSettings, LossScaling, LrSchedulerType, NumProcesses, Offload, OptimizerName, Precision,
    Recompute, StateDtype, StrategyName, Warmup, WarmupLrParams, WarmupType, recognize,
};

fn deepspeed(text: &str, overrides: &[&str]) -> crate::RunConfig {
    let overrides: Vec<&str> = [&["model=tiny"], overrides].concat();
    accepted(&[("ds.json", text)], "", &overrides).config
}

#[test]
fn deepspeed_monitors_are_trackers() {
    use crate::Tracker::{Csv, Wandb};
    let text = r#"{"steps_per_print": 1, "tensorboard": {"enabled": true, "output_path": "tb"},
        "wandb": {"enabled": true, "project": "mine", "team": "us"}, "csv_monitor": {"enabled": true},
        "wall_clock_breakdown": false, "flops_profiler": {"enabled": true}}"#;
    let output = deepspeed(text, &[]).output;
    assert_eq!(output.tensorboard, Some("tb".into()));
    assert_eq!((output.trackers, output.project.as_deref()), (vec![Wandb, Csv], Some("mine")));
    assert!(!output.wall_clock_breakdown, "DeepSpeed's key of that name decides");
    let text = r#"{"steps_per_print": 1, "wandb": {"enabled": false}, "flops_profiler": {"enabled": true}}"#;
    let output = deepspeed(text, &[]).output;
    assert!(output.trackers.is_empty() && output.wall_clock_breakdown);
    assert_eq!(deepspeed(text, &["report_to=csv"]).output.trackers, [Csv]);
}

#[test]
fn deepspeeds_bf16_states() {
    let optim = |text: &str| deepspeed(text, &[]).optim;
    let all = optim(
        r#"{"steps_per_print": 1, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}}"#,
    );
    assert_eq!((all.master_weights, all.gradient_dtype), (false, DType::BF16));
    assert_eq!(all.state_dtype, StateDtype::Bf16);
    let off = optim(
        r#"{"steps_per_print": 1, "bf16": {"enabled": true, "bf16_master_weights_and_grads": false, "bf16_optimizer_states": false}}"#,
    );
    assert!(off.master_weights && off.state_dtype == StateDtype::F32 && off.gradient_dtype == DType::F32);
    let summed = optim(r#"{"steps_per_print": 1, "data_types": {"grad_accum_dtype": "bf16"}}"#);
    assert_eq!((summed.gradient_dtype, summed.master_weights), (DType::BF16, true));
}

#[test]
fn files_are_recognized_by_their_keys() {
    for (text, role) in [
        (ZERO1, FileRole::DeepSpeed),
        (DS_CONFIG, FileRole::DeepSpeed),
        ("{\"zero_optimization.stage\": 2}", FileRole::DeepSpeed),
        ("compute_environment: LOCAL_MACHINE\n", FileRole::Accelerate),
        ("distributed_type: FSDP\nmixed_precision: bf16\n", FileRole::Accelerate),
        ("model: tiny\nfp16: {enabled: true}\n", FileRole::Config),
        ("model: tiny\nzero_optimization: {stage: 2}\n", FileRole::Config),
        ("training:\n  use_fsdp: true\n", FileRole::Config),
        ("optimizer: adamw\n", FileRole::Config),
        ("[1]", FileRole::Config),
        ("", FileRole::Config),
    ] {
        assert_eq!(recognize(text), role, "{text}");
    }
}

#[test]
fn every_value_of_a_deepspeed_file_arrives() {
    let config = deepspeed(ZERO1, &[]);
    assert_eq!((config.plan.strategy, config.plan.allgather_bucket_size), (StrategyName::Zero1, 200_000_000));
    assert_eq!(config.plan.reduce_bucket_size, 200_000_000);
    assert_eq!(config.precision, Precision::F16(LossScaling::default()));
    let optim = &config.optim;
    assert_eq!((optim.optimizer, optim.learning_rate), (OptimizerName::AdamW, 3e-5));
    assert_eq!((optim.adam_beta1, optim.adam_beta2, optim.adam_epsilon), (0.8, 0.999, 1e-8));
    assert_eq!((optim.weight_decay, optim.max_grad_norm), (3e-7, Some(1.0)));
    let rates = WarmupLrParams {
        warmup_min_lr: 0.0,
        warmup_max_lr: None,
        warmup_type: WarmupType::Log,
        total_num_steps: None,
    };
    assert_eq!(
        (optim.lr_scheduler_type, optim.warmup),
        (LrSchedulerType::WarmupLr(rates), Warmup::Steps(500))
    );
    assert_eq!(config.batch.per_device_train_batch_size, 4);
    assert_eq!((config.batch.gradient_accumulation_steps, config.output.logging_steps), (8, 10));
    assert_eq!(config.origin("strategy").to_string(), "ds.json:3:5");
    assert_eq!(config.origin("adam_beta1").to_string(), "ds.json:21:28");
}

#[test]
fn offload_and_automatic_sizes() {
    let config = deepspeed(&zero3(), &[]);
    assert_eq!((config.plan.offload_optimizer, config.plan.offload_param), (Offload::Cpu, Offload::Cpu));
    assert_eq!((config.plan.offload_ratio, config.plan.reduce_bucket_size), (None, 0));
    assert_eq!(
        config.origin("reduce_bucket_size").to_string(),
        "auto (zero3.json:9:27)".replace("zero3", "ds")
    );
    // transformers' formula: the square of the hidden size.
    let mut resolved = config.clone();
    resolved.resolve_auto_sizes(4096);
    assert_eq!(resolved.plan.reduce_bucket_size, 4096 * 4096);
    let mut given = deepspeed(ZERO1, &[]);
    given.resolve_auto_sizes(4096);
    assert_eq!(given.plan.reduce_bucket_size, 200_000_000);
    let model = "model={architectures: [LlamaForCausalLM], hidden_size: 64, num_hidden_layers: 2}";
    let explicit = accepted(&[("ds.json", &zero3())], "", &[model]).config;
    assert_eq!(explicit.plan.reduce_bucket_size, 64 * 64);
    let nvme = "{\"zero_optimization\": {\"stage\": 3, \"offload_optimizer\": {\"device\": \"nvme\", \
                \"nvme_path\": \"/local\", \"buffer_count\": 4, \"pipeline_read\": true, \"ratio\": 0.3}}}";
    let plan = deepspeed(nvme, &[]).plan;
    assert_eq!((plan.offload_optimizer, plan.offload_ratio), (Offload::Nvme, Some(0.3)));
    assert_eq!(plan.nvme_path, Some("/local".into()));
    let legacy = "{\"zero_optimization\": {\"stage\": 2, \"cpu_offload\": true}}";
    assert_eq!(deepspeed(legacy, &[]).plan.offload_optimizer, Offload::Cpu);
}

#[test]
fn dotted_keys_replace_nested_ones() {
    let config = deepspeed(&ds_config_for_less_memory(), &[]);
    assert_eq!((config.plan.recompute, config.plan.reduce_bucket_size), (Recompute::Full, 500_000_000));
    let text = "{\"zero_optimization\": {\"stage\": 3}, \"zero_optimization.stage\": 2}";
    let config = deepspeed(text, &[]);
    assert_eq!(config.plan.strategy, StrategyName::Zero2);
    assert!(
        config.notes.iter().any(|note| note.contains("replaces the value at ds.json:1:33")),
        "{:?}",
        config.notes
    );
}

#[test]
fn auto_leaves_values_to_the_rest() {
    let text = "{\"train_batch_size\": \"auto\", \"train_micro_batch_size_per_gpu\": \"auto\", \
                \"gradient_accumulation_steps\": \"auto\", \"gradient_clipping\": \"auto\", \
                \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": \"auto\", \"betas\": \"auto\", \
                \"eps\": \"auto\", \"weight_decay\": \"auto\"}}, \
                \"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_min_lr\": \"auto\", \
                \"warmup_max_lr\": \"auto\", \"warmup_num_steps\": \"auto\"}}, \
                \"fp16\": {\"enabled\": \"auto\", \"loss_scale_window\": 500}, \"bf16\": {\"enabled\": \"auto\"}}";
    let flags = "deepspeed train.py --deepspeed ds.json --model tiny --learning_rate 1e-3 --adam_beta2 0.95 \
                 --per_device_train_batch_size 2 --gradient_accumulation_steps 3 --max_grad_norm 0.5 --warmup_steps 7 --fp16";
    let config = accepted(&[("ds.json", text)], flags, &[]).config;
    assert_eq!((config.optim.learning_rate, config.optim.adam_beta2), (1e-3, 0.95));
    assert_eq!((config.optim.max_grad_norm, config.optim.warmup), (Some(0.5), Warmup::Steps(7)));
    assert_eq!(config.batch.per_device_train_batch_size, 2);
    let scaling = LossScaling { loss_scale_window: 500, ..LossScaling::default() };
    assert_eq!(config.precision, Precision::F16(scaling));
    // Without other sources, the Trainer's defaults count: no warmup.
    let config = deepspeed(text, &[]);
    assert_eq!((config.optim.learning_rate, config.optim.warmup), (5e-5, Warmup::Steps(0)));
    assert_eq!((config.batch.per_device_train_batch_size, config.precision), (8, Precision::F32));
    assert!(config.origin("learning_rate").to_string().starts_with("auto (ds.json:1:"));
}

#[test]
fn the_batch_is_solved_for_what_is_not_set() {
    for (text, micro, accumulation) in [
        ("train_batch_size: 64\n", 16, 1),
        ("train_batch_size: 64\ngradient_accumulation_steps: 2\n", 8, 2),
        ("train_batch_size: 64\nper_device_train_batch_size: 2\n", 2, 8),
        ("train_batch_size: 64\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 4\n", 4, 4),
    ] {
        let config = accepted(&[("run.yaml", text)], "", &["model=tiny", "nproc_per_node=4"]).config;
        let batch = &config.batch;
        assert_eq!(
            (batch.per_device_train_batch_size, batch.gradient_accumulation_steps),
            (micro, accumulation)
        );
        assert_eq!(config.global_batch_rows(), 64);
    }
}

#[test]
fn the_scheduler_and_the_optimizer_share_the_learning_rate() {
    let text = |lr: &str, max: &str| {
        format!(
            "{{\"optimizer\": {{\"type\": \"Adam\", \"params\": {{{lr}}}}}, \
             \"scheduler\": {{\"type\": \"WarmupDecayLR\", \"params\": {{{max}}}}}}}"
        )
    };
    let config = deepspeed(&text("\"lr\": 1e-4", "\"warmup_max_lr\": 2e-4"), &[]);
    assert_eq!(config.optim.learning_rate, 2e-4);
    assert!(config.notes.iter().any(|note| note.contains("`optimizer.params.lr`")), "{:?}", config.notes);
    assert!(config.notes.iter().any(|note| note.contains("is AdamW, as in DeepSpeed")));
    assert_eq!(deepspeed(&text("", "\"warmup_max_lr\": 2e-4"), &[]).optim.learning_rate, 2e-4);
    // An override replaces both.
    let config = deepspeed(&text("\"lr\": 1e-4", "\"warmup_max_lr\": 1e-4"), &["learning_rate=3e-4"]);
    assert_eq!(config.optim.learning_rate, 3e-4);
    let LrSchedulerType::WarmupDecayLr(params) = config.optim.lr_scheduler_type else { panic!() };
    assert_eq!(params.warmup_max_lr, None);
}

#[test]
fn deepspeed_inside_our_own_files() {
    for text in [
        "model: tiny\ndeepspeed:\n  zero_optimization:\n    stage: 2\n  train_micro_batch_size_per_gpu: 3\n",
        "model: tiny\nzero_optimization: {stage: 2}\ntrain_micro_batch_size_per_gpu: 3\n",
        "model: tiny\ntraining:\n  deepspeed: {zero_optimization.stage: 2}\n  per_device_train_batch_size: 3\n",
        "model: tiny\nzero_optimization.stage: 2\nper_device_train_batch_size: 3\n",
    ] {
        let config = accepted(&[("run.yaml", text)], "", &[]).config;
        assert_eq!(
            (config.plan.strategy, config.batch.per_device_train_batch_size),
            (StrategyName::Zero2, 3),
            "{text}"
        );
    }
    // The pasted `deepspeed` with its own learning rate gives way to ours.
    let text =
        "model: tiny\nlearning_rate: 1e-3\ndeepspeed: {optimizer: {type: AdamW, params: {lr: 1e-4}}}\n";
    let config = accepted(&[("run.yaml", text)], "", &[]).config;
    assert_eq!(config.optim.learning_rate, 1e-3);
}

#[test]
fn accelerate_files() {
    let text = "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\ndowncast_bf16: 'no'\n\
                fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n  fsdp_offload_params: true\n  \
                fsdp_activation_checkpointing: true\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\n\
                main_process_port: 29500\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 8\n";
    let loaded = accepted(&[("acc.yaml", text)], "", &["model=tiny"]);
    let plan = &loaded.config.plan;
    assert_eq!((plan.nodes, plan.nproc_per_node, plan.strategy), (2, 4, StrategyName::ShardGradOp));
    assert_eq!((plan.offload_param, plan.offload_optimizer), (Offload::Cpu, Offload::Cpu));
    assert_eq!((plan.recompute, loaded.config.precision), (Recompute::Full, Precision::Bf16));
    assert_eq!(loaded.config.origin("nproc_per_node").to_string(), "acc.yaml:15:1");
    assert_eq!(
        loaded.launch,
        LaunchSettings {
            nodes: Some(2),
            nproc_per_node: Some(NumProcesses::Count(4)),
            node_rank: Some(1),
            master_addr: Some("10.0.0.1".into()),
            master_port: Some(29500),
            ..LaunchSettings::default()
        }
    );
    for (number, strategy) in
        [(1, StrategyName::FullShard), (3, StrategyName::NoShard), (4, StrategyName::HybridShard)]
    {
        let text = format!("distributed_type: FSDP\nfsdp_config: {{fsdp_sharding_strategy: {number}}}\n");
        assert_eq!(accepted(&[("acc.yaml", &text)], "", &["model=tiny"]).config.plan.strategy, strategy);
    }
    let plain = accepted(&[("acc.yaml", "distributed_type: FSDP\n")], "", &["model=tiny"]).config;
    assert_eq!(plain.plan.strategy, StrategyName::FullShard);
}

#[test]
fn weak_values_give_way() {
    let both = [
        ("ds.json", "{\"steps_per_print\": 2000, \"zero_optimization\": {\"stage\": 2}}"),
        ("run.yaml", "logging_steps: 5\n"),
    ];
    let config = accepted(&both, "", &["model=tiny"]).config;
    assert_eq!(config.output.logging_steps, 5);
    assert!(
        config
            .notes
            .iter()
            .any(|note| note.contains("`steps_per_print`") && note.contains("another source sets it"))
    );
}
