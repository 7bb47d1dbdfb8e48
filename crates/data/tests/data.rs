//! Preparing data from files: the resulting documents, and the message of every error.

use std::fs;
use std::path::PathBuf;

use insta::assert_snapshot;
use lockstep_core::{Fault, FaultClass};
use lockstep_data::{
    Batch, DataError, DataSpec, Dataset, OnBadRow, Packing, SampleOrder, Tokenizer, TokenizerSource, prepare,
};
use tempfile::TempDir;

const EOS: u32 = 256;

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Folder(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.path(name), content).unwrap();
        self.path(name)
    }

    fn spec(&self, content: impl AsRef<[u8]>) -> DataSpec {
        let files = vec![self.write("train.jsonl", content)];
        DataSpec { max_length: 32, ..DataSpec::new(files, &self.path("cache")) }
    }

    /// Exit code, message and hint of an error, without the temporary path.
    fn show(&self, error: &DataError) -> String {
        let hint = error.hint().map(|hint| format!("\nhint: {hint}")).unwrap_or_default();
        let text = format!("[{}] {error}{hint}", error.class().exit_code());
        text.replace(&format!("{}/", self.0.path().display()), "")
            .replace(&self.0.path().display().to_string(), "DIR")
    }

    fn fails(&self, spec: &DataSpec) -> String {
        self.show(&load(spec).unwrap_err())
    }

    /// The message for a file with this content.
    fn row(&self, content: impl AsRef<[u8]>) -> String {
        self.fails(&self.spec(content))
    }
}

fn load(spec: &DataSpec) -> Result<Dataset, DataError> {
    load_with(spec, &TokenizerSource::Byte)
}

fn load_with(spec: &DataSpec, tokenizer: &TokenizerSource) -> Result<Dataset, DataError> {
    prepare(spec, &Tokenizer::load(tokenizer)?, None)
}

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[test]
fn text_is_supervised_and_gets_one_eos_token() {
    let dir = Folder::new();
    let ds =
        load(&dir.spec("{\"text\": \"ab\"}\n\n{\"text\": \"c<|endoftext|>\", \"id\": 1}\n{\"text\": \"\"}"))
            .unwrap();
    assert_eq!(ds.doc(0).unwrap(), (vec![97, 98, EOS], vec![false, true, true]));
    assert_eq!(ds.doc(1).unwrap(), (vec![99, EOS], vec![false, true]));
    let stats = ds.stats();
    assert_eq!((ds.num_docs(), ds.num_rows(), stats.read, stats.dropped_short), (2, 2, 3, 1));
    assert_eq!((ds.num_tokens(), ds.num_supervised()), (5, 3));
}

#[test]
fn completions_are_supervised_prompts_are_not() {
    let dir = Folder::new();
    let mut spec = dir.spec("{\"prompt\": \"2+2=\", \"completion\": \"4\"}\n");
    let masks = |spec: &DataSpec| load(spec).unwrap().doc(0).unwrap().1;
    assert_eq!(masks(&spec), [false, false, false, false, true, true]);
    let ds = load(&spec).unwrap();
    assert_eq!(ds.doc(0).unwrap().0, [ids("2+2=4"), vec![EOS]].concat());
    spec.completion_only_loss = Some(false);
    assert_eq!(masks(&spec), [false, true, true, true, true, true]);
}

#[test]
fn truncation_keeps_the_start_and_drops_rows_without_targets() {
    let dir = Folder::new();
    let rows =
        "{\"prompt\": \"abcd\", \"completion\": \"e\"}\n{\"prompt\": \"ab\", \"completion\": \"cdef\"}\n";
    let spec = DataSpec { max_length: 4, ..dir.spec(rows) };
    let ds = load(&spec).unwrap();
    assert_eq!(ds.num_docs(), 1);
    assert_eq!(ds.doc(0).unwrap(), (ids("abcd"), vec![false, false, true, true]));
    let stats = ds.stats();
    assert_eq!((stats.dropped_unsupervised, stats.truncated, stats.longest), (1, 1, 4));
}

#[test]
fn prompts_that_merge_with_their_completion_are_counted() {
    let dir = Folder::new();
    // Byte-level BPE with one merge, `a` + `b`, which spans the end of the prompt and the start of the completion.
    let byte = Tokenizer::load(&TokenizerSource::Byte).unwrap();
    let json = String::from_utf8(byte.files()[0].1.clone()).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&json).unwrap();
    json["model"]["vocab"]["ab"] = 257.into();
    json["model"]["merges"] = serde_json::json!(["a b"]);
    let tokenizer = TokenizerSource::File(dir.write("tokenizer.json", json.to_string()));
    let spec = dir.spec("{\"prompt\": \"xa\", \"completion\": \"bc\"}\n");
    let ds = load_with(&spec, &tokenizer).unwrap();
    assert_eq!(ds.stats().prefix_mismatches, 1);
    assert_eq!(ds.doc(0).unwrap(), (vec![120, 257, 99, EOS], vec![false, true, true, true]));
}

#[test]
fn an_epoch_of_packed_rows_has_all_supervised_tokens() {
    let dir = Folder::new();
    let rows: String = (1..30).map(|n| format!("{{\"text\": \"{}\"}}\n", "y".repeat(n))).collect();
    let spec = DataSpec { packing: Packing::Bfd, ..dir.spec(rows) };
    let ds = load(&spec).unwrap();
    let stats = ds.stats();
    assert!(stats.rows < stats.docs && stats.tokens <= stats.capacity);
    let order = SampleOrder::new(1, ds.num_rows(), 4, false, true).unwrap();
    let (mut rows, mut batch, mut supervised) = (Vec::new(), Batch::default(), 0);
    for step in 0..order.steps_per_epoch() {
        order.rows(lockstep_core::Step(step), &mut rows);
        batch.fill(&ds, &rows).unwrap();
        supervised += batch.supervised;
    }
    assert_eq!(supervised, ds.num_supervised());
}

#[test]
fn bad_rows_are_skipped_and_listed() {
    let dir = Folder::new();
    let content = b"{\"text\": \"good\"}\n{\"text\"\n[1]\n{\"text\": \"\xFF\"}\n{\"txt\": \"\"}\n\
        {\"prompt\": \"p\", \"completion\": \"c\"}\n{\"text\": \"also good\"}\n";
    let spec = DataSpec { on_bad_row: OnBadRow::Skip, ..dir.spec(content) };
    let ds = load(&spec).unwrap();
    assert_eq!((ds.num_docs(), ds.stats().read, ds.stats().skipped), (2, 7, 5));
    assert_eq!(ds.skipped().iter().map(|s| s.row).collect::<Vec<_>>(), [2, 3, 4, 5, 6]);
    let many = DataSpec {
        on_bad_row: OnBadRow::Skip,
        ..dir.spec("{\"text\": \"ok\"}\n".to_string() + &"x\n".repeat(500))
    };
    let ds = load(&many).unwrap();
    assert_eq!((ds.skipped().len(), ds.stats().skipped), (100, 500));
}

#[test]
fn messages_about_files() {
    let dir = Folder::new();
    let spec = dir.spec("");
    let with = |files: Vec<PathBuf>| dir.fails(&DataSpec { files, ..spec.clone() });
    assert_snapshot!(with(vec![]), @r"
    [64] no data files were given
    hint: give one or more files, folders or patterns.
    ");
    assert_snapshot!(with(vec![dir.path("tarin.jsonl")]), @r"
    [66] data file tarin.jsonl does not exist
    hint: check the spelling; relative paths are resolved from the directory that the command runs in.
    ");
    assert_snapshot!(with(vec![dir.0.path().into()]), @r"
    [65] no rows in train.jsonl
    hint: every row needs `text`, `messages`, or `prompt` and `completion`.
    ");
    assert_snapshot!(dir.row("\n \n"), @r"
    [65] no rows in train.jsonl
    hint: every row needs `text`, `messages`, or `prompt` and `completion`.
    ");
    assert_snapshot!(with(vec![spec.files[0].clone(), spec.files[0].clone()]), @r"
    [65] no rows in train.jsonl and 1 more
    hint: every row needs `text`, `messages`, or `prompt` and `completion`.
    ");
    assert_snapshot!(dir.fails(&DataSpec { max_length: 1, ..spec.clone() }), @r"
    [64] max_length is 1, but a document needs at least two tokens: one input and one target
    hint: set max_length to 2 or more.
    ");
}

#[test]
fn messages_about_rows() {
    let dir = Folder::new();
    assert_snapshot!(dir.row("{\"text\": \"a\"}\n{\"text\": \"b\"\n"), @r#"
    [65] train.jsonl row 2: invalid JSON at column 12: EOF while parsing an object
      {"text": "b"
    hint: each row must be one JSON object; set on_bad_row: skip to leave out such rows.
    "#);
    assert_snapshot!(dir.row(format!("{{\"text\": {}\n", "z".repeat(200))), @r#"
    [65] train.jsonl row 1: invalid JSON at column 10: expected value
      {"text": zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz…
    hint: each row must be one JSON object; set on_bad_row: skip to leave out such rows.
    "#);
    assert_snapshot!(dir.row("[\"a\", 1]\n"), @r#"
    [65] train.jsonl row 1: expected a JSON object, found a list
      ["a", 1]
    hint: each row must be one JSON object; set on_bad_row: skip to leave out such rows.
    "#);
    assert_snapshot!(dir.row(b"{\"text\": \"caf\xE9\"}\n"), @r"
    [65] train.jsonl row 1: invalid UTF-8 at byte 13 of the row
    hint: convert the file to UTF-8, or set on_bad_row: skip to leave out such rows.
    ");
    assert_snapshot!(dir.row("{\"txet\": \"a\", \"id\": 7}\n"), @r"
    [65] train.jsonl row 1: no column to train on; columns found: `id`, `txet`
    hint: did you mean `text` by `txet`? Rename it, or set `columns: {text: txet}`.
    ");
    assert_snapshot!(dir.row("{\"question\": \"a\", \"answer\": \"b\"}\n"), @r"
    [65] train.jsonl row 1: no column to train on; columns found: `answer`, `question`
    hint: rows need `text`, `messages`, `prompt` and `completion`, `conversations`, `instruction` and `output`, or `input_ids`; if your columns have other names, map them with `columns: {text: NAME}`.
    ");
    assert_snapshot!(dir.row("{}\n"), @r"
    [65] train.jsonl row 1: no column to train on; columns found: none
    hint: rows need `text`, `messages`, `prompt` and `completion`, `conversations`, `instruction` and `output`, or `input_ids`; if your columns have other names, map them with `columns: {text: NAME}`.
    ");
    assert_snapshot!(dir.row("{\"prompt\": \"a\", \"competion\": \"b\"}\n"), @r"
    [65] train.jsonl row 1: found `prompt` but no `completion`; columns found: `competion`, `prompt`
    hint: did you mean `completion` by `competion`? Rename it, or set `columns: {completion: competion}`.
    ");
    assert_snapshot!(dir.row("{\"completion\": \"b\"}\n"), @r"
    [65] train.jsonl row 1: found `completion` but no `prompt`; columns found: `completion`
    hint: rows need `text`, `messages`, `prompt` and `completion`, `conversations`, `instruction` and `output`, or `input_ids`; if your columns have other names, map them with `columns: {text: NAME}`.
    ");
    assert_snapshot!(dir.row("{\"text\": [1, 2]}\n"), @r"
    [65] train.jsonl row 1: `text` is a list, expected a string
      [1,2]
    hint: write it as a string, or set on_bad_row: skip to leave out such rows.
    ");
    assert_snapshot!(dir.row("{\"text\": \"a\"}\n{\"prompt\": \"a\", \"completion\": \"b\"}\n"), @r"
    [65] train.jsonl row 2: the row has `prompt` and `completion`, but row 1, the first of the file, has `text`
    hint: put rows of different formats into separate files.
    ");
    assert_snapshot!(dir.row("{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n"), @r"
    [65] train.jsonl row 1: the row is a conversation (`messages`), but there is no chat template
    hint: set chat_template_path, use the plain template with `chat_template: builtin`, or render the messages to `text` or to `prompt` and `completion` beforehand.
    ");
    let long = format!("{{\"text\": \"{}\"}}\n", "a".repeat(65 << 20));
    assert_snapshot!(dir.row(long), @"[65] train.jsonl row 1: the row is longer than the limit of 64.0 MiB");
}

#[test]
fn messages_about_datasets_without_trainable_rows() {
    let dir = Folder::new();
    let spec = dir.spec("{\"text\": \"a\"}\n");
    assert_snapshot!(dir.fails(&DataSpec { completion_only_loss: Some(true), ..spec }), @r"
    [64] completion_only_loss is true, but the rows of train.jsonl have no `completion` column
    hint: remove completion_only_loss, or provide rows with `prompt` and `completion`.
    ");
    let row = "{\"prompt\": \"a long prompt\", \"completion\": \"b\"}\n";
    assert_snapshot!(dir.fails(&DataSpec { max_length: 8, ..dir.spec(row) }), @r"
    [65] no trainable rows in train.jsonl: of 1 rows, 0 are invalid, 0 have fewer than two tokens, 0 are longer than max_length (8), and 1 have no supervised token within max_length
    hint: raise max_length: the prompts fill it and leave no completion to train on.
    ");
    assert_snapshot!(dir.fails(&DataSpec { on_bad_row: OnBadRow::Skip, ..dir.spec("x\ny\n") }), @r"
    [65] no trainable rows in train.jsonl: of 2 rows, 2 are invalid, 0 have fewer than two tokens, 0 are longer than max_length (32), and 0 have no supervised token within max_length
    hint: set on_bad_row: stop to see what is wrong with the first row.
    ");
    assert_snapshot!(dir.show(&SampleOrder::new(1, 3, 8, true, true).unwrap_err()), @r"
    [64] one step needs 8 rows, but the dataset has only 3
    hint: reduce per_device_train_batch_size or gradient_accumulation_steps, turn off packing or dataloader_drop_last, or add data.
    ");
}

#[test]
fn messages_about_tokenizers() {
    let dir = Folder::new();
    let load = |path: PathBuf| dir.show(&Tokenizer::load(&TokenizerSource::File(path)).unwrap_err());
    assert_snapshot!(load(dir.path("nowhere/tokenizer.json")), @r"
    [66] no tokenizer at nowhere/tokenizer.json
    hint: set `tokenizer` to a tokenizer.json, to a folder that contains one, or to `byte` for the built-in byte tokenizer.
    ");
    dir.write("tokenizer.model", "");
    assert_snapshot!(load(dir.0.path().into()), @r"
    [66] DIR has no tokenizer.json (found tokenizer.model)
    hint: copy the tokenizer.json that the model was trained with into the folder, or load the tokenizer with AutoTokenizer.from_pretrained in transformers and write it there with save_pretrained.
    ");
    assert_snapshot!(load(dir.write("tokenizer.json", "{\"version\": ")), @r"
    [65] tokenizer.json is not a valid tokenizer file: EOF while parsing a value at line 1 column 12
    hint: write the tokenizer files again with save_pretrained in transformers.
    ");
    let byte = Tokenizer::load(&TokenizerSource::Byte).unwrap();
    byte.copy_files_to(dir.0.path()).unwrap();
    dir.write("tokenizer_config.json", "{");
    assert_snapshot!(load(dir.0.path().into()), @r"
    [65] tokenizer_config.json is not a valid tokenizer file: EOF while parsing an object at line 1 column 1
    hint: write the tokenizer files again with save_pretrained in transformers.
    ");
    assert_eq!(byte.decode(&[97, 300, 98], false).unwrap(), "ab", "an id outside the vocabulary has no text");
    let unwritable = byte.copy_files_to(&dir.path("not/there")).unwrap_err();
    assert_eq!(unwritable.class(), FaultClass::CannotWrite);
    assert_snapshot!(dir.show(&unwritable), @"[73] cannot write not/there/tokenizer.json: No such file or directory (os error 2)");
    let words = r#"{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}"#;
    let tokenizer = TokenizerSource::File(dir.write("words.json", words));
    let spec = dir.spec("{\"text\": \"b\"}\n");
    fs::remove_file(dir.path("tokenizer_config.json")).unwrap();
    assert_snapshot!(dir.show(&load_with(&spec, &tokenizer).unwrap_err()), @"[65] train.jsonl row 1: the tokenizer failed to encode the row: WordLevel error: Missing [UNK] token from the vocabulary");
    let large = dir.path("large.json");
    fs::File::create(&large).unwrap().set_len(1 << 30).unwrap();
    assert_snapshot!(load(large), @r"
    [65] large.json is 1.00 GiB; a tokenizer file may have at most 256 MiB
    hint: this is probably not a tokenizer file: download or write the tokenizer files again.
    ");
}
