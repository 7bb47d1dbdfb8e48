//! Command lines of other launchers: what they set.

use super::{accepted, launch_line, words};
use crate::{
    FileRole, Inputs, LaunchSettings, ModelSource, NumProcesses, Precision, Recompute, Source, StrategyName,
    referenced_files,
};

#[test]
fn torchrun_sets_the_world() {
    let line = "torchrun --nnodes=2 --node-rank 1 --nproc_per_node=4 --master_addr=10.0.0.1 --master_port 29501 \
                --max-restarts=3 --tee 3 --rdzv_backend=c10d train.py --model tiny --learning_rate 1e-3";
    let loaded = accepted(&[], line, &[]);
    assert_eq!(
        loaded.launch,
        LaunchSettings {
            nodes: Some(2),
            nproc_per_node: Some(NumProcesses::Count(4)),
            node_rank: Some(1),
            master_addr: Some("10.0.0.1".into()),
            master_port: Some(29501),
            max_restarts: Some(3),
            tee: Some("3".into()),
            ..LaunchSettings::default()
        }
    );
    assert_eq!(
        loaded.launch.flags().join(" "),
        "--node-rank 1 --master-addr 10.0.0.1 --master-port 29501 --max-restarts 3 --tee 3"
    );
    assert_eq!((loaded.config.plan.world_size(), loaded.config.optim.learning_rate), (8, 1e-3));
    assert_eq!(loaded.config.origin("learning_rate").to_string(), "argument --learning_rate 1e-3");
    assert_eq!(loaded.config.origin("nodes").to_string(), "argument --nnodes 2");
    assert!(loaded.config.notes.iter().any(|note| note.contains("--rdzv_backend c10d")));
}

#[test]
fn other_forms_of_the_same_launch() {
    for line in [
        "torchrun --nproc-per-node 4 train.py --model tiny",
        "python -m torch.distributed.run --nproc_per_node=4 train.py --model=tiny",
        "python3 -m torch.distributed.launch --use_env --nproc_per_node=4 train.py --local_rank 0 --model tiny",
        "/opt/env/bin/python3.11 -m torch.distributed.run --nproc_per_node 4 -m pkg.train --model tiny",
        "deepspeed --num_gpus 4 train.py --model tiny",
        "deepspeed --num_gpus=4 --module pkg.train --model tiny --deepspeed",
        "accelerate launch --num_processes 4 train.py --model tiny",
        "accelerate launch --multi_gpu --num_processes=4 -m pkg.train --model tiny",
        "python scripts/run.py --nproc_per_node 4 --model tiny",
    ] {
        let loaded = accepted(&[], line, &[]);
        assert_eq!(loaded.config.plan.nproc_per_node, 4, "{line}");
        assert_eq!(loaded.config.model.source, ModelSource::Named("tiny".into()), "{line}");
    }
}

#[test]
fn one_process_per_gpu_is_for_the_launcher_to_count() {
    for word in ["gpu", "auto"] {
        let loaded = accepted(&[], &format!("torchrun --nproc_per_node={word} train.py --model tiny"), &[]);
        assert_eq!(loaded.launch.nproc_per_node, Some(NumProcesses::PerGpu));
        assert_eq!(loaded.launch.flags(), ["--nproc gpu"]);
        assert_eq!(loaded.config.plan.nproc_per_node, 1);
    }
    let loaded = accepted(&[], "torchrun --standalone --nproc_per_node=2 train.py --model tiny", &[]);
    assert!(loaded.launch.standalone);
    let loaded = accepted(&[], "torchrun --nnodes=2 --rdzv_endpoint=alpha:1234 train.py --model tiny", &[]);
    assert_eq!(
        (loaded.launch.master_addr.as_deref(), loaded.launch.master_port),
        (Some("alpha"), Some(1234))
    );
}

#[test]
fn flags_of_the_trainer_are_settings() {
    let line = "torchrun --nproc_per_node=2 run_clm.py --model tiny --bf16 --gradient_checkpointing True \
                --fsdp \"full_shard auto_wrap\" --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer \
                --do_train --report_to tensorboard --max_steps -1 --no_shuffle --warmup_ratio=0.1 \
                --train_files a.jsonl b.jsonl --lr_scheduler_kwargs '{\"num_cycles\": 2}' --lr_scheduler_type cosine";
    let config = accepted(&[], line, &[]).config;
    assert_eq!((config.precision, config.plan.recompute), (Precision::Bf16, Recompute::Full));
    assert_eq!((config.plan.strategy, config.data.shuffle), (StrategyName::FullShard, false));
    assert_eq!(config.data.train_files.len(), 2);
    assert_eq!(config.optim.lr_scheduler_type, crate::LrSchedulerType::Cosine { cycles: 2.0 });
    assert!(config.output.tensorboard.is_some());
}

#[test]
fn flags_replace_files_and_overrides_replace_flags() {
    let file = ("run.yaml", "model: tiny\nlearning_rate: 1e-5\nseed: 1\nmax_steps: 5\n");
    let line = "torchrun train.py run.yaml --learning_rate 2e-5 --seed 2";
    let config = accepted(&[file], line, &["seed=3"]).config;
    assert_eq!((config.optim.learning_rate, config.batch.seed, config.batch.max_steps), (2e-5, 3, Some(5)));
}

#[test]
fn trl_keeps_its_defaults() {
    let line =
        "trl sft --model_name_or_path m --dataset_name d --output_dir out --per_device_train_batch_size 2";
    let config = accepted(&[], line, &[]).config;
    assert_eq!((config.optim.learning_rate, config.output.logging_steps), (2e-5, 10));
    assert_eq!((config.precision, config.plan.recompute), (Precision::Bf16, Recompute::Full));
    assert_eq!(config.origin("learning_rate").to_string(), "default of trl sft");
    // What is set replaces them.
    let other =
        format!("{line} --fp16 --learning_rate 1e-4 --gradient_checkpointing false --logging_steps 1");
    let config = accepted(&[], &other, &[]).config;
    assert!(matches!(config.precision, Precision::F16(_)), "{:?}", config.precision);
    assert_eq!((config.optim.learning_rate, config.plan.recompute), (1e-4, Recompute::None));
    for (command, algorithm) in [("dpo", "dpo"), ("reward", "reward")] {
        let config =
            accepted(&[], &format!("trl {command} --model_name_or_path m --dataset_name d"), &[]).config;
        assert_eq!(config.algorithm.name(), algorithm);
    }
    let grpo = "trl grpo --model_name_or_path m --dataset_name d --reward_funcs exact_match format \
                --accelerate_config zero2 --num_processes 2";
    let config = accepted(&[], grpo, &[]).config;
    assert_eq!((config.algorithm.name(), config.plan.strategy), ("grpo", StrategyName::Zero2));
    assert_eq!(config.plan.world_size(), 2);
}

#[test]
fn accelerate_flags() {
    let line = "accelerate launch --num_machines 2 --machine_rank 1 --main_process_ip a --main_process_port 1234 \
                --num_processes 8 --mixed_precision bf16 --use_deepspeed --zero_stage 3 \
                --offload_optimizer_device cpu --gpu_ids 0,1 train.py --model tiny";
    let loaded = accepted(&[], line, &[]);
    let plan = &loaded.config.plan;
    assert_eq!((plan.nodes, plan.nproc_per_node, plan.strategy), (2, 4, StrategyName::Zero3));
    assert_eq!((plan.offload_optimizer, loaded.config.precision), (crate::Offload::Cpu, Precision::Bf16));
    assert_eq!((loaded.launch.node_rank, loaded.launch.gpu_ids.as_deref()), (Some(1), Some("0,1")));
    let fsdp = "accelerate launch --use_fsdp --fsdp_sharding_strategy 2 --fsdp_offload_params true train.py --model tiny";
    let plan = accepted(&[], fsdp, &[]).config.plan;
    assert_eq!((plan.strategy, plan.offload_param), (StrategyName::ShardGradOp, crate::Offload::Cpu));
}

#[test]
fn files_are_asked_for_until_all_are_there() {
    let line = launch_line("accelerate launch --config_file acc.yaml train.py --config run.yaml");
    let acc = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: conf/ds.json\n";
    let asked = |files: &[Source<'_>]| -> Vec<(String, FileRole)> {
        let inputs = Inputs { files, launch_line: Some(&line), ..Inputs::default() };
        referenced_files(&inputs).into_iter().map(|file| (file.path, file.role)).collect()
    };
    let (config, accelerate) = (FileRole::Config, FileRole::Accelerate);
    assert_eq!(asked(&[]), [("acc.yaml".into(), accelerate), ("run.yaml".into(), config)]);
    let acc = Source { name: "acc.yaml", text: acc };
    let run = Source { name: "./run.yaml", text: "model: tiny\n" };
    assert_eq!(asked(&[acc, run]), [("conf/ds.json".into(), FileRole::DeepSpeed)]);
    let ds = Source { name: "project/conf/ds.json", text: "{\"bf16\": {\"enabled\": \"auto\"}}" };
    assert_eq!(asked(&[acc, run, ds]), []);
}

#[test]
fn variables_in_front_of_a_command() {
    let line = launch_line("NCCL_TIMEOUT=60 CUDA_VISIBLE_DEVICES=0,1 torchrun train.py --model tiny");
    assert_eq!(line.variables[1], ("CUDA_VISIBLE_DEVICES".into(), "0,1".into()));
    let config = accepted(&[], "NCCL_TIMEOUT=60 torchrun train.py --model tiny", &[]).config;
    assert_eq!(config.plan.collective_timeout, 60.0);
    assert_eq!(config.origin("collective_timeout").to_string(), "variable NCCL_TIMEOUT");
    let config = accepted(&[], "NCCL_TIMEOUT=60 torchrun train.py --model tiny --ddp_timeout 90", &[]).config;
    assert_eq!(config.plan.collective_timeout, 90.0);
}

#[test]
fn secrets_are_not_shown() {
    let line = "torchrun train.py --model tiny --hub_token s3cr3tw0rd";
    let errors = super::load_with(&[], line, &[]).unwrap_err().to_string();
    assert!(errors.contains("hub_token") && !errors.contains("s3cr3t"), "{errors}");
}

#[test]
fn words_are_split_as_a_shell_does() {
    assert_eq!(words("a \"b c\" \\\n 'd e'f ''"), ["a", "b c", "d ef", ""]);
}
