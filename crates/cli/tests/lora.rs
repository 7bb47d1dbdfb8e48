//! LoRA runs, from a model folder to an adapter and back to a whole model.

use insta::assert_snapshot;

use crate::support::{Folder, rows};

pub(crate) const RUN: &str = "\
model_name_or_path: base/model
use_peft: true
lora_target_modules: all-linear
train_files: data.jsonl
max_length: 64
per_device_train_batch_size: 4
max_steps: 4
save_steps: 2
learning_rate: 1e-2
output_dir: out
threads: 1
";

/// A folder with data and a model.
pub(crate) fn prepared() -> Folder {
    let folder = Folder::new(RUN);
    folder.write("data.jsonl", rows(64));
    let base =
        "model: tiny\ntrain_files: data.jsonl\nmax_length: 64\nmax_steps: 3\nthreads: 1\noutput_dir: base\n";
    folder.write("base.yaml", base);
    folder.succeeds(&["train", "base.yaml"]);
    folder
}

pub(crate) fn adapter(folder: &Folder, run: &str) -> Vec<u8> {
    std::fs::read(folder.path(&format!("{run}/model/adapter_model.safetensors"))).unwrap()
}

/// A run that stopped and was resumed, under another strategy, ends with the same adapter. It takes two ranks' worth of
/// checkpoints, which hold the adapter and nothing of the base.
#[test]
fn a_resumed_run_has_the_same_adapter() {
    let folder = prepared();
    let whole = ["train", "run.yaml", "--nproc", "2", "strategy=zero3", "output_dir=whole"];
    folder.succeeds(&whole);
    folder.succeeds(&["train", "run.yaml", "--nproc", "2", "strategy=zero3", "accumulation_order=reduced"]);
    std::fs::remove_dir_all(folder.path("out/checkpoints/step-4")).unwrap();
    let resumed = ["resume_from_checkpoint=latest", "strategy=zero2", "offload_optimizer=cpu"];
    folder.succeeds(
        &[&["train", "run.yaml", "--nproc", "2", "accumulation_order=reduced"], &resumed[..]].concat(),
    );
    assert!(adapter(&folder, "whole") == adapter(&folder, "out"));
    let names = folder.succeeds(&["generate", "out", "--prompt", "a", "--max-new-tokens", "4"]);
    assert!(!names.is_empty());
}

/// A run does not continue with other weights under its adapter.
#[test]
fn another_base_is_refused() {
    let folder = prepared();
    folder.succeeds(&["train", "run.yaml"]);
    std::fs::remove_dir_all(folder.path("out/checkpoints/step-4")).unwrap();
    folder.succeeds(&["train", "base.yaml", "max_steps=5", "overwrite_output_dir=true"]);
    let ran = folder.run(&["train", "run.yaml", "resume_from_checkpoint=latest"]);
    assert_eq!(ran.code, Some(64), "{ran:#?}");
    assert!(ran.stderr.contains("base model hash"), "{ran:#?}");
}

/// The adapter beside its model, found by itself, and merged into it, give the same loss.
#[test]
fn adapters_are_evaluated_and_merged() {
    let folder = prepared();
    folder.succeeds(&["train", "run.yaml"]);
    folder.succeeds(&["export", "out", "merged", "--merge"]);
    folder.succeeds(&["export", "out", "adapter"]);
    let loss = |model: &[&str]| -> f64 {
        let settings = ["eval_files=data.jsonl", "max_length=64", "--json"];
        let text = folder.succeeds(&[&["eval"], model, &settings[..]].concat());
        let found: serde_json::Value = serde_json::from_str(&text).unwrap();
        found["loss"].as_f64().unwrap()
    };
    let (plain, adapted) = (loss(&["base"]), loss(&["base", "--adapter", "out"]));
    assert!(adapted < plain - 0.01, "{adapted} {plain}");
    assert_eq!(loss(&["out"]), adapted);
    assert_eq!(loss(&["base", "--adapter", "adapter"]), adapted);
    let merged = loss(&["merged"]);
    assert!((merged - adapted).abs() < 1e-5, "{merged} {adapted}");
}

/// The reference of a policy with an adapter is the policy without it: it takes no memory, and changes no loss.
#[test]
fn the_reference_shares_the_weights() {
    let folder = prepared();
    let pair = |i: usize| format!("{{\"prompt\": \"{i}\", \"chosen\": \"a{i}\", \"rejected\": \"b\"}}\n");
    folder.write("pairs.jsonl", (0..32).map(pair).collect::<String>());
    let dpo = ["algorithm=dpo", "train_files=pairs.jsonl"];
    let losses = |settings: &[&str], out: &str| {
        let out_dir = format!("output_dir={out}");
        folder.succeeds(&[&["train", "run.yaml", &out_dir], &dpo[..], settings].concat());
        let text = folder.read(&format!("{out}/metrics.jsonl"));
        let loss =
            |line: &str| Some(serde_json::from_str::<serde_json::Value>(line).ok()?.get("loss")?.to_string());
        text.lines().filter_map(loss).collect::<Vec<String>>()
    };
    let shared = losses(&["strategy=zero3", "--nproc", "2"], "shared");
    let own = losses(&["strategy=zero3", "--nproc", "2", "ref_model_name_or_path=base/model"], "own");
    assert_eq!(shared, own);
    let weights = |settings: &[&str]| {
        let text = folder.succeeds(&[&["plan", "run.yaml", "--json"], &dpo[..], settings].concat());
        let plan: serde_json::Value = serde_json::from_str(&text).unwrap();
        plan["memory"]["residents"]["device_bytes"].as_u64().unwrap()
    };
    assert!(weights(&[]) + 400_000 < weights(&["ref_model_name_or_path=base/model"]));
}

#[test]
fn what_cannot_be() {
    let folder = prepared();
    assert_snapshot!(folder.refused(&["train", "run.yaml", "lora_target_modules=qproj"], 64), @r"
    error: `qproj` names no module of the model that can have an adapter or be saved with one
    hint: did you mean `q_proj`? `all-linear` targets all projections of all blocks.
    ");
    assert_snapshot!(folder.refused(&["export", "base", "x", "--merge"], 66), @r"
    error: base/checkpoints/step-3: there is no adapter to merge
    hint: remove --merge, or give a run that trained an adapter.
    ");
    let refused = folder.refused(&["generate", "base", "--adapter", "base/model", "--prompt", "a"], 66);
    assert!(refused.contains("is not an adapter's folder"), "{refused}");
}
