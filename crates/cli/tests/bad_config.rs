//! Invalid configurations: all errors at once, each with its position and a hint.

use insta::assert_snapshot;

use crate::support::{Folder, RUN};

fn refused(settings: &[&str], code: i32) -> String {
    Folder::new(RUN).train_refused(settings, code)
}

#[test]
fn misspelt_key() {
    let folder = Folder::new(&format!("{RUN}lerning_rate: 1e-3\n"));
    assert_snapshot!(folder.train_refused(&[], 64), @r"
    error: run.yaml:8:1: unknown key `lerning_rate`
      |
    8 | lerning_rate: 1e-3
      | ^^^^^^^^^^^^
      hint: did you mean `learning_rate`?
    ");
    assert_snapshot!(refused(&["max_setps=3"], 64), @r"
    error: argument max_setps=3: unknown key `max_setps`
      hint: did you mean `max_steps`?
    ");
}

#[test]
fn wrong_type() {
    assert_snapshot!(Folder::new(&format!("{RUN}seed: many\n")).train_refused(&[], 64), @r"
    error: run.yaml:8:7: `seed` expects a whole number, found `many`
      |
    8 | seed: many
      |       ^^^^
    ");
}

#[test]
fn several_at_once() {
    let folder = Folder::new(&format!("{RUN}packing: bfdd\nsave_steps: 0\nzero_stage: 3\n"));
    assert_snapshot!(folder.train_refused(&["learning_rate=fast"], 64), @r"
    error: run.yaml:8:10: `packing` cannot be `bfdd`
      |
    8 | packing: bfdd
      |          ^^^^
      hint: did you mean `bfd`? Possible values: none, bfd, bfd_split, wrapped.

    error: run.yaml:9:13: `save_steps` must be at least 1, found 0
      |
    9 | save_steps: 0
      |             ^

    error: run.yaml:10:1: `zero_stage` is not implemented yet
       |
    10 | zero_stage: 3
       | ^^^^^^^^^^
      hint: use `strategy: zero1`, `zero2` or `zero3`.

    error: argument learning_rate=fast: `learning_rate` expects a number, found `fast`

    error: the configuration has 4 errors
    ");
}

#[test]
fn not_yaml() {
    assert_snapshot!(Folder::new("model: [15m\n").train_refused(&[], 64), @r"
    error: run.yaml:1:8: `[` is never closed
      |
    1 | model: [15m
      |        ^
    ");
}

#[test]
fn missing_config_file() {
    assert_snapshot!(Folder::new(RUN).refused(&["train", "nope.yaml"], 66), @r"
    error: configuration file nope.yaml does not exist
    hint: give the path of a YAML or JSON file, or settings as key=value.
    ");
}

#[test]
fn config_that_is_a_folder() {
    assert_snapshot!(Folder::new(RUN).refused(&["train", "."], 66), @r"
    error: configuration file . is a folder, not a regular file
    hint: give the path of a YAML or JSON file, or settings as key=value.
    ");
}

/// The file is read only up to the size limit: these files have no end, or are larger than the memory.
#[test]
fn config_that_is_too_large_or_has_no_end() {
    let folder = Folder::new(RUN);
    assert_snapshot!(folder.refused(&["train", "/dev/zero"], 66), @r"
    error: configuration file /dev/zero is a device, a pipe or a socket, not a regular file
    hint: give the path of a YAML or JSON file, or settings as key=value.
    ");
    std::fs::File::create(folder.path("huge.yaml")).unwrap().set_len(1 << 40).unwrap();
    let ran = folder.run(&["train", "huge.yaml"]);
    assert_eq!(ran.code, Some(64));
    assert_snapshot!(ran.stderr, @r"
    error: configuration file huge.yaml is larger than 1.00 MiB
    hint: give the path of a YAML or JSON file, or settings as key=value.
    ");
    // Opening a pipe without a writer would block.
    let made = std::process::Command::new("mkfifo").arg(folder.path("pipe.yaml")).status().unwrap();
    assert!(made.success());
    let ran = folder.run(&["train", "pipe.yaml"]);
    assert_eq!(ran.code, Some(66));
    assert_snapshot!(ran.stderr, @r"
    error: configuration file pipe.yaml is a device, a pipe or a socket, not a regular file
    hint: give the path of a YAML or JSON file, or settings as key=value.
    ");
}

/// As in `lockstep train <(command)`.
#[test]
fn config_through_a_pipe_of_the_shell() {
    use std::io::Write as _;
    let folder = Folder::new(RUN);
    let mut command = folder.command(&["train", "/dev/stdin", "max_steps=0"]);
    let mut child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(RUN.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
fn config_that_is_not_text() {
    let folder = Folder::new(RUN);
    folder.write("run.yaml", b"model: \xff\n");
    assert_snapshot!(folder.train_refused(&[], 64), @r"
    error: configuration file run.yaml is not UTF-8 text
    hint: give the path of a YAML or JSON file, or settings as key=value.
    ");
}

#[test]
fn a_setting_without_a_value() {
    assert_snapshot!(refused(&["learning_rate"], 66), @r"
    error: configuration file learning_rate does not exist
    hint: give the path of a YAML or JSON file, or settings as key=value.
    ");
}

#[test]
fn a_config_file_may_have_an_equals_sign_in_its_path() {
    let folder = Folder::new(RUN);
    folder.write("lr=1.yaml", RUN);
    folder.succeeds(&["train", "lr=1.yaml", "max_steps=0"]);
    assert_snapshot!(folder.refused(&["train", "runs/lr=1.yaml"], 66), @r"
    error: configuration file runs/lr=1.yaml does not exist
    hint: give the path of a YAML or JSON file, or settings as key=value.
    ");
}

#[test]
fn nothing_to_train_on() {
    let text = RUN.replace("train_files: data.jsonl\n", "");
    assert_snapshot!(Folder::new(&text).train_refused(&[], 64), @r"
    error: `train_files` is missing: set `train_files` to a file, a folder or a list of them, or set `dataset_name`
    ");
}

#[test]
fn evaluation_without_data() {
    assert_snapshot!(refused(&["eval_steps=100"], 64), @r"
    error: evaluation is enabled, but there is no evaluation data
    hint: set `eval_files`, or turn evaluation off with `eval_strategy: no`.
    ");
}

#[test]
fn unimplemented_algorithm() {
    let error = refused(&["algorithm=kto"], 64);
    assert!(error.contains("kto") && error.contains("use dpo"), "{error}");
}

#[test]
fn a_pattern_that_freezes_nothing() {
    assert_snapshot!(refused(&["freeze=[model.embed_token]"], 64), @r"
    error: the `freeze` pattern `model.embed_token` matches no tensor of the model
    hint: did you mean `model.embed_tokens`? `*` matches any text; the name of a module matches all its tensors.
    ");
    assert_snapshot!(refused(&["freeze=['*']"], 64), @r"
    error: every tensor is frozen: there is nothing to train
    hint: remove patterns from `freeze`.
    ");
}

#[test]
fn momentum_of_the_wrong_optimizer() {
    assert_snapshot!(refused(&["optim=sgd", "nesterov=true"], 64), @r"error: argument nesterov=true: `nesterov` must be false unless `momentum` is above 0, found true");
    assert_snapshot!(refused(&["optim=muon"], 64), @r"
    error: argument optim=muon: `optim: muon` is not implemented yet
      hint: use `optim: adamw`, `adamw_8bit`, `sgd` or `lion`.
    ");
}

#[test]
fn several_ranks_are_planned() {
    let plan = Folder::new(RUN).succeeds(&["plan", "run.yaml", "strategy=zero3", "nproc_per_node=4"]);
    assert!(plan.lines().any(|line| line.starts_with("ranks ") && line.contains(" 4")), "{plan}");
}

#[test]
fn hybrid_shard_on_one_node() {
    let args = ["plan", "run.yaml", "strategy=hybrid_shard", "nproc_per_node=4"];
    assert_snapshot!(Folder::new(RUN).refused(&args, 64), @r"
    error: hybrid_shard shards inside a node and replicates across nodes; it needs at least two nodes of at least two ranks, found 1 node(s) of 4 rank(s)
    ");
}

#[test]
fn over_the_memory_budget() {
    assert_snapshot!(refused(&["memory_budget_gib=0.001"], 64), @r"
    error: the plan needs 28.4 MiB on the device, 27.4 MiB over the budget of 1.02 MiB
    hint: no change of batch, recomputation, precision, strategy or offload makes it fit: use more or larger GPUs, or lower max_length.
    ");
}

#[test]
fn rows_longer_than_the_model() {
    assert_snapshot!(refused(&["max_length=100"], 64), @r"
    error: max_length 100 exceeds the model's 64 positions
    hint: set max_length to at most 64.
    ");
}

#[test]
fn no_full_batch() {
    assert_snapshot!(refused(&["per_device_train_batch_size=9", "dataloader_drop_last=true"], 64), @r"
    error: one step needs 9 rows, but the dataset has only 8
    hint: reduce per_device_train_batch_size or gradient_accumulation_steps, turn off packing or dataloader_drop_last, or add data.
    ");
}

#[test]
fn usage() {
    let ran = Folder::new(RUN).run(&["train"]);
    assert_eq!(ran.code, Some(2));
    assert_snapshot!(ran.stderr, @r"
    error: the following required arguments were not provided:
      <CONFIG | KEY=VALUE>...

    Usage: lockstep train <CONFIG | KEY=VALUE>... [-- <LAUNCH LINE>...]

    For more information, try '--help'.
    ");
    let ran = Folder::new(RUN).run(&["trian", "run.yaml"]);
    assert_eq!(ran.code, Some(2));
    assert_snapshot!(ran.stderr, @r"
    error: unrecognized subcommand 'trian'

      tip: a similar subcommand exists: 'train'

    Usage: lockstep <COMMAND>

    For more information, try '--help'.
    ");
}
