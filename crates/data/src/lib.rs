//! From rows in files to micro-batches: reading, tokenizing, loss masks, packing, and the order of rows.
//!
//! [`prepare`] does all the work that does not depend on the number of ranks and caches the result in a file
//! for later runs. [`SampleOrder`] computes which rows a step uses, from the seed and the step number alone.
//! [`Batch`] lays out those rows for the model, and [`Loader`] fills batches ahead of the step. Nothing here
//! communicates with other ranks: each rank picks its own share of the rows ([`RankShare`]).
//!
//! [`DataTask`] selects the kind of rows: documents for supervised training, preference pairs, or prompts with the
//! other columns of their rows. Not supported: unpaired preferences (KTO) and stepwise labels.

#![forbid(unsafe_code)]

mod alpaca;
mod batch;
mod builder;
mod byte_level;
mod cache;
mod card;
mod chat;
mod columns;
mod content;
mod dataset;
mod doc;
mod encode;
mod error;
mod fast_bpe;
mod files;
mod hub;
mod loader;
mod lock_file;
mod packing;
mod part;
mod pipeline;
mod preference;
mod prepare;
mod read;
mod record;
mod row;
mod row_fault;
mod sample_order;
mod sharegpt;
mod splits;
mod stats;
mod store;
mod task;
mod tokenizer;
mod value;

use std::path::{Path, PathBuf};

pub use batch::Batch;
pub use chat::{
    Chat, ChatEncoder, ChatFault, ChatTemplate, DateTime, EncodedChat, LossMasks, TemplateFault,
    TemplateSource, encode_chat, encode_chat_pair,
};
pub use columns::Columns;
pub use dataset::Dataset;
pub use encode::EncodeChat;
pub use error::DataError;
pub use hub::{HubFolders, Named, locate};
pub use loader::{Loader, RankShare, StepBatches};
pub use lock_file::{LockError, LockFile};
pub use packing::{Packing, Rows, pack};
pub use part::Part;
pub use prepare::{first_format, prepare, preparing_bytes};
pub use row::Format;
pub use row_fault::{RowFault, RowKind};
pub use sample_order::SampleOrder;
pub use splits::{data_files, files_of_splits};
pub use stats::{SkippedRow, Stats};
pub use task::{DataTask, PreferenceLayout};
pub use tokenizer::{Tokenizer, TokenizerSource};

/// Which files to read, and how to turn them into rows of tokens.
#[derive(Clone, Debug)]
pub struct DataSpec {
    /// What the rows are for.
    pub task: DataTask,
    /// Files, folders and glob patterns, read in this order.
    pub files: Vec<PathBuf>,
    /// The names that the files use for known columns.
    pub columns: Columns,
    /// Which of the rows to use.
    pub part: Part,
    /// The most tokens of a document, and the capacity of a packed row. A row of preference pairs has twice the
    /// capacity, and prompts have a limit of their own.
    pub max_length: usize,
    pub packing: Packing,
    pub truncation: Truncation,
    pub on_long_row: OnLongRow,
    /// Whether to exclude the prompt from the loss. `None`: exclude it for rows that have one. The prompts of
    /// preference pairs are always excluded.
    pub completion_only_loss: Option<bool>,
    pub on_bad_row: OnBadRow,
    /// The folder of prepared data; created if it does not exist.
    pub cache_dir: PathBuf,
}

impl DataSpec {
    /// All rows of `files`, for supervised training, with the default settings.
    pub fn new(files: Vec<PathBuf>, cache_dir: &Path) -> DataSpec {
        DataSpec {
            task: DataTask::Sft,
            files,
            columns: Columns::default(),
            part: Part::All,
            max_length: 1024,
            packing: Packing::None,
            truncation: Truncation::KeepStart,
            on_long_row: OnLongRow::Truncate,
            completion_only_loss: None,
            on_bad_row: OnBadRow::Stop,
            cache_dir: cache_dir.into(),
        }
    }
}

/// Which end of a document longer than `max_length` is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Truncation {
    #[default]
    KeepStart,
    KeepEnd,
}

/// What to do with a document longer than `max_length`, unless packing keeps all of it. Sequences that get one score
/// and prompts are never truncated: there, `Truncate` drops the row like `Drop`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLongRow {
    #[default]
    Truncate,
    /// Leave the document (or the pair) out and count it.
    Drop,
    Stop,
}

/// What to do with a row that cannot be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnBadRow {
    #[default]
    Stop,
    /// Leave the row out, count it, and list it in [`Dataset::skipped`].
    Skip,
}
