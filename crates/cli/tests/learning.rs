//! Every algorithm learns, not only runs: short versions of `bench/learning`, on the quickstart's sums.

use std::fs;

use serde_json::Value;

use crate::support::{Folder, RUN};

/// The records of a run's evaluations.
fn evaluations(folder: &Folder, output: &str) -> Vec<Value> {
    let metrics = folder.read(&format!("{output}/metrics.jsonl"));
    let records = metrics.lines().map(|line| serde_json::from_str(line).unwrap());
    records.filter(|record: &Value| record["eval_seconds"].is_number()).collect()
}

/// The share of held-out problems that the quickstart reports with `prefix`.
fn solved(printed: &str, prefix: &str) -> f64 {
    let line = printed.lines().rfind(|line| line.starts_with(prefix)).unwrap_or_else(|| panic!("{printed}"));
    let numbers: Vec<f64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
    println!("{line}");
    numbers[0] / numbers[1]
}

/// GRPO learns sums from rewards alone, after a few demonstrations.
#[test]
fn grpo_learns_sums() {
    let folder = Folder::new(RUN);
    let printed =
        folder.succeeds(&["quickstart", "--algorithm", "grpo", "--output-dir", "quick", "max_steps=40"]);
    let (before, after) = (solved(&printed, "after sft: "), solved(&printed, "after grpo: "));
    assert!(before < 0.4 && after > before + 0.1, "{before} and {after}");
    folder.succeeds(&["train", "quick/grpo.yaml", "max_steps=1"]);
}

/// DPO and reward models learn from pairs of which a tenth are labelled wrong; PPO then raises the reward.
#[test]
fn pairs_and_ppo_learn() {
    let folder = Folder::new(RUN);
    folder.succeeds(&[
        "quickstart",
        "--algorithm",
        "dpo",
        "--output-dir",
        "quick",
        "max_steps=80",
        "eval_steps=80",
    ]);
    let found = evaluations(&folder, "quick/dpo");
    let accuracy = |record: &Value, name: &str| record[name].as_f64().unwrap();
    let (first, last) = (&found[0], found.last().unwrap());
    assert!(accuracy(first, "eval_rewards/accuracies") < 0.1, "equal to the reference: {first}");
    assert!(accuracy(last, "eval_rewards/accuracies") > 0.9, "{last}");

    let text = folder.read("quick/dpo.yaml").replace("algorithm: dpo", "algorithm: reward");
    folder.write("reward.yaml", text);
    let settings = ["output_dir=reward", "learning_rate=3e-4", "max_steps=160", "eval_steps=160"];
    folder.succeeds(&[&["train", "reward.yaml"], &settings[..]].concat());
    let found = evaluations(&folder, "reward");
    assert!(accuracy(found.last().unwrap(), "eval_accuracy") > 0.6, "{found:?}");

    let sums = fs::read_to_string(folder.path("quick/held_out_pairs.jsonl")).unwrap();
    folder.write("prompts.jsonl", sums);
    let ppo = [
        "ppo",
        "model_name_or_path=quick/sft/model",
        "reward_model_path=reward/model",
        "train_files=quick/demonstrations.jsonl",
        "eval_files=prompts.jsonl",
        "max_prompt_length=8",
        "max_completion_length=32",
        "per_device_train_batch_size=128",
        "max_steps=40",
        "learning_rate=1e-4",
        "value_learning_rate=1e-3",
        "num_mini_batches=1",
        "lr_scheduler_type=constant",
        "kl_coef=0.05",
        "missing_eos_penalty=1.0",
        "eval_on_start=true",
        "eval_steps=40",
        "save_strategy=no",
        "output_dir=ppo",
    ];
    folder.succeeds(&ppo);
    let found = evaluations(&folder, "ppo");
    let reward = |record: &Value| record["eval_reward"].as_f64().unwrap();
    let gain = reward(&found[1]) - reward(&found[0]);
    assert!(gain > 0.15 * found[0]["eval_reward_std"].as_f64().unwrap(), "{found:?}");
}
