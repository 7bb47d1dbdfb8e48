//! Every configuration and command line of the guides: it runs, it is completed and said so, or it is refused with the
//! correction. `docs/guides-configs.md` is the table of them.

use std::fmt::Write;

use super::guide_configs::*;
use super::load_with;

enum Outcome {
    Runs,
    /// It runs, and a note with this text says what was completed or replaced.
    Completed(&'static str),
    /// It is refused, and the error contains this text.
    Refused(&'static str),
}
use Outcome::{Completed, Refused, Runs};

struct Case {
    guide: &'static str,
    what: &'static str,
    files: Vec<(&'static str, String)>,
    line: &'static str,
    overrides: &'static [&'static str],
    outcome: Outcome,
}

fn case(guide: &'static str, what: &'static str, line: &'static str, outcome: Outcome) -> Case {
    Case { guide, what, files: Vec::new(), line, overrides: &["model=tiny"], outcome }
}

impl Case {
    fn file(mut self, name: &'static str, text: impl Into<String>) -> Self {
        self.files.push((name, text.into()));
        self
    }

    fn with(mut self, overrides: &'static [&'static str]) -> Self {
        self.overrides = overrides;
        self
    }
}

const FOUR: &[&str] = &["model=tiny", "nproc_per_node=4"];

fn guides_000_to_002() -> Vec<Case> {
    let fsdp = "config/train300M_fsdp.yaml";
    let without_world = || FSDP_YAML.replace("world_size: 4\n", "");
    vec![
        case("000", "FSDP in config.yaml", "", Runs).file("config.yaml", USE_FSDP),
        case("000", "allocator variable", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py --config config.yaml", Completed("does not fragment"))
            .file("config.yaml", USE_FSDP),
        case("001", "2 GPUs, but `world_size: 4`", "torchrun --nproc_per_node=2 train_fsdp.py config/train300M_fsdp.yaml", Refused("`world_size` must be the product of `nodes` and `nproc_per_node`"))
            .file(fsdp, FSDP_YAML),
        case("001", "4 GPUs", "torchrun --nproc_per_node=4 train_fsdp.py config/train300M_fsdp.yaml", Runs)
            .file(fsdp, FSDP_YAML),
        case("001", "8 GPUs, but `world_size: 4`", "torchrun --nproc_per_node=8 train_fsdp.py config/train300M_fsdp.yaml", Refused("`world_size` must be the product"))
            .file(fsdp, FSDP_YAML),
        case("001", "8 GPUs without `world_size`", "torchrun --nproc_per_node=8 train_fsdp.py config/train300M_fsdp.yaml", Runs)
            .file(fsdp, without_world()),
        case("001", "2 nodes, the first", "torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=192.168.1.100 --master_port=29500 train_fsdp.py config/train300M_fsdp.yaml", Runs)
            .file(fsdp, without_world()),
        case("001", "2 nodes, the second", "torchrun --nnodes=2 --node_rank=1 --nproc_per_node=4 --master_addr=192.168.1.100 --master_port=29500 train_fsdp.py config/train300M_fsdp.yaml", Runs)
            .file(fsdp, without_world()),
        case("001", "2 nodes of 8, from the script", "torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=192.168.1.100 --master_port=29500 train_fsdp.py config/train300M_fsdp.yaml", Runs)
            .file(fsdp, without_world()),
        case("001", "resume", "torchrun --nproc_per_node=4 train_fsdp.py config/train300M_fsdp.yaml --resume_from checkpoints/fsdp_cpt4000.pth", Runs)
            .file(fsdp, FSDP_YAML),
        case("001", "4 GPUs with variables", "CUDA_VISIBLE_DEVICES=0,1,2,3 TORCH_DISTRIBUTED_DEBUG=INFO torchrun --nproc_per_node=4 train_fsdp.py config/train300M_fsdp.yaml", Completed("TORCH_DISTRIBUTED_DEBUG has no effect"))
            .file(fsdp, FSDP_YAML),
        case("001", "one GPU, but `world_size: 4`", "python train_fsdp.py config/train300M_fsdp.yaml", Refused("`world_size` must be the product"))
            .file(fsdp, FSDP_YAML),
        case("001", "one GPU without `world_size`", "python train_fsdp.py config/train300M_fsdp.yaml", Runs)
            .file(fsdp, without_world()),
        case("001", "SHARD_GRAD_OP", "", Runs).file(fsdp, "sharding_strategy: SHARD_GRAD_OP\n"),
        case("001", "HYBRID_SHARD", "", Runs).file(fsdp, "sharding_strategy: HYBRID_SHARD\n"),
        case("001", "NO_SHARD", "", Runs).file(fsdp, "sharding_strategy: NO_SHARD\n"),
        case("001", "a total batch of 64 on 4 GPUs", "torchrun --nproc_per_node=4 train_fsdp.py config/train300M_fsdp.yaml", Runs)
            .file(fsdp, "train_batch: 64\n"),
        case("001", "a total batch of 64 on 3 GPUs", "torchrun --nproc_per_node=3 train_fsdp.py config/train300M_fsdp.yaml", Refused("`train_batch_size` of 64 is not divisible by 3"))
            .file(fsdp, "train_batch: 64\n"),
        case("002", "accelerate, 4 processes", "accelerate launch --config_file default_config.yaml scripts/train.py --distributed", Runs)
            .file("default_config.yaml", "num_processes: 4\n"),
        case("002", "accelerate, 8 processes", "accelerate launch --config_file default_config.yaml scripts/train.py --distributed", Runs)
            .file("default_config.yaml", "num_processes: 8\n"),
        case("002", "the wrapper script", "python scripts/fix_distributed_train.py --num_gpus 4 --epochs 50", Runs),
        case("002", "the script that writes accelerate's file, which is not needed", "python scripts/setup_accelerate_config.py --num_gpus 4", Runs),
        case("002", "peer-to-peer turned off", "NCCL_P2P_DISABLE=1 NCCL_SOCKET_IFNAME=eth0 python scripts/fix_distributed_train.py --num_gpus 4", Runs),
    ]
}

fn guide_003_commands() -> Vec<Case> {
    let ddp = "config_distributed_example.yaml";
    let ds = "config_deepspeed_example.yaml";
    let json = "configs/deepspeed/zero2.json";
    vec![
        case("003", "the guide's launcher", "python scripts/run_distributed.py --nproc_per_node 4 --config config_distributed_example.yaml --algorithm sft", Runs)
            .file(ddp, DISTRIBUTED),
        case("003", "the guide's launcher over torchrun", "python scripts/run_distributed.py --use_torchrun --nproc_per_node 4 --config config_distributed_example.yaml", Completed("`--use_torchrun true` has no effect"))
            .file(ddp, DISTRIBUTED),
        case("003", "torchrun", "torchrun --nproc_per_node=4 main.py --mode train --config config_distributed_example.yaml --algorithm sft", Runs)
            .file(ddp, DISTRIBUTED),
        case("003", "torch.distributed.launch", "python -m torch.distributed.launch --nproc_per_node=4 main.py --mode train --config config_distributed_example.yaml --algorithm sft", Runs)
            .file(ddp, DISTRIBUTED),
        case("003", "deepspeed, with zero2.json as written", "deepspeed --num_gpus=4 main.py --config config_deepspeed_example.yaml --mode train --algorithm sft", Refused("`train_batch_size` is 32, but 4 rows x 8 micro-batches x 4 ranks are 128"))
            .file(ds, DEEPSPEED)
            .file(json, zero2()),
        case("003", "deepspeed, with `train_batch_size` corrected", "deepspeed --num_gpus=4 main.py --config config_deepspeed_example.yaml --mode train --algorithm sft", Runs)
            .file(ds, DEEPSPEED)
            .file(json, for_four_ranks(&zero2())),
        case("003", "2 nodes, the first", "python scripts/run_distributed.py --nproc_per_node 4 --nnodes 2 --node_rank 0 --master_addr 192.168.1.100 --master_port 29500 --config config_distributed_example.yaml", Runs)
            .file(ddp, DISTRIBUTED),
        case("003", "2 nodes, the second", "python scripts/run_distributed.py --nproc_per_node 4 --nnodes 2 --node_rank 1 --master_addr 192.168.1.100 --master_port 29500 --config config_distributed_example.yaml", Runs)
            .file(ddp, DISTRIBUTED),
        case("003", "deepspeed on 2 nodes", "deepspeed --num_nodes=2 --node_rank=0 --master_addr=192.168.1.100 --master_port=29500 --num_gpus=4 main.py --config config_deepspeed_example.yaml --mode train --algorithm sft", Refused("x 8 ranks are 256"))
            .file(ds, DEEPSPEED)
            .file(json, zero2()),
        case("003", "another port", "python scripts/run_distributed.py --master_port 29501 --config config_distributed_example.yaml", Runs)
            .file(ddp, DISTRIBUTED),
        case("003", "one GPU", "python main.py --config config.yaml --mode train --algorithm sft", Runs)
            .file("config.yaml", DDP),
        case("003", "deepspeed on one GPU, where 32 = 4 x 8 is right", "deepspeed --num_gpus=1 main.py --config config_deepspeed.yaml --mode train --algorithm sft", Runs)
            .file("config_deepspeed.yaml", DEEPSPEED)
            .file(json, zero2()),
        case("003", "torchrun, 2 GPUs", "torchrun --nproc_per_node=2 main.py --config config.yaml", Runs).file("config.yaml", DDP),
        case("003", "a file with a profiler instead of the YAML's", "deepspeed --num_gpus=4 main.py --config config_deepspeed.yaml --deepspeed_config configs/deepspeed/zero2_with_profiling.json", Completed("flops_profiler.profile_step"))
            .file("config_deepspeed.yaml", "training:\n  distributed: true\n  distributed_strategy: deepspeed\n")
            .file("configs/deepspeed/zero2_with_profiling.json", for_four_ranks(&zero2_with_profiling())),
        case("003", "a timeout in a variable", "NCCL_TIMEOUT=1800 NCCL_IB_DISABLE=1 torchrun --nproc_per_node=4 main.py --config config.yaml", Runs)
            .file("config.yaml", DDP),
        case("003", "variables for debugging", "NCCL_DEBUG=INFO DEEPSPEED_LOG_LEVEL=INFO CUDA_LAUNCH_BLOCKING=1 torchrun --nproc_per_node=2 main.py --config config.yaml", Completed("DEEPSPEED_LOG_LEVEL has no effect"))
            .file("config.yaml", DDP),
        case("003", "prepare the data: `lockstep prepare` here", "python prepare_datasets.py --config config.yaml", Runs).file("config.yaml", DDP),
    ]
}

fn guide_003_files() -> Vec<Case> {
    let yaml = "config.yaml";
    let json = "configs/deepspeed/zero2.json";
    vec![
        case("003", "strategy `auto`", "", Runs).file(yaml, "training:\n  distributed_strategy: \"auto\"\n"),
        case("003", "DDP", "", Runs).file(yaml, DDP),
        case("003", "zero1.json on 4 ranks", "", Refused("4 rows x 8 micro-batches x 4 ranks are 128"))
            .file("zero1.json", ZERO1)
            .with(FOUR),
        case("003", "zero1.json on one rank", "", Runs).file("zero1.json", ZERO1),
        case("003", "zero2.json on one rank", "", Runs).file(json, zero2()),
        case("003", "zero3.json on one rank", "", Runs).file("zero3.json", zero3()),
        case("003", "zero3.json on 4 ranks, corrected", "", Runs)
            .file("zero3.json", for_four_ranks(&zero3()))
            .with(FOUR),
        case("003", "the part of zero3.json about gathering", "", Runs).file("zero3.json", "{\"zero_optimization\": {\"stage\": 3, \"stage3_gather_16bit_weights_on_model_save\": true, \"stage3_max_live_parameters\": 1e9, \"stage3_max_reuse_distance\": 1e9}}"),
        case("003", "distributed settings with bf16", "", Runs).file(yaml, DISTRIBUTED),
        case("003", "DDP for less memory", "", Runs).file(yaml, "training:\n  gradient_checkpointing: true\n  bf16: true\n  per_device_train_batch_size: 2\n  gradient_accumulation_steps: 4\n"),
        case("003", "DeepSpeed for less memory", "", Refused("contradicts `train_micro_batch_size_per_gpu: 4`"))
            .file(yaml, DEEPSPEED_MEMORY)
            .file("configs/deepspeed/zero3.json", zero3()),
        case("003", "DDP for fast communication", "", Runs).file(yaml, "training:\n  find_unused_parameters: false\n  ddp_bucket_cap_mb: 25\n  dataloader_num_workers: 4\n  dataloader_pin_memory: true\n"),
        case("003", "DeepSpeed without its file", "", Refused("`training.distributed_strategy: deepspeed` is not implemented"))
            .file(yaml, "training:\n  distributed_strategy: \"deepspeed\"\n  dataloader_num_workers: 4\n"),
        case("003", "learning rate and warmup", "", Runs).file(yaml, "training:\n  learning_rate: 5e-5\n  warmup_ratio: 0.1\n  lr_scheduler_type: \"cosine\"\n"),
        case("003", "learning rate in both, and another warmup", "", Refused("`training.warmup_ratio` must be equal to the scheduler's `warmup_num_steps`, 500"))
            .file(yaml, DEEPSPEED_RATE)
            .file(json, zero2()),
        case("003", "another learning rate in the YAML", "", Completed("`training.learning_rate: 1e-5` (config.yaml:5:3) replaces `optimizer.params.lr: 3e-5`"))
            .file(yaml, "training:\n  distributed_strategy: \"deepspeed\"\n  deepspeed:\n    config_path: \"configs/deepspeed/zero2.json\"\n  learning_rate: 1e-5\n")
            .file(json, zero2()),
        case("003", "YAML bf16 against JSON fp16", "", Refused("contradicts `fp16.enabled: true`"))
            .file(yaml, "deepspeed: configs/deepspeed/zero2.json\nbf16: true\n")
            .file(json, zero2()),
        case("003", "out of memory, DDP", "", Runs).file(yaml, "training:\n  per_device_train_batch_size: 2\n  gradient_accumulation_steps: 8\n  mixed_precision: \"fp16\"\n"),
        case("003", "fp16 and bf16 at once", "", Refused("`training.fp16: true` contradicts `training.bf16: true`"))
            .file(yaml, "training:\n  fp16: true\n  fp16_opt_level: \"O1\"\n  bf16: true\n  fp16_full_eval: false\n"),
        case("003", "fp16 with Apex's level", "", Completed("`training.fp16_opt_level`"))
            .file(yaml, "training:\n  fp16: true\n  fp16_opt_level: \"O1\"\n  fp16_full_eval: false\n"),
        case("003", "data loading", "", Runs).file(yaml, "dataloader_num_workers: 8\ndataloader_pin_memory: true\ndataloader_prefetch_factor: 2\n"),
        case("003", "a fixed seed", "", Runs).file(yaml, "seed: 42\n"),
        case("003", "experiments with wandb", "", Runs)
            .file(yaml, "training:\n  experiment_name: \"sft_4gpu_experiment\"\n  save_steps: 500\n  save_total_limit: 3\n  logging_steps: 50\n  report_to: [\"tensorboard\", \"wandb\"]\n"),
        case("003", "experiments with TensorBoard", "", Runs).file(yaml, "training:\n  experiment_name: \"sft_4gpu_experiment\"\n  save_steps: 500\n  save_total_limit: 3\n  logging_steps: 50\n  report_to: [\"tensorboard\"]\n"),
        case("003", "resume", "", Runs).file(yaml, "training:\n  resume_from_checkpoint: \"./outputs/experiment/checkpoints/latest\"\n  save_strategy: \"steps\"\n  save_steps: 1000\n"),
    ]
}

const RUN_CLM: &str = "CUDA_VISIBLE_DEVICES=0,1,2,3 MASTER_ADDR=localhost deepspeed --num_gpus=4 --module training.run_clm --model_name_or_path /path/to/llama-7b --dataset_name wikitext --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --deepspeed ds_config.json --output_dir ./output";
const RUN_CLM_FP16_EVAL: &str = "deepspeed --num_gpus=4 --module training.run_clm --model_name_or_path /path/to/llama-7b --dataset_name wikitext --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --deepspeed ds_config.json --output_dir ./output --fp16_full_eval";

fn guide_004() -> Vec<Case> {
    vec![
        case(
            "004",
            "WarmupDecayLR without `total_num_steps`",
            RUN_CLM,
            Completed("it is the number of steps of the run"),
        )
        .file("ds_config.json", DS_CONFIG)
        .with(&[]),
        case(
            "004",
            "evaluate in fp16",
            RUN_CLM_FP16_EVAL,
            Completed("evaluation already uses the precision of training"),
        )
        .file("ds_config.json", DS_CONFIG)
        .with(&[]),
        case("004", "keys against running out of memory", RUN_CLM, Runs)
            .file("ds_config.json", ds_config_for_less_memory())
            .with(&[]),
        case("004", "bf16 instead of fp16", RUN_CLM, Runs)
            .file(
                "ds_config.json",
                DS_CONFIG
                    .replace("\"enabled\": true", "\"enabled\": 0")
                    .replace("\"enabled\": false", "\"enabled\": true")
                    .replace("\"enabled\": 0", "\"enabled\": false"),
            )
            .with(&[]),
        case(
            "004",
            "both precisions at once",
            RUN_CLM,
            Refused("`fp16.enabled: true` contradicts `bf16.enabled: true`"),
        )
        .file("ds_config.json", DS_CONFIG.replace("\"enabled\": false", "\"enabled\": true"))
        .with(&[]),
    ]
}

fn all() -> Vec<Case> {
    [guides_000_to_002(), guide_003_commands(), guide_003_files(), guide_004()]
        .into_iter()
        .flatten()
        .collect()
}

/// Checks a case, and describes the outcome.
fn outcome(case: &Case) -> String {
    let files: Vec<(&str, &str)> = case.files.iter().map(|(name, text)| (*name, text.as_str())).collect();
    let what = format!("{} {}", case.guide, case.what);
    match (load_with(&files, case.line, case.overrides), &case.outcome) {
        (Ok(_), Runs) => "runs".into(),
        (Ok(loaded), Completed(text)) => {
            let notes = loaded.config.notes;
            let note = notes.iter().find(|note| note.contains(text));
            format!("runs; {}", note.unwrap_or_else(|| panic!("{what}: no note with {text}: {notes:#?}")))
        }
        (Err(errors), Refused(text)) => {
            let shown = errors.to_string();
            assert!(shown.contains(text), "{what}: {shown}");
            let error = errors.0.iter().find(|error| error.to_string().contains(text)).expect("the error");
            let hint = error.problem.hint().map_or_else(String::new, |hint| format!(" Hint: {hint}"));
            format!("refused: {}.{hint}", error.problem)
        }
        (Ok(loaded), Refused(text)) => panic!("{what} is not refused with {text}: {loaded:?}"),
        (Err(errors), _) => panic!("{what}: {errors}"),
    }
}

fn page() -> String {
    let mut page = String::from(
        "# The guides' configurations\n\n\
         Every configuration and command line of the five guides that Lockstep started from (000 to 004): it runs, it\n\
         runs and a note says what was completed, or it is refused with the correction. \"Runs\" means that it loads as a\n\
         training run: a test of the configuration crate checks every row. Configurations without a model are loaded with\n\
         `model=tiny`.\n\n\
         | Guide | What | Files | Command line | Outcome |\n|---|---|---|---|---|\n",
    );
    for case in all() {
        let files: Vec<String> = case.files.iter().map(|(name, _)| format!("`{name}`")).collect();
        let line = if case.line.is_empty() { String::new() } else { format!("`{}`", case.line) };
        let outcome = outcome(&case);
        let _ =
            writeln!(page, "| {} | {} | {} | {line} | {outcome} |", case.guide, case.what, files.join(", "));
    }
    page
}

#[test]
fn every_configuration_of_the_guides_has_its_outcome() {
    let page = page();
    let document = include_str!("../../../../../docs/guides-configs.md");
    assert!(page == document, "docs/guides-configs.md must be:\n{page}\nEND OF PAGE");
    assert!(all().len() >= 65, "{}", all().len());
}
