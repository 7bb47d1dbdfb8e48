//! What users read: errors, notes and final lines, each as a snapshot of a whole command.

use std::fs;

use crate::launch::nameless;
use crate::support::{Folder, RUN, TUNE, steady};

/// Runs a command without GPUs, and compares everything that it prints with a snapshot.
fn message(name: &str, folder: &Folder, line: &str) {
    message_with(name, folder, line, &[]);
}

fn message_with(name: &str, folder: &Folder, line: &str, variables: &[(&str, &str)]) {
    let args: Vec<String> = words(line);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut command = folder.command(&args);
    let output = command.env("CUDA_VISIBLE_DEVICES", "").env("COLUMNS", "100").envs(variables.to_vec());
    let output = output.output().unwrap();
    let text = |bytes| steady(&nameless(&String::from_utf8(bytes).unwrap()));
    let set: String = variables.iter().map(|(name, value)| format!("{name}={value} ")).collect();
    let printed = format!(
        "$ {set}lockstep {line}\n{}{}exit code {}",
        text(output.stdout),
        text(output.stderr),
        output.status.code().unwrap()
    );
    let root = folder.path("").display().to_string();
    let printed = printed.replace(root.trim_end_matches('/'), "[folder]");
    insta::assert_snapshot!(name, printed);
}

/// Splits a command line at spaces outside of single quotes.
fn words(line: &str) -> Vec<String> {
    let parts = line.split('\'').enumerate();
    let split = |(idx, part): (usize, &str)| match idx % 2 {
        0 => part.split_whitespace().map(String::from).collect::<Vec<_>>(),
        _ => vec![part.to_string()],
    };
    parts.flat_map(split).collect()
}

fn with(more: &str) -> Folder {
    Folder::new(&format!("{RUN}{more}"))
}

#[test]
fn bad_configurations() {
    message("misspelled_key", &with("lerning_rate: 1e-3\n"), "train run.yaml");
    let several = with("packing: bfdd\nsave_steps: 0\nzero_stage: 3\n");
    message("several_errors", &several, "train run.yaml learning_rate=fast lr=1");
    message("tab_in_yaml", &with("training:\n\tseed: 1\n"), "train run.yaml");
    message("open_bracket", &with("freeze: [a, b\nseed: 1\nmax_length: 8\n"), "train run.yaml");
    message("open_quote", &with("experiment_name: \"first\nseed: 1\n"), "train run.yaml");
    message("other_syntax_error", &with("seed: 1: 2\n"), "train run.yaml");
    message("wrong_type", &with("seed: many\n"), "train run.yaml");
    message("contradiction", &with("fp16: true\nbf16: true\n"), "train run.yaml");
    message("value_of_another_trainer", &with("optim: paged_adamw_8bit\n"), "train run.yaml");
    message("everything_missing", &Folder::new("seed: 1\n"), "train run.yaml");
    let run = Folder::new(RUN);
    message("no_such_config", &run, "train nope.yaml");
    message("two_configs", &run, "train run.yaml learning_rate");
    message("algorithm", &run, "train run.yaml algorithm=dpo");
    message("algorithm_command", &run, "kto run.yaml");
    message("another_algorithm", &with("algorithm: grpo\nreward_funcs: format\n"), "dpo run.yaml");
    message("key_of_another_algorithm", &run, "dpo run.yaml --num_generations 8");
    message("no_reward", &run, "grpo run.yaml");
    message("freeze_pattern", &run, "train run.yaml freeze=[model.embed_token]");
    message("memory_budget", &run, "train run.yaml memory_budget_gib=0.001");
    message("too_long", &run, "train run.yaml max_length=100");
    message("secret", &run, "train run.yaml --hub_token hf_abcdefgh");
    message("eval_without_data", &run, "train run.yaml eval_steps=5");
}

#[test]
fn bad_flags() {
    let run = Folder::new(RUN);
    for (name, line) in [
        ("flag_lr", "train run.yaml --lr 1e-4"),
        ("flag_nproc_per_nod", "train run.yaml --nproc_per_nod 2"),
        ("flag_nnode", "train --nnode=2 run.yaml"),
        ("flag_local_addr", "train --local_addr alpha run.yaml"),
        ("flag_rdzv_backend", "train --rdzv_backend etcd run.yaml"),
        ("flag_rdzv_endpoint", "train --rdzv-endpoint :29500 run.yaml"),
        ("flag_use_env", "train --use_env run.yaml"),
        ("flag_num_machines", "train --num_machines 2 run.yaml"),
        ("flag_unknown", "train run.yaml --foo_bar_baz 1"),
        ("flag_nproc_value", "train run.yaml --nproc many"),
        ("flag_nnodes_range", "train run.yaml --nnodes 1:4"),
        ("flag_conflict", "train run.yaml --standalone --nnodes 2"),
        ("no_arguments", "train"),
        ("misspelled_command", "trian run.yaml"),
        ("generate_flag", "generate out --temprature 1"),
    ] {
        message(name, &run, line);
    }
}

#[test]
fn bad_launches() {
    let run = Folder::new(RUN);
    message("no_node_rank", &run, "train run.yaml --nnodes 2");
    message("node_rank_too_large", &run, "train run.yaml --nnodes 2 --node-rank 2");
    message("no_master_addr", &run, "train run.yaml --nnodes 2 --node-rank 1");
    message("no_token", &run, "train run.yaml --nnodes 2 --node-rank 0 --master-addr 127.0.0.1");
    message("no_gpu", &run, "train run.yaml --nproc gpu");
    message_with("nested", &run, "train run.yaml --nproc 2", &[("RANK", "0"), ("WORLD_SIZE", "2")]);
    message_with("bad_rank", &run, "train run.yaml", &[("RANK", "2"), ("WORLD_SIZE", "2")]);
    message("one_rank_for_collectives", &run, "bench collectives device=cpu --nproc 1");
    let world = with("nproc_per_node: 4\n");
    message_with("other_world", &world, "train run.yaml", &[("RANK", "0"), ("WORLD_SIZE", "2")]);
}

#[test]
fn starting_points() {
    let run = Folder::new(RUN);
    message("recipe_ls", &run, "recipe ls");
    message("recipe_unknown", &run, "recipe show ddpo");
    message("recipe_far", &run, "recipe show pretraining");
    message("recipe_cp", &run, "recipe cp dpo");
    message("recipe_exists", &run, "recipe cp dpo");
    message("recipe_no_folder", &run, "recipe cp dpo nope/dpo.yaml");
    message("init_no_terminal", &run, "init new.yaml");
    message("init_exists", &run, "init");
    message("init_done", &run, "init new.yaml --yes");
    message("init_algorithm", &run, "init other.yaml --yes --algorithm drpo");
    message("init_model", &run, "init other.yaml --yes --model nope");
    message("init_data", &run, "init other.yaml --yes --data 'no data'");
    message("init_reward", &run, "init other.yaml --yes --algorithm grpo --reward luck");
    message("init_reward_model", &run, "init other.yaml --yes --algorithm ppo --reward exact_match");
    message("init_nproc", &run, "init other.yaml --yes --nproc 0");
    message("completions_shell", &run, "completions tcsh");
    message("man_no_folder", &run, "man --dir run.yaml/man");
    message("doctor_flags", &run, "doctor --json --report");
    message("selftest_one_rank", &run, "selftest --device cpu --nproc 1");
}

#[test]
fn bad_data() {
    let run = Folder::new(RUN);
    message("no_such_data", &run, "train run.yaml train_files=nope.jsonl");
    run.write("bad.jsonl", "{\"text\": \"fine\"}\n{\"text\": oops}\n");
    message("bad_row", &run, "train run.yaml train_files=bad.jsonl");
    run.write("empty.jsonl", "");
    message("empty_data", &run, "train run.yaml train_files=empty.jsonl");
    run.write("data.xyz", "a");
    message("unknown_format", &run, "train run.yaml train_files=data.xyz");
    run.write("body.jsonl", "{\"body\": \"fine\"}\n");
    message("no_text_column", &run, "train run.yaml train_files=body.jsonl");
}

#[test]
fn bad_models_and_checkpoints() {
    let run = Folder::new(RUN);
    message("no_such_model", &Folder::new(&TUNE.replace("path: model", "path: ./nope")), "train run.yaml");
    message("no_checkpoint_to_resume", &run, "train run.yaml resume_from_checkpoint=true");
    message("export_without_checkpoint", &run, "export nope model");
    message("generate_without_model", &run, "generate nope --prompt hello");
    run.succeeds(&["train", "run.yaml"]);
    message("output_folder_in_use", &run, "train run.yaml");
    message("no_prompt", &run, "generate out");
    run.write("prompts.jsonl", "{\"prompt\": 1}\n");
    message("bad_prompt", &run, "generate out --prompts prompts.jsonl");
    let weights = "out/checkpoints/step-2/model-rank-0.safetensors";
    let whole = fs::read(run.path(weights)).unwrap();
    run.write(weights, &whole[..whole.len() - 8]);
    message("damaged_checkpoint", &run, "train run.yaml max_steps=3 resume_from_checkpoint=true");
}

#[test]
fn what_runs_print() {
    let run = with("torch_compile: false\nmomentum: 0.9\n");
    message("dry_run", &run, "train run.yaml --nproc 2 strategy=auto mixed_precision=auto --dry-run");
    message("train", &run, "train run.yaml");
    message("resume", &run, "train run.yaml max_steps=3 resume_from_checkpoint=auto");
    message("export", &run, "export out model");
    run.write("some.jsonl", "{\"text\": \"fine\"}\nnonsense\n");
    message("skipped_rows", &run, "train run.yaml train_files=some.jsonl on_bad_row=skip output_dir=other");
    message("stopped_by_bad_loss", &run, "train run.yaml learning_rate=1e30 output_dir=third max_steps=9");
}

/// What `--dry-run` prints is a configuration that gives the same plan, and nothing is written.
#[test]
fn a_dry_run_can_be_saved() {
    let folder = Folder::new(RUN);
    let before = folder.tree();
    let line =
        ["train", "run.yaml", "--nproc", "2", "strategy=auto", "gradient_accumulation_steps=2", "--dry-run"];
    let printed = folder.succeeds(&line);
    assert_eq!(folder.tree(), before);
    folder.write("saved.yaml", &printed);
    let second = folder.succeeds(&["train", "saved.yaml", "--dry-run"]);
    let sorted = |text: &str| {
        // Origins differ: the second run has one file.
        let is_origin = |line: &str| line.starts_with("# run.yaml:") || line.starts_with("# saved.yaml:");
        let kept = text.lines().filter(|line| !is_origin(line));
        let mut lines: Vec<String> =
            kept.map(|line| line.split("  # ").next().unwrap().to_string()).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&second), sorted(&printed));
}
