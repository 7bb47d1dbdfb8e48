//! Prompt rows: tokens, the other columns of their rows from every kind of file, and error messages.

use std::fs;
use std::path::{Path, PathBuf};

use insta::assert_snapshot;
use lockstep_core::Fault;
use lockstep_data::{
    ChatEncoder, ChatTemplate, Columns, DataError, DataSpec, DataTask, Dataset, DateTime, OnBadRow,
    OnLongRow, Packing, TemplateSource, Tokenizer, TokenizerSource, prepare,
};
use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

const PROMPT: DataTask = DataTask::Prompt { max_prompt_length: 24 };

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Folder(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> DataSpec {
        let file = self.0.path().join(name);
        fs::write(&file, content).unwrap();
        self.spec_of(&file)
    }

    fn spec_of(&self, file: &Path) -> DataSpec {
        DataSpec { task: PROMPT, ..DataSpec::new(vec![file.into()], &self.0.path().join("cache")) }
    }

    fn spec(&self, rows: &[Value]) -> DataSpec {
        self.write("train.jsonl", rows.iter().map(|row| format!("{row}\n")).collect::<String>())
    }

    /// Exit code, message and hint of the error, without the temporary path.
    fn fails(&self, spec: &DataSpec) -> String {
        let error = load(spec).unwrap_err();
        let hint = error.hint().map(|hint| format!("\nhint: {hint}")).unwrap_or_default();
        let text = format!("[{}] {error}{hint}", error.class().exit_code());
        text.replace(&format!("{}/", self.0.path().display()), "")
    }

    fn row(&self, row: &str) -> String {
        self.fails(&self.write("train.jsonl", row))
    }
}

fn golden(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../goldens/data/prompts.{kind}"))
}

fn byte() -> Tokenizer {
    Tokenizer::load(&TokenizerSource::Byte).unwrap()
}

fn load(spec: &DataSpec) -> Result<Dataset, DataError> {
    prepare(spec, &byte(), None)
}

fn columns(dataset: &Dataset) -> Vec<Value> {
    let docs = 0..dataset.num_docs() as u32;
    docs.map(|doc| serde_json::from_str(&dataset.columns_json(doc).unwrap()).unwrap()).collect()
}

#[test]
fn columns_come_from_every_kind_of_file() {
    let dir = Folder::new();
    let rows: Vec<Value> = fs::read_to_string(golden("jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    for kind in ["jsonl", "json", "parquet", "arrow", "csv"] {
        let spec = dir.spec_of(&golden(kind));
        let dataset = load(&spec).unwrap_or_else(|e| panic!("{kind}: {e}"));
        assert_eq!((dataset.num_docs(), dataset.num_rows()), (3, 3), "{kind}");
        for (doc, row) in rows.iter().enumerate() {
            let (tokens, supervised) = dataset.doc(doc as u32).unwrap();
            assert_eq!(byte().decode(&tokens, false).unwrap(), row["prompt"].as_str().unwrap(), "{kind}");
            assert!(!supervised.contains(&true));
            assert_eq!(dataset.row_docs(doc), [doc as u32]);
            assert_eq!((dataset.row_tokens(doc), dataset.row_supervised(doc)), (tokens.len(), 0));
        }
        let found = columns(&dataset);
        if kind == "csv" {
            // Every field is a string there.
            assert_eq!(found[0]["level"], "1");
            assert_eq!(found[1]["prompt"], rows[1]["prompt"]);
            let names = |row: &Value| row.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
            assert_eq!(names(&found[0]), names(&rows[0]));
        } else {
            assert_eq!(found, rows, "{kind}");
        }
        let cached = load(&spec).unwrap();
        assert!(cached.was_cached());
        assert_eq!((columns(&cached), cached.fingerprint()), (found, dataset.fingerprint()));
        assert_eq!((cached.task(), cached.num_pairs()), (PROMPT, 0));
    }
}

#[test]
fn the_text_of_a_json_row_is_kept_as_it_is() {
    let dir = Folder::new();
    let row =
        "{\"prompt\":\"a\",  \"big\": 12345678901234567890123, \"x\": 0.10, \"nested\": {\"b\": [null]}}";
    let dataset = load(&dir.write("train.jsonl", format!("  {row} \r\n"))).unwrap();
    assert_eq!(dataset.columns_json(0).unwrap(), row);
    // A prompt of one token is fine, and no EOS token is appended.
    assert_eq!(dataset.doc(0).unwrap(), (vec![97], vec![false]));
    assert_eq!((dataset.num_tokens(), dataset.num_supervised(), dataset.max_doc_len()), (1, 0, 1));
}

#[test]
fn other_columns_are_part_of_the_data() {
    let dir = Folder::new();
    let fingerprint =
        |answer: &str| load(&dir.spec(&[json!({ "prompt": "a", "answer": answer })])).unwrap().fingerprint();
    assert_ne!(fingerprint("1"), fingerprint("2"));
}

#[test]
fn renamed_prompts_and_lines_of_text() {
    let dir = Folder::new();
    let columns = Columns::new([("prompt", "question")]).unwrap();
    let spec = dir.spec(&[json!({ "question": "q", "prompt": 5 })]);
    let dataset = load(&DataSpec { columns, ..spec }).unwrap();
    assert_eq!(dataset.doc(0).unwrap().0, [u32::from(b'q')]);
    assert_eq!(dataset.columns_json(0).unwrap(), r#"{"question":"q","prompt":5}"#);
    let columns = Columns::new([("prompt", "text")]).unwrap();
    let dataset = load(&DataSpec { columns, ..dir.write("a.txt", "one\ntwo\n") }).unwrap();
    assert_eq!((dataset.num_docs(), dataset.columns_json(1).unwrap()), (2, r#"{"text":"two"}"#.into()));
}

#[test]
fn conversations_end_with_the_generation_prompt() {
    let dir = Folder::new();
    let template = ChatTemplate::load(&TemplateSource::Builtin, &byte(), DateTime::default()).unwrap();
    let chat = ChatEncoder { template, assistant_only: false };
    let row = json!({ "prompt": [{ "role": "user", "content": "hi" }], "answer": 3 });
    let spec = DataSpec {
        task: DataTask::Prompt { max_prompt_length: 100 },
        ..dir.spec(std::slice::from_ref(&row))
    };
    let dataset = prepare(&spec, &byte(), Some(&chat)).unwrap();
    let text = byte().decode(&dataset.doc(0).unwrap().0, false).unwrap();
    assert!(text.starts_with("user: hi") && text.trim_end().ends_with("assistant:"), "{text:?}");
    assert_eq!(columns(&dataset), [row]);
    assert_snapshot!(dir.fails(&spec), @r"
    [65] train.jsonl row 1: the row is a conversation (`prompt` as messages), but there is no chat template
    hint: set chat_template_path, use the plain template with `chat_template: builtin`, or render the messages to `text` or to `prompt` and `completion` beforehand.
    ");
}

#[test]
fn long_and_empty_prompts_are_dropped_and_counted() {
    let dir = Folder::new();
    let spec = dir.spec(&[
        json!({ "prompt": "x".repeat(25) }),
        json!({ "prompt": "" }),
        json!({ "prompt": "x".repeat(24) }),
    ]);
    let dataset = load(&spec).unwrap();
    let stats = dataset.stats();
    assert_eq!((stats.docs, stats.dropped_long, stats.dropped_short, stats.truncated), (1, 1, 1, 0));
    let shorter = DataSpec { task: DataTask::Prompt { max_prompt_length: 5 }, ..spec.clone() };
    assert_snapshot!(dir.fails(&shorter), @r"
    [65] no trainable rows in train.jsonl: of 3 rows, 0 are invalid, 1 have an empty prompt, and 2 have a prompt longer than max_prompt_length (5)
    hint: raise max_prompt_length, or shorten the prompts.
    ");
    assert_snapshot!(dir.fails(&DataSpec { on_long_row: OnLongRow::Stop, ..spec.clone() }), @r"
    [65] train.jsonl row 1: the prompt has 25 tokens, more than max_prompt_length (24)
    hint: raise max_prompt_length, or set on_long_row: drop to leave out such prompts.
    ");
    assert_snapshot!(dir.fails(&DataSpec { packing: Packing::Bfd, ..spec }), @r"
    [64] `packing: bfd` cannot be used with an algorithm that generates completions (grpo, rloo, ppo): prompts do not share rows
    hint: set `packing: none`.
    ");
}

#[test]
fn messages_for_rows_of_the_wrong_kind() {
    let dir = Folder::new();
    assert_snapshot!(dir.row(r#"{"text": "x"}"#), @r"
    [65] train.jsonl row 1: the row is a document for supervised training, but an algorithm that generates completions (grpo, rloo, ppo) needs `prompt`; columns found: `text`
    hint: rows need `prompt`, as text or as a list of messages that ends before the completion; if another column has it, set `columns: {prompt: NAME}`. To train on these rows as they are, set `algorithm: sft`.
    ");
    assert_snapshot!(dir.row(r#"{"messages": [{"role": "user", "content": "x"}], "answer": 1}"#), @r"
    [65] train.jsonl row 1: the row is a document for supervised training, but an algorithm that generates completions (grpo, rloo, ppo) needs `prompt`; columns found: `answer`, `messages`
    hint: rows need `prompt`, as text or as a list of messages that ends before the completion; if another column has it, set `columns: {prompt: NAME}`. To train on these rows as they are, set `algorithm: sft`.
    ");
    assert_snapshot!(dir.row(r#"{"chosen": "x", "rejected": "y"}"#), @r"
    [65] train.jsonl row 1: the row is a preference pair, but an algorithm that generates completions (grpo, rloo, ppo) needs `prompt`; columns found: `chosen`, `rejected`
    hint: set `algorithm: dpo` or `algorithm: reward` to train on pairs.
    ");
    assert_snapshot!(dir.row(r#"{"promt": "x", "answer": "y"}"#), @r"
    [65] train.jsonl row 1: an algorithm that generates completions (grpo, rloo, ppo) needs `prompt`; columns found: `answer`, `promt`
    hint: did you mean `prompt` by `promt`? Rename it, or set `columns: {prompt: promt}`.
    ");
    assert_snapshot!(dir.row(r#"{"prompt": 5, "answer": "y"}"#), @r"
    [65] train.jsonl row 1: `prompt` is a number, expected a string
      5
    hint: write it as a string, or set on_bad_row: skip to leave out such rows.
    ");
    assert_snapshot!(dir.row(r#"{"prompt": [{"content": "x"}]}"#), @r"
    [65] train.jsonl row 1: `prompt`, message 1: `role` is missing
    hint: fix the row, or set on_bad_row: skip to leave out such rows.
    ");
    assert_snapshot!(dir.fails(&dir.write("empty.jsonl", "")), @r"
    [65] no rows in empty.jsonl
    hint: every row needs `prompt`.
    ");
    assert_snapshot!(dir.fails(&dir.write("a.txt", "one\ntwo\n")), @r"
    [65] a.txt row 1: the row is a document for supervised training, but an algorithm that generates completions (grpo, rloo, ppo) needs `prompt`; columns found: `text`
    hint: rows need `prompt`, as text or as a list of messages that ends before the completion; if another column has it, set `columns: {prompt: NAME}`. To train on these rows as they are, set `algorithm: sft`.
    ");
    let skipping =
        DataSpec { on_bad_row: OnBadRow::Skip, ..dir.write("train.jsonl", "x\n{\"prompt\": \"\u{1}") };
    assert_snapshot!(dir.fails(&skipping), @r"
    [65] no trainable rows in train.jsonl: of 2 rows, 2 are invalid, 0 have an empty prompt, and 0 have a prompt longer than max_prompt_length (24)
    hint: set on_bad_row: stop to see what is wrong with the first row.
    ");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_text_in_other_columns_is_kept(texts in prop::collection::vec(any::<String>(), 1..20)) {
        let dir = Folder::new();
        let rows: Vec<Value> = texts.iter().map(|text| json!({ "prompt": "p", (text.as_str()): text })).collect();
        let dataset = load(&dir.spec(&rows)).unwrap();
        prop_assert_eq!(columns(&dataset), rows);
    }
}
