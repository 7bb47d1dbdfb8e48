//! Invalid data: errors name the file, the row and the field.

use insta::assert_snapshot;

use crate::support::{Folder, RUN, rows, steady};

fn refused(data: impl AsRef<[u8]>, settings: &[&str], code: i32) -> String {
    let folder = Folder::new(RUN);
    folder.write("data.jsonl", data);
    folder.train_refused(settings, code)
}

#[test]
fn missing_file() {
    assert_snapshot!(Folder::new(RUN).train_refused(&["train_files=dta.jsonl"], 66), @r"
    error: data file dta.jsonl does not exist
    hint: check the spelling; relative paths are resolved from the directory that the command runs in.
    ");
}

#[test]
fn a_folder_without_data() {
    let folder = Folder::new(RUN);
    std::fs::create_dir(folder.path("empty")).unwrap();
    assert_snapshot!(folder.train_refused(&["train_files=empty"], 66), @r"
    error: folder empty contains no data files
    hint: supported file types are .jsonl, .json, .txt, .csv, .tsv, .parquet, .arrow, .ndjson; the text formats may also be compressed (.gz or .zst).
    ");
}

#[test]
fn a_data_set_that_is_not_here() {
    let folder = Folder::new(&RUN.replace("train_files: data.jsonl", "dataset_name: owner/name"));
    let mut command = folder.command(&["train", "run.yaml"]);
    let ran = command
        .env("HF_HOME", "hf")
        .env_remove("HF_HUB_CACHE")
        .env_remove("HF_DATASETS_CACHE")
        .output()
        .unwrap();
    assert_eq!(ran.status.code(), Some(66));
    assert_snapshot!(String::from_utf8(ran.stderr).unwrap(), @r"
    error: dataset owner/name (revision main) is not in the cache hf/hub, and HF_HUB_OFFLINE is set
    hint: unset HF_HUB_OFFLINE, or run `lockstep download owner/name --repo-type dataset` on a machine with a network and the same cache (HF_HOME).
    ");
}

#[test]
fn a_row_that_is_too_long() {
    let long = format!("{{\"text\": \"{}\"}}\n", "long ".repeat(20));
    assert_snapshot!(refused(rows(2) + &long, &["on_long_row=stop"], 65), @r"
    error: data.jsonl row 3: the row has 101 tokens, more than max_length (64)
    hint: raise max_length, set on_long_row to truncate or drop, or use `packing: bfd_split`, which keeps all tokens.
    ");
}

#[test]
fn not_json() {
    assert_snapshot!(refused(rows(3) + "{\"text\": \"no end\n", &[], 65), @r#"
    error: data.jsonl row 4: invalid JSON at column 16: EOF while parsing a string
      {"text": "no end
    hint: each row must be one JSON object; set on_bad_row: skip to leave out such rows.
    "#);
}

#[test]
fn not_an_object() {
    assert_snapshot!(refused("[1, 2]\n", &[], 65), @r"
    error: data.jsonl row 1: expected a JSON object, found a list
      [1, 2]
    hint: each row must be one JSON object; set on_bad_row: skip to leave out such rows.
    ");
}

#[test]
fn missing_field() {
    assert_snapshot!(refused("{\"txt\": \"a\"}\n", &[], 65), @r"
    error: data.jsonl row 1: no column to train on; columns found: `txt`
    hint: did you mean `text` by `txt`? Rename it, or set `columns: {text: txt}`.
    ");
    assert_snapshot!(refused("{\"prompt\": \"a\", \"answer\": \"b\"}\n", &[], 65), @r"
    error: data.jsonl row 1: found `prompt` but no `completion`; columns found: `answer`, `prompt`
    hint: rows need `text`, `messages`, `prompt` and `completion`, `conversations`, `instruction` and `output`, or `input_ids`; if your columns have other names, map them with `columns: {text: NAME}`.
    ");
}

#[test]
fn wrong_type() {
    assert_snapshot!(refused(rows(1) + "\n{\"text\": 17}\n", &[], 65), @r"
    error: data.jsonl row 3: `text` is a number, expected a string
      17
    hint: write it as a string, or set on_bad_row: skip to leave out such rows.
    ");
}

#[test]
fn not_utf8() {
    assert_snapshot!(refused(b"{\"text\": \"a\xff\"}\n", &[], 65), @r"
    error: data.jsonl row 1: invalid UTF-8 at byte 11 of the row
    hint: convert the file to UTF-8, or set on_bad_row: skip to leave out such rows.
    ");
}

#[test]
fn conversations() {
    assert_snapshot!(refused("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n", &[], 65), @r"
    error: data.jsonl row 1: the row is a conversation (`messages`), but there is no chat template
    hint: set chat_template_path, use the plain template with `chat_template: builtin`, or render the messages to `text` or to `prompt` and `completion` beforehand.
    ");
}

#[test]
fn empty() {
    assert_snapshot!(refused("", &[], 65), @r"
    error: no rows in data.jsonl
    hint: every row needs `text`, `messages`, or `prompt` and `completion`.
    ");
    assert_snapshot!(refused("\n\n", &[], 65), @r"
    error: no rows in data.jsonl
    hint: every row needs `text`, `messages`, or `prompt` and `completion`.
    ");
}

#[test]
fn all_rows_dropped() {
    assert_snapshot!(refused("nonsense\n17\n", &["on_bad_row=skip"], 65), @r"
    error: no trainable rows in data.jsonl: of 2 rows, 2 are invalid, 0 have fewer than two tokens, 0 are longer than max_length (64), and 0 have no supervised token within max_length
    hint: set on_bad_row: stop to see what is wrong with the first row.
    ");
    let prompt = format!("{{\"prompt\": \"{}\", \"completion\": \"b\"}}\n", "long ".repeat(20));
    assert_snapshot!(refused(prompt, &[], 65), @r"
    error: no trainable rows in data.jsonl: of 1 rows, 0 are invalid, 0 have fewer than two tokens, 0 are longer than max_length (64), and 1 have no supervised token within max_length
    hint: raise max_length: the prompts fill it and leave no completion to train on.
    ");
}

#[test]
fn completions_without_prompts() {
    assert_snapshot!(Folder::new(RUN).train_refused(&["completion_only_loss=true"], 64), @r"
    error: completion_only_loss is true, but the rows of data.jsonl have no `completion` column
    hint: remove completion_only_loss, or provide rows with `prompt` and `completion`.
    ");
}

#[test]
fn bad_rows_can_be_skipped() {
    let folder = Folder::new(RUN);
    folder.write("data.jsonl", rows(3) + "nonsense\n" + &rows(3));
    assert_snapshot!(steady(&folder.succeeds(&["train", "run.yaml", "on_bad_row=skip"])), @r"
    LlamaForCausalLM, 37.1 k parameters | f32 ddp on 2 threads | memory [size]
    6 documents in 6 rows, 170 tokens
    1 bad row skipped; the first: data.jsonl row 4: invalid JSON at column 2: expected ident
      nonsense
    step 1/2 | loss: 5.527451 | grad_norm 1.73 | lr 5.00e-5 | [speed] | [time]
    step 2/2 | loss: 5.534704 | grad_norm 1.62 | lr 2.50e-5 | [speed] | [time]
    model in out/model
    checkpoint in out/checkpoints/step-2
    peak memory [size] (planned [size])
    ");
}

#[test]
fn missing_tokenizer() {
    assert_snapshot!(Folder::new(RUN).train_refused(&["tokenizer=tokenizer.json"], 66), @r"
    error: no tokenizer at tokenizer.json
    hint: set `tokenizer` to a tokenizer.json, to a folder that contains one, or to `byte` for the built-in byte tokenizer.
    ");
}

#[test]
fn malformed_tokenizer() {
    let folder = Folder::new(RUN);
    folder.write("tokenizer.json", "{\"model\": 1}");
    assert_snapshot!(folder.train_refused(&["tokenizer=tokenizer.json"], 65), @r"
    error: tokenizer.json is not a valid tokenizer file: data did not match any variant of untagged enum ModelUntagged at line 1 column 12
    hint: write the tokenizer files again with save_pretrained in transformers.
    ");
}
