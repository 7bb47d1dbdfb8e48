//! Errors of a single row.

use std::fmt;

use lockstep_core::{Bytes, closest};

use crate::chat::ChatFault;
use crate::columns::DECIDING;
use crate::row::Format;
use crate::{DataTask, PreferenceLayout};

/// The kind of a row that does not fit the task, by its columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// `chosen` and `rejected`.
    Pair,
    /// `chosen_ids` and `rejected_ids`.
    TokenPair,
    /// `completion` and `label`.
    Unpaired,
    /// A row for supervised training, such as `text` or `messages`.
    Document,
    /// `prompt` without a completion.
    Prompt,
    Unknown,
}

impl RowKind {
    fn of(columns: &[String]) -> RowKind {
        let has = |name: &str| columns.iter().any(|column| column == name);
        let documents = ["input_ids", "messages", "conversations", "text", "completion", "output"];
        if has("chosen") && has("rejected") {
            RowKind::Pair
        } else if has("chosen_ids") && has("rejected_ids") {
            RowKind::TokenPair
        } else if has("completion") && has("label") {
            RowKind::Unpaired
        } else if documents.into_iter().any(has) {
            RowKind::Document
        } else if has("prompt") {
            RowKind::Prompt
        } else {
            RowKind::Unknown
        }
    }
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
    #[error("{}; columns found: {}", TaskMismatch(*task, *kind), ColumnList(columns))]
    WrongTask { task: DataTask, kind: RowKind, columns: Vec<String> },
    #[error("`{field}` is {found}, expected {expected}\n  {excerpt}")]
    WrongType { field: &'static str, expected: &'static str, found: &'static str, excerpt: String },
    #[error("the row has {found} fields, but the header has {expected}")]
    Fields { expected: u64, found: u64 },
    #[error("column `{column}` has the unsupported Arrow type {found}")]
    ArrowType { column: String, found: String },
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
    #[error("a document of the pair has {tokens} tokens, more than max_length ({max_length})")]
    LongPair { tokens: usize, max_length: usize },
    #[error("the prompt has {tokens} tokens, more than max_prompt_length ({max_prompt_length})")]
    LongPrompt { tokens: usize, max_prompt_length: usize },
    #[error("`chosen` and `rejected` begin with different messages, so they have no prompt in common")]
    NoCommonPrompt,
    #[error("`margin` is {found}, expected a finite number")]
    Margin { found: String },
    #[error("the row has {} `margin`, but row {first_row}, the first of the file, has {}",
        if *present { "a" } else { "no" }, if *present { "none" } else { "one" })]
    MixedMargins { present: bool, first_row: u64 },
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

const NEEDED: &str = "rows need `text`, `messages`, `prompt` and `completion`, `conversations`, `instruction` and \
                      `output`, or `input_ids`; if your columns have other names, map them with \
                      `columns: {text: NAME}`.";
const NEEDED_PAIR: &str = "rows need `chosen` and `rejected`, and usually `prompt`, as text or as lists of messages; \
                           if your columns have other names, map them with `columns: {chosen: NAME, rejected: NAME}`.";
const NEEDED_PROMPT: &str = "rows need `prompt`, as text or as a list of messages that ends before the completion; if \
                             another column has it, set `columns: {prompt: NAME}`.";
const FIX_ROW: &str = "fix the row, or set on_bad_row: skip to leave out such rows.";

impl RowFault {
    /// The fault of a row without the columns that `task` needs. [`RowFault::with_columns`] adds the kind of the row.
    pub(crate) fn wrong_task(task: DataTask) -> RowFault {
        RowFault::WrongTask { task, kind: RowKind::Unknown, columns: Vec::new() }
    }

    /// Adds the names of all columns of the row to a fault about columns, and the kind of the row that they suggest.
    pub(crate) fn with_columns(mut self, names: impl FnOnce() -> Vec<String>) -> RowFault {
        let (RowFault::UnknownColumns { columns }
        | RowFault::MissingColumn { columns, .. }
        | RowFault::WrongTask { columns, .. }) = &mut self
        else {
            return self;
        };
        *columns = names();
        columns.sort_unstable();
        let found = RowKind::of(columns);
        match self {
            RowFault::WrongTask { task: task @ DataTask::Prompt { .. }, columns, .. }
                if found == RowKind::Unpaired =>
            {
                RowFault::WrongTask { task, kind: RowKind::Document, columns }
            }
            RowFault::WrongTask { task, columns, .. } => RowFault::WrongTask { task, kind: found, columns },
            // The columns of pairs are not read for supervised training.
            RowFault::UnknownColumns { columns }
            | RowFault::MissingColumn { present: "prompt", missing: "completion", columns }
                if matches!(found, RowKind::Pair | RowKind::TokenPair) =>
            {
                RowFault::WrongTask { task: DataTask::Sft, kind: found, columns }
            }
            other => other,
        }
    }

    pub(crate) fn hint(&self) -> Option<String> {
        let text = match self {
            RowFault::WrongType { expected: "a string", .. } => {
                "write it as a string, or set on_bad_row: skip to leave out such rows."
            }
            RowFault::WrongType { .. }
            | RowFault::Message { .. }
            | RowFault::Fields { .. }
            | RowFault::LengthsDiffer { .. }
            | RowFault::Margin { .. }
            | RowFault::Template { .. } => FIX_ROW,
            RowFault::LongPair { .. } => {
                "raise max_length, or set on_long_row: drop to leave out such pairs."
            }
            RowFault::LongPrompt { .. } => {
                "raise max_prompt_length, or set on_long_row: drop to leave out such prompts."
            }
            RowFault::NoCommonPrompt => {
                "add a `prompt` column, or begin both lists with the same messages; set on_bad_row: skip to leave out \
                 such rows."
            }
            RowFault::MixedMargins { .. } => {
                "give every row of the file a `margin`, or none; set on_bad_row: skip to leave out such rows."
            }
            RowFault::WrongTask { task, kind, columns } => return Some(task_hint(*task, *kind, columns)),
            RowFault::UnknownTag { .. } => {
                "`from` can be human, gpt, system, observation or function_call, or an alias such as user, \
                 assistant or tool."
            }
            RowFault::ArrowType { .. } => {
                "remove the column from the file, or use `columns` to read another one instead."
            }
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
                return Some(similar.map_or_else(|| needed(missing), |column| looks_like(column, missing)));
            }
            RowFault::Chat(fault) => return fault.hint(),
            _ => return None,
        };
        Some(text.into())
    }
}

/// The hint for a row without a known column: the column that was probably meant, or what rows need.
fn rename_hint(columns: &[String]) -> String {
    similar(columns, &DECIDING).unwrap_or_else(|| NEEDED.into())
}

/// The hint for a column whose name resembles one of `wanted`.
fn similar(columns: &[String], wanted: &[&'static str]) -> Option<String> {
    let close = |column: &String| Some((column.clone(), closest(column, wanted.iter().copied())?));
    let (column, known) = columns.iter().find_map(close).filter(|(column, known)| column != known)?;
    Some(looks_like(&column, known))
}

/// What rows need, if the column `missing` is missing.
fn needed(missing: &str) -> String {
    match missing {
        "chosen" | "rejected" => NEEDED_PAIR.into(),
        "chosen_ids" | "rejected_ids" => "tokenized pairs need `chosen_ids` and `rejected_ids`.".into(),
        _ => NEEDED.into(),
    }
}

/// The hint for rows that do not fit the task.
fn task_hint(task: DataTask, kind: RowKind, columns: &[String]) -> String {
    let has_prompt = columns.iter().any(|column| column == "prompt");
    match (task, kind) {
        (_, RowKind::Unpaired) => {
            "combine a good and a bad completion of each prompt to a row with `prompt`, `chosen` and `rejected`; or \
             set `algorithm: sft` and keep only the good completions."
                .into()
        }
        (DataTask::Sft, RowKind::Pair) if has_prompt => {
            "set `algorithm: dpo` or `algorithm: reward` to train on pairs; to train on the chosen completions alone, \
             set `columns: {completion: chosen}`."
                .into()
        }
        (_, RowKind::Pair) => "set `algorithm: dpo` or `algorithm: reward` to train on pairs.".into(),
        (DataTask::Preference(PreferenceLayout::Completion), RowKind::TokenPair) => {
            "provide `prompt`, `chosen` and `rejected` as text or messages: token ids do not show where the \
             completions begin."
                .into()
        }
        (_, RowKind::TokenPair) => "set `algorithm: reward` to train on tokenized pairs.".into(),
        (DataTask::Preference(_), RowKind::Prompt) => {
            format!("{NEEDED_PAIR} To train on prompts alone, set `algorithm: grpo`.")
        }
        (DataTask::Preference(_), RowKind::Document) => {
            format!("{NEEDED_PAIR} To train on these rows as they are, set `algorithm: sft`.")
        }
        (DataTask::Preference(_), RowKind::Unknown) => {
            similar(columns, &["chosen", "rejected"]).unwrap_or_else(|| NEEDED_PAIR.into())
        }
        (DataTask::Prompt { .. }, RowKind::Document) => {
            format!("{NEEDED_PROMPT} To train on these rows as they are, set `algorithm: sft`.")
        }
        (DataTask::Prompt { .. }, _) => similar(columns, &["prompt"]).unwrap_or_else(|| NEEDED_PROMPT.into()),
        (DataTask::Sft, _) => NEEDED.into(),
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

/// Which message of a list; nothing for the list as a whole.
struct MessageNumber(usize);

impl fmt::Display for MessageNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(f, ", message {}", self.0) }
    }
}

struct TaskMismatch(DataTask, RowKind);

impl fmt::Display for TaskMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TaskMismatch(task, kind) = self;
        let kind = match kind {
            RowKind::Unpaired => return f.write_str("unpaired preference data (KTO) is not supported"),
            RowKind::Unknown => return write!(f, "{task} needs {}", task.needed_columns()),
            RowKind::Pair => "a preference pair",
            RowKind::TokenPair => "a tokenized preference pair",
            RowKind::Document => "a document for supervised training",
            RowKind::Prompt => "a prompt",
        };
        write!(f, "the row is {kind}, but {task} needs {}", task.needed_columns())
    }
}
