//! What can be wrong with data and tokenizers. Every message says what, where and why; hints say what
//! to do.

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
    #[error("no data files are given")]
    NoFiles,
    #[error("data file {} does not exist", path.display())]
    FileMissing { path: PathBuf },
    #[error("{} has no data files in it", path.display())]
    EmptyFolder { path: PathBuf },
    #[error("{} lies more than {max_depth} folders deep", path.display())]
    TooDeep { path: PathBuf, max_depth: usize },
    #[error("no file matches {}", pattern.display())]
    NoMatch { pattern: PathBuf },
    #[error("{} is of no kind that is read", path.display())]
    UnknownKind { path: PathBuf },
    #[error("{} is compressed with {codec} inside, which this build does not read", path.display())]
    Codec { path: PathBuf, codec: &'static str },
    #[error("{} cannot be read: {why}", path.display())]
    Damaged { path: PathBuf, why: String },
    #[error("data set {name} is not on this machine; looked for {}", Places(looked))]
    DatasetMissing { name: String, looked: Vec<PathBuf> },
    #[error("data set {name} has no split `{split}` here; found {}", Splits(splits))]
    NoSplit { name: String, split: String, splits: Vec<String>, looked: Vec<PathBuf> },
    #[error("data set {name} has the configurations {}", configs.join(", "))]
    WhichConfig { name: String, configs: Vec<String> },
    #[error("there is no column `{name}` to give another name to")]
    UnknownColumn { name: String },
    /// A pipe, a socket.
    #[error("{} is not a regular file", path.display())]
    NotAFile { path: PathBuf },
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} row {row}: {fault}", file.display())]
    BadRow {
        file: PathBuf,
        /// Its number, from 1: of the line in files of lines, blank ones counted, of the record elsewhere.
        row: u64,
        fault: RowFault,
    },
    #[error("max_length is {max_length}, but a document needs two tokens for one target")]
    MaxLengthTooSmall { max_length: usize },
    #[error("completion_only_loss is true, but the rows of {} have no `completion`", file.display())]
    NoCompletion { file: PathBuf },
    #[error("no rows in {}", Paths(files))]
    Empty { files: Vec<PathBuf> },
    #[error(
        "no row of {} can be trained on: of {read} read, {skipped} bad, {too_short} shorter than two \
         tokens, {too_long} longer than {max_length}, {unsupervised} without a supervised token in the first {max_length}",
        Paths(files)
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
    #[error("a step takes {rows_per_step} rows, but there are only {num_rows}")]
    TooFewRows { num_rows: usize, rows_per_step: usize },
    #[error("no tokenizer at {}", path.display())]
    TokenizerMissing { path: PathBuf },
    #[error("{} has no tokenizer.json{}", folder.display(), Found(found))]
    TokenizerNotInFolder {
        folder: PathBuf,
        /// Tokenizers of other kinds that are there.
        found: Vec<String>,
    },
    #[error("{} is not a tokenizer: {why}", path.display())]
    TokenizerMalformed { path: PathBuf, why: String },
    #[error("{} is {size}, more than the {cap} a tokenizer file may have", path.display())]
    TokenizerTooLarge { path: PathBuf, size: Bytes, cap: Bytes },
    #[error("the tokenizer cannot {action}: {why}")]
    Tokenizer {
        /// `encode` or `decode`.
        action: &'static str,
        why: String,
    },
    #[error(transparent)]
    ChatTemplate(TemplateFault),
    #[error("no chat template {}", Place(path.as_deref()))]
    NoChatTemplate {
        /// The file or the folder; `None` for the byte tokenizer.
        path: Option<PathBuf>,
    },
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// What is wrong with one row.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RowFault {
    #[error("not valid JSON at column {column}: {why}\n  {excerpt}")]
    Json { column: usize, why: String, excerpt: String },
    #[error("not UTF-8 at byte {byte} of the row")]
    NotUtf8 {
        /// Offset of the first bad byte within the row, from 0.
        byte: usize,
    },
    #[error("longer than {cap}")]
    TooLong { cap: Bytes },
    #[error("expected an object, found {found}\n  {excerpt}")]
    NotAnObject { found: &'static str, excerpt: String },
    #[error("no column to train on; found {}", Columns(columns))]
    UnknownColumns { columns: Vec<String> },
    #[error("`{present}` without `{missing}`; found {}", Columns(columns))]
    MissingColumn { present: &'static str, missing: &'static str, columns: Vec<String> },
    #[error("`{field}` is {found}, expected {expected}\n  {excerpt}")]
    WrongType { field: &'static str, expected: &'static str, found: &'static str, excerpt: String },
    #[error("{found} of the header's {expected} fields")]
    Fields { expected: u64, found: u64 },
    #[error("column `{column}` has the Arrow type {found}, which means nothing here")]
    ArrowType { column: &'static str, found: String },
    #[error("`{column}`{}: {why}", Number(*number))]
    Message {
        column: &'static str,
        /// From 1; 0 for the list as a whole.
        number: usize,
        why: &'static str,
    },
    #[error("`conversations`, message {number}: `from` is `{tag}`")]
    UnknownTag { number: usize, tag: String },
    #[error("token id {id} is outside the vocabulary of {vocab}")]
    IdOutside { id: u32, vocab: usize },
    #[error("`{field}` has {found} entries, `input_ids` {ids}")]
    LengthsDiffer { field: &'static str, found: usize, ids: usize },
    #[error("`labels` has {label} at {at}, where `input_ids` has {id}")]
    LabelDiffers { at: usize, id: u32, label: i64 },
    #[error("{tokens} tokens, more than max_length {max_length}")]
    LongerThanContext { tokens: usize, max_length: usize },
    #[error("{format} row in a file whose first row, {first_row}, is {first}")]
    MixedFormats { format: Format, first: Format, first_row: u64 },
    #[error("this row ({format}) is a conversation, and there is no chat template")]
    NoTemplate { format: Format },
    #[error("this row ({format}) is text, and there is no tokenizer")]
    NoTokenizer { format: Format },
    #[error("the chat template cannot render it: {why}")]
    Template { why: String },
    #[error("the tokenizer cannot encode it: {why}")]
    NotEncodable { why: String },
    #[error(transparent)]
    Chat(#[from] ChatFault),
}

impl Fault for DataError {
    fn class(&self) -> FaultClass {
        match self {
            DataError::NoFiles
            | DataError::MaxLengthTooSmall { .. }
            | DataError::NoCompletion { .. }
            | DataError::UnknownColumn { .. }
            | DataError::WhichConfig { .. }
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
        let text = match self {
            DataError::NoFiles => "name one or more files or folders.".into(),
            DataError::FileMissing { .. } | DataError::NoMatch { .. } => {
                "check the spelling; relative paths start at the folder the command runs in.".into()
            }
            DataError::EmptyFolder { .. } | DataError::UnknownKind { .. } => format!(
                "files whose names end in {} are read; text also compressed, as .gz or .zst.",
                ENDINGS.map(|ending| format!(".{ending}")).join(", ")
            ),
            DataError::TooDeep { .. } => "name the folders that have the data.".into(),
            DataError::NotAFile { .. } => "name a file, not a pipe or a device.".into(),
            DataError::TokenizerTooLarge { .. } => {
                "it is not what its name says: fetch or write the tokenizer's files again.".into()
            }
            DataError::Codec { path, .. } => format!(
                "write it again with another compression, in Python: import pyarrow.parquet as pq; \
                 pq.write_table(pq.read_table({0:?}), {0:?}, compression=\"snappy\")",
                path.display().to_string()
            ),
            DataError::Damaged { .. } => "the file is cut short or damaged: fetch or write it again.".into(),
            DataError::Read { source, .. }
                if matches!(source.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData) =>
            {
                "the file is cut short or damaged: fetch or write it again.".into()
            }
            DataError::DatasetMissing { name, .. } if crate::hub::looks_like_a_path(name) => {
                "check the spelling; relative paths start at the folder the command runs in.".into()
            }
            DataError::DatasetMissing { name, .. } => format!(
                "nothing is downloaded: fetch it first with `hf download --repo-type dataset {name}`, or name \
                 its files in train_files."
            ),
            DataError::NoSplit { looked, .. } => format!(
                "set dataset_train_split or dataset_test_split, or name the files in train_files or \
                 eval_files; looked in {}.",
                Places(looked)
            ),
            DataError::WhichConfig { .. } => "set dataset_config to one of them.".into(),
            DataError::UnknownColumn { name } => match closest(name, KNOWN) {
                Some(known) => format!("did you mean `{known}`?"),
                None => format!("these columns mean something: {}.", KNOWN.join(", ")),
            },
            DataError::BadRow { fault, .. } => return fault.hint(),
            DataError::MaxLengthTooSmall { .. } => "set max_length to 2 or more.".into(),
            DataError::NoCompletion { .. } => {
                "leave completion_only_loss out, or give rows with `prompt` and `completion`.".into()
            }
            DataError::AllDropped { skipped, read, .. } if skipped == read => {
                "set on_bad_row to stop to see what is wrong with the first one.".into()
            }
            DataError::AllDropped { unsupervised, .. } if *unsupervised > 0 => {
                "prompts that fill max_length leave no completion to learn; raise max_length.".into()
            }
            DataError::AllDropped { too_long, .. } if *too_long > 0 => {
                "raise max_length, or set on_long_row to truncate.".into()
            }
            DataError::TooFewRows { .. } => {
                "make the global batch smaller, turn packing or drop_last off, or add data.".into()
            }
            DataError::TokenizerMissing { .. } => {
                "name a tokenizer.json, a folder that has one, or use the built-in `byte` tokenizer.".into()
            }
            DataError::TokenizerNotInFolder { .. } => {
                "text needs the tokenizer that the model was trained with: copy its tokenizer.json into the \
                 folder, or load it with AutoTokenizer.from_pretrained in transformers and save it there with \
                 save_pretrained."
                    .into()
            }
            DataError::TokenizerMalformed { .. } => {
                "write the tokenizer's files again, with save_pretrained in transformers.".into()
            }
            DataError::ChatTemplate(fault) => fault.hint(),
            DataError::NoChatTemplate { path: None } => {
                "set chat_template to `builtin`, or give one with chat_template_path.".into()
            }
            DataError::NoChatTemplate { .. } => {
                "give a Jinja file, or a folder that has chat_template.jinja, with chat_template_path \
                 (--chat-template for commands), or take the plain one that is called `builtin`."
                    .into()
            }
            DataError::Empty { .. } => "a row has `text`, `messages`, or `prompt` and `completion`.".into(),
            DataError::Write { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                "the disk is full: free space, or choose another output_dir or data_cache_dir.".into()
            }
            _ => return None,
        };
        Some(text)
    }
}

const NEEDED: &str = "rows need `text`, `messages`, `prompt` and `completion`, `conversations`, \
                      `instruction` and `output`, or `input_ids`; `columns: {text: NAME}` says that they \
                      are called otherwise.";

impl RowFault {
    /// The same with the names of all columns of the row.
    pub(crate) fn with_columns(mut self, mut names: Vec<String>) -> RowFault {
        if let RowFault::UnknownColumns { columns } | RowFault::MissingColumn { columns, .. } = &mut self {
            names.sort_unstable();
            *columns = names;
        }
        self
    }

    fn hint(&self) -> Option<String> {
        match self {
            RowFault::WrongType { expected: "a string", .. } => {
                Some("write it as a string, or set on_bad_row to skip to leave such rows out.".into())
            }
            RowFault::WrongType { .. }
            | RowFault::Message { .. }
            | RowFault::Fields { .. }
            | RowFault::LengthsDiffer { .. }
            | RowFault::Template { .. } => {
                Some("mend the row, or set on_bad_row to skip to leave such rows out.".into())
            }
            RowFault::UnknownTag { .. } => {
                Some("known are human, gpt, system, observation, function_call, and their like.".into())
            }
            RowFault::ArrowType { .. } => {
                Some("drop the column, or set `columns` so that another one is read.".into())
            }
            RowFault::IdOutside { .. } => {
                Some(
                    "the rows were tokenised with another tokenizer: name that one. With `tokenizer: none` the \
                     model's vocab_size decides."
                        .into(),
                )
            }
            RowFault::NoTokenizer { .. } => {
                Some("name a tokenizer with `tokenizer`, or give rows of `input_ids` alone.".into())
            }
            RowFault::LabelDiffers { .. } => {
                Some("a label is the token itself, or -100 where it is not to be learned.".into())
            }
            RowFault::LongerThanContext { .. } => Some(
                "raise max_length, set on_long_row to truncate or drop, or pack with bfd_split, which loses \
                 nothing."
                    .into(),
            ),
            RowFault::Json { .. } | RowFault::NotAnObject { .. } => Some(
                "each row must be one JSON object; set on_bad_row to skip to leave such rows out.".into(),
            ),
            RowFault::NotUtf8 { .. } => {
                Some("convert the file to UTF-8, or set on_bad_row to skip to leave such rows out.".into())
            }
            RowFault::UnknownColumns { columns } => {
                let meant = columns
                    .iter()
                    .find_map(|c| Some((c, closest(c, DECIDING)?)))
                    .filter(|(c, known)| c != known);
                Some(match meant {
                    Some((column, known)) => format!(
                        "`{column}` looks like `{known}`; rename it, or write `columns: {{{known}: {column}}}`."
                    ),
                    None => NEEDED.into(),
                })
            }
            RowFault::MissingColumn { missing, columns, .. } => {
                Some(match closest(missing, names(columns)) {
                    Some(column) => format!(
                        "`{column}` looks like `{missing}`; rename it, or write `columns: {{{missing}: {column}}}`."
                    ),
                    None => NEEDED.into(),
                })
            }
            RowFault::MixedFormats { .. } => {
                Some("put rows of different formats into different files.".into())
            }
            RowFault::Chat(fault) => fault.hint(),
            RowFault::NoTemplate { .. } => Some(
                "give one with chat_template_path, take the plain one with `chat_template: builtin`, or render \
                 the messages to `text`, or to `prompt` and `completion`, first."
                    .into(),
            ),
            _ => None,
        }
    }
}

fn names(columns: &[String]) -> impl Iterator<Item = &str> {
    columns.iter().map(String::as_str)
}

struct Columns<'a>(&'a [String]);

impl fmt::Display for Columns<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 12;
        if self.0.is_empty() {
            return f.write_str("no columns at all");
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

struct Places<'a>(&'a [PathBuf]);

impl fmt::Display for Places<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> = self.0.iter().map(|path| path.display().to_string()).collect();
        f.write_str(&all.join(" and "))
    }
}

struct Splits<'a>(&'a [String]);

impl fmt::Display for Splits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str("no data files") } else { f.write_str(&self.0.join(", ")) }
    }
}

/// Which message of a list.
struct Number(usize);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(f, ", message {}", self.0) }
    }
}

struct Paths<'a>(&'a [PathBuf]);

impl fmt::Display for Paths<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => f.write_str("no files"),
            [one] => one.display().fmt(f),
            [first, rest @ ..] => write!(f, "{} and {} more", first.display(), rest.len()),
        }
    }
}

struct Place<'a>(Option<&'a Path>);

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(path) => write!(f, "at {}", path.display()),
            None => f.write_str("comes with the byte tokenizer"),
        }
    }
}

struct Found<'a>(&'a [String]);

impl fmt::Display for Found<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, "; it has {}", self.0.join(", ")) }
    }
}
