//! What is trained on and how rows become tokens.

use std::path::PathBuf;

use crate::reader::{Later, Reader};
use crate::sections::ModelSource;
use crate::yaml::Value;

#[derive(Clone, Debug, PartialEq)]
pub struct DataConfig {
    /// May be empty: a plan needs no data. `RunConfig::check_trainable` asks for it.
    pub train_files: Vec<PathBuf>,
    /// Evaluated on; may be empty.
    pub eval_files: Vec<PathBuf>,
    /// A data set by name, instead of files.
    pub dataset: Option<NamedDataset>,
    /// The share of the training rows that is held back for evaluation.
    pub eval_fraction: Option<f64>,
    /// Known columns with what the files call them.
    pub columns: Vec<(String, String)>,
    pub tokenizer: Tokenizer,
    pub chat_template: ChatTemplate,
    /// Of conversations, only what the assistant says is learned.
    pub assistant_only_loss: bool,
    /// Tokens per row at most.
    pub max_length: u32,
    pub packing: Packing,
    /// `None`: yes exactly for rows with a prompt and a completion.
    pub completion_only_loss: Option<bool>,
    pub truncation: Truncation,
    pub on_long_row: OnLongRow,
    pub on_bad_row: OnBadRow,
    /// Where prepared data is kept; `None`: in the output folder.
    pub data_cache_dir: Option<PathBuf>,
    pub shuffle: bool,
    /// Threads that fill batches ahead; 0: the loop does.
    pub dataloader_num_workers: u32,
    /// Steps that each of them is ahead.
    pub dataloader_prefetch_factor: u32,
    /// Where Hugging Face libraries keep data sets on this machine. Not a key: the program fills it in.
    pub hub: HubFolders,
}

/// A data set by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedDataset {
    pub name: String,
    pub config: Option<String>,
    pub train_split: String,
    pub test_split: String,
    /// The split to evaluate on was named, not left at its default.
    pub test_split_given: bool,
}

/// `$HF_HOME/hub` and `$HF_HOME/datasets`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HubFolders {
    pub hub: PathBuf,
    pub datasets: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncation {
    KeepStart,
    KeepEnd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLongRow {
    Truncate,
    Drop,
    Stop,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokenizer {
    /// The model folder's own, and bytes without a folder. Rows of token ids need none.
    Auto,
    /// All rows are token ids.
    None,
    /// Bytes are tokens.
    Byte,
    /// A tokenizer file, or a folder with one.
    File(PathBuf),
}

/// How conversations become text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatTemplate {
    /// As the tokenizer's files say.
    Auto,
    /// The one that needs no file.
    Builtin,
    /// The template's own text.
    Inline(String),
    /// A file, or a folder with a tokenizer.
    Path(PathBuf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    None,
    /// Best-fit decreasing.
    Bfd,
    /// The same, with rows that are too long split instead of cut.
    BfdSplit,
    /// All rows end to end, cut into rows of `max_length`.
    Wrapped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBadRow {
    Stop,
    Skip,
}

const TRUNCATIONS: [(&str, Truncation); 2] =
    [("keep_start", Truncation::KeepStart), ("keep_end", Truncation::KeepEnd)];
const LONG_ROWS: [(&str, OnLongRow); 3] =
    [("truncate", OnLongRow::Truncate), ("drop", OnLongRow::Drop), ("stop", OnLongRow::Stop)];
const BAD_ROWS: [(&str, OnBadRow); 2] = [("stop", OnBadRow::Stop), ("skip", OnBadRow::Skip)];
const PACKINGS: [(&str, Packing); 4] = [
    ("none", Packing::None),
    ("bfd", Packing::Bfd),
    ("bfd_split", Packing::BfdSplit),
    ("wrapped", Packing::Wrapped),
];

impl DataConfig {
    pub(crate) fn read(r: &mut Reader<'_>, model: &ModelSource) -> Self {
        DataConfig {
            train_files: r.paths("train_files"),
            eval_files: r.paths("eval_files"),
            dataset: read_dataset(r),
            eval_fraction: r.float("eval_fraction", "above 0 and below 1", |x| x > 0.0 && x < 1.0),
            columns: read_columns(r),
            tokenizer: read_tokenizer(r, model),
            chat_template: read_chat_template(r),
            assistant_only_loss: r.bool("assistant_only_loss").unwrap_or(false),
            max_length: r.count("max_length", 2).unwrap_or(2),
            packing: read_packing(r),
            completion_only_loss: r.bool("completion_only_loss"),
            truncation: r.word("truncation", &TRUNCATIONS, Later::NONE).unwrap_or(Truncation::KeepStart),
            on_long_row: r.word("on_long_row", &LONG_ROWS, Later::NONE).unwrap_or(OnLongRow::Truncate),
            on_bad_row: r.word("on_bad_row", &BAD_ROWS, Later::NONE).unwrap_or(OnBadRow::Stop),
            data_cache_dir: r.text("data_cache_dir", "the path of a folder").map(PathBuf::from),
            shuffle: r.bool("shuffle").unwrap_or(true),
            dataloader_num_workers: r.count("dataloader_num_workers", 0).unwrap_or(0),
            dataloader_prefetch_factor: r.count("dataloader_prefetch_factor", 1).unwrap_or(1),
            hub: HubFolders::default(),
        }
    }
}

fn read_dataset(r: &mut Reader<'_>) -> Option<NamedDataset> {
    r.prefer_flags(&["train_files", "dataset_name"]);
    let (files, named) = (r.given("train_files"), r.given("dataset_name"));
    if let (Some(files), Some(named)) = (&files, &named) {
        r.conflict(files, named, "one of them says what is trained on.");
    }
    let name = r.text("dataset_name", "the name of a data set, or a path");
    let config = r.text("dataset_config", "a name");
    let train_split = r.text("dataset_train_split", "the name of a split");
    let test_split_given = r.given("dataset_test_split").is_some();
    let test_split = r.text("dataset_test_split", "the name of a split");
    Some(NamedDataset {
        name: name?,
        config,
        train_split: train_split.unwrap_or_default(),
        test_split: test_split.unwrap_or_default(),
        test_split_given,
    })
}

/// `columns: {text: body}`, and `text_column: body` for the most frequent case.
fn read_columns(r: &mut Reader<'_>) -> Vec<(String, String)> {
    let mut columns = Vec::new();
    if let Some(text) = r.text("text_column", "the name of a column").filter(|name| name != "text") {
        columns.push(("text".to_owned(), text));
    }
    let Some(node) = r.node("columns") else { return columns };
    let Value::Map(entries) = &node.value else {
        r.wrong_type("columns", "a map such as `{text: body}`", &node);
        return columns;
    };
    for entry in entries {
        let key = format!("columns.{}", entry.key);
        if let Some(name) = r.text_of(&key, "the name of a column", &entry.node) {
            columns.push((entry.key.clone(), name));
        }
    }
    columns
}

fn read_tokenizer(r: &mut Reader<'_>, model: &ModelSource) -> Tokenizer {
    match (r.text("tokenizer", "`byte`, `none` or a path"), model) {
        (Some(text), _) if text.eq_ignore_ascii_case("byte") => Tokenizer::Byte,
        (Some(text), _) if text.eq_ignore_ascii_case("none") => Tokenizer::None,
        (Some(path), _) => Tokenizer::File(path.into()),
        (None, ModelSource::Folder(_)) => {
            r.derived("tokenizer", "model_name_or_path");
            Tokenizer::Auto
        }
        (None, _) => Tokenizer::Auto,
    }
}

fn read_chat_template(r: &mut Reader<'_>) -> ChatTemplate {
    let rivals = ["chat_template", "chat_template_path"];
    r.prefer_flags(&rivals);
    if let (Some(text), Some(path)) = (r.given(rivals[0]), r.given(rivals[1])) {
        r.conflict(&text, &path, "both say how conversations are written; keep one.");
    }
    let text = r.text("chat_template", "`builtin` or a template");
    match (text, r.text("chat_template_path", "a path")) {
        (Some(text), _) if text.eq_ignore_ascii_case("builtin") => ChatTemplate::Builtin,
        (Some(text), _) => ChatTemplate::Inline(text),
        (None, Some(path)) => ChatTemplate::Path(path.into()),
        (None, None) => ChatTemplate::Auto,
    }
}

fn read_packing(r: &mut Reader<'_>) -> Packing {
    // TRL's `packing_strategy` has no effect by itself: it says how `packing: true` packs.
    let strategy = r.word("packing_strategy", &PACKINGS[1..], Later::NONE).unwrap_or(Packing::Bfd);
    let Some(node) = r.node("packing") else { return Packing::None };
    match node.bool() {
        Some(true) => strategy,
        Some(false) => Packing::None,
        None => r.word_of("packing", &PACKINGS, Later::NONE, &node).unwrap_or(Packing::None),
    }
}
