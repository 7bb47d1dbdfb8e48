//! The texts of errors in files and command lines of other trainers. Each snapshot is the whole text that a user sees.

use insta::assert_snapshot;

use super::refused;

/// The errors of a DeepSpeed file with a model.
fn deepspeed(text: &str) -> String {
    refused(&[("ds.json", text)], "", &["model=tiny"])
}

fn accelerate(text: &str) -> String {
    refused(&[("acc.yaml", text)], "", &["model=tiny"])
}

/// The errors of two files.
fn both(yaml: &str, json: &str) -> String {
    refused(&[("run.yaml", yaml), ("ds.json", json)], "", &["model=tiny"])
}

fn line(text: &str) -> String {
    refused(&[], text, &["model=tiny"])
}

#[test]
fn deepspeed_keys() {
    assert_snapshot!(deepspeed("{\"zero_optimization\": {\"stag\": 3}}"), @r#"
    ds.json:1:24: unknown key `zero_optimization.stag`
      |
    1 | {"zero_optimization": {"stag": 3}}
      |                        ^^^^^^
      hint: did you mean `zero_optimization.stage`?
    "#);
    assert_snapshot!(deepspeed("{\n  \"zero_optimization\": {\"stage\": 4}\n}"), @r#"
    ds.json:2:34: `zero_optimization.stage` expects 0, 1, 2 or 3, found `4`
      |
    2 |   "zero_optimization": {"stage": 4}
      |                                  ^
    "#);
    assert_snapshot!(deepspeed("{\"zero_optimization\": 3}"), @r#"
    ds.json:1:23: `zero_optimization` expects a map, found `3`
      |
    1 | {"zero_optimization": 3}
      |                       ^
    "#);
    assert_snapshot!(deepspeed("{\"steps_per_print\": 10, \"stage\": 2}"), @r#"
    ds.json:1:25: unknown key `stage`
      |
    1 | {"steps_per_print": 10, "stage": 2}
      |                         ^^^^^^^
      hint: did you mean `zero_optimization.stage`?
    "#);
    assert_snapshot!(deepspeed("{\"steps_per_print\": 10, \"gradient_acumulation_steps\": 2}"), @r#"
    ds.json:1:25: unknown key `gradient_acumulation_steps`
      |
    1 | {"steps_per_print": 10, "gradient_acumulation_steps": 2}
      |                         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
      hint: did you mean `gradient_accumulation_steps`?
    "#);
    assert_snapshot!(deepspeed("{\"train_micro_batch_size_per_gpu\": \"four\"}"), @r#"
    ds.json:1:36: `per_device_train_batch_size` expects a whole number, found `four`
      |
    1 | {"train_micro_batch_size_per_gpu": "four"}
      |                                    ^^^^^^
    "#);
    assert_snapshot!(deepspeed("{\"train_micro_batch_size_per_gpu\": 1.5}"), @r#"
    ds.json:1:36: `per_device_train_batch_size` expects a whole number, found `1.5`
      |
    1 | {"train_micro_batch_size_per_gpu": 1.5}
      |                                    ^^^
    "#);
}

#[test]
fn deepspeed_features() {
    assert_snapshot!(deepspeed("{\"zero_optimization\": {\"zero_quantized_weights\": true}}"), @r#"
    ds.json:1:50: `zero_optimization.zero_quantized_weights: true` is not implemented
      |
    1 | {"zero_optimization": {"zero_quantized_weights": true}}
      |                                                  ^^^^
      hint: remove it: communication is not quantized.
    "#);
    assert_snapshot!(deepspeed("{\"zero_optimization\": {\"zero_hpz_partition_size\": 8}}"), @r#"
    ds.json:1:51: `zero_optimization.zero_hpz_partition_size: 8` is not implemented
      |
    1 | {"zero_optimization": {"zero_hpz_partition_size": 8}}
      |                                                   ^
      hint: use `strategy: hybrid_shard`, which shards inside a node and replicates across nodes.
    "#);
    assert_snapshot!(deepspeed("{\"zero_optimization\": {\"offload_optimizer\": {\"device\": \"disk\"}}}"), @r#"
    ds.json:1:56: `offload_optimizer` cannot be `disk`
      |
    1 | {"zero_optimization": {"offload_optimizer": {"device": "disk"}}}
      |                                                        ^^^^^^
      hint: possible values: none, cpu, nvme.
    "#);
    assert_snapshot!(deepspeed("{\"zero_optimization\": {\"offload_optimizer\": {\"devise\": \"cpu\"}}}"), @r#"
    ds.json:1:45: `offload_optimizer` expects none, cpu, nvme or a map with `device`, found a map
      |
    1 | {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}
      |                                             ^

    error: ds.json:1:46: unknown key `offload_optimizer.devise`
      |
    1 | {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}
      |                                              ^^^^^^^^
      hint: did you mean `device`?

    error: the configuration has 2 errors
    "#);
    assert_snapshot!(deepspeed("{\"zero_optimization\": {\"offload_param\": \"cpu\"}}"), @r#"
    ds.json:1:41: `zero_optimization.offload_param` expects a map with `device`, found `cpu`
      |
    1 | {"zero_optimization": {"offload_param": "cpu"}}
      |                                         ^^^^^
    "#);
    assert_snapshot!(deepspeed("{\"zero_optimization\": {\"cpu_offload\": \"maybe\"}}"), @r#"
    ds.json:1:39: `zero_optimization.cpu_offload` expects true or false, found `maybe`
      |
    1 | {"zero_optimization": {"cpu_offload": "maybe"}}
      |                                       ^^^^^^^
    "#);
    assert_snapshot!(deepspeed("{\"steps_per_print\": 1, \"autotuning\": {\"enabled\": true}}"), @r#"
    ds.json:1:24: `autotuning` is not implemented yet
      |
    1 | {"steps_per_print": 1, "autotuning": {"enabled": true}}
      |                        ^^^^^^^^^^^^
      hint: remove it and use `recompute: auto` with `memory_budget_gib`.
    "#);
    assert_snapshot!(deepspeed("{\"steps_per_print\": 1, \"comet\": {\"enabled\": true}}"), @r#"
    ds.json:1:24: `comet` is not implemented yet
      |
    1 | {"steps_per_print": 1, "comet": {"enabled": true}}
      |                        ^^^^^^^
      hint: use `report_to: wandb` or `tensorboard`; metrics.jsonl in the output folder has all metrics.
    "#);
}

#[test]
fn deepspeed_blocks() {
    assert_snapshot!(deepspeed("{\"steps_per_print\": 1, \"sparse_attention\": {\"mode\": \"fixed\"}}"), @r#"
    ds.json:1:24: `sparse_attention` is not implemented yet
      |
    1 | {"steps_per_print": 1, "sparse_attention": {"mode": "fixed"}}
      |                        ^^^^^^^^^^^^^^^^^^
      hint: remove it: attention is dense.
    "#);
    assert_snapshot!(deepspeed("{\"steps_per_print\": 1, \"tensor_parallel\": {\"autotp_size\": 4}}"), @r#"
    ds.json:1:24: `tensor_parallel` is not implemented yet
      |
    1 | {"steps_per_print": 1, "tensor_parallel": {"autotp_size": 4}}
      |                        ^^^^^^^^^^^^^^^^^
      hint: use `strategy: zero3` to split the weights.
    "#);
    assert_snapshot!(deepspeed("{\"activation_checkpointing\": {\"cpu_checkpointing\": true}}"), @r#"
    ds.json:1:52: `activation_checkpointing.cpu_checkpointing: true` is not implemented
      |
    1 | {"activation_checkpointing": {"cpu_checkpointing": true}}
      |                                                    ^^^^
      hint: remove it and use `recompute: full`: activations are not offloaded.
    "#);
    assert_snapshot!(deepspeed("{\"steps_per_print\": 1, \"prescale_gradients\": true}"), @r#"
    ds.json:1:46: `prescale_gradients: true` is not implemented
      |
    1 | {"steps_per_print": 1, "prescale_gradients": true}
      |                                              ^^^^
      hint: remove it: gradients are summed in fp32.
    "#);
}

#[test]
fn deepspeed_optimizers_and_schedules() {
    assert_snapshot!(deepspeed("{\"optimizer\": {\"type\": \"OneBitAdam\", \"params\": {\"lr\": 1e-4}}}"), @r#"
    ds.json:1:24: `optimizer.type: OneBitAdam` is not implemented
      |
    1 | {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4}}}
      |                        ^^^^^^^^^^^^
      hint: use AdamW, Lion or SGD.
    "#);
    assert_snapshot!(deepspeed("{\"optimizer\": {\"type\": \"AdamX\"}}"), @r#"
    ds.json:1:24: `optimizer.type` cannot be `AdamX`
      |
    1 | {"optimizer": {"type": "AdamX"}}
      |                        ^^^^^^^
      hint: did you mean `AdamW`? Possible values: AdamW, Adam, Lion, SGD.
    "#);
    assert_snapshot!(deepspeed("{\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"betas\": [0.9]}}}"), @r#"
    ds.json:1:53: `optimizer.params.betas` expects a list of two numbers, found a list
      |
    1 | {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}
      |                                                     ^
    "#);
    assert_snapshot!(deepspeed("{\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"betas\": [0.9, 1.5]}}}"), @r#"
    ds.json:1:59: `adam_beta2` must be at least 0 and below 1, found 1.5
      |
    1 | {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.5]}}}
      |                                                           ^^^
    "#);
    assert_snapshot!(deepspeed("{\"optimizer\": {\"type\": \"Adam\", \"params\": {\"adam_w_mode\": false}}}"), @r#"
    ds.json:1:58: `optimizer.params.adam_w_mode: false` is not implemented
      |
    1 | {"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}}
      |                                                          ^^^^^
      hint: remove it: weight decay is always decoupled (AdamW).
    "#);
    assert_snapshot!(deepspeed("{\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": -1}}}"), @r#"
    ds.json:1:50: `learning_rate` must be a finite number, at least 0, found -1
      |
    1 | {"optimizer": {"type": "AdamW", "params": {"lr": -1}}}
      |                                                  ^^
    "#);
    assert_snapshot!(deepspeed("{\"steps_per_print\": 1, \"scheduler\": {\"type\": \"OneCycle\"}}"), @r#"
    ds.json:1:46: `scheduler: OneCycle` is not implemented yet
      |
    1 | {"steps_per_print": 1, "scheduler": {"type": "OneCycle"}}
      |                                              ^^^^^^^^^^
      hint: use linear, cosine or constant.
    "#);
    assert_snapshot!(deepspeed("{\"steps_per_print\": 1, \"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_steps\": 5}}}"), @r#"
    ds.json:1:69: unknown key `scheduler.params.warmup_steps`
      |
    1 | {"steps_per_print": 1, "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}}
      |                                                                     ^^^^^^^^^^^^^^
      hint: did you mean `warmup_type`?
    "#);
    assert_snapshot!(deepspeed("{\"steps_per_print\": 1, \"scheduler\": \"WarmupLR\"}"), @r#"
    ds.json:1:37: `scheduler` expects a map with `type` and `params`, found `WarmupLR`
      |
    1 | {"steps_per_print": 1, "scheduler": "WarmupLR"}
      |                                     ^^^^^^^^^^
    "#);
}

#[test]
fn batches() {
    let triple = "{\"train_batch_size\": 32, \"train_micro_batch_size_per_gpu\": 4, \"gradient_accumulation_steps\": 8}";
    assert_snapshot!(refused(&[("ds.json", triple)], "", &["model=tiny", "nproc_per_node=4"]), @r#"
    ds.json:1:2: `train_batch_size` is 32, but 4 rows x 8 micro-batches x 4 ranks are 128
      |
    1 | {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
      |  ^^^^^^^^^^^^^^^^^^
      hint: set `train_batch_size` to 128, or `gradient_accumulation_steps` to 2.
    "#);
    assert_snapshot!(refused(&[("ds.json", triple)], "", &["model=tiny", "nproc_per_node=3"]), @r#"
    ds.json:1:2: `train_batch_size` is 32, but 4 rows x 8 micro-batches x 3 ranks are 96
      |
    1 | {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
      |  ^^^^^^^^^^^^^^^^^^
      hint: set `train_batch_size` to 96, or remove it.
    "#);
    assert_snapshot!(both("train_batch: 10\nnproc_per_node: 4\n", "{}"), @r"
    run.yaml:1:1: `train_batch_size` of 10 is not divisible by 4 (4 ranks)
      |
    1 | train_batch: 10
      | ^^^^^^^^^^^
      hint: set it to 8 or 12, for example.
    ");
    assert_snapshot!(both("train_batch_size: 2\ngradient_accumulation_steps: 4\n", "{}"), @r"
    run.yaml:1:1: `train_batch_size` of 2 is not divisible by 4 (4 micro-batches x 1 rank)
      |
    1 | train_batch_size: 2
      | ^^^^^^^^^^^^^^^^
      hint: set it to 4, for example.
    ");
    assert_snapshot!(both("train_batch_size: 0\n", "{}"), @r"
    run.yaml:1:19: `train_batch_size` must be at least 1, found 0
      |
    1 | train_batch_size: 0
      |                   ^
    ");
}

#[test]
fn precision() {
    assert_snapshot!(both("bf16: true\n", "{\n  \"steps_per_print\": 10,\n  \"fp16\": {\"enabled\": true}\n}"), @r#"
    run.yaml:1:1: `bf16: true` contradicts `fp16.enabled: true` (ds.json:3:12)
      |
    1 | bf16: true
      | ^^^^
      ::: ds.json:3:12
    3 |   "fp16": {"enabled": true}
      |            ^^^^^^^^^
      hint: at most one of `bf16` and `fp16` can be true.
    "#);
    assert_snapshot!(both("fp16: false\n", "{\n  \"steps_per_print\": 10,\n  \"fp16\": {\"enabled\": true}\n}"), @r#"
    run.yaml:1:1: `fp16: false` contradicts `fp16.enabled: true` (ds.json:3:12)
      |
    1 | fp16: false
      | ^^^^
      ::: ds.json:3:12
    3 |   "fp16": {"enabled": true}
      |            ^^^^^^^^^
      hint: the two files disagree; keep one of the two.
    "#);
    assert_snapshot!(both("mixed_precision: bf16\n", "{\n  \"steps_per_print\": 10,\n  \"fp16\": {\"enabled\": true}\n}"), @r#"
    run.yaml:1:1: `mixed_precision: bf16` contradicts `fp16.enabled: true` (ds.json:3:12)
      |
    1 | mixed_precision: bf16
      | ^^^^^^^^^^^^^^^
      ::: ds.json:3:12
    3 |   "fp16": {"enabled": true}
      |            ^^^^^^^^^
      hint: both set the precision; keep one.
    "#);
    assert_snapshot!(deepspeed("{\"steps_per_print\": 1, \"data_types\": {\"grad_accum_dtype\": \"fp16\"}}"), @r#"
    ds.json:1:59: `data_types.grad_accum_dtype: fp16` is not implemented
      |
    1 | {"steps_per_print": 1, "data_types": {"grad_accum_dtype": "fp16"}}
      |                                                           ^^^^^^
      hint: use `fp32`, or `bf16` with one micro-batch per step.
    "#);
    assert_snapshot!(deepspeed("{\"steps_per_print\": 1, \"amp\": {\"enabled\": true}}"), @r#"
    ds.json:1:43: `amp.enabled: true` is not implemented
      |
    1 | {"steps_per_print": 1, "amp": {"enabled": true}}
      |                                           ^^^^
      hint: use `fp16` or `bf16`; Apex is not needed.
    "#);
}

#[test]
fn sources_that_disagree() {
    assert_snapshot!(both("gradient_accumulation_steps: 4\n", "{\n  \"steps_per_print\": 10,\n  \"gradient_accumulation_steps\": 8\n}"), @r#"
    run.yaml:1:1: `gradient_accumulation_steps: 4` contradicts `gradient_accumulation_steps: 8` (ds.json:3:3)
      |
    1 | gradient_accumulation_steps: 4
      | ^^^^^^^^^^^^^^^^^^^^^^^^^^^
      ::: ds.json:3:3
    3 |   "gradient_accumulation_steps": 8
      |   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
      hint: the two files disagree; keep one of the two.
    "#);
    assert_snapshot!(both("strategy: zero2\n", "{\n  \"zero_optimization\": {\n    \"stage\": 3\n  }\n}"), @r#"
    run.yaml:1:1: `strategy: zero2` contradicts `zero_optimization.stage: 3` (ds.json:3:5)
      |
    1 | strategy: zero2
      | ^^^^^^^^
      ::: ds.json:3:5
    3 |     "stage": 3
      |     ^^^^^^^
      hint: the two files disagree; keep one of the two.
    "#);
    assert_snapshot!(both("max_grad_norm: 0.5\n", "{\"steps_per_print\": 10, \"gradient_clipping\": 1.0}"), @r#"
    run.yaml:1:1: `max_grad_norm: 0.5` contradicts `gradient_clipping: 1.0` (ds.json:1:25)
      |
    1 | max_grad_norm: 0.5
      | ^^^^^^^^^^^^^
      ::: ds.json:1:25
    1 | {"steps_per_print": 10, "gradient_clipping": 1.0}
      |                         ^^^^^^^^^^^^^^^^^^^
      hint: the two files disagree; keep one of the two.
    "#);
    assert_snapshot!(both("offload_optimizer: nvme\n", "{\"zero_optimization\": {\"offload_optimizer\": {\"device\": \"cpu\"}}}"), @r#"
    run.yaml:1:1: `offload_optimizer: nvme` contradicts `zero_optimization.offload_optimizer: {device: "cpu"}` (ds.json:1:24)
      |
    1 | offload_optimizer: nvme
      | ^^^^^^^^^^^^^^^^^
      ::: ds.json:1:24
    1 | {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
      |                        ^^^^^^^^^^^^^^^^^^^
      hint: the two files disagree; keep one of the two.
    "#);
    assert_snapshot!(refused(&[("a.yaml", "seed: 1\n"), ("b.yaml", "model: tiny\nseed: 2\n")], "", &[]), @r"
    a.yaml:1:1: `seed: 1` contradicts `seed: 2` (b.yaml:2:1)
      |
    1 | seed: 1
      | ^^^^
      ::: b.yaml:2:1
    2 | seed: 2
      | ^^^^
      hint: the two files disagree; keep one of the two.
    ");
    assert_snapshot!(
        refused(
            &[("ds.json", "{\"train_micro_batch_size_per_gpu\": 4}")],
            "deepspeed train.py --deepspeed ds.json --per_device_train_batch_size 2",
            &["model=tiny"]
        ), @r#"
    ds.json:1:2: `train_micro_batch_size_per_gpu: 4` contradicts `per_device_train_batch_size: 2` (argument --per_device_train_batch_size 2)
      |
    1 | {"train_micro_batch_size_per_gpu": 4}
      |  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
      hint: the flag and the DeepSpeed file disagree; make them equal, or write "auto" in the file.
    "#
    );
    assert_snapshot!(
        refused(
            &[("acc.yaml", "machine_rank: 0\nmain_process_ip: a\n"), ("other.yaml", "machine_rank: 1\nmain_process_ip: a\n")],
            "",
            &["model=tiny"]
        ), @r"
    acc.yaml:1:1: `machine_rank: 0` contradicts `machine_rank: 1` (other.yaml:1:1)
      |
    1 | machine_rank: 0
      | ^^^^^^^^^^^^
      ::: other.yaml:1:1
    1 | machine_rank: 1
      | ^^^^^^^^^^^^
      hint: both are the same setting of the launcher; keep one.
    "    );
}

#[test]
fn all_errors_of_all_files_at_once() {
    assert_snapshot!(both("lerning_rate: 1e-4\nbf16: true\n", "{\n  \"zero_optimization\": {\"stage\": 9},\n  \"fp16\": {\"enabled\": true}\n}"), @r#"
    run.yaml:1:1: unknown key `lerning_rate`
      |
    1 | lerning_rate: 1e-4
      | ^^^^^^^^^^^^
      hint: did you mean `learning_rate`?

    error: run.yaml:2:1: `bf16: true` contradicts `fp16.enabled: true` (ds.json:3:12)
      |
    2 | bf16: true
      | ^^^^
      ::: ds.json:3:12
    3 |   "fp16": {"enabled": true}
      |            ^^^^^^^^^
      hint: at most one of `bf16` and `fp16` can be true.

    error: ds.json:2:34: `zero_optimization.stage` expects 0, 1, 2 or 3, found `9`
      |
    2 |   "zero_optimization": {"stage": 9},
      |                                  ^

    error: the configuration has 3 errors
    "#);
}

#[test]
fn accelerate_keys() {
    assert_snapshot!(accelerate("distributed_type: MEGATRON_LM\n"), @r"
    acc.yaml:1:19: `distributed_type: MEGATRON_LM` is not implemented
      |
    1 | distributed_type: MEGATRON_LM
      |                   ^^^^^^^^^^^
      hint: use FSDP or DEEPSPEED.
    ");
    assert_snapshot!(accelerate("distributed_type: MULTI_GPUS\n"), @r"
    acc.yaml:1:19: `distributed_type` cannot be `MULTI_GPUS`
      |
    1 | distributed_type: MULTI_GPUS
      |                   ^^^^^^^^^^
      hint: possible values: NO, MULTI_GPU, MULTI_CPU, FSDP, DEEPSPEED.
    ");
    assert_snapshot!(accelerate("distributed_type: XLA\n"), @r"
    acc.yaml:1:19: `distributed_type: XLA` is not implemented
      |
    1 | distributed_type: XLA
      |                   ^^^
      hint: use MULTI_GPU or MULTI_CPU.
    ");
    assert_snapshot!(accelerate("compute_environment: AMAZON_SAGEMAKER\n"), @r"
    acc.yaml:1:22: `compute_environment: AMAZON_SAGEMAKER` is not implemented
      |
    1 | compute_environment: AMAZON_SAGEMAKER
      |                      ^^^^^^^^^^^^^^^^
      hint: use LOCAL_MACHINE.
    ");
    assert_snapshot!(accelerate("machine_rank: 0\nnum_process: 4\n"), @r"
    acc.yaml:2:1: unknown key `num_process`
      |
    2 | num_process: 4
      | ^^^^^^^^^^^
      hint: did you mean `num_processes`?
    ");
    assert_snapshot!(accelerate("machine_rank: first\n"), @r"
    acc.yaml:1:15: `machine_rank` expects a whole number, found `first`
      |
    1 | machine_rank: first
      |               ^^^^^
    ");
    assert_snapshot!(accelerate("machine_rank: 0\nnum_machines: 2\nnum_processes: 3\n"), @r"
    acc.yaml:3:16: `num_processes` must be a multiple of the number of nodes, 2, found 3
      |
    3 | num_processes: 3
      |                ^
      hint: every node has the same number of processes.
    ");
}

#[test]
fn accelerate_blocks() {
    assert_snapshot!(accelerate("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD_ZERO2\n"), @r"
    acc.yaml:3:27: `fsdp_config.fsdp_sharding_strategy: HYBRID_SHARD_ZERO2` is not implemented
      |
    3 |   fsdp_sharding_strategy: HYBRID_SHARD_ZERO2
      |                           ^^^^^^^^^^^^^^^^^^
      hint: use HYBRID_SHARD or SHARD_GRAD_OP.
    ");
    assert_snapshot!(accelerate("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_stratgy: FULL_SHARD\n"), @r"
    acc.yaml:3:3: unknown key `fsdp_config.fsdp_sharding_stratgy`
      |
    3 |   fsdp_sharding_stratgy: FULL_SHARD
      |   ^^^^^^^^^^^^^^^^^^^^^
      hint: did you mean `sharding_strategy`?
    ");
    assert_snapshot!(accelerate("distributed_type: NO\nmixed_precision: fp8\n"), @r"
    acc.yaml:2:18: `mixed_precision: fp8` is not implemented yet
      |
    2 | mixed_precision: fp8
      |                  ^^^
      hint: use `mixed_precision: bf16`.
    ");
    assert_snapshot!(accelerate("distributed_type: NO\ndynamo_config:\n  dynamo_backend: INDUCTOR\n"), @r"
    acc.yaml:2:1: `dynamo_config` is not implemented yet
      |
    2 | dynamo_config:
      | ^^^^^^^^^^^^^
      hint: remove it: models are not compiled.
    ");
    assert_snapshot!(accelerate("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 5\n"), @r"
    acc.yaml:3:15: `deepspeed_config.zero_stage` expects 0, 1, 2 or 3, found `5`
      |
    3 |   zero_stage: 5
      |               ^
    ");
    assert_snapshot!(accelerate("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"), @r"
    acc.yaml:3:3: the file `ds.json` was not found
      |
    3 |   deepspeed_config_file: ds.json
      |   ^^^^^^^^^^^^^^^^^^^^^
      hint: give it as well: it is the DeepSpeed configuration.
    ");
}

#[test]
fn trainer_keys() {
    let yaml = |text: &str| refused(&[("run.yaml", text)], "", &["model=tiny"]);
    assert_snapshot!(yaml("fsdp: full_shards auto_wrap\n"), @r"
    run.yaml:1:7: `fsdp` cannot be `full_shards`
      |
    1 | fsdp: full_shards auto_wrap
      |       ^^^^^^^^^^^^^^^^^^^^^
      hint: did you mean `full_shard`? Possible values: full_shard, shard_grad_op, no_shard, hybrid_shard, offload, auto_wrap.
    ");
    assert_snapshot!(yaml("fsdp: hybrid_shard_zero2\n"), @r"
    run.yaml:1:7: `fsdp: hybrid_shard_zero2` is not implemented
      |
    1 | fsdp: hybrid_shard_zero2
      |       ^^^^^^^^^^^^^^^^^^
      hint: use hybrid_shard or shard_grad_op.
    ");
    assert_snapshot!(yaml("fsdp_config: fsdp.json\n"), @r"
    run.yaml:1:14: `fsdp_config: fsdp.json` is not implemented
      |
    1 | fsdp_config: fsdp.json
      |              ^^^^^^^^^
      hint: write the map itself: `fsdp_config: {...}`.
    ");
    assert_snapshot!(yaml("deepspeed: ds.json\n"), @r"
    run.yaml:1:1: the file `ds.json` was not found
      |
    1 | deepspeed: ds.json
      | ^^^^^^^^^
      hint: give it as well: it is the DeepSpeed configuration.
    ");
    assert_snapshot!(yaml("deepspeed: true\n"), @r"
    run.yaml:1:12: `deepspeed` expects the name of a DeepSpeed file, or its keys as a map, found `true`
      |
    1 | deepspeed: true
      |            ^^^^
    ");
    assert_snapshot!(yaml("deepspeed:\n  zero_optimization:\n    stage: 3\n    satge3_max_live_parameters: 1\n"), @r"
    run.yaml:4:5: unknown key `deepspeed.zero_optimization.satge3_max_live_parameters`
      |
    4 |     satge3_max_live_parameters: 1
      |     ^^^^^^^^^^^^^^^^^^^^^^^^^^
      hint: did you mean `zero_optimization.stage3_max_live_parameters`?
    ");
    assert_snapshot!(yaml("distributed_strategy: deepspeed\n"), @r"
    run.yaml:1:23: `distributed_strategy: deepspeed` is not implemented
      |
    1 | distributed_strategy: deepspeed
      |                       ^^^^^^^^^
      hint: it names no stage: give the DeepSpeed file (`deepspeed: FILE`), or use `strategy: zero1`, `zero2` or `zero3`.
    ");
    assert_snapshot!(yaml("optimizer: adamw\n"), @r"
    run.yaml:1:1: `optimizer` is not implemented yet
      |
    1 | optimizer: adamw
      | ^^^^^^^^^
      hint: use `optim: adamw`, `learning_rate`, `adam_beta1` and so on.
    ");
    assert_snapshot!(yaml("world_size: 4\nnproc_per_node: 2\n"), @r"
    run.yaml:1:13: `world_size` must be the product of `nodes` and `nproc_per_node`, found 4
      |
    1 | world_size: 4
      |             ^
      hint: 2 ranks are started: remove it, or start 4.
    ");
}

#[test]
fn launch_lines() {
    assert_snapshot!(line("torchrun --nproc_per_nod=4 train.py"), @r"
    unknown flag `--nproc_per_nod` of torchrun
      hint: did you mean `--nproc_per_node`?
    ");
    assert_snapshot!(line("torchrun --nnodes=1:4 train.py"), @r"
    `--nnodes` of torchrun is not implemented
      hint: the number of nodes is fixed; write one number.
    ");
    assert_snapshot!(line("torchrun --nproc_per_node=4"), @r"
    the command line names no script
      hint: write a command such as `torchrun --nproc_per_node=4 train.py --config run.yaml`.
    ");
    assert_snapshot!(line("torchrun --nproc_per_node=cpu train.py"), @r"
    argument --nproc_per_node cpu: `--nproc_per_node: cpu` is not implemented
      hint: write the number of processes.
    ");
    assert_snapshot!(line("torchrun --nproc_per_node=two train.py"), @r"argument --nproc_per_node two: `nproc_per_node` expects a whole number, found `two`");
    assert_snapshot!(line("torchrun train.py --lerning_rate 1e-4 --batch 4"), @r"
    unknown flag `--lerning_rate` of the script
      hint: did you mean `--learning_rate`?

    error: unknown flag `--batch` of the script
      hint: did you mean `--per_device_train_batch_size`?

    error: the configuration has 2 errors
    ");
    assert_snapshot!(line("torchrun train.py --mode eval"), @r"
    `--mode` of torchrun is not implemented
      hint: only `--mode train` is translated.
    ");
    assert_snapshot!(line("torchrun train.py --learning_rate fast"), @r"argument --learning_rate fast: `learning_rate` expects a number, found `fast`");
    assert_snapshot!(line("torchrun train.py output"), @r"
    `output` belongs to no flag
      hint: write `--flag value`; only YAML and JSON files need no flag.
    ");
    assert_snapshot!(line("torchrun train.py --config run.yaml"), @r"
    argument --config run.yaml: the file `run.yaml` was not found
      hint: give it as well: it is the configuration.
    ");
    assert_snapshot!(line("deepspeed --autotuning run train.py"), @r"
    `--autotuning` of deepspeed is not implemented
      hint: remove it and use `recompute: auto` with `memory_budget_gib`.
    ");
    assert_snapshot!(line("accelerate launch --use_megatron_lm train.py"), @r"
    `--use_megatron_lm` of accelerate launch is not implemented
      hint: use FSDP or DeepSpeed.
    ");
    assert_snapshot!(line("accelerate launch --config_file"), @r"
    `--config_file` needs a value
      hint: write the value after it.

    error: the command line names no script
      hint: write a command such as `torchrun --nproc_per_node=4 train.py --config run.yaml`.

    error: the configuration has 2 errors
    ");
    assert_snapshot!(line("trl kto --model_name_or_path m"), @r"
    `trl kto` has no counterpart; there are sft, dpo, grpo, rloo, reward
      hint: write a command such as `torchrun --nproc_per_node=4 train.py --config run.yaml`.
    ");
    assert_snapshot!(line("trl sft --model_name_or_path m --use_peft --use_dora"), @r"
    argument --use_dora true: `use_dora` is not implemented yet
      hint: only LoRA and rsLoRA are implemented.
    ");
    assert_snapshot!(line("mpirun -n 4 python train.py"), @r"
    `mpirun` is not a launcher that is known here
      hint: write a command such as `torchrun --nproc_per_node=4 train.py --config run.yaml`.
    ");
    assert_snapshot!(line(" "), @r"
    the command line is empty
      hint: write a command such as `torchrun --nproc_per_node=4 train.py --config run.yaml`.
    ");
    assert_snapshot!(line("torchrun --rdzv_endpoint=:x train.py"), @r"argument --rdzv_endpoint :x: `--rdzv_endpoint` expects HOST:PORT, found `:x`");
}
