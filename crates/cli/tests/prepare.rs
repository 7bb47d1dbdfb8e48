//! `lockstep prepare`: what it says, what it leaves, and that a run finds it.

use insta::assert_snapshot;
use serde_json::Value;

use crate::support::{Folder, RUN, rows};

/// What differs from machine to machine, replaced: times, speeds, and the hash in a file's name.
fn steady(text: &str) -> String {
    let line = |line: &str| {
        let mut words: Vec<String> = line.split(' ').map(str::to_string).collect();
        for word in &mut words {
            if word.starts_with("out/cache/") {
                *word = "out/cache/[key].tokens".into();
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
    prepared out/cache/[key].tokens | [time] | [speed]
    rows        5 read, 1 bad and skipped, 1 dropped: 0 shorter than two tokens, 1 with nothing to learn, 0 too long
      skipped   data.jsonl row 3: invalid JSON at column 2: expected ident
    documents   3, 0 of them cut | tokens: median 6, 90 % up to 83, 99 % up to 83, most 83
    packed      1 rows of up to 64 tokens, 40.6 % full
    tokens      26, 53.8 % to learn

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
    found out/cache/[key].tokens | prepared before
    rows        5 read, 1 bad and skipped, 1 dropped: 0 shorter than two tokens, 1 with nothing to learn, 0 too long
      skipped   data.jsonl row 3: invalid JSON at column 2: expected ident
    documents   3, 0 of them cut | tokens: median 6, 90 % up to 83, 99 % up to 83, most 83
    packed      1 rows of up to 64 tokens, 40.6 % full
    tokens      26, 53.8 % to learn
    ");
    // Nothing but the data, and a run finds it.
    let left: Vec<_> = folder.tree().into_keys().filter(|path| path.starts_with("out")).collect();
    assert_eq!(left.len(), 3, "{left:?}");
    let before = folder.tree();
    folder.succeeds(&["train", "run.yaml", "packing=bfd", "--on-bad-row", "skip", "max_steps=1"]);
    let (before, after) = (before, folder.tree());
    let caches = |tree: &std::collections::BTreeMap<std::path::PathBuf, _>| {
        tree.keys().filter(|path| path.starts_with("out/cache")).cloned().collect::<Vec<_>>()
    };
    assert_eq!(caches(&before), caches(&after));
}

#[test]
fn for_machines() {
    let folder = Folder::new(RUN);
    folder.write("data.jsonl", rows(100));
    let settings = ["prepare", "run.yaml", "eval_fraction=0.2", "--json", "--samples", "1"];
    let first: Value = serde_json::from_str(&folder.succeeds(&settings)).unwrap();
    let again: Value = serde_json::from_str(&folder.succeeds(&settings)).unwrap();
    let (train, eval) = (&first["train"], &first["eval"]);
    assert_eq!(train["read"].as_u64().unwrap() + eval["read"].as_u64().unwrap(), 100);
    assert!((5..40).contains(&eval["read"].as_u64().unwrap()), "{eval}");
    assert_eq!((&train["cached"], &again["train"]["cached"]), (&false.into(), &true.into()));
    assert_eq!(train["fingerprint"], again["train"]["fingerprint"]);
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
fn a_damaged_cache_is_made_again() {
    let folder = Folder::new(RUN);
    let made: Value = serde_json::from_str(&folder.succeeds(&["prepare", "run.yaml", "--json"])).unwrap();
    let path = made["train"]["path"].as_str().unwrap();
    let whole = std::fs::read(folder.path(path)).unwrap();
    folder.write(path, &whole[..whole.len() / 2]);
    let printed = folder.succeeds(&["train", "run.yaml"]);
    assert!(printed.contains("is damaged"), "{printed}");
    assert_eq!(std::fs::read(folder.path(path)).unwrap(), whole);
}
