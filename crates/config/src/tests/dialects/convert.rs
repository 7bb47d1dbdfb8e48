//! The YAML of `convert` is the same run.

use insta::assert_snapshot;

use super::guide_configs::*;
use super::{accepted, words};
use crate::{Inputs, Source, convert, translate_launch_line};

fn converted(files: &[(&str, &str)], line: &str, overrides: &[&str]) -> String {
    let files: Vec<Source<'_>> = files.iter().map(|(name, text)| Source { name, text }).collect();
    let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
    let line = (!line.is_empty()).then(|| translate_launch_line(&words(line)).unwrap());
    let inputs = Inputs { files: &files, launch_line: line.as_ref(), overrides: &overrides, variables: &[] };
    convert(&inputs).unwrap_or_else(|errors| panic!("{errors}"))
}

#[test]
fn reading_it_back_is_the_same_run() {
    let fsdp = "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 2, fsdp_offload_params: true}\n\
                num_machines: 2\nnum_processes: 4\nmixed_precision: fp16\n";
    let grpo = "trl grpo --model_name_or_path m --dataset_name d --reward_funcs exact_match \
                --num_generations 4 --fp16 --chat_template '{% for m in messages %}{{ m }}\n{% endfor %}'";
    let map = "model: {architectures: [LlamaForCausalLM], hidden_size: 64, tie: 'yes', eps: 1e-5}\n\
               train_files: ['a b.jsonl', \"c#d.jsonl\"]\ncolumns: {prompt: 'a: b'}\n";
    for (files, line) in [
        (vec![("ds.json", ZERO1.to_owned())], "torchrun train.py --model tiny"),
        (vec![("ds.json", zero3())], "torchrun train.py --model tiny"),
        (vec![("ds.json", zero3()), ("run.yaml", map.to_owned())], ""),
        (
            vec![("ds.json", ds_config_for_less_memory())],
            "deepspeed --num_gpus=4 train.py --model tiny --deepspeed ds.json --per_device_train_batch_size 2",
        ),
        (vec![("run.yaml", format!("model: tiny\n{DDP}"))], ""),
        (vec![("run.yaml", format!("model: tiny\n{DISTRIBUTED}"))], "torchrun --nproc_per_node 4 train.py"),
        (
            vec![
                ("run.yaml", format!("model: tiny\n{DEEPSPEED}")),
                ("configs/deepspeed/zero2.json", zero2()),
            ],
            "",
        ),
        (vec![("acc.yaml", fsdp.to_owned()), ("run.yaml", "model: tiny\n".to_owned())], ""),
        (vec![], grpo),
        (vec![("run.yaml", map.to_owned())], "NCCL_TIMEOUT=5 torchrun train.py --report_to none"),
        (
            vec![("run.yaml", "model: tiny\ntrain_batch: 64\nsave_strategy: 'no'\n".to_owned())],
            "torchrun --nproc_per_node=4 t.py",
        ),
    ] {
        let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
        let overrides = ["output_dir=out", "seed=9"];
        let text = converted(&files, line, &overrides);
        let first = accepted(&files, line, &overrides).config;
        let second = accepted(&[("out.yaml", &text)], "", &[]).config;
        assert!(second.is_same_run(&first), "{text}\n{first:#?}\n{second:#?}");
    }
}

#[test]
fn it_says_where_values_came_from_and_what_was_dropped() {
    let yaml = "model: tiny\ndeepspeed: ds.json\nlearning_rate: 1e-5\n";
    let json = "{\n  \"zero_optimization\": {\n    \"stage\": 2,\n    \"overlap_comm\": true,\n    \
                \"offload_optimizer\": {\"device\": \"cpu\", \"pin_memory\": true}\n  },\n  \
                \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 3e-5}}\n}\n";
    let line = "OMP_NUM_THREADS=4 torchrun --nnodes=2 --node_rank=1 --nproc_per_node=4 --master_addr=a train.py run.yaml --bf16";
    assert_snapshot!(converted(&[("run.yaml", yaml), ("ds.json", json)], line, &[]), @r#"
    # Configuration of Lockstep, translated from run.yaml, ds.json and a command line of torchrun.

    # Model
    model: tiny  # run.yaml:1:1

    # Optimizer
    optim: adamw  # ds.json:7:17, optimizer.type
    learning_rate: 1e-5  # run.yaml:3:1

    # Precision
    bf16: true  # argument --bf16 true

    # Plan
    strategy: zero2  # ds.json:3:5, zero_optimization.stage
    # ds.json:5:5, zero_optimization.offload_optimizer
    offload_optimizer:
      device: "cpu"
    nodes: 2  # argument --nnodes 2
    nproc_per_node: 4  # argument --nproc_per_node 4

    # Flags of `lockstep train` for this launch:
    #   --node-rank 1 --master-addr a

    # Variables of the command line:
    #   OMP_NUM_THREADS=4

    # Notes:
    #   `learning_rate: 1e-5` (run.yaml:3:1) replaces `optimizer.params.lr: 3e-5` (ds.json:7:45) of the DeepSpeed file

    # Dropped, because it has no effect here:
    #   `zero_optimization.overlap_comm` (ds.json:4:5) has no effect here: communication always overlaps with computation
    #   `zero_optimization.offload_optimizer.pin_memory` (ds.json:5:44) has no effect here: the plan determines it
    #   the variable OMP_NUM_THREADS has no effect here: `threads` sets the threads of a rank
    "#);
}

/// A DeepSpeed file says nothing about the model.
#[test]
fn files_without_a_model_are_converted() {
    let page = converted(
        &[("ds.json", r#"{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}"#)],
        "",
        &[],
    );
    assert!(page.contains("strategy: zero3") && !page.contains("# Model"), "{page}");
    assert!(
        !page.contains("model: 15m") && page.contains("# No model is named: set `model_name_or_path`"),
        "{page}"
    );
}
