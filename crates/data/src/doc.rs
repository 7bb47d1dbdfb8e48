//! Tokenized documents, before they are stored.

/// Which tokens of a document count in the loss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mask {
    /// All tokens from this index on.
    From(usize),
    /// One flag per token.
    Each(Vec<bool>),
}

impl Mask {
    pub(crate) fn at(&self, token: usize) -> bool {
        match self {
            Mask::From(first) => token >= *first,
            Mask::Each(each) => each[token],
        }
    }
}

/// A sequence of tokens that attend to each other.
#[derive(Debug)]
pub(crate) struct Doc {
    pub(crate) tokens: Vec<u32>,
    pub(crate) mask: Mask,
    /// The prompt, tokenized alone, is not a prefix of the whole document.
    pub(crate) prefix_mismatch: bool,
}

/// The documents of one row of a file.
#[derive(Debug)]
pub(crate) enum Sample {
    Document(Doc),
    Pair {
        /// The chosen one, then the rejected one.
        docs: Box<[Doc; 2]>,
        margin: Option<f32>,
    },
    Prompt {
        tokens: Vec<u32>,
        /// All columns of the row, as a JSON object.
        columns: String,
    },
}

/// The bit that marks a supervised token in its stored word. Vocabularies stay far below it.
pub(crate) const SUPERVISED: u32 = 1 << 31;
