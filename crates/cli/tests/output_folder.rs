//! The output folder: what a run writes to it, and when it is refused.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use insta::assert_snapshot;

use crate::support::{Folder, RUN, steady};

#[test]
fn a_run() {
    let folder = Folder::new(RUN);
    assert_snapshot!(steady(&folder.succeeds(&["train", "run.yaml"])), @r"
    LlamaForCausalLM, 37.1 k parameters | f32 ddp on 2 threads | memory [size]
    8 documents in 8 rows, 247 tokens
    step 1/2 | loss: 5.553245 | grad_norm 1.91 | lr 5.00e-5 | [speed] | [time]
    step 2/2 | loss: 5.566049 | grad_norm 1.78 | lr 2.50e-5 | [speed] | [time]
    model in out/model
    checkpoint in out/checkpoints/step-2
    peak memory [size] (planned [size])
    ");
    let mut names: Vec<String> = folder.tree().into_keys().map(|p| p.display().to_string()).collect();
    names.retain(|name| name.starts_with("out/"));
    assert_snapshot!(names.join("\n"), @r"
    out/checkpoints
    out/checkpoints/step-2
    out/checkpoints/step-2/config.json
    out/checkpoints/step-2/exp_avg-rank-0.safetensors
    out/checkpoints/step-2/exp_avg_sq-rank-0.safetensors
    out/checkpoints/step-2/generation_config.json
    out/checkpoints/step-2/manifest.json
    out/checkpoints/step-2/model-rank-0.safetensors
    out/checkpoints/step-2/tokenizer.json
    out/checkpoints/step-2/tokenizer_config.json
    out/logs
    out/logs/training.log
    out/metrics.jsonl
    out/model
    out/model/config.json
    out/model/generation_config.json
    out/model/model.safetensors
    out/model/tokenizer.json
    out/model/tokenizer_config.json
    out/plan.json
    out/report.html
    out/run.json
    ");
    let log = folder.read("out/logs/training.log");
    assert!(log.contains("Z peak memory ") && log.contains(" bytes (planned "), "{log}");
}

#[test]
fn in_use() {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "run.yaml"]);
    assert_snapshot!(folder.train_refused(&[], 64), @r"
    error: out: the output folder has checkpoints of an earlier run (the newest is step-2)
    hint: set resume_from_checkpoint: true to continue that run, overwrite_output_dir: true to delete its checkpoints, or choose another output_dir.
    ");
    // Even a damaged checkpoint is only overwritten on request.
    fs::remove_file(folder.path("out/checkpoints/step-2/manifest.json")).unwrap();
    folder.train_refused(&[], 64);
}

#[test]
fn overwriting() {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "run.yaml", "max_steps=4", "save_steps=1"]);
    // A run that cannot start deletes nothing.
    folder.train_refused(&["overwrite_output_dir=true", "train_files=nope.jsonl"], 66);
    folder.succeeds(&["train", "run.yaml", "overwrite_output_dir=true"]);
    let steps = fs::read_dir(folder.path("out/checkpoints")).unwrap().count();
    assert_eq!(steps, 1, "only the new run's checkpoint is there");
    assert_eq!(folder.read("out/metrics.jsonl").lines().count(), 2);
    assert_eq!(folder.read("out/metrics.previous.jsonl").lines().count(), 4);
}

#[test]
fn locked_by_a_running_process() {
    let folder = Folder::new(RUN);
    let mut first = folder.start(&["train", "run.yaml", "max_steps=1000000", "save_strategy=no"]);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !folder.path("out/metrics.jsonl").exists() {
        assert!(Instant::now() < deadline, "the first run did not start");
        sleep(Duration::from_millis(5));
    }
    let ran = folder.run(&["train", "run.yaml"]);
    let resumed = folder.run(&["train", "run.yaml", "resume_from_checkpoint=true"]);
    assert!(first.try_wait().unwrap().is_none(), "the first run goes on");
    first.kill().unwrap();
    first.wait().unwrap();
    assert_eq!((ran.code, resumed.code), (Some(73), Some(73)), "{ran:#?}");
    let pid = format!("(pid {} on ", first.id());
    let (before, after) = ran.stderr.split_once(&pid).unwrap_or_else(|| panic!("{}", ran.stderr));
    let (_, after) = after.split_once(')').unwrap();
    assert_snapshot!(format!("{before}[holder]{after}"), @r"
    error: out: another run is using this output folder [holder]
    hint: wait for that run to end, or choose another output_dir.
    ");
    // A killed run holds no lock.
    folder.succeeds(&["train", "run.yaml"]);
}

#[test]
fn not_writable() {
    let folder = Folder::new(RUN);
    assert_snapshot!(folder.train_refused(&["output_dir=data.jsonl"], 73), @r"
    error: cannot write data.jsonl: File exists (os error 17)
    hint: output_dir must be a folder, but a file of that name exists.
    ");
    assert_snapshot!(folder.train_refused(&["output_dir=data.jsonl/out"], 73), @r"
    error: cannot write data.jsonl/out: Not a directory (os error 20)
    hint: output_dir must be a folder, but a file of that name exists.
    ");
    if cfg!(target_os = "linux") {
        // Not even root can create a folder there.
        assert_snapshot!(folder.train_refused(&["output_dir=/proc/self/out"], 73), @r"
        error: cannot write /proc/self/out: No such file or directory (os error 2)
        hint: choose an output_dir that you have permission to write to.
        ");
    }
}

#[test]
fn a_full_disk() {
    if !cfg!(target_os = "linux") {
        return;
    }
    let folder = Folder::new(RUN);
    fs::create_dir_all(folder.path("out/logs")).unwrap();
    std::os::unix::fs::symlink("/dev/full", folder.path("out/logs/training.log")).unwrap();
    let ran = folder.run(&["train", "run.yaml"]);
    assert_eq!(ran.code, Some(73), "{ran:#?}");
    assert_snapshot!(ran.stderr, @r"
    error: cannot write out/logs/training.log: No space left on device (os error 28)
    hint: free some space and resume; the last checkpoint is complete.
    ");
    folder.assert_no_partial();
}

#[test]
fn something_else_where_the_model_goes() {
    let folder = Folder::new(RUN);
    fs::create_dir_all(folder.path("out/model")).unwrap();
    folder.write("out/model/notes.txt", "mine");
    assert_snapshot!(folder.train_refused(&[], 73), @r"
    error: out/model exists and is not a model folder
    hint: choose another folder, or remove this one if it is not needed.
    ");
}

/// Unfinished files of killed runs are removed when the next one starts.
#[test]
fn unfinished_folders_go() {
    let folder = Folder::new(RUN);
    fs::create_dir_all(folder.path("out/checkpoints/step-7.partial")).unwrap();
    fs::create_dir_all(folder.path("out/checkpoints/step-5.trash")).unwrap();
    fs::create_dir_all(folder.path("out/model.partial")).unwrap();
    fs::create_dir_all(folder.path("out/notes.partial")).unwrap();
    let ran = folder.run(&["train", "run.yaml"]);
    assert_eq!(ran.code, Some(0), "{ran:#?}");
    assert!(folder.path("out/notes.partial").exists(), "what is not ours stays");
    fs::remove_dir(folder.path("out/notes.partial")).unwrap();
    folder.assert_no_partial();
}
