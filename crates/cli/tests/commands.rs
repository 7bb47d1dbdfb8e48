//! `plan`, `keys`, help, and readers that leave early.

use std::io::Read;
use std::process::Stdio;

use insta::assert_snapshot;

use crate::support::{Folder, RUN};

/// The lines of a plan that start with or contain one of the words.
fn planned(settings: &[&str], words: &[&str]) -> String {
    let folder = Folder::new(&RUN.replace("threads: 2\n", "threads: 2\nrecompute: full\n"));
    let text = folder.succeeds(&[&["plan", "run.yaml"], settings].concat());
    let kept: Vec<&str> =
        text.lines().filter(|line| words.iter().any(|word| line.contains(word))).map(str::trim_end).collect();
    kept.join("\n")
}

#[test]
fn plan_of_one_rank() {
    assert_snapshot!(planned(&[], &["parameters", "Adam moments", "arena", "foreign", "total"]), @"FILL");
}

#[test]
fn zero3_with_prefetch() {
    let settings = ["strategy=zero3", "--nodes", "2", "--nproc-per-node", "4", "prefetch=1", "--schedule"];
    assert_snapshot!(planned(&settings, &["ranks", "gathered", "gather block", "release block"]), @"FILL");
}

#[test]
fn ddp_buckets() {
    let settings = ["strategy=ddp", "nproc_per_node=2", "ddp_bucket_cap_mb=1", "--schedule"];
    assert_snapshot!(planned(&settings, &["ranks", "reduce", "norm and clip"]), @"FILL");
}

#[test]
fn hybrid_shard() {
    let settings = ["strategy=hybrid_shard", "--nodes", "2", "--nproc-per-node", "2", "--schedule"];
    assert_snapshot!(planned(&settings, &["ranks", "reduce head"]), @"FILL");
}

#[test]
fn offloaded_optimizer() {
    assert_snapshot!(planned(&["offload_optimizer=cpu"], &["per rank", "Adam", "master", "arena", "total"]), @"FILL");
}

#[test]
fn ppo() {
    assert_snapshot!(planned(&["algorithm=ppo"], &["parameters", "phase "]), @"FILL");
}

#[test]
fn adapter() {
    let settings = ["adapter={r: 4, target_modules: [q_proj, v_proj]}"];
    assert_snapshot!(planned(&settings, &["parameters", "gradients, ", "Adam"]), @"FILL");
}

#[test]
fn plan_needs_no_data_and_leaves_nothing() {
    let folder = Folder::new(&RUN.replace("train_files: data.jsonl\n", ""));
    let before = folder.tree();
    folder.succeeds(&["plan", "run.yaml"]);
    folder.succeeds(&[
        "plan",
        "model=7b",
        "output_dir=out",
        "strategy=zero3",
        "--nodes",
        "4",
        "--nproc-per-node",
        "8",
    ]);
    assert_eq!(folder.tree(), before);
}

#[test]
fn help_fits_a_screen() {
    let folder = Folder::new(RUN);
    for args in
        [&["--help"][..], &["train", "--help"], &["plan", "--help"], &["keys", "--help"], &["help", "train"]]
    {
        let text = folder.succeeds(args);
        assert!(text.lines().count() <= 60 && text.contains("Usage: lockstep"), "{args:?}: {text}");
    }
    assert_eq!(folder.succeeds(&["--version"]), format!("lockstep {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn keys() {
    let page = Folder::new(RUN).succeeds(&["keys"]);
    for key in ["learning_rate", "max_steps", "strategy", "resume_from_checkpoint"] {
        assert!(page.contains(&format!("| `{key}` |")), "{key} is on the page");
    }
}

/// As in `lockstep keys | head -1`.
#[test]
fn a_reader_may_leave_early() {
    let folder = Folder::new(RUN);
    let plan = ["plan", "model=7b", "output_dir=out", "strategy=zero3", "nproc_per_node=8", "--schedule"];
    for args in [&["keys"][..], &["--help"], &plan, &["train", "run.yaml"]] {
        let mut command = folder.command(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!((child.wait().unwrap().code(), stderr.as_str()), (Some(0), ""), "{args:?}");
    }
    assert!(folder.path("out/model/model.safetensors").exists(), "the run went on without its reader");
}

#[test]
fn output_that_cannot_be_written() {
    if !cfg!(target_os = "linux") {
        return;
    }
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = Folder::new(RUN).command(&["keys"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(73));
    assert_snapshot!(String::from_utf8(output.stderr).unwrap(), @"FILL");
}
