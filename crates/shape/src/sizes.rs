//! The model sizes that a configuration can name.

use crate::{Architecture, Biases, Dropout, Head, ModelShape, Rope, ShapeError, WeightFormat};

/// A named model size. The vocabulary size comes from the tokenizer.
#[derive(Clone, Copy, Debug)]
pub struct NamedSize {
    pub name: &'static str,
    dim: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    ffn: usize,
    max_positions: usize,
}

#[rustfmt::skip]
pub const NAMED_SIZES: [NamedSize; 6] = [
    NamedSize { name: "tiny", dim: 64, layers: 2, heads: 4, kv_heads: 2, ffn: 176, max_positions: 1024 },
    NamedSize { name: "15m", dim: 288, layers: 6, heads: 6, kv_heads: 6, ffn: 768, max_positions: 2048 },
    NamedSize { name: "90m", dim: 768, layers: 12, heads: 12, kv_heads: 12, ffn: 2048, max_positions: 2048 },
    NamedSize { name: "300m", dim: 1024, layers: 24, heads: 16, kv_heads: 16, ffn: 2816, max_positions: 2048 },
    NamedSize { name: "1b", dim: 2048, layers: 22, heads: 32, kv_heads: 4, ffn: 5632, max_positions: 2048 },
    NamedSize { name: "7b", dim: 4096, layers: 32, heads: 32, kv_heads: 32, ffn: 11008, max_positions: 4096 },
];

impl ModelShape {
    /// A LLaMA of a named size.
    pub fn named(name: &str, vocab: usize) -> Result<ModelShape, ShapeError> {
        let wanted = name.to_ascii_lowercase();
        let size = NAMED_SIZES.iter().find(|s| s.name == wanted);
        let size = size.ok_or_else(|| ShapeError::UnknownSize { name: name.into() })?;
        Ok(ModelShape {
            head: Head::LanguageModel,
            architecture: Architecture::Llama,
            vocab,
            dim: size.dim,
            layers: size.layers,
            heads: size.heads,
            kv_heads: size.kv_heads,
            head_dim: size.dim / size.heads,
            ffn: size.ffn,
            norm_eps: 1e-5,
            rope: Rope::plain(10_000.0),
            biases: Biases::default(),
            window: None,
            dropout: Dropout::default(),
            tied: false,
            max_positions: size.max_positions,
            lora: None,
            frozen_projections: WeightFormat::Storage,
            init_std: 0.02,
            bos_id: None,
            eos_id: None,
        })
    }
}
