//! Slots: the named tensors that a unit's steps read and write.

use lockstep_core::{Bytes, DType};

/// How many rows a slot has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotRows {
    /// One per row that is computed: a token of the micro-batch, or one that several documents share.
    Tokens,
    /// One per position of every document, for attention.
    Positions,
    /// One per row that the head runs on.
    HeadRows,
    /// One per token of a head chunk.
    Chunk,
}

/// A tensor that steps read and write, in the order of a block's computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Slot {
    /// The unit's input: the residual stream before it. \[T, D\]
    X,
    /// The unit's output: the residual stream after it. \[T, D\]
    Y,
    /// The gradient of the residual stream. Backward turns ∂L/∂y into ∂L/∂x in place. \[T, D\]
    DX,
    /// The normalized input of attention. \[T, D\]
    N1,
    /// The reciprocal standard deviations of that norm. \[T, 1\]
    R1,
    /// Queries, keys and values, in adjacent columns. \[T, (H + 2G)·h\]
    Qkv,
    /// Normalized queries and keys, in families with QK norm.
    Qn,
    Kn,
    /// The reciprocal standard deviations of the QK norms.
    Rq,
    Rk,
    /// Attention's output. \[T, H·h\]
    O,
    /// Attention's log-sum-exp. \[T, H\]
    Lse,
    /// The residual stream after attention. \[T, D\]
    X2,
    /// The normalized input of the MLP and its reciprocal standard deviations, like `N1` and `R1`.
    N2,
    R2,
    /// Gate and up projections, in adjacent columns. Backward replaces them by their gradients. \[T, 2F\]
    GateUp,
    /// The output of SwiGLU. \[T, F\]
    S,
    /// The gradient of `S`. Backward may replace it by a recomputed `S`.
    DS,
    /// The gradient of `N1` or `N2`. Backward may replace it by a recomputed `N1` or `N2`.
    DN,
    DO,
    DQkv,
    /// The operands of attention at every position, if documents share rows.
    PosQkv,
    PosO,
    PosLse,
    PosDO,
    PosDQkv,
    /// The hidden numbers of adapters, scale · A·x, of each projection in adjacent columns. \[T, r\] each
    LoraQkv,
    LoraO,
    LoraGateUp,
    LoraDown,
    /// The gradient of one of these.
    DLora,
    /// The input of an adapter after dropout, or its gradient before that.
    LoraX,
    /// The rows of the residual stream that the head runs on: those whose outputs are needed.
    XF,
    /// The normalized input of the head, and its reciprocal standard deviations.
    NF,
    RF,
    /// The gradient of `NF`, then of `XF`.
    DNF,
    /// The logits of one head chunk.
    Logits,
}

impl Slot {
    pub const COUNT: usize = Slot::Logits as usize + 1;

    pub const fn index(self) -> usize {
        self as usize
    }
}

/// The shape and type of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotSpec {
    pub slot: Slot,
    pub rows: SlotRows,
    /// Elements per row.
    pub width: usize,
    /// `None` for activations, which have the storage type.
    pub dtype: Option<DType>,
}

impl SlotSpec {
    pub const fn activation(slot: Slot, width: usize) -> SlotSpec {
        SlotSpec { slot, rows: SlotRows::Tokens, width, dtype: None }
    }

    pub const fn statistic(slot: Slot, width: usize) -> SlotSpec {
        SlotSpec { slot, rows: SlotRows::Tokens, width, dtype: Some(DType::F32) }
    }

    pub const fn with_rows(self, rows: SlotRows) -> SlotSpec {
        SlotSpec { rows, ..self }
    }

    /// The most bytes of the slot, for a micro-batch of at most `tokens` positions: no kind of row has more.
    pub fn bytes(&self, tokens: usize, chunk: usize, activation: DType) -> Bytes {
        let rows = match self.rows {
            SlotRows::Tokens | SlotRows::Positions | SlotRows::HeadRows => tokens,
            SlotRows::Chunk => chunk,
        };
        Bytes((rows * self.width * self.dtype.unwrap_or(activation).size()) as u64)
    }
}
