//! Preference pairs: tokens and masks compared with TRL, every format and file kind, packing, and error messages.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use insta::assert_snapshot;
use lockstep_core::Fault;
use lockstep_data::{
    Batch, ChatEncoder, ChatTemplate, Columns, DataError, DataSpec, DataTask, Dataset, DateTime, EncodeChat,
    Loader, OnBadRow, OnLongRow, Packing, PreferenceLayout, RankShare, SampleOrder, TemplateSource,
    Tokenizer, TokenizerSource, Truncation, prepare,
};
use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

const DPO: DataTask = DataTask::Preference(PreferenceLayout::Completion);
const REWARD: DataTask = DataTask::Preference(PreferenceLayout::Sequence);
const EOS: u32 = 256;

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Folder(tempfile::tempdir().unwrap())
    }

    fn spec(&self, task: DataTask, rows: impl AsRef<[u8]>) -> DataSpec {
        let file = self.0.path().join("train.jsonl");
        fs::write(&file, rows).unwrap();
        self.spec_of(task, &file)
    }

    fn spec_of(&self, task: DataTask, file: &Path) -> DataSpec {
        DataSpec { task, ..DataSpec::new(vec![file.into()], &self.0.path().join("cache")) }
    }

    /// Exit code, message and hint of the error, without the temporary path.
    fn fails(&self, spec: &DataSpec) -> String {
        let error = load(spec).unwrap_err();
        let hint = error.hint().map(|hint| format!("\nhint: {hint}")).unwrap_or_default();
        let text = format!("[{}] {error}{hint}", error.class().exit_code());
        text.replace(&format!("{}/", self.0.path().display()), "")
    }

    fn row(&self, task: DataTask, rows: &str) -> String {
        self.fails(&self.spec(task, rows))
    }
}

fn goldens(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens").join(folder)
}

fn load(spec: &DataSpec) -> Result<Dataset, DataError> {
    prepare(spec, &Tokenizer::load(&TokenizerSource::Byte).unwrap(), None)
}

fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// The stored tokens and masks of every pair. The mask of the first token is stored too.
fn stored(dataset: &Dataset) -> Vec<[Vec<(u32, bool)>; 2]> {
    assert_eq!(dataset.num_docs(), 2 * dataset.num_pairs());
    let pairs = 0..dataset.num_pairs() as u32;
    pairs.map(|p| [2 * p, 2 * p + 1].map(|doc| dataset.masked(doc).unwrap())).collect()
}

/// Prepares the rows of a golden case.
fn prepared(case: &Value, settings: DataSpec) -> Result<Dataset, DataError> {
    let tokenizer = Tokenizer::load(&TokenizerSource::File(goldens("chat/tokenizer"))).unwrap();
    let chat = case["template"].as_str().map(|name| {
        let source = TemplateSource::Path(goldens(&format!("chat/templates/{name}.jinja")));
        let template = ChatTemplate::load(&source, &tokenizer, DateTime::default()).unwrap();
        ChatEncoder { template, assistant_only: false }
    });
    prepare(&settings, &tokenizer, chat.as_ref().map(|chat| chat as &dyn EncodeChat))
}

#[test]
fn tokens_masks_and_truncation_match_trl() {
    let cases: Value = serde_json::from_slice(&fs::read(goldens("data/preferences.json")).unwrap()).unwrap();
    let (mut compared, mut without_target) = (0, 0);
    for case in cases.as_array().unwrap() {
        let dir = Folder::new();
        let rows = lines(case["rows"].as_array().unwrap());
        for run in case["dpo"].as_array().unwrap() {
            let max_length = run["max_length"].as_u64().unwrap() as usize;
            let truncation = match run["mode"].as_str().unwrap() {
                "keep_start" => Truncation::KeepStart,
                _ => Truncation::KeepEnd,
            };
            let spec = DataSpec { max_length, truncation, ..dir.spec(DPO, &rows) };
            let doc = |doc: &Value| -> Vec<(u32, bool)> {
                ids(&doc["ids"]).into_iter().zip(ids(&doc["mask"]).into_iter().map(|bit| bit == 1)).collect()
            };
            let all = run["pairs"].as_array().unwrap().iter().map(|pair| [doc(&pair[0]), doc(&pair[1])]);
            // TRL keeps pairs of which one document has no target, and computes its log-probability as 0.
            let has_target = |doc: &Vec<(u32, bool)>| doc.iter().skip(1).any(|(_, counts)| *counts);
            let (expected, rest): (Vec<_>, Vec<_>) = all.partition(|pair| pair.iter().all(has_target));
            without_target += rest.len();
            let found = match prepared(case, spec) {
                Ok(dataset) => stored(&dataset),
                Err(DataError::AllDropped { .. }) => Vec::new(),
                Err(e) => panic!("{e}"),
            };
            assert_eq!(
                found, expected,
                "{} {} at {max_length}, {}",
                case["name"], case["template"], run["mode"]
            );
            compared += found.len();
        }
        for run in case["reward"].as_array().unwrap() {
            let max_length = run["max_length"].as_u64().unwrap() as usize;
            let spec = DataSpec { max_length, ..dir.spec(REWARD, &rows) };
            let pairs = run["pairs"].as_array().unwrap().iter();
            let expected: Vec<[Vec<u32>; 2]> = pairs.map(|pair| [ids(&pair[0]), ids(&pair[1])]).collect();
            let found = match prepared(case, spec) {
                Ok(dataset) => {
                    let dropped = case["rows"].as_array().unwrap().len() - expected.len();
                    assert_eq!(dataset.stats().dropped_long as usize, dropped);
                    stored(&dataset)
                }
                Err(DataError::AllDropped { .. }) => Vec::new(),
                Err(e) => panic!("{e}"),
            };
            let tokens = |doc: &Vec<(u32, bool)>| doc.iter().map(|(id, _)| *id).collect::<Vec<u32>>();
            let found: Vec<[Vec<u32>; 2]> =
                found.iter().map(|pair| [tokens(&pair[0]), tokens(&pair[1])]).collect();
            assert_eq!(found, expected, "{} {} at {max_length}", case["name"], case["template"]);
            compared += found.len();
        }
    }
    assert!(compared > 100 && without_target < 10, "{compared} compared, {without_target} without a target");
}

#[test]
fn every_kind_of_file_gives_the_same_pairs() {
    let dir = Folder::new();
    let of = |kind: &str, task| load(&dir.spec_of(task, &goldens(&format!("data/pairs.{kind}")))).unwrap();
    for task in [DPO, REWARD] {
        let expected = stored(&of("jsonl", task));
        assert_eq!(expected.len(), 3);
        for kind in ["json", "csv", "parquet", "arrow"] {
            let dataset = of(kind, task);
            assert_eq!(stored(&dataset), expected, "{kind}");
            let margins: Vec<Option<f32>> = (0..3).map(|pair| dataset.margin(pair)).collect();
            let given = if task == REWARD { [0.5, -1.25, 2.0].map(Some) } else { [None; 3] };
            assert_eq!((margins, dataset.has_margins()), (given.into(), task == REWARD), "{kind}");
        }
    }
}

#[test]
fn the_two_layouts_of_one_row() {
    let dir = Folder::new();
    let row = json!({ "prompt": "ab", "chosen": "c", "rejected": "de<|endoftext|>", "margin": 1 });
    let dpo = load(&dir.spec(DPO, row.to_string())).unwrap();
    assert_eq!(dpo.doc(0).unwrap(), (vec![97, 98, 99, EOS], vec![false, false, true, true]));
    assert_eq!(dpo.doc(1).unwrap(), (vec![97, 98, 100, 101, EOS], vec![false, false, true, true, true]));
    assert!(dpo.is_preference() && dpo.margin(0).is_none());
    assert_eq!((dpo.num_rows(), dpo.num_pairs(), dpo.row_pairs(0)), (1, 1, 1));
    assert_eq!((dpo.row_tokens(0), dpo.row_supervised(0), dpo.num_supervised()), (3 + 4, 2 + 3, 5));
    let mut batch = Batch::default();
    batch.fill(&dpo, &[0]).unwrap();
    assert_eq!(batch.tokens, [97, 98, 99, 97, 98, 100, 101]);
    assert_eq!(batch.targets, [98, 99, EOS, 98, 100, 101, EOS]);
    assert_eq!(batch.weights, [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]);

    let reward = load(&dir.spec(REWARD, row.to_string())).unwrap();
    assert!(!reward.was_cached(), "another task is another entry");
    assert_eq!(reward.doc(0).unwrap(), (vec![97, 98, 99, EOS], vec![false, false, false, true]));
    assert_eq!((reward.task(), reward.margin(0)), (REWARD, Some(1.0)));
    assert_eq!((reward.row_tokens(0), reward.row_supervised(0), reward.max_doc_len()), (4 + 5, 2, 5));
    batch.fill(&reward, &[0]).unwrap();
    assert_eq!(batch.tokens, [97, 98, 99, EOS, 97, 98, 100, 101, EOS]);
    assert_eq!(batch.targets, [98, 99, EOS, 0, 98, 100, 101, EOS, 0]);
    assert_eq!(batch.weights, [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]);
    assert_eq!(batch.positions, [0, 1, 2, 3, 0, 1, 2, 3, 4]);
    assert_eq!(
        (batch.cu_seqlens.as_slice(), batch.samples.as_slice()),
        ([0, 4, 9].as_slice(), [0, 1].as_slice())
    );
    assert_eq!(batch.supervised, 2);
    let sequences = batch.clone();
    batch.fill_sequences(&dpo, &[0]).unwrap();
    assert_eq!(batch, sequences);
    let second = load(&dir.spec(REWARD, row.to_string())).unwrap();
    assert!(second.was_cached());
    assert_eq!(
        (second.fingerprint(), second.margin(0), second.task()),
        (reward.fingerprint(), Some(1.0), REWARD)
    );
    assert_ne!(reward.fingerprint(), dpo.fingerprint());
}

#[test]
fn tokenized_pairs_and_sequences_of_one_token() {
    let dir = Folder::new();
    let rows = lines(&[
        json!({ "chosen_ids": [1, 2, 3], "rejected_ids": [4] }),
        json!({ "chosen_ids": [1], "rejected_ids": [] }),
    ]);
    let dataset = load(&dir.spec(REWARD, rows)).unwrap();
    assert_eq!((dataset.num_pairs(), dataset.stats().dropped_short), (1, 1));
    assert_eq!(dataset.doc(1).unwrap(), (vec![4], vec![true]));
    assert_eq!((dataset.row_tokens(0), dataset.row_supervised(0)), (4, 2));
    let mut batch = Batch::default();
    batch.fill(&dataset, &[0]).unwrap();
    assert_eq!((batch.targets, batch.weights), (vec![2, 3, 0, 0], vec![0.0, 0.0, 1.0, 1.0]));
}

#[test]
fn long_pairs_are_truncated_filtered_dropped_or_refused() {
    let dir = Folder::new();
    let pair = |prompt: usize, chosen: usize, rejected: usize| json!({ "prompt": "p".repeat(prompt), "chosen": "c".repeat(chosen), "rejected": "r".repeat(rejected) });
    // With EOS, the documents have 5 and 9, 4 and 4, 9 and 9 tokens; the last prompt alone has 8.
    let rows = lines(&[pair(2, 2, 6), pair(2, 1, 1), pair(8, 0, 0)]);
    let spec = |task| DataSpec { max_length: 8, ..dir.spec(task, &rows) };
    let lengths = |spec: &DataSpec| {
        let dataset = load(spec).unwrap();
        let docs = 0..dataset.num_docs() as u32;
        (docs.map(|doc| dataset.doc_len(doc)).collect::<Vec<_>>(), dataset.stats())
    };
    let (truncated, stats) = lengths(&spec(DPO));
    assert_eq!(truncated, [5, 8, 4, 4]);
    assert_eq!((stats.truncated, stats.dropped_unsupervised, stats.docs), (1, 1, 4));
    // With the end kept, the completion of the last pair (its EOS token) remains.
    let (ends, stats) = lengths(&DataSpec { truncation: Truncation::KeepEnd, ..spec(DPO) });
    assert_eq!(ends, [5, 8, 4, 4, 8, 8]);
    assert_eq!((stats.truncated, stats.dropped_unsupervised), (3, 0));
    for spec in [spec(REWARD), DataSpec { on_long_row: OnLongRow::Drop, ..spec(DPO) }] {
        let (kept, stats) = lengths(&spec);
        assert_eq!((kept, stats.dropped_long), (vec![4, 4], 2));
    }
    let stop = |task| dir.fails(&DataSpec { on_long_row: OnLongRow::Stop, ..spec(task) });
    assert_eq!(stop(REWARD), stop(DPO));
    assert_snapshot!(stop(DPO), @r"
    [65] train.jsonl row 1: a document of the pair has 9 tokens, more than max_length (8)
    hint: raise max_length, or set on_long_row: drop to leave out such pairs.
    ");
}

#[test]
fn pairs_without_a_target_on_one_side_are_dropped() {
    let dir = Folder::new();
    // The byte tokenizer adds no BOS token, so a document of one token has no target.
    let rows = lines(&[
        json!({ "prompt": "", "chosen": "", "rejected": "x" }),
        json!({ "prompt": "a", "chosen": "b", "rejected": "c" }),
    ]);
    let dataset = load(&dir.spec(DPO, rows)).unwrap();
    assert_eq!((dataset.num_pairs(), dataset.stats().dropped_unsupervised), (1, 1));
}

#[test]
fn margins_are_in_all_rows_of_a_file_or_in_none() {
    let dir = Folder::new();
    let with = json!({ "chosen": "ab", "rejected": "ac", "margin": 0.5 });
    let without = json!({ "chosen": "ab", "rejected": "ad" });
    let mixed = dir.spec(REWARD, lines(&[with.clone(), without.clone(), with.clone()]));
    assert_snapshot!(dir.fails(&mixed), @r"
    [65] train.jsonl row 2: the row has no `margin`, but row 1, the first of the file, has one
    hint: give every row of the file a `margin`, or none; set on_bad_row: skip to leave out such rows.
    ");
    let skipped = load(&DataSpec { on_bad_row: OnBadRow::Skip, ..mixed }).unwrap();
    assert_eq!((skipped.num_pairs(), skipped.stats().skipped), (2, 1));
    assert_snapshot!(dir.row(REWARD, &lines(&[without.clone(), with.clone()])), @r"
    [65] train.jsonl row 2: the row has a `margin`, but row 1, the first of the file, has none
    hint: give every row of the file a `margin`, or none; set on_bad_row: skip to leave out such rows.
    ");
    // Another file may have none: its pairs have the margin 0.
    let files = [("a.jsonl", &without), ("b.jsonl", &with), ("c.jsonl", &without)].map(|(name, row)| {
        let path = dir.0.path().join(name);
        fs::write(&path, row.to_string()).unwrap();
        path
    });
    let dataset = load(&DataSpec { files: files.into(), ..dir.spec(REWARD, "") }).unwrap();
    assert_eq!([0, 1, 2, 3].map(|pair| dataset.margin(pair)), [Some(0.0), Some(0.5), Some(0.0), None]);
}

#[test]
fn columns_can_have_other_names() {
    let dir = Folder::new();
    let columns = Columns::new([("prompt", "q"), ("chosen", "good"), ("rejected", "bad")]).unwrap();
    let row = json!({ "q": "a", "good": "b", "bad": "c", "chosen": 1 });
    let dataset = load(&DataSpec { columns, ..dir.spec(DPO, row.to_string()) }).unwrap();
    assert_eq!(dataset.doc(1).unwrap().0, [97, 99, EOS]);
}

#[test]
fn loaders_count_pairs_over_all_ranks() {
    let dir = Folder::new();
    let rows: Vec<Value> =
        (0..10).map(|n| json!({ "prompt": "x".repeat(n), "chosen": "yes", "rejected": "no" })).collect();
    for (task, packing) in [(DPO, Packing::None), (REWARD, Packing::None), (DPO, Packing::Bfd)] {
        let spec = DataSpec { packing, max_length: 32, ..dir.spec(task, lines(&rows)) };
        let dataset = Arc::new(load(&spec).unwrap());
        let order = Arc::new(SampleOrder::new(1, dataset.num_rows(), 4, false, true).unwrap());
        let end = order.steps_per_epoch();
        let of_rank = |rank: usize| {
            let share = RankShare { rank, world: 2, rows_per_micro_batch: 1, num_micro_batches: 2 };
            let mut loader = Loader::new(Arc::clone(&dataset), Arc::clone(&order), share, 0, end, 0, 1);
            (0..end).map(|_| loader.next(None).unwrap()).collect::<Vec<_>>()
        };
        let (a, b) = (of_rank(0), of_rank(1));
        assert_eq!(a.iter().map(|step| step.pairs).sum::<u64>(), 10);
        for (a, b) in a.iter().zip(&b) {
            let all = || a.micro_batches.iter().chain(&b.micro_batches);
            assert_eq!((a.pairs, a.tokens, a.supervised), (b.pairs, b.tokens, b.supervised));
            assert_eq!(a.pairs, all().map(|batch| batch.num_docs() as u64).sum::<u64>() / 2);
            assert_eq!(a.tokens, all().map(|batch| batch.num_tokens() as u64).sum::<u64>());
            assert_eq!(a.supervised, all().map(|batch| batch.supervised).sum::<u64>());
        }
    }
}

#[test]
fn packings_that_split_pairs_are_refused() {
    let dir = Folder::new();
    let row = json!({ "chosen": "ab", "rejected": "ac" }).to_string();
    let with = |task, packing| dir.fails(&DataSpec { packing, ..dir.spec(task, &row) });
    assert_snapshot!(with(DPO, Packing::Wrapped), @r"
    [64] `packing: wrapped` would split preference pairs, whose two documents belong together
    hint: use `packing: bfd`, which keeps the two documents of a pair in one row, or `packing: none`.
    ");
    assert_snapshot!(with(REWARD, Packing::BfdSplit), @r"
    [64] `packing: bfd_split` would split preference pairs, whose two documents belong together
    hint: use `packing: bfd`, which keeps the two documents of a pair in one row, or `packing: none`.
    ");
}

#[test]
fn messages_for_rows_of_the_wrong_kind() {
    let dir = Folder::new();
    let pair = r#"{"prompt": "p", "chosen": "c", "rejected": "r", "id": 1}"#;
    assert_snapshot!(dir.row(DataTask::Sft, pair), @r"
    [65] train.jsonl row 1: the row is a preference pair, but supervised training needs `text`, `messages`, or `prompt` and `completion`; columns found: `chosen`, `id`, `prompt`, `rejected`
    hint: set `algorithm: dpo` or `algorithm: reward` to train on pairs; to train on the chosen completions alone, set `columns: {completion: chosen}`.
    ");
    assert_snapshot!(dir.row(DataTask::Sft, r#"{"chosen": "c", "rejected": "r"}"#), @r"
    [65] train.jsonl row 1: the row is a preference pair, but supervised training needs `text`, `messages`, or `prompt` and `completion`; columns found: `chosen`, `rejected`
    hint: set `algorithm: dpo` or `algorithm: reward` to train on pairs.
    ");
    assert_snapshot!(dir.row(DataTask::Sft, r#"{"chosen_ids": [1], "rejected_ids": [2]}"#), @r"
    [65] train.jsonl row 1: the row is a tokenized preference pair, but supervised training needs `text`, `messages`, or `prompt` and `completion`; columns found: `chosen_ids`, `rejected_ids`
    hint: set `algorithm: reward` to train on tokenized pairs.
    ");
    assert_snapshot!(dir.row(DPO, r#"{"prompt": "p", "completion": "c", "label": true}"#), @r"
    [65] train.jsonl row 1: unpaired preference data (KTO) is not supported; columns found: `completion`, `label`, `prompt`
    hint: combine a good and a bad completion of each prompt to a row with `prompt`, `chosen` and `rejected`; or set `algorithm: sft` and keep only the good completions.
    ");
    assert_snapshot!(dir.row(REWARD, r#"{"prompt": "p", "completion": "c"}"#), @r"
    [65] train.jsonl row 1: the row is a document for supervised training, but `algorithm: reward` needs `chosen` and `rejected`; columns found: `completion`, `prompt`
    hint: rows need `chosen` and `rejected`, and usually `prompt`, as text or as lists of messages; if your columns have other names, map them with `columns: {chosen: NAME, rejected: NAME}`. To train on these rows as they are, set `algorithm: sft`.
    ");
    assert_snapshot!(dir.row(DPO, r#"{"prompt": "p", "answer": "c"}"#), @r"
    [65] train.jsonl row 1: the row is a prompt, but `algorithm: dpo` needs `chosen` and `rejected`; columns found: `answer`, `prompt`
    hint: rows need `chosen` and `rejected`, and usually `prompt`, as text or as lists of messages; if your columns have other names, map them with `columns: {chosen: NAME, rejected: NAME}`. To train on prompts alone, set `algorithm: grpo`.
    ");
    assert_snapshot!(dir.row(DPO, r#"{"chosen_ids": [1], "rejected_ids": [2]}"#), @r"
    [65] train.jsonl row 1: the row is a tokenized preference pair, but `algorithm: dpo` needs `chosen` and `rejected`; columns found: `chosen_ids`, `rejected_ids`
    hint: provide `prompt`, `chosen` and `rejected` as text or messages: token ids do not show where the completions begin.
    ");
    assert_snapshot!(dir.row(DPO, r#"{"prompt": "p", "chosen": "c"}"#), @r"
    [65] train.jsonl row 1: found `chosen` but no `rejected`; columns found: `chosen`, `prompt`
    hint: rows need `chosen` and `rejected`, and usually `prompt`, as text or as lists of messages; if your columns have other names, map them with `columns: {chosen: NAME, rejected: NAME}`.
    ");
    assert_snapshot!(dir.row(DPO, r#"{"chosen": "c", "rejeted": "r"}"#), @r"
    [65] train.jsonl row 1: found `chosen` but no `rejected`; columns found: `chosen`, `rejeted`
    hint: did you mean `rejected` by `rejeted`? Rename it, or set `columns: {rejected: rejeted}`.
    ");
    assert_snapshot!(dir.row(REWARD, r#"{"good": "c", "bad": "r"}"#), @r"
    [65] train.jsonl row 1: `algorithm: reward` needs `chosen` and `rejected`; columns found: `bad`, `good`
    hint: rows need `chosen` and `rejected`, and usually `prompt`, as text or as lists of messages; if your columns have other names, map them with `columns: {chosen: NAME, rejected: NAME}`.
    ");
    assert_snapshot!(dir.row(REWARD, ""), @r"
    [65] no rows in train.jsonl
    hint: every row needs `chosen` and `rejected`.
    ");
}

#[test]
fn messages_for_hostile_rows() {
    let dir = Folder::new();
    let message = r#"[{"role": "user", "content": "x"}]"#;
    assert_snapshot!(dir.row(DPO, r#"{"prompt": "p", "chosen": "c", "rejected": null}"#), @r"
    [65] train.jsonl row 1: `rejected` is null, expected a string
      null
    hint: write it as a string, or set on_bad_row: skip to leave out such rows.
    ");
    assert_snapshot!(dir.row(DPO, r#"{"prompt": "p", "chosen": {"a": 1}, "rejected": "r"}"#), @r#"
    [65] train.jsonl row 1: `chosen` is an object, expected a string
      {"a":1}
    hint: write it as a string, or set on_bad_row: skip to leave out such rows.
    "#);
    assert_snapshot!(dir.row(DPO, &format!(r#"{{"prompt": {message}, "chosen": "c", "rejected": "r"}}"#)), @r#"
    [65] train.jsonl row 1: `prompt` is a list, expected a string
      [{"role":"user","content":"x"}]
    hint: write it as a string, or set on_bad_row: skip to leave out such rows.
    "#);
    assert_snapshot!(dir.row(DPO, &format!(r#"{{"chosen": {message}, "rejected": "r"}}"#)), @r#"
    [65] train.jsonl row 1: `rejected` is a string, expected a list of messages like `chosen`
      "r"
    hint: fix the row, or set on_bad_row: skip to leave out such rows.
    "#);
    assert_snapshot!(dir.row(DPO, &format!(r#"{{"chosen": {message}, "rejected": []}}"#)), @r"
    [65] train.jsonl row 1: `rejected`: the list is empty
    hint: fix the row, or set on_bad_row: skip to leave out such rows.
    ");
    assert_snapshot!(dir.row(DPO, &format!(r#"{{"chosen": {message}, "rejected": [{{"role": "assistant"}}]}}"#)), @r"
    [65] train.jsonl row 1: `chosen` and `rejected` begin with different messages, so they have no prompt in common
    hint: add a `prompt` column, or begin both lists with the same messages; set on_bad_row: skip to leave out such rows.
    ");
    assert_snapshot!(dir.row(DPO, &format!(r#"{{"prompt": {message}, "chosen": {message}, "rejected": {message}}}"#)), @r"
    [65] train.jsonl row 1: the row is a conversation (`prompt`, `chosen` and `rejected` as messages), but there is no chat template
    hint: set chat_template_path, use the plain template with `chat_template: builtin`, or render the messages to `text` or to `prompt` and `completion` beforehand.
    ");
    assert_snapshot!(dir.row(REWARD, r#"{"chosen": "c", "rejected": "r", "margin": "much"}"#), @r#"
    [65] train.jsonl row 1: `margin` is "much", expected a finite number
    hint: fix the row, or set on_bad_row: skip to leave out such rows.
    "#);
    assert_snapshot!(dir.row(REWARD, r#"{"chosen_ids": [1, 300], "rejected_ids": [2]}"#), @r"
    [65] train.jsonl row 1: token id 300 is out of range for a vocabulary of 257 tokens
    hint: the rows were tokenized with another tokenizer: set `tokenizer` to that one. With `tokenizer: none`, ids must be below the model's vocab_size.
    ");
    assert_snapshot!(dir.row(REWARD, "{\"chosen\": \"c\", \"rejected\": \"r\"}\n{\"prompt\": \"p\", \"chosen\": \"c\", \"rejected\": \"r\"}"), @r"
    [65] train.jsonl row 2: the row has `prompt`, `chosen` and `rejected`, but row 1, the first of the file, has `chosen` and `rejected` without a `prompt`
    hint: put rows of different formats into separate files.
    ");
    let long = json!({ "prompt": "x".repeat(50), "chosen": "a", "rejected": "b" }).to_string();
    assert_snapshot!(dir.fails(&DataSpec { max_length: 20, ..dir.spec(DPO, &long) }), @r"
    [65] no trainable rows in train.jsonl: of 1 rows, 0 are invalid, 0 have a document longer than max_length (20), and 1 have a document without a supervised token within max_length
    hint: raise max_length: the prompts fill it and leave no completion to train on.
    ");
    assert_snapshot!(dir.fails(&DataSpec { max_length: 20, ..dir.spec(REWARD, &long) }), @r"
    [65] no trainable rows in train.jsonl: of 1 rows, 0 are invalid, 0 have a document without tokens, and 1 have a document longer than max_length (20)
    hint: raise max_length: reward models score whole sequences.
    ");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Packing keeps the two documents of a pair next to each other, and every pair exactly once.
    #[test]
    fn packing_never_splits_pairs(
        lengths in prop::collection::vec((1usize..10, 0usize..14, 0usize..14), 1..40), reward in any::<bool>(),
    ) {
        let dir = Folder::new();
        let row = |(n, (p, c, r)): (usize, &(usize, usize, usize))| {
            let letter = char::from(b'a' + (n % 26) as u8).to_string();
            json!({ "prompt": letter.repeat(*p), "chosen": "1".repeat(*c), "rejected": "2".repeat(*r) })
        };
        let rows: Vec<Value> = lengths.iter().enumerate().map(row).collect();
        let task = if reward { REWARD } else { DPO };
        let spec = DataSpec { max_length: 16, packing: Packing::Bfd, ..dir.spec(task, lines(&rows)) };
        let (packed, plain) = match (load(&spec), load(&DataSpec { packing: Packing::None, ..spec.clone() })) {
            (Ok(packed), Ok(plain)) => (packed, plain),
            (Err(DataError::AllDropped { .. }), Err(DataError::AllDropped { .. })) => return Ok(()),
            other => panic!("{other:?}"),
        };
        prop_assert_eq!(stored(&packed), stored(&plain));
        prop_assert_eq!(plain.num_rows(), plain.num_pairs());
        let mut seen = Vec::new();
        for row in 0..packed.num_rows() {
            let docs = packed.row_docs(row);
            prop_assert!(docs.iter().map(|doc| packed.doc_len(*doc)).sum::<usize>() <= 2 * 16);
            prop_assert_eq!(packed.row_pairs(row) as usize * 2, docs.len());
            for pair in docs.chunks(2) {
                prop_assert_eq!((pair[0] % 2, pair[1]), (0, pair[0] + 1));
                seen.push(pair[0] / 2);
            }
        }
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..packed.num_pairs() as u32).collect::<Vec<_>>());
        let mut batch = Batch::default();
        batch.fill(&packed, &(0..packed.num_rows() as u32).collect::<Vec<_>>()).unwrap();
        prop_assert_eq!(batch.supervised, packed.num_supervised());
        prop_assert_eq!(batch.num_docs(), 2 * packed.num_pairs());
    }
}

#[test]
fn both_documents_begin_with_the_prompt() {
    let dir = Folder::new();
    let dataset = load(&dir.spec(DPO, r#"{"chosen": "see the cat", "rejected": "see the dog"}"#)).unwrap();
    let (chosen, mask) = dataset.doc(0).unwrap();
    assert_eq!(chosen, [bytes("see the cat"), vec![EOS]].concat());
    assert_eq!(mask.iter().position(|counts| *counts), Some("see the".len()));
}
