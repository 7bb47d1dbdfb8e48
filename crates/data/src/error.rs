//! Errors of reading and preparing data, and of tokenizers. A message names the cause and the place; the hint names a
//! remedy. [`RowFault`] has the errors of a single row.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use lockstep_core::{Bytes, Fault, FaultClass, closest};

use crate::chat::TemplateFault;
use crate::columns::KNOWN;
use crate::read::ENDINGS;
use crate::{DataTask, Packing, PreferenceLayout, RowFault, Stats};

/// Why data could not be prepared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    #[error("no data files were given")]
    NoFiles,
    #[error("data file {} does not exist", path.display())]
    FileMissing { path: PathBuf },
    #[error("folder {} contains no data files", path.display())]
    EmptyFolder { path: PathBuf },
    #[error("folder {} is nested more than {max_depth} levels deep", path.display())]
    TooDeep { path: PathBuf, max_depth: usize },
    #[error("no file matches the pattern {}", pattern.display())]
    NoMatch { pattern: PathBuf },
    #[error("{} is not a supported data file", path.display())]
    UnknownKind { path: PathBuf },
    #[error("{}: this build does not support the compression codec {codec}", path.display())]
    Codec { path: PathBuf, codec: &'static str },
    #[error("cannot read {}: {why}", path.display())]
    Damaged { path: PathBuf, why: String },
    #[error("dataset {name} is not on this machine; searched {}", SearchedPaths(searched))]
    DatasetMissing { name: String, searched: Vec<PathBuf> },
    #[error("dataset {name} has no split `{split}`; found {}", SplitList(splits))]
    NoSplit { name: String, split: String, splits: Vec<String>, searched: Vec<PathBuf> },
    #[error("dataset {name} has several configurations: {}", configs.join(", "))]
    WhichConfig { name: String, configs: Vec<String> },
    #[error("dataset {name} has no configuration `{config}`; found {}", configs.join(", "))]
    NoConfig { name: String, config: String, configs: Vec<String> },
    #[error("the card (README.md) of dataset {name} cannot be read: {why}")]
    BadCard { name: String, why: String },
    #[error("`columns` cannot rename `{name}`: no row format has a column of that name")]
    UnknownColumn { name: String },
    /// A pipe, a socket or a device.
    #[error("{} is not a regular file", path.display())]
    NotAFile { path: PathBuf },
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} row {row}: {fault}", file.display())]
    BadRow {
        file: PathBuf,
        /// Counted from 1: the line number in line-based files (blank lines count), otherwise the record number.
        row: u64,
        fault: RowFault,
    },
    #[error("max_length is {max_length}, but a document needs at least two tokens: one input and one target")]
    MaxLengthTooSmall { max_length: usize },
    #[error("completion_only_loss is true, but the rows of {} have no `completion` column", file.display())]
    NoCompletion { file: PathBuf },
    #[error("no rows in {}", FileList(files))]
    Empty { files: Vec<PathBuf>, task: DataTask },
    #[error("no trainable rows in {}: {}", FileList(files), DropCounts(*task, stats, *max_length))]
    AllDropped { files: Vec<PathBuf>, task: DataTask, stats: Box<Stats>, max_length: usize },
    /// The packing would separate the documents of a pair, or several prompts would share a row.
    #[error("{}", PackingConflict(*packing, *task))]
    Packing { packing: Packing, task: DataTask },
    #[error("one step needs {rows_per_step} rows, but the dataset has only {num_rows}")]
    TooFewRows { num_rows: usize, rows_per_step: usize },
    #[error("no tokenizer at {}", path.display())]
    TokenizerMissing { path: PathBuf },
    #[error("{} has no tokenizer.json{}", folder.display(), OtherTokenizers(found))]
    TokenizerNotInFolder {
        folder: PathBuf,
        /// Tokenizer files of other kinds that the folder has.
        found: Vec<String>,
    },
    #[error("{} is not a valid tokenizer file: {why}", path.display())]
    TokenizerMalformed { path: PathBuf, why: String },
    #[error("{} is {size}; a tokenizer file may have at most {cap}", path.display())]
    TokenizerTooLarge { path: PathBuf, size: Bytes, cap: Bytes },
    #[error("the tokenizer failed to {action}: {why}")]
    Tokenizer {
        /// `encode` or `decode`.
        action: &'static str,
        why: String,
    },
    #[error(transparent)]
    ChatTemplate(TemplateFault),
    #[error("{}", MissingTemplate(path.as_deref()))]
    NoChatTemplate {
        /// The file or folder that was searched; `None` for the byte tokenizer.
        path: Option<PathBuf>,
    },
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

const CHECK_PATH: &str =
    "check the spelling; relative paths are resolved from the directory that the command runs in.";
const DAMAGED_FILE: &str = "the file is truncated or corrupt: download or write it again.";

impl Fault for DataError {
    fn class(&self) -> FaultClass {
        match self {
            DataError::NoFiles
            | DataError::MaxLengthTooSmall { .. }
            | DataError::NoCompletion { .. }
            | DataError::UnknownColumn { .. }
            | DataError::WhichConfig { .. }
            | DataError::NoConfig { .. }
            | DataError::Packing { .. }
            | DataError::TooFewRows { .. } => FaultClass::BadConfig,
            DataError::FileMissing { .. }
            | DataError::DatasetMissing { .. }
            | DataError::NoSplit { .. }
            | DataError::EmptyFolder { .. }
            | DataError::NoMatch { .. }
            | DataError::TokenizerMissing { .. }
            | DataError::TokenizerNotInFolder { .. }
            | DataError::NoChatTemplate { .. } => FaultClass::InputMissing,
            DataError::Codec { .. } => FaultClass::Unavailable,
            DataError::Write { .. } => FaultClass::CannotWrite,
            DataError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                FaultClass::InputMissing
            }
            _ => FaultClass::BadData,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            DataError::BadRow { fault, .. } => fault.hint(),
            DataError::TokenizerMissing { .. }
            | DataError::TokenizerNotInFolder { .. }
            | DataError::TokenizerMalformed { .. }
            | DataError::TokenizerTooLarge { .. }
            | DataError::ChatTemplate(_)
            | DataError::NoChatTemplate { .. } => self.tokenizer_hint(),
            DataError::MaxLengthTooSmall { .. }
            | DataError::NoCompletion { .. }
            | DataError::AllDropped { .. }
            | DataError::Packing { .. }
            | DataError::TooFewRows { .. }
            | DataError::Empty { .. } => self.rows_hint(),
            _ => self.files_hint(),
        }
    }
}

impl DataError {
    /// Hints about finding, reading and writing files and datasets.
    fn files_hint(&self) -> Option<String> {
        let text = match self {
            DataError::NoFiles => "give one or more files, folders or patterns.".into(),
            DataError::FileMissing { .. } | DataError::NoMatch { .. } => CHECK_PATH.into(),
            DataError::EmptyFolder { .. } | DataError::UnknownKind { .. } => format!(
                "supported file types are {}; the text formats may also be compressed (.gz or .zst).",
                ENDINGS.map(|ending| format!(".{ending}")).join(", ")
            ),
            DataError::TooDeep { .. } => "give the folders that contain the data.".into(),
            DataError::NotAFile { .. } => "give a file, not a pipe or a device.".into(),
            DataError::Codec { path, .. } => format!(
                "rewrite the file with another codec, in Python: import pyarrow.parquet as pq; \
                 pq.write_table(pq.read_table({0:?}), {0:?}, compression=\"snappy\")",
                path.display().to_string()
            ),
            DataError::Damaged { .. } => DAMAGED_FILE.into(),
            DataError::Read { source, .. }
                if matches!(source.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData) =>
            {
                DAMAGED_FILE.into()
            }
            DataError::DatasetMissing { name, .. } if crate::hub::looks_like_a_path(name) => {
                CHECK_PATH.into()
            }
            DataError::DatasetMissing { name, .. } => {
                format!(
                    "run `lockstep download {name} --repo-type dataset`, or list the files in train_files."
                )
            }
            DataError::BadCard { .. } => {
                "list the files in train_files instead, and report the problem to the owners of the dataset."
                    .into()
            }
            DataError::NoSplit { searched, .. } if searched.is_empty() => {
                "set dataset_train_split or dataset_test_split to one of them.".into()
            }
            DataError::NoSplit { searched, .. } => format!(
                "set dataset_train_split or dataset_test_split, or list the files in train_files or eval_files; \
                 searched {}.",
                SearchedPaths(searched)
            ),
            DataError::WhichConfig { .. } | DataError::NoConfig { .. } => {
                "set dataset_config to one of them.".into()
            }
            DataError::UnknownColumn { name } => match closest(name, KNOWN) {
                Some(known) => format!("did you mean `{known}`?"),
                None => format!("the columns that can be renamed are {}.", KNOWN.join(", ")),
            },
            DataError::Write { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                "the disk is full: free some space, or choose another output_dir or data_cache_dir.".into()
            }
            _ => return None,
        };
        Some(text)
    }

    /// Hints about datasets whose rows cannot be trained on.
    fn rows_hint(&self) -> Option<String> {
        let text = match self {
            DataError::MaxLengthTooSmall { .. } => "set max_length to 2 or more.",
            DataError::NoCompletion { .. } => {
                "remove completion_only_loss, or provide rows with `prompt` and `completion`."
            }
            DataError::AllDropped { stats, .. } if stats.skipped == stats.read => {
                "set on_bad_row: stop to see what is wrong with the first row."
            }
            DataError::AllDropped { task: DataTask::Prompt { .. }, .. } => {
                "raise max_prompt_length, or shorten the prompts."
            }
            DataError::AllDropped { stats, .. } if stats.dropped_unsupervised > 0 => {
                "raise max_length: the prompts fill it and leave no completion to train on."
            }
            DataError::AllDropped {
                task: DataTask::Preference(PreferenceLayout::Sequence), stats, ..
            } if stats.dropped_long > 0 => "raise max_length: reward models score whole sequences.",
            DataError::AllDropped { stats, .. } if stats.dropped_long > 0 => {
                "raise max_length, or set on_long_row: truncate."
            }
            DataError::Packing { task: DataTask::Preference(_), .. } => {
                "use `packing: bfd`, which keeps the two documents of a pair in one row, or `packing: none`."
            }
            DataError::Packing { .. } => "set `packing: none`.",
            DataError::TooFewRows { .. } => {
                "reduce per_device_train_batch_size or gradient_accumulation_steps, turn off packing or \
                 dataloader_drop_last, or add data."
            }
            DataError::Empty { task, .. } => {
                return Some(format!("every row needs {}.", task.needed_columns()));
            }
            _ => return None,
        };
        Some(text.into())
    }

    /// Hints about tokenizers and chat templates.
    fn tokenizer_hint(&self) -> Option<String> {
        let text = match self {
            DataError::TokenizerMissing { .. } => {
                "set `tokenizer` to a tokenizer.json, to a folder that contains one, or to `byte` for the built-in \
                 byte tokenizer."
            }
            DataError::TokenizerNotInFolder { .. } => {
                "copy the tokenizer.json that the model was trained with into the folder, or load the tokenizer \
                 with AutoTokenizer.from_pretrained in transformers and write it there with save_pretrained."
            }
            DataError::TokenizerMalformed { .. } => {
                "write the tokenizer files again with save_pretrained in transformers."
            }
            DataError::TokenizerTooLarge { .. } => {
                "this is probably not a tokenizer file: download or write the tokenizer files again."
            }
            DataError::ChatTemplate(fault) => return Some(fault.hint()),
            DataError::NoChatTemplate { path: None } => {
                "set `chat_template: builtin`, or set chat_template_path to a Jinja template."
            }
            DataError::NoChatTemplate { .. } => {
                "set chat_template_path (on the command line: --chat-template) to a Jinja template or to a folder \
                 with a chat_template.jinja, or use `builtin` for the plain template."
            }
            _ => return None,
        };
        Some(text.into())
    }
}

struct SearchedPaths<'a>(&'a [PathBuf]);

impl fmt::Display for SearchedPaths<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> = self.0.iter().map(|path| path.display().to_string()).collect();
        f.write_str(&all.join(" and "))
    }
}

struct SplitList<'a>(&'a [String]);

impl fmt::Display for SplitList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str("no data files") } else { f.write_str(&self.0.join(", ")) }
    }
}

struct FileList<'a>(&'a [PathBuf]);

impl fmt::Display for FileList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => f.write_str("no files"),
            [one] => one.display().fmt(f),
            [first, rest @ ..] => write!(f, "{} and {} more", first.display(), rest.len()),
        }
    }
}

struct MissingTemplate<'a>(Option<&'a Path>);

impl fmt::Display for MissingTemplate<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(path) => write!(f, "no chat template at {}", path.display()),
            None => f.write_str("the byte tokenizer has no chat template"),
        }
    }
}

struct OtherTokenizers<'a>(&'a [String]);

impl fmt::Display for OtherTokenizers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " (found {})", self.0.join(", ")) }
    }
}

/// How many rows were left out, for each reason.
struct DropCounts<'a>(DataTask, &'a Stats, usize);

impl fmt::Display for DropCounts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DropCounts(task, stats, max_length) = self;
        let Stats { read, skipped, dropped_short: short, dropped_long: long, .. } = stats;
        write!(f, "of {read} rows, {skipped} are invalid, ")?;
        // With `packing: wrapped` a row can have all its targets beyond the end of a document.
        let unsupervised = read - skipped - short - long;
        match task {
            DataTask::Prompt { max_prompt_length } => write!(
                f,
                "{short} have an empty prompt, and {long} have a prompt longer than max_prompt_length \
                 ({max_prompt_length})"
            ),
            DataTask::Preference(PreferenceLayout::Sequence) => write!(
                f,
                "{short} have a document without tokens, and {long} have a document longer than max_length \
                 ({max_length})"
            ),
            DataTask::Preference(PreferenceLayout::Completion) => write!(
                f,
                "{long} have a document longer than max_length ({max_length}), and {unsupervised} have a document without \
                 a supervised token within max_length"
            ),
            DataTask::Sft => write!(
                f,
                "{short} have fewer than two tokens, {long} are longer than max_length ({max_length}), and \
                 {unsupervised} have no supervised token within max_length"
            ),
        }
    }
}

struct PackingConflict(Packing, DataTask);

impl fmt::Display for PackingConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PackingConflict(packing, task) = self;
        match task {
            DataTask::Preference(_) => {
                write!(
                    f,
                    "`packing: {packing}` would split preference pairs, whose two documents belong together"
                )
            }
            _ => write!(f, "`packing: {packing}` cannot be used with {task}: prompts do not share rows"),
        }
    }
}
