//! Slots: the named places in memory that a unit's steps read and write.

use lockstep_core::{Bytes, DType};

/// How many rows a slot has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotRows {
    /// One per token of the micro-batch.
    Tokens,
    /// One per token of a head chunk.
    Chunk,
}

/// A place that steps read and write. Names follow a block from its input to its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Slot {
    /// The unit's input: the residual stream before it. \[T, D\]
    X,
    /// The unit's output: the residual stream after it. \[T, D\]
    Y,
    /// The gradient of the residual stream, turned from ∂L/∂y to ∂L/∂x in place. \[T, D\]
    DX,
    /// Normed input of attention and its reciprocal deviations. \[T, D\], \[T, 1\]
    N1,
    R1,
    /// Queries, keys and values side by side. \[T, (H + 2G)·h\]
    Qkv,
    /// Normed queries and keys with their reciprocal deviations (QK-norm families).
    Qn,
    Kn,
    Rq,
    Rk,
    /// Attention's output and log-sum-exp. \[T, H·h\], \[T, H\]
    O,
    Lse,
    /// The residual stream after attention. \[T, D\]
    X2,
    N2,
    R2,
    /// Gate and up projections side by side, replaced by their gradients in backward. \[T, 2F\]
    GateUp,
    /// Their product. \[T, F\]
    S,
    /// Gradients that live within one backward. The first may become `S` again, the second `N1` and `N2`.
    DS,
    DN,
    DO,
    DQkv,
    /// The head's normed input, its gradient and the logits of one chunk.
    NF,
    RF,
    DNF,
    /// The rows of `NF` that a next token is drawn from. \[documents, D\]
    Last,
    Logits,
}

impl Slot {
    pub const COUNT: usize = Slot::Logits as usize + 1;

    pub const fn index(self) -> usize {
        self as usize
    }
}

/// The size of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotSpec {
    pub slot: Slot,
    pub rows: SlotRows,
    /// Elements per row.
    pub width: usize,
    /// `None` for activations, whose storage type the precision decides.
    pub dtype: Option<DType>,
}

impl SlotSpec {
    pub const fn activation(slot: Slot, width: usize) -> SlotSpec {
        SlotSpec { slot, rows: SlotRows::Tokens, width, dtype: None }
    }

    pub const fn statistic(slot: Slot, width: usize) -> SlotSpec {
        SlotSpec { slot, rows: SlotRows::Tokens, width, dtype: Some(DType::F32) }
    }

    pub fn bytes(&self, tokens: usize, chunk: usize, activation: DType) -> Bytes {
        let rows = match self.rows {
            SlotRows::Tokens => tokens,
            SlotRows::Chunk => chunk,
        };
        Bytes((rows * self.width * self.dtype.unwrap_or(activation).size()) as u64)
    }
}
