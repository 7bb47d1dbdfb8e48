//! The families, and what each takes for granted where `config.json` is silent.

/// The decoder families this build can run: LLaMA, and what sets the others apart from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    Llama,
    /// A sliding window in every layer.
    Mistral,
    /// Biases on queries, keys and values; a sliding window in chosen layers.
    Qwen2,
    /// Norms on queries and keys; a sliding window in chosen layers.
    Qwen3,
}

impl Architecture {
    pub const ALL: [Architecture; 4] =
        [Architecture::Llama, Architecture::Mistral, Architecture::Qwen2, Architecture::Qwen3];

    pub const fn class_name(self) -> &'static str {
        match self {
            Architecture::Llama => "LlamaForCausalLM",
            Architecture::Mistral => "MistralForCausalLM",
            Architecture::Qwen2 => "Qwen2ForCausalLM",
            Architecture::Qwen3 => "Qwen3ForCausalLM",
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

    /// Norms on queries and keys, over each head.
    pub const fn qk_norm(self) -> bool {
        matches!(self, Architecture::Qwen3)
    }

    /// Whether layers choose between full attention and a window.
    pub(crate) const fn chooses_windows(self) -> bool {
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

    /// Key-value heads where the key is absent. Where it is null, every family has as many as heads.
    pub(crate) const fn default_kv_heads(self, heads: usize) -> usize {
        match self {
            Architecture::Llama => heads,
            Architecture::Mistral => 8,
            Architecture::Qwen2 | Architecture::Qwen3 => 32,
        }
    }
}
