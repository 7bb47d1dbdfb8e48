//! From rows in files to batches on a device: reading, tokenising, masking, packing, and the order in
//! which rows are met.
//!
//! [`prepare`] does all the work that does not depend on the run's mesh and leaves the result in a file
//! that later runs find; [`Order`] says which rows step `s` takes, from the seed and `s` alone; [`Batch`]
//! lays those rows out for the model, and [`Loader`] does so ahead of the step. Nothing here knows ranks: a
//! caller takes its share of the rows.
//!
//! Left out so far: preference pairs, data that is downloaded.

#![forbid(unsafe_code)]

mod alpaca;
mod batch;
mod builder;
mod byte_level;
mod cache;
mod chat;
mod columns;
mod dataset;
mod doc;
mod encode;
mod error;
mod fast_bpe;
mod files;
mod hub;
mod loader;
mod lock_file;
mod order;
mod packing;
mod part;
mod pipeline;
mod prepare;
mod read;
mod record;
mod row;
mod sharegpt;
mod stats;
mod store;
mod tokenizer;
mod value;

use std::path::{Path, PathBuf};

pub use batch::Batch;
pub use chat::{
    Chat, ChatFault, ChatRows, ChatTemplate, Encoded, Masks, Moment, TemplateFault, TemplateSource, encode,
    encode_pair,
};
pub use columns::Columns;
pub use dataset::Dataset;
pub use encode::EncodeChat;
pub use error::{DataError, RowFault};
pub use hub::{HubFolders, Named, locate};
pub use loader::{Loader, Share, Window};
pub use lock_file::{LockError, LockFile};
pub use order::Order;
pub use packing::{Packing, Rows, pack};
pub use part::Part;
pub use prepare::{first_format, prepare, preparing_bytes};
pub use row::Format;
pub use stats::{SkippedRow, Stats};
pub use tokenizer::{Tokenizer, TokenizerSource};

/// What to read and how to turn it into rows.
#[derive(Clone, Debug)]
pub struct DataSpec {
    /// Files, folders and patterns, read in this order.
    pub files: Vec<PathBuf>,
    /// What the files call their columns.
    pub columns: Columns,
    /// Which of the rows are taken.
    pub part: Part,
    /// Tokens kept of a document, and the capacity of a packed row.
    pub max_length: usize,
    pub packing: Packing,
    pub truncation: Truncation,
    pub on_long_row: OnLongRow,
    /// Whether the prompt is left out of the loss. `None`: yes for rows that have one.
    pub completion_only_loss: Option<bool>,
    pub on_bad_row: OnBadRow,
    /// Where prepared data is kept; made where it is missing.
    pub cache_dir: PathBuf,
}

impl DataSpec {
    /// All rows of `files`, with nothing special about them.
    pub fn new(files: Vec<PathBuf>, cache_dir: &Path) -> DataSpec {
        DataSpec {
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

/// Which end of a document that is too long stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Truncation {
    #[default]
    KeepStart,
    KeepEnd,
}

/// What becomes of a document longer than `max_length`, unless packing keeps all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLongRow {
    #[default]
    Truncate,
    /// Leave it out and count it.
    Drop,
    Stop,
}

/// What a row that cannot be used does to the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnBadRow {
    #[default]
    Stop,
    /// Leave it out, count it, and list it in [`Dataset::skipped`].
    Skip,
}
