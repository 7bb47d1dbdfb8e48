//! The output folder: who may have it, what happens to what is in it.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use insta::assert_snapshot;

use crate::support::{Folder, RUN, steady};

#[test]
fn a_run() {
    let folder = Folder::new(RUN);
    assert_snapshot!(steady(&folder.succeeds(&["train", "run.yaml"])), @"FILL");
    let mut names: Vec<String> = folder.tree().into_keys().map(|p| p.display().to_string()).collect();
    names.retain(|name| name.starts_with("out/"));
    assert_snapshot!(names.join("\n"), @"FILL");
    let log = folder.read("out/logs/training.log");
    assert!(log.contains("Z peak memory ") && log.contains(" bytes (planned "), "{log}");
}

#[test]
fn in_use() {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "run.yaml"]);
    assert_snapshot!(folder.train_refused(&[], 64), @"FILL");
    // Not even a damaged checkpoint is trained over without being asked to.
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
    assert_snapshot!(format!("{before}[holder]{after}"), @"FILL");
    // A killed run holds nothing.
    folder.succeeds(&["train", "run.yaml"]);
}

#[test]
fn not_writable() {
    let folder = Folder::new(RUN);
    assert_snapshot!(folder.train_refused(&["output_dir=data.jsonl"], 73), @"FILL");
    assert_snapshot!(folder.train_refused(&["output_dir=data.jsonl/out"], 73), @"FILL");
    if cfg!(target_os = "linux") {
        // Nobody, root included, can make a folder there.
        assert_snapshot!(folder.train_refused(&["output_dir=/proc/self/out"], 73), @"FILL");
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
    assert_snapshot!(ran.stderr, @"FILL");
    folder.assert_no_partial();
}

#[test]
fn something_else_where_the_model_goes() {
    let folder = Folder::new(RUN);
    fs::create_dir_all(folder.path("out/model")).unwrap();
    folder.write("out/model/notes.txt", "mine");
    assert_snapshot!(folder.train_refused(&[], 73), @"FILL");
}

/// What killed runs left unfinished goes when the next one starts.
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
