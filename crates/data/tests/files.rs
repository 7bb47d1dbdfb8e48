//! Files of every kind, written by other libraries, give the same tokens.

use std::fs;
use std::path::{Path, PathBuf};

use insta::assert_snapshot;
use lockstep_core::Fault;
use lockstep_data::{
    Batch, Columns, DataError, DataSpec, Dataset, OnBadRow, OnLongRow, Packing, Part, Tokenizer,
    TokenizerSource, Truncation, prepare,
};
use serde_json::{Value, json};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/data").join(name)
}

struct Cache(tempfile::TempDir);

impl Cache {
    fn new() -> Cache {
        Cache(tempfile::tempdir().unwrap())
    }

    fn spec(&self, file: &Path) -> DataSpec {
        DataSpec::new(vec![file.into()], &self.0.path().join("cache"))
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, content).unwrap();
        path
    }

    fn fails(&self, spec: &DataSpec) -> String {
        let error = load(spec).unwrap_err();
        let hint = error.hint().map(|hint| format!("\nhint: {hint}")).unwrap_or_default();
        let text = format!("[{}] {error}{hint}", error.class().exit_code());
        text.replace(&format!("{}/", self.0.path().display()), "")
            .replace(&format!("{}/", golden("").display().to_string().trim_end_matches('/')), "")
    }
}

fn load(spec: &DataSpec) -> Result<Dataset, DataError> {
    prepare(spec, &Tokenizer::load(&TokenizerSource::Byte).unwrap(), None)
}

fn docs(dataset: &Dataset) -> Vec<(Vec<u32>, Vec<bool>)> {
    (0..dataset.num_docs() as u32).map(|doc| dataset.doc(doc).unwrap()).collect()
}

#[test]
fn every_kind_of_file_gives_the_same_rows() {
    let cache = Cache::new();
    let expected = docs(&load(&cache.spec(&golden("rows.jsonl"))).unwrap());
    assert_eq!(expected.len(), 20);
    let byte = Tokenizer::load(&TokenizerSource::Byte).unwrap();
    assert_eq!(byte.decode(&expected[2].0, true).unwrap(), "naïve 水 🦀");
    for name in [
        "rows.jsonl.gz",
        "rows.jsonl.zst",
        "rows.json",
        "under-key.json",
        "rows.csv",
        "rows.txt",
        "rows-train.arrow",
        "rows-file.arrow",
        "rows.parquet",
        "rows-lz4.parquet",
        "rows-gzip.parquet",
        "rows-zstd.parquet",
        "rows-brotli.parquet",
        "rows-zstd.arrow",
    ] {
        let dataset = load(&cache.spec(&golden(name))).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(docs(&dataset), expected, "{name}");
    }
}

#[test]
fn token_ids_are_read_from_parquet() {
    let cache = Cache::new();
    let dataset = load(&cache.spec(&golden("ids.parquet"))).unwrap();
    let expected = [(vec![1, 2, 3], vec![false, true, true]), (vec![4, 5], vec![false, true])];
    assert_eq!(docs(&dataset), expected);
}

/// Records the messages that it encodes.
struct RecordingEncoder(std::sync::Mutex<Vec<Value>>);

impl lockstep_data::EncodeChat for RecordingEncoder {
    fn fingerprint(&self) -> String {
        String::new()
    }

    fn conversation(
        &self,
        _: &Tokenizer,
        chat: &lockstep_data::Chat,
    ) -> Result<lockstep_data::EncodedChat, lockstep_data::RowFault> {
        self.0.lock().unwrap().push(Value::Array(chat.messages.clone()));
        Ok(lockstep_data::EncodedChat {
            tokens: vec![1, 2],
            supervised: vec![true; 2],
            prefix_mismatch: false,
        })
    }

    fn prompt(
        &self,
        tokenizer: &Tokenizer,
        chat: &lockstep_data::Chat,
    ) -> Result<Vec<u32>, lockstep_data::RowFault> {
        self.conversation(tokenizer, chat).map(|encoded| encoded.tokens)
    }

    fn pair(
        &self,
        tokenizer: &Tokenizer,
        prompt: &lockstep_data::Chat,
        _: &[Value],
        _: bool,
    ) -> Result<lockstep_data::EncodedChat, lockstep_data::RowFault> {
        self.conversation(tokenizer, prompt)
    }
}

#[test]
fn conversations_from_parquet_equal_those_from_json() {
    let chats = |name: &str| {
        let (cache, encoder) = (Cache::new(), RecordingEncoder(Default::default()));
        let byte = Tokenizer::load(&TokenizerSource::Byte).unwrap();
        prepare(&cache.spec(&golden(name)), &byte, Some(&encoder)).unwrap();
        let mut chats = encoder.0.into_inner().unwrap();
        chats.sort_by_key(Value::to_string);
        chats
    };
    assert_eq!(chats("chats.parquet"), chats("chats.jsonl"));
    assert_eq!(chats("chats.jsonl").len(), 2);
}

#[test]
fn packing_matches_trl() {
    let golden: Value = serde_json::from_slice(&fs::read(golden("packing.json")).unwrap()).unwrap();
    let cache = Cache::new();
    let mut next = 0;
    // The byte tokenizer has only 257 ids. They repeat, which does not matter for packing.
    let wrapped = |id: u64| id % 251;
    let rows: String = golden["lengths"]
        .as_array()
        .unwrap()
        .iter()
        .map(|len| {
            let ids: Vec<u64> = (next..next + len.as_u64().unwrap()).map(wrapped).collect();
            next += len.as_u64().unwrap();
            format!("{}\n", json!({ "input_ids": ids }))
        })
        .collect();
    let file = cache.write("ids.jsonl", rows);
    let max_length = golden["max_length"].as_u64().unwrap() as usize;
    for (name, packing) in
        [("bfd", Packing::Bfd), ("bfd_split", Packing::BfdSplit), ("wrapped", Packing::Wrapped)]
    {
        let dataset = load(&DataSpec { packing, max_length, ..cache.spec(&file) }).unwrap();
        let row = |row: usize| -> Vec<u64> {
            let docs = dataset.row_docs(row).iter().flat_map(|doc| dataset.doc(*doc).unwrap().0);
            docs.map(u64::from).collect()
        };
        let ours: Vec<Vec<u64>> = (0..dataset.num_rows()).map(row).collect();
        let ids =
            |row: &Value| row.as_array().unwrap().iter().map(|id| wrapped(id.as_u64().unwrap())).collect();
        let mut theirs: Vec<Vec<u64>> = golden[name].as_array().unwrap().iter().map(ids).collect();
        // A row of one token, such as the last one of `wrapped`, has no target and is dropped here.
        theirs.retain(|row| row.len() > 1);
        assert_eq!(ours, theirs, "{name}");
    }
}

#[test]
fn columns_can_be_renamed() {
    let cache = Cache::new();
    let file = cache.write("a.csv", "question,answer,text\n2+2=,4,unused\n");
    let columns = Columns::new([("prompt", "question"), ("completion", "answer")]).unwrap();
    let dataset = load(&DataSpec { columns, ..cache.spec(&file) }).unwrap();
    assert_eq!(dataset.doc(0).unwrap().1, [false, false, false, false, true, true]);
    let file = cache.write("b.jsonl", "{\"body\": \"ab\", \"text\": 7}\n");
    let columns = Columns::new([("text", "body")]).unwrap();
    assert_eq!(load(&DataSpec { columns, ..cache.spec(&file) }).unwrap().num_tokens(), 3);
}

#[test]
fn train_and_eval_parts_divide_the_rows() {
    let cache = Cache::new();
    let rows: String = (0..400).map(|n| format!("{{\"text\": \"row {n}\"}}\n")).collect();
    let file = cache.write("a.jsonl", rows);
    let part = |part| {
        let docs = docs(&load(&DataSpec { part, ..cache.spec(&file) }).unwrap());
        docs.into_iter().map(|(tokens, _)| tokens).collect::<Vec<_>>()
    };
    let (train, eval) =
        (part(Part::Train { fraction: 0.2, seed: 1 }), part(Part::Eval { fraction: 0.2, seed: 1 }));
    assert!((50..110).contains(&eval.len()), "{}", eval.len());
    let mut both = [train, eval].concat();
    both.sort();
    let mut all = part(Part::All);
    all.sort();
    assert_eq!(both, all);
}

#[test]
fn long_rows() {
    let cache = Cache::new();
    let file = cache.write("a.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"abcdefgh\"}\n");
    let spec = DataSpec { max_length: 4, ..cache.spec(&file) };
    let ends = load(&DataSpec { truncation: Truncation::KeepEnd, ..spec.clone() }).unwrap();
    assert_eq!(ends.doc(1).unwrap().0, [102, 103, 104, 256]);
    let dropped = load(&DataSpec { on_long_row: OnLongRow::Drop, ..spec.clone() }).unwrap();
    let stats = dropped.stats();
    assert_eq!((stats.docs, stats.dropped_long, stats.truncated, stats.length_max), (1, 1, 0, 9));
    let stop = DataSpec { on_long_row: OnLongRow::Stop, on_bad_row: OnBadRow::Skip, ..spec.clone() };
    assert_snapshot!(cache.fails(&stop), @r"
    [65] a.jsonl row 2: the row has 9 tokens, more than max_length (4)
    hint: raise max_length, set on_long_row to truncate or drop, or use `packing: bfd_split`, which keeps all tokens.
    ");
    let packing = Packing::BfdSplit;
    let split = load(&DataSpec { on_long_row: OnLongRow::Stop, packing, ..spec.clone() }).unwrap();
    let mut batch = Batch::default();
    batch.fill(&split, &(0..split.num_rows() as u32).collect::<Vec<_>>()).unwrap();
    // The pieces are abcd, efgh and a last one of a single token, which has no target.
    assert_eq!((split.num_rows(), batch.num_tokens()), (3, 9));
    let none = DataSpec { on_long_row: OnLongRow::Drop, max_length: 2, ..spec };
    assert_snapshot!(cache.fails(&none), @r"
    [65] no trainable rows in a.jsonl: of 2 rows, 0 are invalid, 0 have fewer than two tokens, 2 are longer than max_length (2), and 0 have no supervised token within max_length
    hint: raise max_length, or set on_long_row: truncate.
    ");
}

#[test]
fn messages_about_files() {
    let cache = Cache::new();
    let fails = |name: &str, content: &[u8]| cache.fails(&cache.spec(&cache.write(name, content)));
    assert_snapshot!(fails("a.parquet", b"nonsense"), @r"
    [65] cannot read a.parquet: Parquet error: Invalid Parquet file. Corrupt footer
    hint: the file is truncated or corrupt: download or write it again.
    ");
    assert_snapshot!(fails("a.arrow", b"nonsense"), @r"
    [65] cannot read a.arrow: Parser error: Unexpected end of stream: expected 1936617326 metadata bytes, got 4
    hint: the file is truncated or corrupt: download or write it again.
    ");
    assert_snapshot!(fails("a.jsonl.gz", b"nonsense"), @r"
    [65] cannot read a.jsonl.gz: unexpected end of file
    hint: the file is truncated or corrupt: download or write it again.
    ");
    assert_snapshot!(fails("a.jsonl.zst", b"nonsense"), @r"
    [65] cannot read a.jsonl.zst: not zstd data, or truncated
    hint: the file is truncated or corrupt: download or write it again.
    ");
    assert_snapshot!(fails("a.xml", b"<a/>"), @r"
    [65] a.xml is not a supported data file
    hint: supported file types are .jsonl, .json, .txt, .csv, .tsv, .parquet, .arrow, .ndjson; the text formats may also be compressed (.gz or .zst).
    ");
    let whole = fs::read(golden("rows.parquet")).unwrap();
    assert_snapshot!(fails("cut.parquet", &whole[..whole.len() / 2]), @r"
    [65] cannot read cut.parquet: Parquet error: Invalid Parquet file. Corrupt footer
    hint: the file is truncated or corrupt: download or write it again.
    ");
    let whole = fs::read(golden("rows.jsonl.gz")).unwrap();
    assert_snapshot!(fails("cut.jsonl.gz", &whole[..whole.len() - 20]), @r"
    [65] cannot read cut.jsonl.gz: incomplete deflate stream
    hint: the file is truncated or corrupt: download or write it again.
    ");
    let whole = fs::read(golden("rows.jsonl.zst")).unwrap();
    assert_snapshot!(fails("cut.jsonl.zst", &whole[..whole.len() - 20]), @r"
    [65] cannot read cut.jsonl.zst: not zstd data, or truncated
    hint: the file is truncated or corrupt: download or write it again.
    ");
    fs::create_dir(cache.0.path().join("empty")).unwrap();
    assert_snapshot!(cache.fails(&cache.spec(&cache.0.path().join("empty"))), @r"
    [66] folder empty contains no data files
    hint: supported file types are .jsonl, .json, .txt, .csv, .tsv, .parquet, .arrow, .ndjson; the text formats may also be compressed (.gz or .zst).
    ");
    assert_snapshot!(cache.fails(&cache.spec(&cache.0.path().join("no-*.jsonl"))), @r"
    [66] no file matches the pattern no-*.jsonl
    hint: check the spelling; relative paths are resolved from the directory that the command runs in.
    ");
    let columns = Columns::new([("txet", "body")]).unwrap_err();
    assert_snapshot!(format!("{columns}\n{}", columns.hint().unwrap()), @r"
    `columns` cannot rename `txet`: no row format has a column of that name
    did you mean `text`?
    ");
}

#[test]
fn messages_about_rows() {
    let cache = Cache::new();
    let fails = |name: &str, content: &[u8]| cache.fails(&cache.spec(&cache.write(name, content)));
    assert_snapshot!(fails("a.csv", b"text,id\nfine,1\nshort\n"), @r"
    [65] a.csv row 3: the row has 1 fields, but the header has 2
    hint: fix the row, or set on_bad_row: skip to leave out such rows.
    ");
    assert_snapshot!(fails("b.csv", b"text,id\nfine,1\n\"caf\xE9\",2\n"), @r"
    [65] b.csv row 3: invalid UTF-8 at byte 3 of the row
    hint: convert the file to UTF-8, or set on_bad_row: skip to leave out such rows.
    ");
    assert_snapshot!(fails("c.csv", b"body,id\nfine,1\n"), @r"
    [65] c.csv row 2: no column to train on; columns found: `body`, `id`
    hint: rows need `text`, `messages`, `prompt` and `completion`, `conversations`, `instruction` and `output`, or `input_ids`; if your columns have other names, map them with `columns: {text: NAME}`.
    ");
    assert_snapshot!(fails("a.txt", b"fine\nnot \xFF fine\n"), @r"
    [65] a.txt row 2: invalid UTF-8 at byte 4 of the row
    hint: convert the file to UTF-8, or set on_bad_row: skip to leave out such rows.
    ");
    assert_snapshot!(fails("a.json", b"[{\"text\": \"a\"}, 7]"), @r"
    [65] a.json row 2: expected a JSON object, found a number
      7
    hint: each row must be one JSON object; set on_bad_row: skip to leave out such rows.
    ");
    assert_snapshot!(fails("b.json", b"[{\"text\": \"a\"}, {\"text\": 1}]"), @r"
    [65] b.json row 2: `text` is a number, expected a string
      1
    hint: write it as a string, or set on_bad_row: skip to leave out such rows.
    ");
    assert_snapshot!(fails("a.jsonl", b"{\"messages\": [{\"content\": \"a\"}]}"), @r"
    [65] a.jsonl row 1: `messages`, message 1: `role` is missing
    hint: fix the row, or set on_bad_row: skip to leave out such rows.
    ");
    assert_snapshot!(fails("b.jsonl", b"{\"messages\": []}"), @r"
    [65] b.jsonl row 1: `messages`: the list is empty
    hint: fix the row, or set on_bad_row: skip to leave out such rows.
    ");
    assert_snapshot!(fails("c.jsonl", b"{\"messages\": \"a\"}"), @r#"
    [65] c.jsonl row 1: `messages` is a string, expected a list
      "a"
    hint: fix the row, or set on_bad_row: skip to leave out such rows.
    "#);
    assert_snapshot!(fails("d.jsonl", b"{\"prompt\": [{\"role\": \"user\"}], \"completion\": \"a\"}"), @r#"
    [65] d.jsonl row 1: `completion` is a string, expected a list of messages like the prompt
      "a"
    hint: fix the row, or set on_bad_row: skip to leave out such rows.
    "#);
    assert_snapshot!(fails("e.jsonl", b"{\"conversations\": [{\"from\": \"me\", \"value\": \"a\"}]}"), @r"
    [65] e.jsonl row 1: `conversations`, message 1: unknown value `me` of `from`
    hint: `from` can be human, gpt, system, observation or function_call, or an alias such as user, assistant or tool.
    ");
    assert_snapshot!(fails("f.jsonl", b"{\"conversations\": [{\"from\": \"gpt\"}]}"), @r"
    [65] f.jsonl row 1: `conversations`, message 1: `value` is not a string
    hint: fix the row, or set on_bad_row: skip to leave out such rows.
    ");
    assert_snapshot!(fails("g.jsonl", b"{\"input_ids\": [1, 999]}"), @r"
    [65] g.jsonl row 1: token id 999 is out of range for a vocabulary of 257 tokens
    hint: the rows were tokenized with another tokenizer: set `tokenizer` to that one. With `tokenizer: none`, ids must be below the model's vocab_size.
    ");
    assert_snapshot!(fails("h.jsonl", b"{\"input_ids\": [1, 2], \"labels\": [1, 3]}"), @r"
    [65] h.jsonl row 1: `labels` has 3 at index 1, but `input_ids` has 2 there
    hint: a label must be the token id itself, or -100 to leave the token out of the loss.
    ");
    assert_snapshot!(fails("i.jsonl", b"{\"instruction\": \"a\"}"), @r"
    [65] i.jsonl row 1: found `instruction` but no `output`; columns found: `instruction`
    hint: rows need `text`, `messages`, `prompt` and `completion`, `conversations`, `instruction` and `output`, or `input_ids`; if your columns have other names, map them with `columns: {text: NAME}`.
    ");
    assert_snapshot!(fails("j.jsonl", b"{\"instruction\": \"a\", \"output\": \"b\", \"history\": [\"c\"]}"), @r#"
    [65] j.jsonl row 1: `history` is a string, expected a list of pairs of strings
      "c"
    hint: fix the row, or set on_bad_row: skip to leave out such rows.
    "#);
    let chats = cache.spec(&golden("chats.parquet"));
    assert_snapshot!(cache.fails(&chats), @r"
    [65] chats.parquet row 1: the row is a conversation (`messages`), but there is no chat template
    hint: set chat_template_path, use the plain template with `chat_template: builtin`, or render the messages to `text` or to `prompt` and `completion` beforehand.
    ");
    // A missing template is not a fault of the row, so it is not skipped.
    assert!(load(&DataSpec { on_bad_row: OnBadRow::Skip, ..chats }).is_err());
}
