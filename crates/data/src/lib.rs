//! From rows in files to batches on a device: reading, tokenising, masking, packing, and the order in
//! which rows are met.
//!
//! [`prepare`] does all the work that does not depend on the run's mesh and keeps the result in memory
//! as flat arrays; [`Order`] says which rows step `s` takes, from the seed and `s` alone; [`Batch`] lays
//! those rows out for the model. Nothing here knows ranks: a caller takes its share of the rows.
//!
//! Left out so far: formats other than jsonl, preference pairs, data on disk larger
//! than memory.

#![forbid(unsafe_code)]

mod batch;
mod byte_level;
mod chat;
mod dataset;
mod error;
mod lines;
mod order;
mod packing;
mod prepare;
mod row;
mod tokenizer;

use std::path::PathBuf;

pub use batch::Batch;
pub use chat::{
    Chat, ChatFault, ChatTemplate, Encoded, Masks, Moment, TemplateFault, TemplateSource, encode, encode_pair,
};
pub use dataset::{Dataset, SkippedRow, Stats};
pub use error::{DataError, RowFault};
pub use order::Order;
pub use packing::{Packing, pack};
pub use prepare::prepare;
pub use row::Format;
pub use tokenizer::{Tokenizer, TokenizerSource};

/// What to read and how to turn it into rows.
#[derive(Clone, Debug)]
pub struct DataSpec {
    /// jsonl files, read in this order.
    pub files: Vec<PathBuf>,
    pub tokenizer: TokenizerSource,
    /// Tokens kept of a document, from its start, and the capacity of a packed row.
    pub max_length: usize,
    pub packing: Packing,
    /// Whether the prompt is left out of the loss. `None`: yes for rows that have one.
    pub completion_only_loss: Option<bool>,
    pub on_bad_row: OnBadRow,
}

/// What a row that cannot be used does to the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnBadRow {
    #[default]
    Stop,
    /// Leave it out, count it, and list it in [`Dataset::skipped`].
    Skip,
}
