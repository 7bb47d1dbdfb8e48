//! Going on: what is damaged is passed over or told, what has changed is refused.

use std::fs;

use insta::assert_snapshot;

use crate::support::{Folder, RUN, rows, steady};
use crate::tensors::flip_bit;

const RESUME: &str = "resume_from_checkpoint=true";

/// A folder with a run of four steps and checkpoints at 2 and 4.
fn interrupted() -> Folder {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "run.yaml", "max_steps=4", "save_steps=2"]);
    folder
}

/// A resume that is refused with a message in which hashes are replaced.
fn refused(change: impl FnOnce(&Folder), settings: &[&str], code: i32) -> String {
    let folder = interrupted();
    change(&folder);
    let settings: Vec<&str> = ["max_steps=6", RESUME].into_iter().chain(settings.iter().copied()).collect();
    without_hashes(&folder.train_refused(&settings, code))
}

fn without_hashes(text: &str) -> String {
    let is_hash = |word: &str| word.len() >= 12 && word.chars().all(|c| c.is_ascii_hexdigit());
    let word = |word: &str| {
        let bare = word.trim_end_matches([',', '\n']);
        if is_hash(bare) { word.replace(bare, "[hash]") } else { word.into() }
    };
    text.split_inclusive([' ', '\n'])
        .map(|w| word(w.trim_end_matches(' ')) + " ")
        .collect::<String>()
        .replace("\n ", "\n")
}

#[test]
fn nothing_there() {
    assert_snapshot!(Folder::new(RUN).train_refused(&[RESUME], 66), @"FILL");
    assert_snapshot!(Folder::new(RUN).train_refused(&["resume_from_checkpoint=out/checkpoints/step-7"], 66), @"FILL");
}

#[test]
fn going_on() {
    let folder = interrupted();
    assert_snapshot!(steady(&folder.succeeds(&["train", "run.yaml", "max_steps=5", RESUME])), @"FILL");
    let again = folder.succeeds(&["train", "run.yaml", "max_steps=5", RESUME]);
    assert!(again.contains("no step is left: the run ends at step 5\n"), "{again}");
    folder.succeeds(&["train", "run.yaml", "max_steps=6", "resume_from_checkpoint=out/checkpoints/step-4"]);
    assert_eq!(folder.read("out/metrics.jsonl").lines().count(), 6);
}

#[test]
fn a_flipped_bit_in_the_latest() {
    let folder = interrupted();
    flip_bit(&folder.path("out/checkpoints/step-4/exp_avg-rank-0.safetensors"));
    let ran = folder.run(&["train", "run.yaml", "max_steps=6", RESUME]);
    assert_eq!(ran.code, Some(0), "{ran:#?}");
    let notes: Vec<&str> =
        ran.stdout.lines().filter(|l| l.contains("passed over") || l.contains("resumed")).collect();
    assert_snapshot!(without_hashes(&notes.join("\n")), @"FILL");
    assert!(folder.read("out/logs/training.log").contains("checkpoint passed over"));
}

#[test]
fn all_damaged() {
    let damage = |folder: &Folder| {
        for step in ["step-2", "step-4"] {
            flip_bit(&folder.path(&format!("out/checkpoints/{step}/model-rank-0.safetensors")));
        }
    };
    assert_snapshot!(refused(damage, &[], 65), @"FILL");
    let one = ["resume_from_checkpoint=out/checkpoints/step-4"];
    assert_snapshot!(refused(damage, &one, 65), @"FILL");
}

#[test]
fn cut_short() {
    let cut = |folder: &Folder| {
        fs::remove_dir_all(folder.path("out/checkpoints/step-2")).unwrap();
        folder.write("out/checkpoints/step-4/model-rank-0.safetensors", "");
    };
    assert_snapshot!(refused(cut, &[], 65), @"FILL");
}

#[test]
fn changed_data() {
    assert_snapshot!(refused(|f| f.write("data.jsonl", rows(9)), &[], 64), @"FILL");
    let other = |f: &Folder| f.write("data.jsonl", rows(8).replace("lockstep", "Lockstep"));
    assert_snapshot!(refused(other, &[], 64), @"FILL");
    assert_snapshot!(refused(|_| (), &["max_length=20"], 64), @"FILL");
}

#[test]
fn changed_settings() {
    assert_snapshot!(refused(|_| (), &["per_device_train_batch_size=4"], 64), @"FILL");
    assert_snapshot!(refused(|_| (), &["seed=7"], 64), @"FILL");
    assert_snapshot!(refused(|_| (), &["shuffle=false"], 64), @"FILL");
    // The same rows in other portions are the same run, up to the order of sums.
    let folder = interrupted();
    folder.succeeds(&[
        "train",
        "run.yaml",
        "max_steps=6",
        RESUME,
        "per_device_train_batch_size=1",
        "gradient_accumulation_steps=2",
    ]);
}

#[test]
fn changed_model() {
    let other =
        |f: &Folder| f.write("run.yaml", RUN.replace("intermediate_size: 64", "intermediate_size: 96"));
    assert_snapshot!(refused(other, &[], 65), @"FILL");
    let more = |f: &Folder| f.write("run.yaml", RUN.replace("num_hidden_layers: 2", "num_hidden_layers: 3"));
    assert_snapshot!(refused(more, &[], 65), @"FILL");
    let fewer = |f: &Folder| f.write("run.yaml", RUN.replace("num_hidden_layers: 2", "num_hidden_layers: 1"));
    assert_snapshot!(refused(fewer, &[], 65), @"FILL");
}

/// The step that diverges is named and not applied; what was saved before it stays and loads.
#[test]
fn divergence_leaves_earlier_checkpoints_intact() {
    let folder = Folder::new(RUN);
    let wild = [
        "train",
        "run.yaml",
        "max_steps=4",
        "save_steps=1",
        "learning_rate=1e30",
        "lr_scheduler_type=constant",
    ];
    let ran = folder.run(&wild);
    assert_eq!(ran.code, Some(76), "{ran:#?}");
    assert_snapshot!(ran.stderr, @"FILL");
    folder.assert_no_partial();
    let kept = folder.path("out/checkpoints/step-1");
    assert!(kept.exists() && !folder.path("out/checkpoints/step-2").exists());
    let before = folder.tree();
    let again = folder.run(&[&wild[..], &[RESUME]].concat());
    assert_eq!((again.code, &again.stderr), (Some(76), &ran.stderr), "it loads, and diverges alike");
    let after = folder.tree();
    for (path, content) in before.iter().filter(|(path, _)| path.starts_with("out/checkpoints")) {
        assert_eq!(after.get(path), Some(content), "{}", path.display());
    }
}
