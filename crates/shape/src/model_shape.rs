//! The shape of a model.

use crate::{Architecture, Lora, Rope};

/// Everything that determines a model's tensors and arithmetic.
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
    /// Low-rank adapters, which are then what is trained.
    pub lora: Option<Lora>,
    /// The format of the projections that are frozen. All other tensors have the storage type.
    pub frozen_projections: WeightFormat,
    pub tied: bool,
    pub max_positions: usize,
    /// The standard deviation of randomly initialised weights.
    pub init_std: f64,
    pub bos_id: Option<u32>,
    pub eos_id: Option<u32>,
}

/// How the elements of a weight are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightFormat {
    /// In the storage type of the run.
    #[default]
    Storage,
    /// NF4 with double quantisation, as in QLoRA: a 4-bit code for each element, an 8-bit scale for each block of them.
    Nf4,
}

/// The kind of a model's head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Head {
    /// Logits over the vocabulary.
    #[default]
    LanguageModel,
    /// One number per token: a reward or value model.
    Score,
}

/// Which projections of a block have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// Queries, keys and values.
    pub qkv: bool,
    /// Attention's output.
    pub out: bool,
    /// Gate, up and down.
    pub mlp: bool,
}

/// Dropout probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropout {
    /// On attention probabilities.
    pub attention: f64,
    /// On what attention and the MLP add to the residual stream.
    pub residual: f64,
}

/// Sliding-window attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    /// The number of keys that a query attends to, including its own.
    pub keys: usize,
    /// For each layer, whether it has the window; the others have full attention.
    pub layers: Vec<bool>,
}

impl ModelShape {
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Whether training drops anything: in the model itself, or at the input of adapters.
    pub fn has_dropout(&self) -> bool {
        self.dropout != Dropout::default() || self.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0)
    }

    /// Whether the head uses the embedding table. A scalar head always has its own weight.
    pub fn head_is_tied(&self) -> bool {
        self.tied && self.head == Head::LanguageModel
    }

    /// The number of keys that a query of this layer attends to, including its own. `None`: all.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        let window = self.window.as_ref()?;
        window.layers.get(layer).copied().unwrap_or(false).then_some(window.keys)
    }

    /// The inverse frequencies of the rotary embedding, one per pair of a head.
    pub fn rope_inverse_frequencies(&self) -> Vec<f64> {
        self.rope.inverse_frequencies(self.head_dim)
    }
}
