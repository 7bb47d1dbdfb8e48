//! What a model is.

use crate::{Architecture, Rope};

/// Everything that decides a model's tensors and arithmetic.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    pub architecture: Architecture,
    pub head: Head,
    pub vocab: usize,
    pub dim: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub norm_eps: f64,
    pub rope: Rope,
    pub biases: Biases,
    pub window: Option<SlidingWindow>,
    pub dropout: Dropout,
    pub tied: bool,
    pub max_positions: usize,
    /// Standard deviation of random weights.
    pub init_std: f64,
    pub bos_id: Option<u32>,
    pub eos_id: Option<u32>,
}

/// What a model ends with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Head {
    /// Logits over the vocabulary.
    #[default]
    LanguageModel,
    /// One number per token: a reward or value model.
    Score,
}

/// Which projections of a block add a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// Queries, keys and values.
    pub qkv: bool,
    /// Attention's output.
    pub out: bool,
    /// Gate, up and down.
    pub mlp: bool,
}

/// The shares of elements that training sets to zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropout {
    /// Of attention's probabilities.
    pub attention: f64,
    /// Of what attention and the feed-forward layer add to the residual stream.
    pub residual: f64,
}

impl Dropout {
    pub fn is_on(&self) -> bool {
        *self != Dropout::default()
    }
}

/// Attention that does not look back for ever.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    /// Keys a query sees, its own among them.
    pub keys: usize,
    /// Which layers have the window; the others see all keys.
    pub layers: Vec<bool>,
}

impl ModelShape {
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Whether the head multiplies by the embedding's table. A scalar head has a weight of its own.
    pub fn head_is_tied(&self) -> bool {
        self.tied && self.head == Head::LanguageModel
    }

    /// Keys that a query of this layer sees, its own among them; all where `None`.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        let window = self.window.as_ref()?;
        window.layers.get(layer).copied().unwrap_or(false).then_some(window.keys)
    }

    /// Inverse frequencies of the rotary embedding, one per pair of a head.
    pub fn rope_inverse_frequencies(&self) -> Vec<f64> {
        self.rope.inverse_frequencies(self.head_dim)
    }
}
