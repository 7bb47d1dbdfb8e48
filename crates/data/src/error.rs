//! What can go wrong with data and tokenizers. Every message says what, where and why; the hint says what to do.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use lockstep_core::{Bytes, Fault, FaultClass, closest};

use crate::chat::{ChatFault, TemplateFault};
use crate::columns::{DECIDING, KNOWN};
use crate::read::ENDINGS;
use crate::row::Format;

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
    Empty { files: Vec<PathBuf> },
    #[error(
        "no trainable rows in {}: of {read} rows, {skipped} are invalid, {too_short} have fewer than two tokens, \
         {too_long} are longer than max_length ({max_length}), and {unsupervised} have no supervised token within \
         max_length",
        FileList(files)
    )]
    AllDropped {
        files: Vec<PathBuf>,
        read: u64,
        skipped: u64,
        too_short: u64,
        too_long: u64,
        unsupervised: u64,
        max_length: usize,
    },
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

/// What is wrong with one row.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RowFault {
    #[error("invalid JSON at column {column}: {why}\n  {excerpt}")]
    Json { column: usize, why: String, excerpt: String },
    #[error("invalid UTF-8 at byte {byte} of the row")]
    NotUtf8 {
        /// Offset of the first invalid byte within the row, from 0.
        byte: usize,
    },
    #[error("the row is longer than the limit of {cap}")]
    TooLong { cap: Bytes },
    #[error("expected a JSON object, found {found}\n  {excerpt}")]
    NotAnObject { found: &'static str, excerpt: String },
    #[error("no column to train on; columns found: {}", ColumnList(columns))]
    UnknownColumns { columns: Vec<String> },
    #[error("found `{present}` but no `{missing}`; columns found: {}", ColumnList(columns))]
    MissingColumn { present: &'static str, missing: &'static str, columns: Vec<String> },
    #[error("`{field}` is {found}, expected {expected}\n  {excerpt}")]
    WrongType { field: &'static str, expected: &'static str, found: &'static str, excerpt: String },
    #[error("the row has {found} fields, but the header has {expected}")]
    Fields { expected: u64, found: u64 },
    #[error("column `{column}` has the unsupported Arrow type {found}")]
    ArrowType { column: &'static str, found: String },
    #[error("`{column}`{}: {why}", MessageNumber(*number))]
    Message {
        column: &'static str,
        /// From 1; 0 for the list as a whole.
        number: usize,
        why: &'static str,
    },
    #[error("`conversations`, message {number}: unknown value `{tag}` of `from`")]
    UnknownTag { number: usize, tag: String },
    #[error("token id {id} is out of range for a vocabulary of {vocab} tokens")]
    IdOutside { id: u32, vocab: usize },
    #[error("`{field}` has {found} entries, but `input_ids` has {ids}")]
    LengthsDiffer { field: &'static str, found: usize, ids: usize },
    #[error("`labels` has {label} at index {at}, but `input_ids` has {id} there")]
    LabelDiffers { at: usize, id: u32, label: i64 },
    #[error("the row has {tokens} tokens, more than max_length ({max_length})")]
    LongerThanContext { tokens: usize, max_length: usize },
    #[error("the row has {format}, but row {first_row}, the first of the file, has {first}")]
    MixedFormats { format: Format, first: Format, first_row: u64 },
    #[error("the row is a conversation ({format}), but there is no chat template")]
    NoTemplate { format: Format },
    #[error("the row is text ({format}), but there is no tokenizer")]
    NoTokenizer { format: Format },
    #[error("the chat template failed: {why}")]
    Template { why: String },
    #[error("the tokenizer failed to encode the row: {why}")]
    NotEncodable { why: String },
    #[error(transparent)]
    Chat(#[from] ChatFault),
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
            DataError::AllDropped { skipped, read, .. } if skipped == read => {
                "set on_bad_row: stop to see what is wrong with the first row."
            }
            DataError::AllDropped { unsupervised, .. } if *unsupervised > 0 => {
                "raise max_length: the prompts fill it and leave no completion to train on."
            }
            DataError::AllDropped { too_long, .. } if *too_long > 0 => {
                "raise max_length, or set on_long_row: truncate."
            }
            DataError::TooFewRows { .. } => {
                "reduce per_device_train_batch_size or gradient_accumulation_steps, turn off packing or \
                 dataloader_drop_last, or add data."
            }
            DataError::Empty { .. } => "every row needs `text`, `messages`, or `prompt` and `completion`.",
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

const NEEDED: &str = "rows need `text`, `messages`, `prompt` and `completion`, `conversations`, `instruction` and \
                      `output`, or `input_ids`; if your columns have other names, map them with \
                      `columns: {text: NAME}`.";
const FIX_ROW: &str = "fix the row, or set on_bad_row: skip to leave out such rows.";

impl RowFault {
    /// Adds the names of all columns of the row to a fault about columns.
    pub(crate) fn with_columns(mut self, mut names: Vec<String>) -> RowFault {
        if let RowFault::UnknownColumns { columns } | RowFault::MissingColumn { columns, .. } = &mut self {
            names.sort_unstable();
            *columns = names;
        }
        self
    }

    fn hint(&self) -> Option<String> {
        let text = match self {
            RowFault::WrongType { expected: "a string", .. } => {
                "write it as a string, or set on_bad_row: skip to leave out such rows."
            }
            RowFault::WrongType { .. }
            | RowFault::Message { .. }
            | RowFault::Fields { .. }
            | RowFault::LengthsDiffer { .. }
            | RowFault::Template { .. } => FIX_ROW,
            RowFault::UnknownTag { .. } => {
                "`from` can be human, gpt, system, observation or function_call, or an alias such as user, \
                 assistant or tool."
            }
            RowFault::ArrowType { .. } => "remove the column, or use `columns` to read another one instead.",
            RowFault::IdOutside { .. } => {
                "the rows were tokenized with another tokenizer: set `tokenizer` to that one. With \
                 `tokenizer: none`, ids must be below the model's vocab_size."
            }
            RowFault::NoTokenizer { .. } => "set `tokenizer`, or provide rows with `input_ids` only.",
            RowFault::LabelDiffers { .. } => {
                "a label must be the token id itself, or -100 to leave the token out of the loss."
            }
            RowFault::LongerThanContext { .. } => {
                "raise max_length, set on_long_row to truncate or drop, or use `packing: bfd_split`, which keeps \
                 all tokens."
            }
            RowFault::Json { .. } | RowFault::NotAnObject { .. } => {
                "each row must be one JSON object; set on_bad_row: skip to leave out such rows."
            }
            RowFault::NotUtf8 { .. } => {
                "convert the file to UTF-8, or set on_bad_row: skip to leave out such rows."
            }
            RowFault::MixedFormats { .. } => "put rows of different formats into separate files.",
            RowFault::NoTemplate { .. } => {
                "set chat_template_path, use the plain template with `chat_template: builtin`, or render the \
                 messages to `text` or to `prompt` and `completion` beforehand."
            }
            RowFault::UnknownColumns { columns } => return Some(rename_hint(columns)),
            RowFault::MissingColumn { missing, columns, .. } => {
                let similar = closest(missing, columns.iter().map(String::as_str));
                return Some(similar.map_or_else(|| NEEDED.into(), |column| looks_like(column, missing)));
            }
            RowFault::Chat(fault) => return fault.hint(),
            _ => return None,
        };
        Some(text.into())
    }
}

/// The hint for a row without a known column: the column that was probably meant, or what rows need.
fn rename_hint(columns: &[String]) -> String {
    let similar = columns.iter().find_map(|column| Some((column, closest(column, DECIDING)?)));
    match similar.filter(|(column, known)| column != known) {
        Some((column, known)) => looks_like(column, known),
        None => NEEDED.into(),
    }
}

fn looks_like(column: &str, known: &str) -> String {
    format!("did you mean `{known}` by `{column}`? Rename it, or set `columns: {{{known}: {column}}}`.")
}

struct ColumnList<'a>(&'a [String]);

impl fmt::Display for ColumnList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 12;
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (idx, column) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}`{}`", if idx == 0 { "" } else { ", " }, crate::value::excerpt(column))?;
        }
        match self.0.len().checked_sub(SHOWN) {
            Some(more @ 1..) => write!(f, " and {more} more"),
            _ => Ok(()),
        }
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

/// Which message of a list; nothing for the list as a whole.
struct MessageNumber(usize);

impl fmt::Display for MessageNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(f, ", message {}", self.0) }
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
