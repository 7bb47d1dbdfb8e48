//! What can be wrong with data and tokenizers. Every message says what, where and why; hints say what
//! to do.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use lockstep_core::{Bytes, Fault, FaultClass, closest};

use crate::chat::{ChatFault, TemplateFault};
use crate::row::{COLUMNS, Format};

/// Why data could not be prepared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    #[error("no data files are given")]
    NoFiles,
    #[error("data file {} does not exist", path.display())]
    FileMissing { path: PathBuf },
    /// A folder, a pipe, a socket.
    #[error("data file {} is not a regular file", path.display())]
    NotAFile { path: PathBuf },
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} row {row}: {fault}", file.display())]
    BadRow {
        file: PathBuf,
        /// The line's number, from 1, blank lines counted.
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
         tokens, {unsupervised} without a supervised token in the first {max_length}",
        Paths(files)
    )]
    AllDropped {
        files: Vec<PathBuf>,
        read: u64,
        skipped: u64,
        too_short: u64,
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
    #[error("`{field}` is {found}, expected a string\n  {excerpt}")]
    WrongType { field: &'static str, found: &'static str, excerpt: String },
    #[error("{format} row in a file whose first row, {first_row}, is {first}")]
    MixedFormats { format: Format, first: Format, first_row: u64 },
    #[error("conversational rows are not implemented yet; column `{column}` holds messages")]
    Conversational { column: String },
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
            | DataError::TooFewRows { .. } => FaultClass::BadConfig,
            DataError::FileMissing { .. }
            | DataError::TokenizerMissing { .. }
            | DataError::TokenizerNotInFolder { .. }
            | DataError::NoChatTemplate { .. } => FaultClass::InputMissing,
            DataError::BadRow { fault: RowFault::Conversational { .. }, .. } => FaultClass::Unavailable,
            DataError::Write { .. } => FaultClass::CannotWrite,
            DataError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                FaultClass::InputMissing
            }
            _ => FaultClass::BadData,
        }
    }

    fn hint(&self) -> Option<String> {
        let text = match self {
            DataError::NoFiles => "name one or more jsonl files.".into(),
            DataError::FileMissing { .. } => {
                "check the spelling; relative paths start at the folder the command runs in.".into()
            }
            DataError::NotAFile { .. } => "name the jsonl files themselves, not their folder.".into(),
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
            DataError::TooFewRows { .. } => {
                "make the global batch smaller, turn packing or drop_last off, or add data.".into()
            }
            DataError::TokenizerMissing { .. } => {
                "name a tokenizer.json, a folder that has one, or use the built-in `byte` tokenizer.".into()
            }
            DataError::TokenizerNotInFolder { .. } => {
                "load the folder with AutoTokenizer.from_pretrained in transformers and save it with \
                 save_pretrained: that writes tokenizer.json."
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
            DataError::Empty { .. } => {
                "each line is one JSON object with `text`, or with `prompt` and `completion`.".into()
            }
            DataError::Write { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                "the disk is full: free space or choose another output folder.".into()
            }
            _ => return None,
        };
        Some(text)
    }
}

impl RowFault {
    fn hint(&self) -> Option<String> {
        match self {
            RowFault::WrongType { .. } => {
                Some("write it as a string, or set on_bad_row to skip to leave such rows out.".into())
            }
            RowFault::Json { .. } | RowFault::NotAnObject { .. } => Some(
                "each line must be one JSON object; set on_bad_row to skip to leave such rows out.".into(),
            ),
            RowFault::NotUtf8 { .. } => {
                Some("convert the file to UTF-8, or set on_bad_row to skip to leave such rows out.".into())
            }
            RowFault::UnknownColumns { columns } => {
                let meant = columns.iter().find_map(|c| Some((c, closest(c, COLUMNS)?)));
                Some(match meant {
                    Some((column, known)) => format!("`{column}` looks like `{known}`; rename the column."),
                    None => "rows need `text`, or `prompt` and `completion`.".into(),
                })
            }
            RowFault::MissingColumn { missing, columns, .. } => {
                Some(match closest(missing, names(columns)) {
                    Some(column) => format!("`{column}` looks like `{missing}`; rename the column."),
                    None => "rows need `text`, or `prompt` and `completion`.".into(),
                })
            }
            RowFault::MixedFormats { .. } => {
                Some("put rows of different formats into different files.".into())
            }
            RowFault::Conversational { .. } => {
                Some("render the messages to `text`, or to `prompt` and `completion`, first.".into())
            }
            RowFault::Chat(fault) => fault.hint(),
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
            write!(f, "{}`{}`", if idx == 0 { "" } else { ", " }, crate::row::excerpt(column))?;
        }
        match self.0.len().checked_sub(SHOWN) {
            Some(more @ 1..) => write!(f, " and {more} more"),
            _ => Ok(()),
        }
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
