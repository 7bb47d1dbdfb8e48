//! Devices: plans for a GPU on machines without one, and errors about missing GPUs.

use insta::assert_snapshot;

use crate::support::{Folder, RUN, below_the_strategies};

const SEVEN_B: [&str; 9] = [
    "plan",
    "model=7b",
    "device=cuda",
    "mixed_precision=auto",
    "packing=none",
    "per_device_train_batch_size=4",
    "max_length=2049",
    "recompute=full",
    "output_dir=out",
];

/// A 7b model does not fit on the GPU, but does with the optimizer offloaded to the host.
#[test]
fn a_7b_model_within_44_gib() {
    let folder = Folder::new(RUN);
    let ran = folder.run(&[&SEVEN_B[..], &["memory_budget_gib=44"]].concat());
    assert_eq!(ran.code, Some(64), "{ran:#?}");
    assert!(ran.stderr.contains("over the budget of 44.0 GiB"), "{ran:#?}");
    let settings = ["memory_budget_gib=44", "offload_optimizer=cpu"];
    let text = folder.succeeds(&[&SEVEN_B[..], &settings].concat());
    let (text, _) = text.split_once("\nfingerprint ").unwrap();
    let words = ["states", "parameters, bf16", "gradients", "moments", "total"];
    let kept = |line: &&str| words.iter().any(|w| line.contains(w));
    assert_snapshot!(below_the_strategies(text).lines().filter(kept).collect::<Vec<_>>().join("\n"), @r"
    offload   optimizer states of the last 23 of 34 units
        parameters, bf16                      12.1 GiB           -           -
        gradients, f32                        7.54 GiB    16.6 GiB           -
        Adam moments, f32                     15.1 GiB    33.2 GiB           -
        gradients before offload              1.51 GiB           -           -
    total                                     43.9 GiB    67.6 GiB           -
    ");
}

/// The same model on a GPU with enough memory for its states and the activations of most blocks.
#[test]
fn a_7b_model_recomputes_little() {
    let folder = Folder::new(RUN);
    let settings = ["memory_budget_gib=130", "recompute=auto"];
    let text = folder.succeeds(&[&SEVEN_B[..], &settings].concat());
    let (text, _) = text.split_once("\nfingerprint ").unwrap();
    let kept = |line: &&str| ["recompute", "saved", "total"].iter().any(|w| line.contains(w));
    assert_snapshot!(below_the_strategies(text).lines().filter(kept).collect::<Vec<_>>().join("\n"), @r"
        activations saved for backward        30.2 GiB           -           -
    total                                      130 GiB    1.02 GiB           -
    ");
}

/// Plans for a GPU and for the CPU differ, and show the memory of each.
#[test]
fn the_plan_of_a_gpu_has_staging_memory() {
    let folder = Folder::new(RUN);
    let text = folder.succeeds(&["plan", "run.yaml", "device=cuda"]);
    assert!(text.contains("input and output staging"), "{text}");
    let text = folder.succeeds(&["plan", "run.yaml", "device=cpu"]);
    assert!(!text.contains("input and output staging"), "{text}");
}

/// A missing GPU is an error with a hint, and nothing is written.
#[test]
fn no_gpu() {
    let folder = Folder::new(RUN);
    let mut command = folder.command(&["train", "run.yaml", "device=cuda"]);
    // Hide the GPU if there is one.
    let ran = command.env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    let reported = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert_eq!(ran.status.code(), Some(69), "{reported}");
    assert!(reported.contains("`device: cpu` runs without"), "{reported}");
    assert!(!folder.path("out").exists(), "a run that cannot start leaves nothing");
    let ran = folder.command(&["train", "run.yaml"]).env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    assert!(ran.status.success(), "`device: auto` trains on the CPU");
}
