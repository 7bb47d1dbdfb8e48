//! Runs on weights in 4 bits (QLoRA): from a plain folder, from one of bitsandbytes, and from random weights.

use std::path::Path;

use insta::assert_snapshot;
use serde_json::Value;

use crate::lora::{self, adapter};
use crate::support::Folder;

/// As [`crate::lora::prepared`], in 4 bits.
fn prepared() -> Folder {
    let folder = lora::prepared();
    folder.write("run.yaml", run());
    folder
}

fn run() -> String {
    format!("{}load_in_4bit: true\n", lora::RUN)
}

fn loss(folder: &Folder, model: &[&str], more: &[&str]) -> f64 {
    let settings = ["eval_files=data.jsonl", "max_length=64", "--json"];
    let text = folder.succeeds(&[&["eval"], model, &settings[..], more].concat());
    let found: Value = serde_json::from_str(&text).unwrap();
    found["loss"].as_f64().unwrap()
}

/// From a model's folder to an adapter and back to a whole model.
#[test]
fn an_adapter_of_weights_in_4_bits() {
    let folder = prepared();
    folder.succeeds(&["train", "run.yaml"]);
    let plain = loss(&folder, &["base"], &[]);
    let (in_4_bits, adapted) = (["load_in_4bit=true"], ["base", "--adapter", "out"]);
    let (quantised, found) = (loss(&folder, &["base"], &in_4_bits), loss(&folder, &adapted, &in_4_bits));
    // Quantisation changes little, training much.
    assert!(quantised != plain && (quantised - plain).abs() < 0.1, "{quantised} {plain}");
    assert!(found < quantised - 0.01, "{found} {quantised}");
    assert_eq!(loss(&folder, &["out"], &in_4_bits), found);
    // The same adapter on the weights as they are, and merged into them.
    let on_plain = loss(&folder, &adapted, &[]);
    assert!(on_plain != found && on_plain < plain - 0.01, "{on_plain} {plain}");
    folder.succeeds(&["export", "out", "merged", "--merge"]);
    let merged = loss(&folder, &["merged"], &[]);
    assert!((merged - on_plain).abs() < 1e-5, "{merged} {on_plain}");
    for model in [&["base", "--adapter", "out"][..], &["out"]] {
        let args = [&["generate"], model, &["--prompt", "a", "--max-new-tokens", "4"]].concat();
        assert!(!folder.succeeds(&args).is_empty());
    }
    let metrics = folder.read("out/metrics.jsonl");
    assert!(metrics.contains("nf4, double quantised"), "{metrics}");
}

/// A run that stopped and was resumed on other ranks, under another strategy, ends with the same adapter.
#[test]
fn a_resumed_run_has_the_same_adapter() {
    let folder = prepared();
    let run = ["train", "run.yaml", "--nproc", "2", "accumulation_order=reduced"];
    folder.succeeds(&[&run[..], &["strategy=zero3", "output_dir=whole"]].concat());
    folder.succeeds(&[&run[..], &["strategy=zero3"]].concat());
    std::fs::remove_dir_all(folder.path("out/checkpoints/step-4")).unwrap();
    let resumed = ["resume_from_checkpoint=latest", "strategy=zero2", "offload_optimizer=cpu"];
    folder.succeeds(&[&run[..], &resumed].concat());
    assert!(adapter(&folder, "whole") == adapter(&folder, "out"));
    // With plain weights it is another run, and says so.
    std::fs::remove_dir_all(folder.path("out/checkpoints/step-4")).unwrap();
    let plain =
        folder.succeeds(&[&run[..], &["resume_from_checkpoint=latest", "load_in_4bit=false"]].concat());
    assert!(plain.contains("frozen weights: nf4, double quantised -> none"), "{plain}");
    assert!(adapter(&folder, "whole") != adapter(&folder, "out"));
}

/// A folder of bitsandbytes is in 4 bits without a setting.
#[test]
fn a_folder_of_bitsandbytes() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/bitsandbytes");
    let folder = Folder::new(&run());
    let ids: Vec<String> = (0..20).map(|i| (i * 7 % 101).to_string()).collect();
    folder.write("data.jsonl", format!("{{\"input_ids\": [{}]}}\n", ids.join(", ")).repeat(16));
    for name in ["config.json", "model.safetensors"] {
        std::fs::create_dir_all(folder.path("base/model")).unwrap();
        std::fs::copy(golden.join(name), folder.path(&format!("base/model/{name}"))).unwrap();
    }
    folder.succeeds(&["train", "run.yaml", "load_in_4bit=false", "output_dir=alone"]);
    folder.succeeds(&[
        "train",
        "run.yaml",
        "--nproc",
        "2",
        "strategy=zero3",
        "per_device_train_batch_size=2",
    ]);
    assert!(folder.read("alone/metrics.jsonl").contains("nf4, double quantised"));
    let plain = loss(&folder, &["base/model"], &[]);
    let adapted = loss(&folder, &["base/model", "--adapter", "alone"], &[]);
    assert!(adapted < plain - 0.1, "{adapted} {plain}");
    // Merged, the model has the storage type.
    folder.succeeds(&["export", "alone", "merged", "--merge"]);
    assert!(!folder.read("merged/config.json").contains("quantization_config"));
    let merged = loss(&folder, &["merged"], &[]);
    assert!((merged - adapted).abs() < 1e-5, "{merged} {adapted}");
    assert_snapshot!(folder.refused(&["train", "run.yaml", "use_peft=false", "overwrite_output_dir=true"], 64), @r"
    error: weights in 4 bits cannot be trained themselves
    hint: train adapters on them with `use_peft: true`, or train weights that are not quantised.
    ");
}

/// Policy and reference share the codes, which are dequantised to generate, to score and to train: the same adapter with
/// sharded and with whole weights.
#[test]
fn a_rollout_of_weights_in_4_bits() {
    let folder = prepared();
    let prompts: String = (0..32).map(|i| format!("{{\"prompt\": \"{i} and {}\"}}\n", i % 7)).collect();
    folder.write("prompts.jsonl", prompts);
    let run = [
        "train",
        "run.yaml",
        "algorithm=grpo",
        "train_files=prompts.jsonl",
        "reward_funcs=[{regex: a}]",
        "num_generations=4",
        "beta=0.1",
        "max_prompt_length=20",
        "max_completion_length=12",
        "accumulation_order=reduced",
        "--nproc",
        "2",
    ];
    folder.succeeds(&[&run[..], &["strategy=zero3", "output_dir=sharded"]].concat());
    folder.succeeds(&[&run[..], &["strategy=ddp", "output_dir=whole"]].concat());
    assert!(adapter(&folder, "sharded") == adapter(&folder, "whole"));
    assert!(folder.read("whole/metrics.jsonl").contains("\"kl\""));
}

#[test]
fn what_cannot_be() {
    let folder = prepared();
    let refused = |settings: &[&str]| folder.refused(&[&["train", "run.yaml"], settings].concat(), 64);
    assert_snapshot!(refused(&["use_peft=false"]), @r"
    error: weights in 4 bits cannot be trained themselves
    hint: train adapters on them with `use_peft: true`, or train weights that are not quantised.
    ");
    let dpo = ["algorithm=dpo", "precompute_ref_log_probs=true", "ref_model_name_or_path=base/model"];
    assert_snapshot!(refused(&dpo), @r"
    error: `precompute_ref_log_probs` does not work with weights in 4 bits: a model would need them in another format
    hint: remove it, or do not load models in 4 bits.
    ");
    let offload = ["plan", "run.yaml", "--nproc", "2", "strategy=zero3", "offload_param=cpu"];
    assert_snapshot!(folder.refused(&offload, 64), @r"
    error: `offload_param` is not implemented for weights in 4 bits
    hint: remove `offload_param`: 4-bit weights take an eighth of f32. `offload_optimizer` works.
    ");
}

/// The memory of `lockstep plan` for one row of 2048 tokens on one GPU, in GiB.
fn planned_gib(model: &str) -> f64 {
    let run = format!(
        "{model}\nuse_peft: true\nlora_target_modules: all-linear\nload_in_4bit: true\nmixed_precision: bf16\n\
         max_length: 2049\nper_device_train_batch_size: 1\nrecompute: full\noutput_dir: out\n"
    );
    let args = ["plan", "run.yaml", "--gpus", "1", "--gpu", "h200"];
    let text = Folder::new(&run).succeeds(&args);
    let line =
        |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{text}"));
    assert!(line("    4-bit weights, u8").contains(" GiB "), "{text}");
    assert!(
        text.contains(" dequantised weights ") && text.contains("1 micro-batch of 2048 tokens"),
        "{text}"
    );
    let words: Vec<&str> = line("total ").split_whitespace().collect();
    assert_eq!(words[2], "GiB", "{text}");
    words[1].parse().unwrap()
}

fn llama(dim: u32, layers: u32, heads: u32, kv_heads: u32, ffn: u32) -> String {
    format!(
        "model: {{architectures: [LlamaForCausalLM], hidden_size: {dim}, num_hidden_layers: {layers}, \
         num_attention_heads: {heads}, num_key_value_heads: {kv_heads}, intermediate_size: {ffn}, \
         max_position_embeddings: 4096, vocab_size: 32000}}"
    )
}

/// Rank 16 on all projections, AdamW in f32.
#[test]
fn models_of_7_to_70_billion_parameters_fit() {
    let of_7b = planned_gib("model: 7b\nvocab_size: 32000");
    assert!((4.5..8.0).contains(&of_7b), "{of_7b} GiB");
    let of_13b = planned_gib(&llama(5120, 40, 40, 40, 13824));
    assert!((8.0..12.0).contains(&of_13b), "{of_13b} GiB");
    let of_70b = planned_gib(&llama(8192, 80, 64, 8, 28672));
    assert!((38.0..47.0).contains(&of_70b), "{of_70b} GiB");
}
