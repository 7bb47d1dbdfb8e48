//! One document on its way into a data set.

/// Which tokens of a document are to be predicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mask {
    /// All from this one on.
    From(usize),
    /// As said for each; as long as the tokens.
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

/// Tokens that attend to each other.
#[derive(Debug)]
pub(crate) struct Doc {
    pub(crate) tokens: Vec<u32>,
    pub(crate) mask: Mask,
    /// The prompt, tokenised alone, is not how the whole begins.
    pub(crate) prefix_mismatch: bool,
}

/// Set on the stored word of a token that is supervised; vocabularies stay far below.
pub(crate) const SUPERVISED: u32 = 1 << 31;
