//! One run in several dialects is the same run.

use super::accepted;
use crate::RunConfig;

const COMMON: &str = "model: tiny\ntrain_files: data.jsonl\noutput_dir: out\nmax_steps: 100\nseed: 7\n";

const OURS: &str = "strategy: zero3
offload_optimizer: cpu
offload_param: cpu
mixed_precision: bf16
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
max_grad_norm: 0.5
learning_rate: 2e-5
adam_beta1: 0.8
weight_decay: 0.01
lr_scheduler_type: WarmupDecayLR
warmup_steps: 10
recompute: full
logging_steps: 10
nproc_per_node: 4
";

const DEEPSPEED: &str = r#"{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": 0.5,
  "steps_per_print": 10,
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "cpu"}
  },
  "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.8, 0.999], "weight_decay": 0.01}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 2e-5, "warmup_num_steps": 10}}
}"#;

const ACCELERATE: &str = "compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: cpu
  offload_param_device: cpu
  gradient_accumulation_steps: 8
  gradient_clipping: 0.5
  zero3_init_flag: true
mixed_precision: bf16
num_machines: 1
num_processes: 4
";

const TRAINER: &str = "learning_rate: 2.0e-05
adam_beta1: 0.8
weight_decay: 0.01
per_device_train_batch_size: 2
lr_scheduler_type: WarmupDecayLR
warmup_steps: 10
gradient_checkpointing: true
logging_steps: 10
";

fn same(a: &RunConfig, b: &RunConfig) {
    // Field by field, so that a failure shows the difference.
    assert_eq!(a.batch, b.batch);
    assert_eq!(a.optim, b.optim);
    assert_eq!(a.plan, b.plan);
    assert_eq!(a.precision, b.precision);
    assert_eq!(a.output, b.output);
    assert!(a.is_same_run(b));
}

#[test]
fn three_dialects_of_one_run() {
    let ours = accepted(&[("run.yaml", &format!("{COMMON}{OURS}"))], "", &[]).config;
    let deepspeed = accepted(
        &[("base.yaml", COMMON), ("ds.json", DEEPSPEED)],
        "deepspeed --num_gpus=4 train.py --config base.yaml --deepspeed ds.json --gradient_checkpointing",
        &[],
    );
    same(&deepspeed.config, &ours);
    let accelerate = accepted(
        &[("acc.yaml", ACCELERATE), ("run.yaml", &format!("{COMMON}{TRAINER}"))],
        "accelerate launch --config_file acc.yaml train.py --config run.yaml",
        &[],
    );
    same(&accelerate.config, &ours);
    let other = accepted(&[("run.yaml", &format!("{COMMON}{OURS}"))], "", &["seed=8"]).config;
    assert!(!other.is_same_run(&ours));
}

#[test]
fn fsdp_in_every_spelling() {
    let ours =
        accepted(&[("run.yaml", &format!("{COMMON}strategy: shard_grad_op\nbf16: true\n"))], "", &[]).config;
    for text in [
        "fsdp: shard_grad_op auto_wrap\nbf16: true\n",
        "fsdp: [shard_grad_op, auto_wrap]\nbf16: true\n",
        "fsdp: true\nsharding_strategy: SHARD_GRAD_OP\nmixed_precision: bf16\n",
        "training: {use_fsdp: true, fsdp_sharding_strategy: SHARD_GRAD_OP, bf16: true}\n",
        "fsdp: true\nfsdp_config: {reshard_after_forward: false}\nbf16: true\n",
    ] {
        same(&accepted(&[("run.yaml", &format!("{COMMON}{text}"))], "", &[]).config, &ours);
    }
}
