//! Reward models, DPO, GRPO, RLOO and PPO as real processes: every strategy gives the same weights, the number of ranks
//! changes only rounding, and runs resume bit for bit, in the middle of a rollout as well.

use std::fs;

use crate::launch::{free_port, node, run_all};
use crate::support::Folder;
use crate::tensors;

const MODEL: &str = "\
model: {architectures: [LlamaForCausalLM], hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, \
intermediate_size: 64, max_position_embeddings: 64}
output_dir: out
threads: 1
learning_rate: 1e-3
logging_steps: 1
";

/// A small configuration of an algorithm, on `pairs.jsonl` or `prompts.jsonl`.
fn config(algorithm: &str) -> String {
    let own = match algorithm {
        "reward" => "train_files: pairs.jsonl\nmax_length: 48\ncenter_rewards_coefficient: 0.01\n",
        "dpo" => "train_files: pairs.jsonl\nmax_length: 48\n",
        "grpo" => {
            "train_files: prompts.jsonl\nreward_funcs: [{length_penalty: {max_length: 6, buffer: 5}}, {regex: '[a-m]'}]\n\
             num_generations: 4\nnum_iterations: 2\nbeta: 0.1\nmax_prompt_length: 16\nmax_completion_length: 6\n"
        }
        "rloo" => {
            "train_files: prompts.jsonl\nreward_funcs: [{regex: '[a-m]'}]\nnum_generations: 4\n\
             max_prompt_length: 16\nmax_completion_length: 6\n"
        }
        "ppo" => {
            "train_files: prompts.jsonl\nreward_model_path: reward\nnum_ppo_epochs: 2\nmax_prompt_length: 16\n\
             max_completion_length: 6\nadaptive_kl: true\n"
        }
        other => unreachable!("{other}"),
    };
    format!("{MODEL}algorithm: {algorithm}\n{own}")
}

/// A folder with data, a configuration, and a reward model if the algorithm needs one.
fn folder(algorithm: &str) -> Folder {
    let folder = Folder::new(&config(algorithm));
    let pair = |i: u32| {
        format!("{{\"prompt\": \"{i} and \", \"chosen\": \"{}\", \"rejected\": \"less {i}\"}}\n", i + 1)
    };
    let prompt = |i: u32| format!("{{\"prompt\": \"{i} plus {}\", \"answer\": \"{}\"}}\n", 7 * i % 5, i);
    folder.write("pairs.jsonl", (0..24).map(pair).collect::<String>());
    folder.write("prompts.jsonl", (0..24).map(prompt).collect::<String>());
    if algorithm == "ppo" {
        folder.write("reward.yaml", config("reward"));
        folder.succeeds(&["train", "reward.yaml", "max_steps=2", "output_dir=trained"]);
        fs::rename(folder.path("trained/model"), folder.path("reward")).unwrap();
    }
    folder
}

/// The tensors of the exported model, and every step's loss, norm and reward.
fn result(folder: &Folder) -> (Vec<tensors::Tensor>, Vec<String>) {
    let numbers = |line: &str| {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        format!("{} {} {} {}", record["step"], record["loss"], record["grad_norm"], record["reward"])
    };
    let losses = folder.read("out/metrics.jsonl").lines().map(numbers).collect();
    (tensors::read(&folder.path("out/model/model.safetensors")), losses)
}

fn trained(folder: &Folder, settings: &[&str]) -> (Vec<tensors::Tensor>, Vec<String>) {
    let _ = fs::remove_dir_all(folder.path("out"));
    folder.succeeds(&[&["train", "run.yaml", "max_steps=3"], settings].concat());
    result(folder)
}

/// Every strategy, offload and recomputation against ddp, on two ranks.
fn strategies_agree(algorithm: &str) {
    let folder = folder(algorithm);
    let base = [
        "--nproc",
        "2",
        "per_device_train_batch_size=4",
        "gradient_accumulation_steps=2",
        "accumulation_order=local",
    ];
    let ddp = trained(&folder, &base);
    assert_eq!(ddp.1.len(), 3);
    for settings in [
        &["strategy=zero1", "offload_optimizer=cpu"][..],
        &["strategy=zero2", "recompute=full", "carrier=tcp"],
        &["strategy=shard_grad_op", "prefetch=3"],
        &["strategy=zero3", "offload_optimizer=nvme", "offload_param=nvme", "nvme_path=spilled"],
        &["strategy=full_shard", "offload_param=cpu", "recompute=none"],
    ] {
        let other = trained(&folder, &[&base[..], settings].concat());
        assert!(other == ddp, "{algorithm} {settings:?}: {:?}, ddp {:?}", other.1, ddp.1);
    }
}

#[test]
fn strategies_agree_for_reward_models() {
    strategies_agree("reward");
}

#[test]
fn strategies_agree_for_dpo() {
    strategies_agree("dpo");
}

#[test]
fn strategies_agree_for_grpo() {
    strategies_agree("grpo");
}

#[test]
fn strategies_agree_for_rloo() {
    strategies_agree("rloo");
}

#[test]
fn strategies_agree_for_ppo() {
    strategies_agree("ppo");
}

/// In bf16 and fp16, with every algorithm: sharded, offloaded and in other formats of states, against ddp.
#[test]
fn half_precisions_agree() {
    for algorithm in ["reward", "dpo", "grpo", "rloo", "ppo"] {
        let folder = folder(algorithm);
        let base = ["--nproc", "2", "per_device_train_batch_size=4", "max_steps=2"];
        for precision in
            [&["bf16=true"][..], &["fp16=true"], &["bf16=true", "master_weights=none", "optim=adamw_8bit"]]
        {
            let run = |settings: &[&str]| trained(&folder, &[&base[..], precision, settings].concat());
            let ddp = run(&["strategy=ddp"]);
            let sharded = run(&["strategy=zero3", "offload_optimizer=cpu", "recompute=full"]);
            assert!(sharded == ddp, "{algorithm} {precision:?}: {:?}, ddp {:?}", sharded.1, ddp.1);
        }
    }
}

/// Two nodes of two ranks each: sharded inside a node and replicated over nodes, against ddp.
#[test]
fn hybrid_shard_agrees() {
    for algorithm in ["reward", "dpo", "grpo", "ppo"] {
        let folder = folder(algorithm);
        let run = |strategy: &str| {
            let _ = fs::remove_dir_all(folder.path("out"));
            let port = free_port();
            let (node, ranks) = (node(&folder, &port), ["--nproc-per-node", "2"]);
            let start = |rank: &str| {
                let mut command = node(rank, &ranks);
                command.args(["max_steps=2", "per_device_train_batch_size=2", strategy]);
                command
            };
            let ends = run_all(vec![start("0"), start("1")]);
            assert!(ends.iter().all(|end| end.code == Some(0)), "{algorithm} {strategy}: {ends:#?}");
            result(&folder)
        };
        let (ddp, hybrid) = (run("strategy=ddp"), run("strategy=hybrid_shard"));
        assert!(hybrid == ddp, "{algorithm}: {:?}, ddp {:?}", hybrid.1, ddp.1);
    }
}

/// The same global batch on other numbers of ranks, rows and micro-batches: the same completions, and losses that differ
/// by rounding.
#[test]
fn the_split_of_a_batch_changes_only_rounding() {
    for algorithm in ["reward", "dpo", "grpo", "rloo", "ppo"] {
        let folder = folder(algorithm);
        let losses = |nproc: &str, rows: &str, micros: &str| -> Vec<Vec<f64>> {
            let (rows, micros) = (
                format!("per_device_train_batch_size={rows}"),
                format!("gradient_accumulation_steps={micros}"),
            );
            let (_, lines) = trained(&folder, &["--nproc", nproc, &rows, &micros, "max_steps=2"]);
            let numbers = |line: &String| line.split(' ').filter_map(|word| word.parse().ok()).collect();
            lines.iter().map(numbers).collect()
        };
        let one = losses("1", "8", "1");
        for (nproc, rows, micros) in [("2", "2", "2"), ("4", "2", "1"), ("1", "2", "4")] {
            let other = losses(nproc, rows, micros);
            for (a, b) in one.iter().flatten().zip(other.iter().flatten()) {
                assert!(
                    (a - b).abs() <= 2e-4 * a.abs().max(1.0),
                    "{algorithm} {nproc} {rows} {micros}: {one:?} {other:?}"
                );
            }
        }
    }
}

/// A run that is interrupted after any step, in the middle of a rollout as well, ends with the bits of one that is not.
#[test]
fn runs_resume_bit_for_bit() {
    for algorithm in ["reward", "dpo", "grpo", "ppo"] {
        let folder = folder(algorithm);
        let settings = ["per_device_train_batch_size=4", "lr_scheduler_type=constant"];
        let whole = trained(&folder, &[&settings[..], &["max_steps=4"]].concat());
        for stop in ["max_steps=1", "max_steps=2", "max_steps=3"] {
            trained(&folder, &[&settings[..], &[stop, "save_steps=1"]].concat());
            let resumed = ["train", "run.yaml", "max_steps=4", "resume_from_checkpoint=true"];
            folder.succeeds(&[&resumed[..], &settings].concat());
            let other = result(&folder);
            assert!(other == whole, "{algorithm} after {stop}: {:?}, whole {:?}", other.1, whole.1);
        }
    }
}

/// A checkpoint in the middle of a rollout loads on another number of ranks and with another strategy.
#[test]
fn a_rollout_continues_on_other_ranks() {
    let folder = folder("grpo");
    let rows = |n: u32| format!("per_device_train_batch_size={n}");
    trained(&folder, &["max_steps=1", &rows(8), "save_steps=1"]);
    let resumed = ["train", "run.yaml", "max_steps=2", "resume_from_checkpoint=true", "--nproc", "2"];
    folder.succeeds(&[&resumed[..], &["strategy=zero3", &rows(4)]].concat());
    assert_eq!(result(&folder).1.len(), 2);
}

/// On the CPU the policy's log-probabilities in training equal those of generation, so that nothing is clipped in the
/// first pass over a rollout and the first loss is the mean of the negative advantages.
#[test]
fn the_first_pass_is_on_policy() {
    let folder = folder("grpo");
    trained(&folder, &["per_device_train_batch_size=8", "max_steps=2", "beta=0", "temperature=0.7"]);
    let metrics = folder.read("out/metrics.jsonl");
    let first: serde_json::Value = serde_json::from_str(metrics.lines().next().unwrap()).unwrap();
    assert_eq!(first["approx_kl"], 0.0, "the ratio of every token is exactly 1");
    let second: serde_json::Value = serde_json::from_str(metrics.lines().nth(1).unwrap()).unwrap();
    assert!(second["approx_kl"].as_f64().unwrap() > 0.0, "the second pass is not");
    assert_eq!(folder.read("out/completions.jsonl").lines().count(), 8);
}

/// The reference's log-probabilities, computed before the run, give the same training as a reference model.
#[test]
fn precomputed_references_change_nothing() {
    let folder = folder("dpo");
    let settings = ["per_device_train_batch_size=4", "eval_fraction=0.2", "eval_steps=2"];
    let model = trained(&folder, &settings);
    let precomputed = trained(&folder, &[&settings[..], &["precompute_ref_log_probs=true"]].concat());
    assert!(precomputed == model, "{:?} and {:?}", precomputed.1, model.1);
    let cached = trained(&folder, &[&settings[..], &["precompute_ref_log_probs=true"]].concat());
    assert!(cached == model, "from the cache");
}

/// transformers' folder of a reward model: its class, its head, and no language-model head.
#[test]
fn reward_models_are_saved_as_classifiers() {
    let folder = folder("reward");
    let (tensors, _) = trained(&folder, &[]);
    let config: serde_json::Value = serde_json::from_str(&folder.read("out/model/config.json")).unwrap();
    assert_eq!(config["architectures"][0], "LlamaForSequenceClassification");
    assert_eq!(config["id2label"].as_object().unwrap().len(), 1);
    let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert!(names.contains(&"score.weight") && !names.contains(&"lm_head.weight"), "{names:?}");
    // It can be trained further.
    fs::rename(folder.path("out/model"), folder.path("first")).unwrap();
    folder.write("run.yaml", config_of_folder("reward", "first"));
    trained(&folder, &["max_steps=1"]);
}

fn config_of_folder(algorithm: &str, model: &str) -> String {
    let rest: String = config(algorithm).lines().skip(1).map(|line| format!("{line}\n")).collect();
    format!("model_name_or_path: {model}\n{rest}")
}

/// A reference that follows the policy is part of checkpoints.
#[test]
fn a_synced_reference_resumes() {
    let folder = folder("dpo");
    let settings = [
        "per_device_train_batch_size=4",
        "lr_scheduler_type=constant",
        "sync_ref_model=true",
        "ref_model_sync_steps=1",
        "ref_model_mixup_alpha=0.5",
    ];
    let whole = trained(&folder, &settings);
    trained(&folder, &[&settings[..], &["max_steps=2", "save_steps=2"]].concat());
    let resumed = ["train", "run.yaml", "max_steps=3", "resume_from_checkpoint=true"];
    folder.succeeds(&[&resumed[..], &settings].concat());
    assert!(result(&folder) == whole);
    assert!(trained(&folder, &settings[..2]) != whole, "the reference matters");
}

/// A reward program: the length of the completion as JSON, modulo 7. At its seventh sample it calls `at_seventh`.
const REWARD_PROGRAM: &str = r#"
n=0
while read -r line; do
    n=$((n + 1))
    if [ $n = 7 ] && [ -e at_seventh.sh ] && mkdir called 2> /dev/null; then . ./at_seventh.sh; fi
    id=${line#*\"id\":}
    completion=${line#*\"completion\":}
    completion=${completion%%,\"completion_ids\"*}
    printf '{"id": %s, "reward": %s}\n' "${id%%,*}" $((${#completion} % 7))
done
"#;

/// A rank that is killed in the middle of a rollout: the restarted ranks make the same completions and end with the same
/// weights.
#[test]
fn a_rank_killed_in_a_rollout() {
    let folder = folder("grpo");
    folder.write("reward.sh", REWARD_PROGRAM);
    let run = [
        "train",
        "run.yaml",
        "--nproc",
        "2",
        "--max-restarts",
        "1",
        "max_steps=6",
        "save_steps=1",
        "per_device_train_batch_size=4",
        "reward_funcs=[{program: {command: [sh, reward.sh], timeout: 20}}]",
    ];
    let completions = || folder.read("out/completions.jsonl");
    folder.succeeds(&run);
    let (whole, all) = (result(&folder), completions());
    assert_eq!(all.lines().count(), 24, "{all}");
    fs::remove_dir_all(folder.path("out")).unwrap();
    // Each rank scores four samples of a rollout: the seventh is in the second one.
    folder.write("at_seventh.sh", "kill -9 $PPID\nsleep 20\n");
    let printed = folder.run(&run);
    assert!(printed.code == Some(0) && printed.stderr.contains("restart"), "{printed:#?}");
    assert!(folder.path("called").exists());
    assert_eq!(completions(), all);
    assert!(result(&folder) == whole, "the weights differ");
}

/// A program gives the rewards; one that dies ends the run with its own words, or not, as the configuration says.
#[test]
fn programs_give_rewards() {
    let folder = folder("grpo");
    folder.write("reward.sh", REWARD_PROGRAM);
    let funcs = "reward_funcs=[{program: {command: [sh, reward.sh], timeout: 20}}]";
    trained(&folder, &[funcs, "per_device_train_batch_size=8"]);
    let line = folder.read("out/metrics.jsonl").lines().next().unwrap().to_string();
    let first: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert!(first["rewards/program/mean"].as_f64().unwrap() > 0.0, "{line}");

    folder.write("reward.sh", "echo out of ideas >&2\nexit 3\n");
    let ran = folder.run(&["train", "run.yaml", funcs, "per_device_train_batch_size=8", "output_dir=failed"]);
    assert!(ran.code != Some(0) && ran.stderr.contains("out of ideas"), "{ran:#?}");
    let skip =
        ["train", "run.yaml", funcs, "per_device_train_batch_size=8", "reward_on_error=zero", "max_steps=2"];
    let ran = folder.run(&[&skip[..], &["output_dir=tolerated"]].concat());
    assert!(ran.code == Some(0) && ran.stdout.contains("a reward function failed"), "{ran:#?}");
}

/// Evaluation on held-out prompts measures rewards.
#[test]
fn rewards_are_evaluated() {
    let folder = folder("grpo");
    trained(&folder, &["per_device_train_batch_size=8", "eval_fraction=0.25", "eval_steps=2", "max_steps=2"]);
    let metrics = folder.read("out/metrics.jsonl");
    let last: serde_json::Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    assert!(last["eval_reward"].is_number() && last["eval_loss"].is_null(), "{last}");
}
