//! Data that cannot be used: file, row and field are named.

use insta::assert_snapshot;

use crate::support::{Folder, RUN, rows, steady};

fn refused(data: impl AsRef<[u8]>, settings: &[&str], code: i32) -> String {
    let folder = Folder::new(RUN);
    folder.write("data.jsonl", data);
    folder.train_refused(settings, code)
}

#[test]
fn missing_file() {
    assert_snapshot!(Folder::new(RUN).train_refused(&["train_files=dta.jsonl"], 66), @"FILL");
}

#[test]
fn a_folder() {
    assert_snapshot!(Folder::new(RUN).train_refused(&["train_files=."], 65), @"FILL");
}

#[test]
fn not_json() {
    assert_snapshot!(refused(rows(3) + "{\"text\": \"no end\n", &[], 65), @"FILL");
}

#[test]
fn not_an_object() {
    assert_snapshot!(refused("[1, 2]\n", &[], 65), @"FILL");
}

#[test]
fn missing_field() {
    assert_snapshot!(refused("{\"txt\": \"a\"}\n", &[], 65), @"FILL");
    assert_snapshot!(refused("{\"prompt\": \"a\", \"answer\": \"b\"}\n", &[], 65), @"FILL");
}

#[test]
fn wrong_type() {
    assert_snapshot!(refused(rows(1) + "\n{\"text\": 17}\n", &[], 65), @"FILL");
}

#[test]
fn not_utf8() {
    assert_snapshot!(refused(b"{\"text\": \"a\xff\"}\n", &[], 65), @"FILL");
}

#[test]
fn conversations() {
    assert_snapshot!(refused("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n", &[], 69), @"FILL");
}

#[test]
fn empty() {
    assert_snapshot!(refused("", &[], 65), @"FILL");
    assert_snapshot!(refused("\n\n", &[], 65), @"FILL");
}

#[test]
fn all_rows_dropped() {
    assert_snapshot!(refused("nonsense\n17\n", &["on_bad_row=skip"], 65), @"FILL");
    let prompt = format!("{{\"prompt\": \"{}\", \"completion\": \"b\"}}\n", "long ".repeat(20));
    assert_snapshot!(refused(prompt, &[], 65), @"FILL");
}

#[test]
fn completions_without_prompts() {
    assert_snapshot!(Folder::new(RUN).train_refused(&["completion_only_loss=true"], 64), @"FILL");
}

#[test]
fn bad_rows_can_be_skipped() {
    let folder = Folder::new(RUN);
    folder.write("data.jsonl", rows(3) + "nonsense\n" + &rows(3));
    assert_snapshot!(steady(&folder.succeeds(&["train", "run.yaml", "on_bad_row=skip"])), @"FILL");
}

#[test]
fn missing_tokenizer() {
    assert_snapshot!(Folder::new(RUN).train_refused(&["tokenizer=tokenizer.json"], 66), @"FILL");
}

#[test]
fn malformed_tokenizer() {
    let folder = Folder::new(RUN);
    folder.write("tokenizer.json", "{\"model\": 1}");
    assert_snapshot!(folder.train_refused(&["tokenizer=tokenizer.json"], 65), @"FILL");
}
