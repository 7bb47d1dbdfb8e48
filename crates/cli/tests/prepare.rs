//! `lockstep prepare`: its output, its files, and that later runs find them.

use std::process::Stdio;

use insta::assert_snapshot;
use serde_json::Value;

use crate::support::{CACHE, Folder, RUN, rows};

/// Replaces what differs between runs: times, speeds, and the path of the prepared file.
fn steady(text: &str) -> String {
    let line = |line: &str| {
        let mut words: Vec<String> = line.split(' ').map(str::to_string).collect();
        for word in &mut words {
            if word.ends_with(".tokens") {
                let folder = format!("{CACHE}/lockstep/data");
                assert!(word.contains(&folder), "{word} is in the user's cache");
                *word = format!("[cache]/{}", "[key].tokens");
            }
        }
        let line = words.join(" ");
        match line.split_once(" | ").filter(|_| line.starts_with("prepared ")) {
            Some((first, _)) => format!("{first} | [time] | [speed]"),
            None => line,
        }
    };
    text.lines().map(|text| line(text) + "\n").collect()
}

const PAIRS: &str = "\
{\"prompt\": \"2+2=\", \"completion\": \"4\"}
{\"prompt\": \"naïve \", \"completion\": \"水\\u001b[31m\\n\"}
nonsense
{\"prompt\": \"an exceedingly long prompt which fills all of the context that there is by itself\", \"completion\": \"x\"}
{\"prompt\": \"a\", \"completion\": \"b\"}
";

#[test]
fn statistics_and_samples() {
    let folder = Folder::new(RUN);
    folder.write("data.jsonl", PAIRS);
    let settings = ["prepare", "run.yaml", "packing=bfd", "--on-bad-row", "skip"];
    assert_snapshot!(steady(&folder.succeeds(&settings)), @r"
    prepared [cache]/[key].tokens | [time] | [speed]
    rows        5 read, 1 bad and skipped, 1 dropped: 0 shorter than two tokens, 1 without tokens in the loss, 0 too long
      skipped   data.jsonl row 3: invalid JSON at column 2: expected ident
    documents   3, 0 of them truncated | tokens: median 6, 90 % up to 83, 99 % up to 83, maximum 83
    packed      1 rows of up to 64 tokens, 40.6 % full
    tokens      26, 53.8 % in the loss

    row 0: 3 documents, 26 tokens
    -- document 1 of 3, 17 tokens
    ⟦naïve ⟧水�[31m
    <|endoftext|>
    -- document 2 of 3, 6 tokens
    ⟦2+2=⟧4<|endoftext|>
    -- document 3 of 3, 3 tokens
    ⟦a⟧b<|endoftext|>
    ");
    assert_snapshot!(steady(&folder.succeeds(&[&settings[..], &["--samples", "0"]].concat())), @r"
    found [cache]/[key].tokens | prepared earlier
    rows        5 read, 1 bad and skipped, 1 dropped: 0 shorter than two tokens, 1 without tokens in the loss, 0 too long
      skipped   data.jsonl row 3: invalid JSON at column 2: expected ident
    documents   3, 0 of them truncated | tokens: median 6, 90 % up to 83, 99 % up to 83, maximum 83
    packed      1 rows of up to 64 tokens, 40.6 % full
    tokens      26, 53.8 % in the loss
    ");
    // Only the data is written, and a run finds it.
    assert!(!folder.path("out").exists());
    let before = folder.tree();
    folder.succeeds(&["train", "run.yaml", "packing=bfd", "--on-bad-row", "skip", "max_steps=1"]);
    let (before, after) = (before, folder.tree());
    let caches = |tree: &std::collections::BTreeMap<std::path::PathBuf, _>| {
        tree.keys().filter(|path| path.starts_with(CACHE)).cloned().collect::<Vec<_>>()
    };
    assert_eq!(caches(&before), caches(&after));
}

#[test]
fn for_machines() {
    let folder = Folder::new(RUN);
    folder.write("data.jsonl", rows(100));
    let settings = ["prepare", "run.yaml", "eval_fraction=0.2", "--json", "--samples", "1"];
    let first: Value = serde_json::from_str(&folder.succeeds(&settings)).unwrap();
    let second: Value = serde_json::from_str(&folder.succeeds(&settings)).unwrap();
    let (train, eval) = (&first["train"], &first["eval"]);
    assert_eq!(train["read"].as_u64().unwrap() + eval["read"].as_u64().unwrap(), 100);
    assert!((5..40).contains(&eval["read"].as_u64().unwrap()), "{eval}");
    assert_eq!((&train["cached"], &second["train"]["cached"]), (&false.into(), &true.into()));
    assert_eq!(train["fingerprint"], second["train"]["fingerprint"]);
    assert!(train["tokens_per_second"].as_f64().unwrap() > 0.0);
    let sample = &train["samples"][0];
    assert_eq!(sample["documents"][0]["runs"][0]["learned"], true);
    assert!(sample["documents"][0]["runs"][0]["text"].as_str().unwrap().ends_with("<|endoftext|>"));
}

#[test]
fn a_data_set_by_name() {
    let folder = Folder::new(&RUN.replace("train_files: data.jsonl", "dataset_name: owner/name"));
    let snapshot = folder.path("hf/hub/datasets--owner--name/snapshots/r1");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::write(snapshot.join("train.jsonl"), rows(6)).unwrap();
    std::fs::write(snapshot.join("test.jsonl"), rows(2)).unwrap();
    let run = |args: &[&str]| {
        let mut command = folder.command(args);
        let ran = command
            .env("HF_HOME", "hf")
            .env_remove("HF_HUB_CACHE")
            .env_remove("HF_DATASETS_CACHE")
            .output()
            .unwrap();
        assert!(ran.status.success(), "{ran:?}");
        serde_json::from_slice::<Value>(&ran.stdout).unwrap()
    };
    let made = run(&["prepare", "run.yaml", "--json"]);
    assert_eq!((&made["train"]["read"], &made["eval"]), (&6.into(), &Value::Null));
    let made = run(&["prepare", "run.yaml", "--json", "dataset_test_split=test"]);
    assert_eq!(made["eval"]["read"], 2);
}

#[test]
fn a_damaged_cache_is_prepared_anew() {
    let folder = Folder::new(RUN);
    let made: Value = serde_json::from_str(&folder.succeeds(&["prepare", "run.yaml", "--json"])).unwrap();
    let path = made["train"]["path"].as_str().unwrap();
    let whole = std::fs::read(folder.path(path)).unwrap();
    folder.write(path, &whole[..whole.len() / 2]);
    let printed = folder.succeeds(&["train", "run.yaml"]);
    assert!(printed.contains("is damaged"), "{printed}");
    assert_eq!(std::fs::read(folder.path(path)).unwrap(), whole);
}

fn prepared(folder: &Folder, settings: &[&str]) -> Value {
    let args = [&["prepare", "run.yaml", "--json", "--samples", "0"], settings].concat();
    serde_json::from_str::<Value>(&folder.succeeds(&args)).unwrap()["train"].clone()
}

/// Another experiment finds the prepared data after its file was moved, and so does `eval`.
#[test]
fn experiments_share_prepared_data() {
    let folder = Folder::new(RUN);
    assert_eq!(prepared(&folder, &[])["cached"], false);
    std::fs::rename(folder.path("data.jsonl"), folder.path("moved.jsonl")).unwrap();
    let moved = "train_files=moved.jsonl";
    assert_eq!(prepared(&folder, &[moved, "output_dir=other"])["cached"], true);
    folder.succeeds(&["train", "run.yaml", moved]);
    folder.succeeds(&["eval", "out", "eval_files=moved.jsonl", "max_length=64"]);
    let files: Vec<_> = folder.tree().into_keys().filter(|path| path.starts_with(CACHE)).collect();
    assert_eq!(files.iter().filter(|path| path.extension().is_some()).count(), 1, "{files:?}");
    folder.write("moved.jsonl", rows(9));
    assert_eq!(prepared(&folder, &[moved])["cached"], false);
    // The key takes precedence over the default.
    let path = prepared(&folder, &[moved, "data_cache_dir=here"])["path"].as_str().unwrap().to_string();
    assert!(path.starts_with("here/"), "{path}");
}

/// Runs that prepare the same data at the same time: one prepares it, all train.
#[test]
fn several_runs_prepare_the_same_data() {
    let folder = Folder::new(RUN);
    folder.write("data.jsonl", rows(2000));
    let run = |out: &str| {
        let mut command = folder.command(&["train", "run.yaml", "max_steps=1", &format!("output_dir={out}")]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let runs = ["a", "b", "c"].map(run);
    for child in runs {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
    folder.assert_no_partial();
}

/// Without a cache folder that can be written to, prepared data goes to the output folder, with a note.
#[test]
fn without_a_cache_folder() {
    let folder = Folder::new(RUN);
    folder.write("file", "");
    let run = |args: &[&str]| {
        // Permissions do not stop root, who may run this test, but a file does.
        let output = folder.command(args).env("XDG_CACHE_HOME", folder.path("file")).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (code, printed, errors) = run(&["train", "run.yaml"]);
    assert_eq!((code, errors.as_str()), (Some(0), ""), "{printed}");
    assert!(printed.contains("prepared data goes to the output folder and is not shared: "));
    assert!(folder.path("out/cache").is_dir());
    assert_eq!(run(&["eval", "out", "eval_files=data.jsonl", "max_length=64"]).0, Some(0));
    let (code, _, errors) = run(&["prepare", "model=tiny", "train_files=data.jsonl"]);
    assert_eq!(code, Some(73), "{errors}");
}
