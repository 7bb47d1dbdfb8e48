//! Evaluation during training: its reports, and the best checkpoint.

use insta::assert_snapshot;
use serde_json::Value;

use crate::support::{Folder, RUN, rows};
use crate::tensors;

fn folder(more: &str) -> Folder {
    let folder = Folder::new(&format!("{RUN}eval_files: eval.jsonl\nlr_scheduler_type: constant\n{more}"));
    folder.write("eval.jsonl", rows(5));
    folder
}

fn evaluations(folder: &Folder, out: &str) -> Vec<(u64, f64)> {
    let text = folder.read(&format!("{out}/metrics.jsonl"));
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| Some((line["step"].as_u64()?, line["eval_loss"].as_f64()?))).collect()
}

fn steps(folder: &Folder, out: &str) -> Vec<String> {
    let entries = folder.path(&format!("{out}/checkpoints")).read_dir().unwrap();
    let mut names: Vec<String> =
        entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn evaluations_are_reported_everywhere() {
    let folder = folder("eval_steps: 2\neval_on_start: true\nreport_to: tensorboard\n");
    let printed = folder.succeeds(&["train", "run.yaml", "max_steps=5"]);
    let found = evaluations(&folder, "out");
    assert_eq!(found.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [0, 2, 4]);
    // Before training, all bytes are about equally likely.
    assert!((found[0].1 - 257f64.ln()).abs() < 0.1, "{found:?}");
    let line = "step 0 | evaluation | nll ";
    assert!(printed.contains(line) && folder.read("out/logs/training.log").contains(line));
    let board = folder.path("out/runs").read_dir().unwrap().next().unwrap().unwrap().path();
    let board = std::fs::read(board).unwrap();
    assert!(board.windows(9).any(|w| w == b"eval/loss") && board.windows(10).any(|w| w == b"train/loss"));
}

/// Evaluation and its batch size do not change training by a single bit.
#[test]
fn evaluation_leaves_training_alone() {
    let folder = folder("");
    let run = |out: &str, more: &[&str]| {
        let out_dir = format!("output_dir={out}");
        folder.succeeds(&[&["train", "run.yaml", "max_steps=4", &out_dir], more].concat());
        std::fs::read(folder.path(&format!("{out}/model/model.safetensors"))).unwrap()
    };
    let plain = run("plain", &["eval_strategy=no"]);
    assert!(run("one", &["eval_steps=1", "per_device_eval_batch_size=1"]) == plain);
    assert!(run("two", &["eval_steps=1", "per_device_eval_batch_size=64"]) == plain);
    assert_eq!(evaluations(&folder, "one"), evaluations(&folder, "two"));
    assert_eq!(evaluations(&folder, "one").len(), 4);
}

#[test]
fn all_ranks_evaluate() {
    let folder = folder("eval_steps: 1\n");
    let of = |out: &str, more: &[&str]| {
        let out_dir = format!("output_dir={out}");
        let args = [
            &["train", "run.yaml", "max_steps=2", "threads=1", "per_device_train_batch_size=1", &out_dir],
            more,
        ];
        folder.succeeds(&args.concat());
        evaluations(&folder, out)
    };
    let (ddp, zero3) = (of("a", &["--nproc", "2"]), of("b", &["--nproc", "2", "strategy=zero3"]));
    assert_eq!(ddp, zero3);
    assert_eq!(ddp.len(), 2);
}

/// The learning rate is so high that later steps are worse: an early checkpoint is the best one and is kept.
#[test]
fn the_best_checkpoint_stays_and_becomes_the_model() {
    let more = "eval_steps: 1\nsave_steps: 1\nsave_total_limit: 2\nload_best_model_at_end: true\n\
                learning_rate: 1.0\nmax_grad_norm: 0\n";
    let folder = folder(more);
    let printed = folder.succeeds(&["train", "run.yaml", "max_steps=6"]);
    let found = evaluations(&folder, "out");
    let best = found.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0;
    assert!(best < 6, "{found:?}");
    assert_eq!(steps(&folder, "out"), [format!("step-{best}"), "step-6".to_string()]);
    assert!(
        printed.contains(&format!("using the model of step {best}, which had the best evaluation")),
        "{printed}"
    );
    folder.succeeds(&["export", &format!("out/checkpoints/step-{best}"), "exported"]);
    let read = |name: &str| std::fs::read(folder.path(name)).unwrap();
    let tensors = |dir: &str| tensors::read(&folder.path(dir).join("model.safetensors"));
    assert!(
        tensors("out/model") == tensors("exported"),
        "the model folder is not that of the best checkpoint"
    );
    folder.succeeds(&["export", "out", "last"]);
    assert!(read("last/model.safetensors") != read("exported/model.safetensors"));
}

/// A resumed run knows the best so far.
#[test]
fn the_best_so_far_is_part_of_a_checkpoint() {
    let more = "eval_steps: 1\nsave_strategy: best\nlearning_rate: 1.0\nmax_grad_norm: 0\n";
    let folder = folder(more);
    folder.succeeds(&["train", "run.yaml", "max_steps=6"]);
    let whole = evaluations(&folder, "out");
    let best = whole.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0;
    assert_eq!(steps(&folder, "out").last(), Some(&format!("step-{best}")));
    folder.succeeds(&["train", "run.yaml", "max_steps=6", "resume_from_checkpoint=true"]);
    assert_eq!(evaluations(&folder, "out"), whole);
    assert_eq!(steps(&folder, "out").last(), Some(&format!("step-{best}")));
}

#[test]
fn epochs_and_what_is_missing() {
    let folder = folder("eval_strategy: epoch\nsave_strategy: epoch\n");
    folder.succeeds(&["train", "run.yaml", "max_steps=-1", "num_train_epochs=2"]);
    // Eight rows, two at a time.
    assert_eq!(evaluations(&folder, "out").iter().map(|(step, _)| *step).collect::<Vec<_>>(), [4, 8]);
    assert_eq!(steps(&folder, "out"), ["step-4", "step-8"]);
    assert_snapshot!(folder.train_refused(&["eval_files=[]", "output_dir=other"], 64), @r"
    error: evaluation is enabled, but there is no evaluation data
    hint: set `eval_files`, or turn evaluation off with `eval_strategy: no`.
    ");
}

/// `eval` computes the same loss for a model folder as training did.
#[test]
fn a_model_is_evaluated_by_itself() {
    let folder = folder("eval_strategy: steps\neval_steps: 2\n");
    folder.succeeds(&["train", "run.yaml", "max_steps=2"]);
    let during = evaluations(&folder, "out");
    let alone = folder.succeeds(&["eval", "out", "run.yaml", "--json"]);
    let alone: Value = serde_json::from_str(&alone).unwrap();
    assert_eq!(alone["loss"].as_f64().unwrap().to_bits(), during[0].1.to_bits());
    let printed = folder.succeeds(&["eval", "out", "eval_files=eval.jsonl", "max_length=64"]);
    assert!(printed.starts_with("loss ") && printed.contains("perplexity "), "{printed}");
    assert_snapshot!(folder.refused(&["eval", "out", "max_length=64"], 64), @r"
    error: evaluation is enabled, but there is no evaluation data
    hint: set `eval_files`, or turn evaluation off with `eval_strategy: no`.
    ");
}
