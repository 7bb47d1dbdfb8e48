//! Configurations that cannot run: all problems at once, each with its place and a remedy.

use insta::assert_snapshot;

use crate::support::{Folder, RUN};

fn refused(settings: &[&str], code: i32) -> String {
    Folder::new(RUN).train_refused(settings, code)
}

#[test]
fn misspelt_key() {
    let folder = Folder::new(&format!("{RUN}lerning_rate: 1e-3\n"));
    assert_snapshot!(folder.train_refused(&[], 64), @"FILL");
    assert_snapshot!(refused(&["max_setps=3"], 64), @"FILL");
}

#[test]
fn wrong_type() {
    assert_snapshot!(Folder::new(&format!("{RUN}seed: many\n")).train_refused(&[], 64), @"FILL");
}

#[test]
fn several_at_once() {
    let folder = Folder::new(&format!("{RUN}packing: bfdd\nsave_steps: 0\nzero_stage: 3\n"));
    assert_snapshot!(folder.train_refused(&["learning_rate=fast"], 64), @"FILL");
}

#[test]
fn not_yaml() {
    assert_snapshot!(Folder::new("model: [15m\n").train_refused(&[], 64), @"FILL");
}

#[test]
fn missing_config_file() {
    assert_snapshot!(Folder::new(RUN).refused(&["train", "nope.yaml"], 66), @"FILL");
}

#[test]
fn config_that_is_a_folder() {
    assert_snapshot!(Folder::new(RUN).refused(&["train", "."], 66), @"FILL");
}

#[test]
fn config_that_is_not_text() {
    let folder = Folder::new(RUN);
    folder.write("run.yaml", b"model: \xff\n");
    assert_snapshot!(folder.train_refused(&[], 64), @"FILL");
}

#[test]
fn two_config_files() {
    assert_snapshot!(refused(&["learning_rate"], 64), @"FILL");
}

#[test]
fn a_config_file_may_have_an_equals_sign_in_its_path() {
    let folder = Folder::new(RUN);
    folder.write("lr=1.yaml", RUN);
    folder.succeeds(&["train", "lr=1.yaml", "max_steps=0"]);
    assert_snapshot!(folder.refused(&["train", "runs/lr=1.yaml"], 66), @"FILL");
}

#[test]
fn nothing_to_train_on() {
    let text = RUN.replace("train_files: data.jsonl\n", "");
    assert_snapshot!(Folder::new(&text).train_refused(&[], 64), @"FILL");
}

#[test]
fn unimplemented_precision() {
    assert_snapshot!(refused(&["fp16=true"], 64), @"FILL");
}

#[test]
fn unimplemented_evaluation() {
    assert_snapshot!(refused(&["eval_steps=100"], 64), @"FILL");
}

#[test]
fn unimplemented_algorithm() {
    assert_snapshot!(refused(&["algorithm=dpo"], 69), @"FILL");
}

#[test]
fn unimplemented_adapter() {
    assert_snapshot!(refused(&["adapter={r: 8, target_modules: [q_proj]}"], 69), @"FILL");
}

#[test]
fn several_ranks() {
    let settings = ["strategy=zero3", "nproc_per_node=4"];
    assert_snapshot!(refused(&settings, 69), @"FILL");
    let folder = Folder::new(RUN);
    let plan = folder.succeeds(&["plan", "run.yaml", settings[0], settings[1]]);
    assert!(plan.lines().any(|line| line.starts_with("ranks ") && line.contains(" 4")), "{plan}");
}

#[test]
fn offload() {
    assert_snapshot!(refused(&["offload_optimizer=cpu"], 69), @"FILL");
    assert_snapshot!(refused(&["strategy=zero3", "offload_param=nvme"], 69), @"FILL");
}

#[test]
fn hybrid_shard_on_one_node() {
    let args = ["plan", "run.yaml", "strategy=hybrid_shard", "nproc_per_node=4"];
    assert_snapshot!(Folder::new(RUN).refused(&args, 64), @"FILL");
}

#[test]
fn over_the_memory_budget() {
    assert_snapshot!(refused(&["memory_budget_gib=0.001"], 64), @"FILL");
}

#[test]
fn rows_longer_than_the_model() {
    assert_snapshot!(refused(&["max_length=100"], 64), @"FILL");
}

#[test]
fn no_full_batch() {
    assert_snapshot!(refused(&["per_device_train_batch_size=9", "dataloader_drop_last=true"], 64), @"FILL");
}

#[test]
fn usage() {
    let ran = Folder::new(RUN).run(&["train"]);
    assert_eq!(ran.code, Some(2));
    assert_snapshot!(ran.stderr, @"FILL");
    let ran = Folder::new(RUN).run(&["trian", "run.yaml"]);
    assert_eq!(ran.code, Some(2));
    assert_snapshot!(ran.stderr, @"FILL");
}
