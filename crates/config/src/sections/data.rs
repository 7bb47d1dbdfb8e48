//! The training and evaluation data, and how rows become tokens.

use std::path::PathBuf;

use crate::reader::{Later, Reader};
use crate::sections::{AlgorithmName, Lengths, ModelSource};
use crate::yaml::Value;

/// The training and evaluation data, and how rows become tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct DataConfig {
    /// May be empty: planning needs no data. `RunConfig::check_trainable` requires it for training.
    pub train_files: Vec<PathBuf>,
    /// May be empty.
    pub eval_files: Vec<PathBuf>,
    /// A dataset by name, instead of files.
    pub dataset: Option<NamedDataset>,
    /// The fraction of the training rows that is held out for evaluation.
    pub eval_fraction: Option<f64>,
    /// Pairs of a known column and the files' name for it.
    pub columns: Vec<(String, String)>,
    pub tokenizer: TokenizerChoice,
    pub chat_template: ChatTemplateChoice,
    /// In conversations, only the assistant's tokens count in the loss.
    pub assistant_only_loss: bool,
    /// The most tokens of a row; with ppo, grpo and rloo, of a prompt and its completion.
    pub max_length: u32,
    pub packing: Packing,
    /// `None`: true for rows with a prompt and a completion, otherwise false.
    pub completion_only_loss: Option<bool>,
    pub truncation: Truncation,
    pub on_long_row: OnLongRow,
    pub on_bad_row: OnBadRow,
    /// The folder of prepared data; `None`: the default folder.
    pub data_cache_dir: Option<PathBuf>,
    pub shuffle: bool,
    /// Threads that fill batches ahead of the step. 0: the training loop fills them itself.
    pub dataloader_num_workers: u32,
    /// The steps that each worker stays ahead.
    pub dataloader_prefetch_factor: u32,
    /// The dataset caches of Hugging Face libraries on this machine. Not a key: the program sets it.
    pub hub: HubFolders,
}

/// A dataset by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedDataset {
    pub name: String,
    pub config: Option<String>,
    /// The branch, tag or commit of a dataset from the Hub.
    pub revision: Option<String>,
    pub train_split: String,
    pub test_split: String,
    /// Whether to evaluate on `test_split`: training does only if `dataset_test_split` is set.
    pub evaluates_test_split: bool,
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
pub enum TokenizerChoice {
    /// The model folder's tokenizer, or the byte tokenizer if there is no folder. Rows of token ids need none.
    Auto,
    /// No tokenizer: all rows are token ids.
    None,
    /// The built-in byte tokenizer.
    Byte,
    /// A tokenizer file, or a folder that contains one.
    File(PathBuf),
}

/// The chat template that renders conversations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatTemplateChoice {
    /// The template in the tokenizer's files.
    Auto,
    /// The built-in template.
    Builtin,
    /// The text of a template.
    Inline(String),
    /// A template file, or a folder with tokenizer files.
    Path(PathBuf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    None,
    /// Best-fit decreasing.
    Bfd,
    /// Best-fit decreasing, after splitting documents longer than `max_length`.
    BfdSplit,
    /// All documents concatenated and cut into rows of `max_length`.
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
            max_length: read_max_length(r),
            packing: read_packing(r),
            completion_only_loss: r.bool("completion_only_loss"),
            truncation: r.word("truncation", &TRUNCATIONS, Later::NONE).unwrap_or(Truncation::KeepStart),
            on_long_row: read_on_long_row(r),
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
        r.conflict(files, named, "both set the training data; keep one.");
    }
    let name = r.text("dataset_name", "the name of a dataset on the Hub, or a path");
    let config = r.text("dataset_config", "a name");
    let revision = r.text("dataset_revision", "a branch, a tag or a commit");
    let train_split = r.text("dataset_train_split", "the name of a split");
    let evaluates_test_split = r.given("dataset_test_split").is_some();
    let test_split = r.text("dataset_test_split", "the name of a split");
    Some(NamedDataset {
        name: name?,
        config,
        revision,
        train_split: train_split.unwrap_or_default(),
        test_split: test_split.unwrap_or_default(),
        evaluates_test_split,
    })
}

/// Reads `columns: {text: body}`, and `text_column: body` for the most common case.
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

fn read_tokenizer(r: &mut Reader<'_>, model: &ModelSource) -> TokenizerChoice {
    match (r.text("tokenizer", "`byte`, `none` or a path"), model) {
        (Some(text), _) if text.eq_ignore_ascii_case("byte") => TokenizerChoice::Byte,
        (Some(text), _) if text.eq_ignore_ascii_case("none") => TokenizerChoice::None,
        (Some(path), _) => TokenizerChoice::File(path.into()),
        (None, ModelSource::Folder(_)) => {
            r.derived("tokenizer", "model_name_or_path");
            TokenizerChoice::Auto
        }
        (None, _) => TokenizerChoice::Auto,
    }
}

fn read_chat_template(r: &mut Reader<'_>) -> ChatTemplateChoice {
    let rivals = ["chat_template", "chat_template_path"];
    r.prefer_flags(&rivals);
    if let (Some(text), Some(path)) = (r.given(rivals[0]), r.given(rivals[1])) {
        r.conflict(&text, &path, "both set the chat template; keep one.");
    }
    let text = r.text("chat_template", "`builtin` or a template");
    match (text, r.text("chat_template_path", "a path")) {
        (Some(text), _) if text.eq_ignore_ascii_case("builtin") => ChatTemplateChoice::Builtin,
        (Some(text), _) => ChatTemplateChoice::Inline(text),
        (None, Some(path)) => ChatTemplateChoice::Path(path.into()),
        (None, None) => ChatTemplateChoice::Auto,
    }
}

fn read_packing(r: &mut Reader<'_>) -> Packing {
    // As in TRL, `packing_strategy` only has an effect with `packing: true`.
    let strategy = r.word("packing_strategy", &PACKINGS[1..], Later::NONE).unwrap_or(Packing::Bfd);
    let Some(node) = r.node("packing") else { return Packing::None };
    let packing = match node.bool() {
        Some(true) => strategy,
        Some(false) => Packing::None,
        None => r.word_of("packing", &PACKINGS, Later::NONE, &node).unwrap_or(Packing::None),
    };
    let rule = match r.algorithm() {
        AlgorithmName::Sft | AlgorithmName::Clm => return packing,
        AlgorithmName::Reward | AlgorithmName::Dpo if packing == Packing::Bfd => return packing,
        algorithm @ (AlgorithmName::Reward | AlgorithmName::Dpo) => {
            format!("none or bfd with {algorithm}, because pairs are not split")
        }
        algorithm => format!("none with {algorithm}, because rows are prompts"),
    };
    if packing != Packing::None {
        r.out_of_range("packing", rule, &node);
    }
    packing
}

fn read_max_length(r: &mut Reader<'_>) -> u32 {
    match r.algorithm().generates() {
        true => Lengths::read(r).total,
        false => r.count("max_length", 2).unwrap_or(2),
    }
}

/// Only documents that are trained on token by token can be truncated: the reward of a sequence is at its end, and a
/// prompt without its end is another prompt.
fn read_on_long_row(r: &mut Reader<'_>) -> OnLongRow {
    let choices = match r.algorithm() {
        AlgorithmName::Sft | AlgorithmName::Clm | AlgorithmName::Dpo => &LONG_ROWS[..],
        _ => &LONG_ROWS[1..],
    };
    r.word("on_long_row", choices, Later::NONE).unwrap_or(OnLongRow::Drop)
}
