//! `plan`, `keys`, and readers that close the pipe early.

use std::io::Read;
use std::process::Stdio;

use insta::assert_snapshot;

use crate::support::{Folder, RUN, below_the_strategies};

/// The lines of a plan that start with or contain one of the words.
fn planned(settings: &[&str], words: &[&str]) -> String {
    let folder = Folder::new(&RUN.replace("threads: 2\n", "threads: 2\nrecompute: full\n"));
    let text = folder.succeeds(&[&["plan", "run.yaml"], settings].concat());
    let (text, _) = text.split_once("\nfingerprint ").unwrap();
    let text = below_the_strategies(text);
    let kept: Vec<&str> =
        text.lines().filter(|line| words.iter().any(|word| line.contains(word))).map(str::trim_end).collect();
    kept.join("\n")
}

#[test]
fn plan_of_one_rank() {
    assert_snapshot!(planned(&[], &["parameters", "Adam moments", "arena", "overhead", "total"]), @r"
    policy    LlamaForCausalLM, 37.1 k parameters
        parameters, f32                        160 KiB           -           -
        Adam moments, f32                      320 KiB           -           -
    arena: residents + largest phase          6.08 MiB           -           -
    overhead: process, libraries, data        22.1 MiB           -           -
    total                                     28.1 MiB           -           -
    ");
}

#[test]
fn zero3_with_prefetch() {
    let settings = ["strategy=zero3", "--nnodes", "2", "--nproc", "4", "prefetch=1", "--schedule"];
    assert_snapshot!(planned(&settings, &["ranks", "gathered", "gather block", "release block"]), @r"
    ranks     8
        gathered parameters                   88.0 KiB           -           -
       #0  comm     all-gather embed from 8 ranks               33.0 KiB
       #1  comm     all-gather block 0 from 8 ranks             42.0 KiB
       #5  comm     all-gather block 1 from 8 ranks             42.0 KiB  #4
       #7  compute  release block 0
       #8  comm     all-gather head from 8 ranks                34.0 KiB  #7
      #14  comm     all-gather block 0 from 8 ranks             42.0 KiB  #13
      #15  comm     reduce-scatter head over 8 ranks            34.0 KiB
      #18  compute  release block 1
      #19  comm     reduce-scatter block 1 over 8 ranks         42.0 KiB  #17
      #22  compute  release block 0
      #23  comm     reduce-scatter block 0 over 8 ranks         42.0 KiB  #21
      #25  comm     reduce-scatter embed over 8 ranks           33.0 KiB  #24
      #27  comm     gradient norm over 8 ranks and clip factor            #26
    ");
}

#[test]
fn ddp_buckets() {
    let settings = ["strategy=ddp", "nproc_per_node=2", "ddp_bucket_cap_mb=1", "--schedule"];
    assert_snapshot!(planned(&settings, &["ranks", "reduce", "norm and clip"]), @r"
    ranks     2 = 2 replicas x 1 shards
      #12  comm     all-reduce head + block 1 + block 0 + embed over 2 ranks (replicate)   151 KiB  #11
      #14  compute  gradient norm and clip factor
    ");
}

#[test]
fn hybrid_shard() {
    let settings = ["strategy=hybrid_shard", "--nnodes", "2", "--nproc-per-node", "2", "--schedule"];
    assert_snapshot!(planned(&settings, &["ranks", "reduce head"]), @r"
    ranks     4 = 2 replicas x 2 shards
       #0  comm     all-gather embed from 2 ranks                33.0 KiB
       #1  comm     all-gather block 0 from 2 ranks              42.0 KiB
       #5  comm     all-gather block 1 from 2 ranks              42.0 KiB  #4
       #8  comm     all-gather head from 2 ranks                 34.0 KiB  #7
      #14  comm     all-gather block 0 from 2 ranks              42.0 KiB  #13
      #15  comm     reduce-scatter head over 2 ranks (shard)     34.0 KiB
      #16  comm     all-reduce head over 2 ranks (replicate)     17.0 KiB
      #20  comm     reduce-scatter block 1 over 2 ranks (shard)  42.0 KiB  #18
      #21  comm     all-reduce block 1 over 2 ranks (replicate)  21.0 KiB
      #25  comm     reduce-scatter block 0 over 2 ranks (shard)  42.0 KiB  #23
      #26  comm     all-reduce block 0 over 2 ranks (replicate)  21.0 KiB
      #28  comm     reduce-scatter embed over 2 ranks (shard)    33.0 KiB  #27
      #29  comm     all-reduce embed over 2 ranks (replicate)    16.5 KiB
      #31  comm     gradient norm over 2 ranks and clip factor             #30
    ");
}

#[test]
fn offloaded_optimizer() {
    let rows = ["per rank", "Adam", "master", "gradients, f32", "arena", "total"];
    assert_snapshot!(planned(&["offload_optimizer=cpu"], &rows), @r"
    bytes per rank                              device        host        nvme
        master parameters, f32                       -     160 KiB           -
        gradients, f32                               -     160 KiB           -
        Adam moments, f32                            -     320 KiB           -
    arena: residents + largest phase          5.69 MiB     732 KiB           -
    total                                     27.7 MiB     732 KiB           -
    ");
}

#[test]
fn frozen_tensors() {
    let settings = ["freeze=[model.embed_tokens, 'model.layers.*.mlp']"];
    assert_snapshot!(planned(&settings, &["parameters", "gradients, ", "Adam"]), @r"
    policy    LlamaForCausalLM, 37.1 k parameters, 16.6 k of them trained
        parameters, f32                        160 KiB           -           -
        gradients, f32                        76.0 KiB           -           -
        Adam moments, f32                      152 KiB           -           -
    ");
}

#[test]
fn other_optimizers() {
    assert_snapshot!(planned(&["optim=sgd"], &["residents", "moment"]), @r"
    residents                                  324 KiB           -           -
    arena: residents + largest phase          5.77 MiB           -           -
    ");
    assert_snapshot!(planned(&["optim=sgd", "momentum=0.9"], &["residents", "moment"]), @r"
    residents                                  484 KiB           -           -
        momentum, f32                          160 KiB           -           -
    arena: residents + largest phase          5.93 MiB           -           -
    ");
    assert_snapshot!(planned(&["optim=lion"], &["residents", "moment"]), @r"
    residents                                  484 KiB           -           -
        momentum, f32                          160 KiB           -           -
    arena: residents + largest phase          5.93 MiB           -           -
    ");
}

/// `lockstep sft` is `lockstep train` with an algorithm, also for the ranks that it starts.
#[test]
fn algorithms_are_commands() {
    let folder = Folder::new(RUN);
    folder.succeeds(&["sft", "--config", "run.yaml", "--nproc", "2", "--learning_rate", "1e-4"]);
    assert!(folder.path("out/model/model.safetensors").exists());
    let text = folder.succeeds(&["sft", "run.yaml", "--dry-run"]);
    assert!(!text.contains("algorithm"), "sft is the default: {text}");
    // The data is text, not preference pairs.
    for command in ["reward", "dpo"] {
        let error = folder.refused(&[command, "run.yaml", "output_dir=other"], 65);
        assert!(error.contains("chosen"), "{error}");
    }
    let plan = folder.succeeds(&["plan", "run.yaml", "algorithm=dpo"]);
    assert!(plan.contains("reference") && plan.contains("phase score reference"), "{plan}");
}

/// The numerics fingerprint: its hash, and its fields, some of which depend on the machine.
fn fingerprint(settings: &[&str]) -> (String, Vec<String>) {
    let text = Folder::new(RUN).succeeds(&[&["plan", "run.yaml"], settings].concat());
    let (_, text) = text.split_once("\nfingerprint ").unwrap();
    let (hash, fields) = text.split_once(": equal fingerprints and inputs give equal bits\n").unwrap();
    (hash.into(), fields.lines().map(|line| line.trim().to_string()).collect())
}

#[test]
fn plan_prints_the_fingerprint() {
    let (hash, fields) = fingerprint(&["device=cpu"]);
    assert!(hash.len() == 12 && hash.chars().all(|c| c.is_ascii_hexdigit()), "{hash}");
    let steady = |line: &&String| !line.starts_with("math library: ") && !line.starts_with("lockstep: ");
    assert_snapshot!(fields.iter().filter(steady).cloned().collect::<Vec<_>>().join("\n"), @r"
    device: CPU
    storage: f32
    gradients: f32
    optimizer: adamw, f32 states
    matmul: vector instructions
    head chunk: whole micro-batch
    gradient scaling: none
    micro-batches: 1
    accumulation order: none
    sum over ranks: one rank
    ");
    let (other, changed) = fingerprint(&["device=cpu", "gradient_accumulation_steps=2", "--schedule"]);
    assert_ne!(other, hash);
    assert!(changed.contains(&"accumulation order: local".to_string()), "{changed:?}");
    // A plan for GPUs can be made anywhere, but without the versions of their libraries.
    let folder = Folder::new(RUN);
    let mut command = folder.command(&["plan", "run.yaml", "device=cuda", "nproc_per_node=2"]);
    let ran = command.env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    let text = String::from_utf8(ran.stdout).unwrap();
    assert!(text.contains("  GPU: unknown here\n"), "{text}");
    assert!(text.contains(", incomplete: equal fingerprints"), "{text}");
}

#[test]
fn plan_needs_no_data_and_no_output_folder() {
    let folder = Folder::new(&RUN.replace("train_files: data.jsonl\n", "").replace("output_dir: out\n", ""));
    let before = folder.tree();
    folder.succeeds(&["plan", "run.yaml"]);
    folder.succeeds(&["plan", "model=7b", "strategy=zero3", "--nnodes", "4", "--nproc_per_node", "8"]);
    assert_eq!(folder.tree(), before);
}

#[test]
fn version() {
    let text = Folder::new(RUN).succeeds(&["--version"]);
    assert_eq!(text, format!("lockstep {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn keys() {
    let page = Folder::new(RUN).succeeds(&["keys"]);
    for key in
        ["learning_rate", "max_steps", "strategy", "resume_from_checkpoint", "num_generations", "kl_coef"]
    {
        assert!(page.contains(&format!("| `{key}` |")), "{key} is on the page");
    }
    for line in [
        "| `learning_rate` | `5e-5` (sft, clm), `1e-4` (reward), `1e-6` (dpo, grpo, rloo), `3e-6` (ppo) |",
        "| `beta` | `0.1` (dpo), `0.0` (grpo), `0.05` (rloo) |",
        "| `max_length` | `1024` (sft, clm, reward, dpo) |",
    ] {
        assert!(page.contains(line), "{line}");
    }
}

/// As in `lockstep keys | head -1`.
#[test]
fn a_reader_may_leave_early() {
    let folder = Folder::new(RUN);
    let plan = ["plan", "model=7b", "output_dir=out", "strategy=zero3", "nproc_per_node=8", "--schedule"];
    for args in [&["keys"][..], &["--help"], &plan, &["train", "run.yaml"]] {
        let mut command = folder.command(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!((child.wait().unwrap().code(), stderr.as_str()), (Some(0), ""), "{args:?}");
    }
    assert!(folder.path("out/model/model.safetensors").exists(), "the run went on without its reader");
}

#[test]
fn output_that_cannot_be_written() {
    if !cfg!(target_os = "linux") {
        return;
    }
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = Folder::new(RUN).command(&["keys"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(73));
    assert_snapshot!(String::from_utf8(output.stderr).unwrap(), @r"
    error: cannot write to standard output: No space left on device (os error 28)
    ");
}

#[test]
fn recompute_auto_uses_the_memory_of_the_host() {
    let folder = Folder::new(RUN);
    let text = folder.succeeds(&["train", "run.yaml", "recompute=auto", "device=cpu", "--dry-run"]);
    // A small model fits into the host's memory.
    assert!(text.contains("\nrecompute: none  # chosen automatically\n"), "{text}");
}
