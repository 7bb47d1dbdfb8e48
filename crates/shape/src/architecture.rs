//! Model families, and their defaults for keys that are absent from `config.json`.

use crate::Head;

/// The supported decoder families: LLaMA, and how the others differ from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    Llama,
    /// A sliding window in every layer.
    Mistral,
    /// Biases on queries, keys and values; a sliding window in some layers.
    Qwen2,
    /// Norms on queries and keys; a sliding window in some layers.
    Qwen3,
}

impl Architecture {
    pub const ALL: [Architecture; 4] =
        [Architecture::Llama, Architecture::Mistral, Architecture::Qwen2, Architecture::Qwen3];

    /// The name of the transformers class with this head.
    pub const fn class_name(self, head: Head) -> &'static str {
        match (self, head) {
            (Architecture::Llama, Head::LanguageModel) => "LlamaForCausalLM",
            (Architecture::Llama, Head::Score) => "LlamaForSequenceClassification",
            (Architecture::Mistral, Head::LanguageModel) => "MistralForCausalLM",
            (Architecture::Mistral, Head::Score) => "MistralForSequenceClassification",
            (Architecture::Qwen2, Head::LanguageModel) => "Qwen2ForCausalLM",
            (Architecture::Qwen2, Head::Score) => "Qwen2ForSequenceClassification",
            (Architecture::Qwen3, Head::LanguageModel) => "Qwen3ForCausalLM",
            (Architecture::Qwen3, Head::Score) => "Qwen3ForSequenceClassification",
        }
    }

    pub(crate) const fn model_type(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Mistral => "mistral",
            Architecture::Qwen2 => "qwen2",
            Architecture::Qwen3 => "qwen3",
        }
    }

    /// Whether queries and keys are normalized, per head.
    pub const fn qk_norm(self) -> bool {
        matches!(self, Architecture::Qwen3)
    }

    /// Whether each layer has either full attention or a sliding window.
    pub(crate) const fn has_window_per_layer(self) -> bool {
        matches!(self, Architecture::Qwen2 | Architecture::Qwen3)
    }

    /// Whether `attention_bias` is a key of the family.
    pub(crate) const fn has_attention_bias(self) -> bool {
        matches!(self, Architecture::Llama | Architecture::Qwen3)
    }

    /// Whether `mlp_bias` is a key of the family.
    pub(crate) const fn has_mlp_bias(self) -> bool {
        matches!(self, Architecture::Llama)
    }

    pub(crate) const fn default_max_positions(self) -> usize {
        match self {
            Architecture::Llama => 2048,
            Architecture::Mistral => 131_072,
            Architecture::Qwen2 | Architecture::Qwen3 => 32_768,
        }
    }

    /// The number of key-value heads if the key is absent. If it is null, it is the number of heads in every family.
    pub(crate) const fn default_kv_heads(self, heads: usize) -> usize {
        match self {
            Architecture::Llama => heads,
            Architecture::Mistral => 8,
            Architecture::Qwen2 | Architecture::Qwen3 => 32,
        }
    }
}
