//! Rows of token ids, which need no tokenizer.

use std::fs;

use insta::assert_snapshot;

use crate::support::{Folder, RUN};

/// Rows of ids below `vocab`.
fn ids(vocab: usize) -> String {
    let row = |row: usize| {
        let ids: Vec<String> = (0..8 + row).map(|i| ((row * 31 + i * 7) % vocab).to_string()).collect();
        format!("{{\"input_ids\": [{}]}}\n", ids.join(", "))
    };
    (0..8).map(row).collect()
}

fn of_vocab(vocab: usize) -> String {
    RUN.replace(
        "max_position_embeddings: 64}",
        &format!("max_position_embeddings: 64, vocab_size: {vocab}}}"),
    )
}

/// A run on ids below 1000 with a vocabulary size in the model; its folder has no tokenizer.
fn trained() -> Folder {
    let folder = Folder::new(&of_vocab(1000));
    folder.write("data.jsonl", ids(1000));
    folder.succeeds(&["train", "run.yaml"]);
    folder
}

#[test]
fn ids_train_without_a_tokenizer() {
    let folder = trained();
    let mut names: Vec<String> = fs::read_dir(folder.path("out/model"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert_eq!(names, ["config.json", "generation_config.json", "model.safetensors"]);
    // The vocabulary may also be smaller than that of any tokenizer.
    let small = Folder::new(&of_vocab(50));
    small.write("data.jsonl", ids(50));
    small.succeeds(&["train", "run.yaml"]);
    // All packings, and a resumed run.
    for packing in ["bfd", "bfd_split", "wrapped"] {
        small.succeeds(&["train", "run.yaml", "overwrite_output_dir=true", &format!("packing={packing}")]);
    }
    small.succeeds(&["train", "run.yaml", "max_steps=3", "packing=wrapped", "resume_from_checkpoint=true"]);
}

#[test]
fn a_folder_without_a_tokenizer_is_trained_and_evaluated_on_ids() {
    let folder = trained();
    let tune = ["train", "run.yaml", "model_name_or_path=out/model", "output_dir=tuned"];
    folder.succeeds(&tune);
    assert!(!folder.path("tuned/model/tokenizer.json").exists());
    let printed = folder.succeeds(&["eval", "tuned/model", "eval_files=data.jsonl", "max_length=64"]);
    assert!(printed.contains("loss"), "{printed}");
    let prepared = folder.succeeds(&["prepare", "run.yaml", "--samples", "1"]);
    assert!(prepared.contains("7 14 21"), "ids are shown as they are: {prepared}");
}

#[test]
fn a_tokenizer_that_does_not_fit_is_no_matter() {
    let folder = Folder::with_model();
    let config = folder.read("model/config.json").replace("\"vocab_size\": 257", "\"vocab_size\": 100");
    assert!(config.contains("100"), "{config}");
    folder.write("model/config.json", config);
    folder.write("data.jsonl", ids(100));
    folder.succeeds(&["train", "run.yaml", "init=random"]);
    assert!(!folder.path("out/model/tokenizer.json").exists());
    // With text, it is needed.
    folder.write("data.jsonl", crate::support::rows(8));
    folder.train_refused(&["init=random", "overwrite_output_dir=true"], 64);
}

#[test]
fn a_named_size_needs_a_vocabulary_size() {
    let folder =
        Folder::new("model: tiny\ntrain_files: data.jsonl\nmax_length: 16\nmax_steps: 0\noutput_dir: out\n");
    folder.write("data.jsonl", ids(400));
    folder.succeeds(&["train", "run.yaml", "vocab_size=400"]);
    assert!(folder.read("out/model/config.json").contains("\"vocab_size\": 400"));
    fs::remove_dir_all(folder.path("out")).unwrap();
    assert_snapshot!(folder.train_refused(&["tokenizer=none"], 64), @r"
    error: there is no tokenizer, and the model does not define vocab_size
    hint: set `vocab_size: N`, one more than the largest token id.
    ");
    let outside = folder.train_refused(&["tokenizer=none", "vocab_size=30"], 65);
    assert!(outside.contains("is out of range for a vocabulary of 30 tokens"), "{outside}");
}

#[test]
fn what_is_not_an_id_of_the_model_is_refused() {
    let folder = Folder::new(&of_vocab(50));
    folder.write("data.jsonl", ids(50) + "{\"input_ids\": [1, 2, 50]}\n");
    assert_snapshot!(folder.train_refused(&[], 65), @r"
    error: data.jsonl row 9: token id 50 is out of range for a vocabulary of 50 tokens
    hint: the rows were tokenized with another tokenizer: set `tokenizer` to that one. With `tokenizer: none`, ids must be below the model's vocab_size.
    ");
    // Text among ids with `tokenizer: none` is an error, even with `on_bad_row: skip`.
    folder.write("data.jsonl", ids(50));
    folder.write("more.jsonl", "{\"text\": \"hello\"}\n");
    for on_bad_row in ["stop", "skip"] {
        let settings = ["train_files=[data.jsonl, more.jsonl]", &format!("on_bad_row={on_bad_row}")];
        let refused = folder.train_refused(&settings, 65);
        let text = "more.jsonl row 1: the row is text (`text`), but there is no tokenizer";
        assert!(refused.contains(text), "{refused}");
    }
}

#[test]
fn text_is_asked_of_no_model_without_a_tokenizer() {
    let folder = trained();
    assert_snapshot!(folder.refused(&["generate", "out", "--prompt", "hello"], 66), @r"
    error: out/model has no tokenizer.json
    hint: copy the tokenizer.json that the model was trained with into the folder, or load the tokenizer with AutoTokenizer.from_pretrained in transformers and write it there with save_pretrained.
    ");
    folder.refused(&["chat", "out"], 66);
    folder.write("text.jsonl", crate::support::rows(2));
    let text = folder.refused(&["eval", "out", "eval_files=text.jsonl"], 66);
    assert!(text.contains("out/model has no tokenizer.json"), "{text}");
}
