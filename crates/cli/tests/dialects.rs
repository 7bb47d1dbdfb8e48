//! Files and launch lines of other trainers: several files at once, files that others refer to, pasted commands.

use insta::assert_snapshot;

use crate::support::{Folder, RUN};

const DEEPSPEED: &str = r#"{
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 2,
  "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
  "gradient_clipping": 0.5
}
"#;

const ACCELERATE: &str = "\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
machine_rank: 0
main_process_port: 29533
num_machines: 1
num_processes: 2
mixed_precision: 'no'
";

/// The run without what the DeepSpeed file sets.
fn run_yaml() -> String {
    RUN.replace("per_device_train_batch_size: 2\n", "")
}

/// The configuration that the last checkpoint stores.
fn stored(folder: &Folder) -> String {
    let manifest: serde_json::Value =
        serde_json::from_str(&folder.read("out/checkpoints/step-2/manifest.json")).unwrap();
    manifest["manifest"]["run_config"].as_str().unwrap_or_default().to_owned()
}

/// The first line of a run: model, strategy, ranks.
fn first_line(printed: &str) -> &str {
    printed.lines().next().unwrap_or_default()
}

#[test]
fn a_deepspeed_file_beside_ours() {
    let folder = Folder::new(&run_yaml());
    folder.write("ds.json", DEEPSPEED);
    let printed = folder.succeeds(&["train", "run.yaml", "ds.json", "--nproc", "2"]);
    assert!(first_line(&printed).contains("zero2 on 2 ranks"), "{printed}");
    // Checkpoints store the whole run as one text.
    let text = stored(&folder);
    assert!(text.contains("strategy: zero2") && text.contains("ds.json:4"), "{text}");
}

#[test]
fn files_that_files_and_flags_refer_to() {
    let folder = Folder::new(&run_yaml());
    std::fs::create_dir(folder.path("configs")).unwrap();
    folder.write("configs/run.yaml", format!("{}deepspeed: ds.json\n", run_yaml()));
    folder.write("configs/ds.json", DEEPSPEED);
    let plan = |args: &[&str]| folder.succeeds(&[&["plan", "--nproc", "2"], args].concat());
    let beside = plan(&["configs/run.yaml"]);
    assert_eq!(beside, plan(&["run.yaml", "--deepspeed", "configs/ds.json"]));
    assert_eq!(beside, plan(&["run.yaml", "deepspeed=configs/ds.json"]));
    assert_eq!(beside, plan(&["run.yaml", "configs/ds.json"]));
    // Relative to the working directory.
    folder.write("elsewhere.json", DEEPSPEED);
    folder.write("configs/run.yaml", format!("{}deepspeed: elsewhere.json\n", run_yaml()));
    assert_eq!(beside, plan(&["configs/run.yaml"]));
    folder.write("run.yaml", format!("{RUN}deepspeed: nowhere.json\n"));
    assert_snapshot!(folder.train_refused(&[], 64), @r"
    error: run.yaml:8:1: the file `nowhere.json` was not found
      |
    8 | deepspeed: nowhere.json
      | ^^^^^^^^^
      hint: give it as well: it is the DeepSpeed configuration.
    ");
    folder.write("run.yaml", format!("{RUN}deepspeed: configs\n"));
    assert_snapshot!(folder.train_refused(&[], 66), @r"
    error: configuration file configs is a folder, not a regular file
    hint: give the path of a YAML or JSON file, or settings as key=value.
    ");
}

#[test]
fn files_that_contradict_each_other() {
    let folder = Folder::new(RUN);
    folder.write(
        "ds.json",
        DEEPSPEED.replace("\"train_micro_batch_size_per_gpu\": 2", "\"train_micro_batch_size_per_gpu\": 4"),
    );
    assert_snapshot!(folder.train_refused(&["ds.json"], 64), @r#"
    error: run.yaml:4:1: `per_device_train_batch_size: 2` contradicts `train_micro_batch_size_per_gpu: 4` (ds.json:2:3)
      |
    4 | per_device_train_batch_size: 2
      | ^^^^^^^^^^^^^^^^^^^^^^^^^^^
      ::: ds.json:2:3
    2 |   "train_micro_batch_size_per_gpu": 4,
      |   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
      hint: the two files disagree; keep one of the two.
    "#);
}

#[test]
fn an_accelerate_file_starts_ranks() {
    let folder = Folder::new(RUN);
    folder.write("accelerate.yaml", ACCELERATE);
    let printed = folder.succeeds(&["train", "run.yaml", "accelerate.yaml", "max_steps=1"]);
    assert!(first_line(&printed).contains("full_shard on 2 ranks"), "{printed}");
    // A flag of this command wins.
    let printed = folder.succeeds(&[
        "train",
        "run.yaml",
        "accelerate.yaml",
        "max_steps=1",
        "--nproc",
        "1",
        "overwrite_output_dir=true",
    ]);
    assert!(!first_line(&printed).contains("ranks"), "{printed}");
    folder.write("accelerate.yaml", ACCELERATE.replace("num_machines: 1", "num_machines: 2"));
    assert_snapshot!(folder.train_refused(&["accelerate.yaml"], 64), @r"
    error: --master-addr is missing: the run has 2 nodes, and they must find node 0
    hint: give the host name or address of node 0 with --master-addr.
    ");
    folder.write("run.yaml", format!("{RUN}nproc_per_node: 3\n"));
    folder.write("accelerate.yaml", ACCELERATE);
    assert_snapshot!(folder.train_refused(&["accelerate.yaml"], 64), @r"
    error: run.yaml:8:1: `nproc_per_node: 3` contradicts `num_processes: 2` (accelerate.yaml:8:1)
      |
    8 | nproc_per_node: 3
      | ^^^^^^^^^^^^^^
      ::: accelerate.yaml:8:1
    8 | num_processes: 2
      | ^^^^^^^^^^^^^
      hint: both set the number of processes; keep one.
    ");
}

#[test]
fn a_pasted_launch_line_runs() {
    let folder = Folder::new(RUN);
    let line = "train -- OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 --max_restarts=0 train.py --config run.yaml --learning_rate 1e-3";
    let printed = folder.succeeds(&line.split(' ').collect::<Vec<_>>());
    assert!(first_line(&printed).contains("ddp on 2 ranks"), "{printed}");
    assert!(stored(&folder).contains("learning_rate: 1e-3"), "{}", stored(&folder));
    let line =
        "train --nproc 1 max_steps=1 overwrite_output_dir=true -- trl sft --config run.yaml --bf16 false";
    let printed = folder.succeeds(&line.split(' ').collect::<Vec<_>>());
    assert!(!first_line(&printed).contains("ranks"), "{printed}");
    folder.write("ds.json", DEEPSPEED);
    let line = "train overwrite_output_dir=true -- deepspeed --num_gpus 2 main.py --config run.yaml --deepspeed ds.json";
    let printed = folder.succeeds(&line.split(' ').collect::<Vec<_>>());
    assert!(first_line(&printed).contains("zero2 on 2 ranks"), "{printed}");
}

/// Our YAML, a DeepSpeed file with its launch line, and an accelerate file with its own: one run, so the same weights.
#[test]
fn one_run_in_three_dialects_has_the_same_bits() {
    const ZERO3: &str = r#"{
      "train_batch_size": 8,
      "train_micro_batch_size_per_gpu": 2,
      "gradient_accumulation_steps": "auto",
      "gradient_clipping": 0.5,
      "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
      "bf16": {"enabled": true},
      "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "weight_decay": 0.01}}
    }"#;
    const PLUGIN: &str = "\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: cpu
  gradient_accumulation_steps: 2
  gradient_clipping: 0.5
mixed_precision: bf16
num_machines: 1
num_processes: 2
";
    let optimizer = "learning_rate: 1e-3\nadam_beta1: 0.8\nweight_decay: 0.01\n";
    let batch = "per_device_train_batch_size: 2\n";
    let plan = "strategy: zero3\noffload_optimizer: cpu\nbf16: true\nmax_grad_norm: 0.5\ngradient_accumulation_steps: 2\n";
    let weights = |run: String, other: (&str, &str), line: &str| {
        let folder = Folder::new(&run);
        folder.write(other.0, other.1);
        let printed = folder.succeeds(&line.split(' ').collect::<Vec<_>>());
        assert!(first_line(&printed).contains("bf16 zero3 on 2 ranks"), "{printed}");
        std::fs::read(folder.path("out/model/model.safetensors")).unwrap()
    };
    let base = run_yaml();
    let ours = weights(format!("{base}{batch}{optimizer}{plan}"), ("unused", ""), "train run.yaml --nproc 2");
    let line = "train -- deepspeed --num_gpus 2 main.py --config run.yaml --deepspeed ds.json";
    assert!(weights(base.clone(), ("ds.json", ZERO3), line) == ours, "DeepSpeed");
    let line = "train -- accelerate launch --config_file acc.yaml train.py --config run.yaml";
    assert!(weights(format!("{base}{batch}{optimizer}"), ("acc.yaml", PLUGIN), line) == ours, "accelerate");
    let other = weights(
        format!("{base}{batch}{optimizer}{plan}").replace("1e-3", "2e-3"),
        ("unused", ""),
        "train run.yaml --nproc 2",
    );
    assert!(other != ours, "another learning rate is another run");
}

#[test]
fn launch_lines_that_cannot_run() {
    let folder = Folder::new(RUN);
    let refused = |line: &str, code| folder.refused(&line.split(' ').collect::<Vec<_>>(), code);
    assert_snapshot!(refused("train -- torchrun --nproc_per_node 2 train.py --config run.yaml --lerning_rate 1", 64), @r"
    error: unknown flag `--lerning_rate` of the script
      hint: did you mean `--learning_rate`?
    ");
    assert_snapshot!(refused("train -- deepspeed --hostfile hosts main.py --config run.yaml", 64), @r"
    error: `hostfile: hosts` of another launcher is not supported
    hint: run the same command on every node with its own --node-rank.
    ");
    assert_snapshot!(refused("train -- deepspeed --include beta:0 main.py --config run.yaml", 64), @r"
    error: `include: beta:0` of another launcher is not supported
    hint: write localhost:0,1 for GPUs of this node. On several nodes, run the same command on every node with its own --node-rank.
    ");
    assert_snapshot!(refused("convert-config run.yaml -- run.sh", 64), @r"
    error: the launch line after `--` starts with `run.sh`, which is no launcher
    hint: it starts with torchrun, deepspeed, accelerate launch, trl or python. Give files before `--`.
    ");
}

/// Words behind `--` that start no launcher are settings.
#[test]
fn settings_behind_two_dashes() {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "--", "run.yaml", "max_steps=0"]);
}

#[test]
fn variables_of_a_launch_line_are_set() {
    let folder = Folder::new(RUN);
    let line = "train -- RANK=x WORLD_SIZE=2 python train.py --config run.yaml";
    let error = folder.refused(&line.split(' ').collect::<Vec<_>>(), 64);
    assert!(error.contains("RANK"), "{error}");
}

#[test]
fn convert_config_prints_one_yaml() {
    let folder = Folder::new(&run_yaml());
    folder.write("ds.json", DEEPSPEED);
    let line = "convert-config run.yaml ds.json -- torchrun --nproc_per_node=2 --master_port 29501 train.py --seed 7";
    let yaml = folder.succeeds(&line.split(' ').collect::<Vec<_>>());
    assert_snapshot!(yaml, @r"
    # Configuration of Lockstep, translated from run.yaml, ds.json and a command line of torchrun.

    # Model
    # run.yaml:1:1
    model:
      architectures: [LlamaForCausalLM]
      hidden_size: 32
      num_hidden_layers: 2
      num_attention_heads: 2
      intermediate_size: 64
      max_position_embeddings: 64

    # Data
    train_files: data.jsonl  # run.yaml:2:1
    max_length: 64  # run.yaml:3:1

    # Batch
    per_device_train_batch_size: 2  # ds.json:2:3, train_micro_batch_size_per_gpu
    gradient_accumulation_steps: 2  # ds.json:3:3
    max_steps: 2  # run.yaml:4:1
    seed: 7  # argument --seed 7

    # Optimizer
    max_grad_norm: 0.5  # ds.json:5:3, gradient_clipping

    # Plan
    reduce_bucket_size: auto  # auto (ds.json:4:59)
    strategy: zero2  # ds.json:4:25, zero_optimization.stage
    nproc_per_node: 2  # argument --nproc_per_node 2
    threads: 2  # run.yaml:6:1

    # Output
    output_dir: out  # run.yaml:5:1

    # Flags of `lockstep train` for this launch:
    #   --master-port 29501
    ");
    folder.write("converted.yaml", &yaml);
    let converted = folder.succeeds(&["plan", "converted.yaml"]);
    let original = folder.succeeds(&["plan", "run.yaml", "ds.json", "seed=7", "nproc_per_node=2"]);
    assert_eq!(converted, original);
}

#[test]
fn the_schema_is_json() {
    let text = Folder::new(RUN).succeeds(&["schema"]);
    let schema: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(schema["properties"]["learning_rate"].is_object(), "{text}");
}
