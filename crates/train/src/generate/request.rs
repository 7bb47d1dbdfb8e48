//! What to generate, and the result.

/// The completion of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The generated tokens, without the EOS token.
    pub tokens: Vec<u32>,
    /// The log-probability of each generated token, including the EOS token, at the model's temperature
    /// (1 in a [`Generator`](super::Generator)).
    pub log_probs: Vec<f32>,
    pub end: FinishReason,
    /// The EOS token that ended it.
    pub end_token: Option<u32>,
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model generated an EOS token.
    EndToken,
    /// The completion reached its maximum length.
    Length,
    /// The callback stopped it.
    Stopped,
}

/// A generated token.
#[derive(Clone, Copy, Debug)]
pub struct SampledToken {
    /// The prompt's index, and that of the completion among those of the prompt.
    pub prompt: usize,
    pub completion: usize,
    pub token: u32,
    pub log_prob: f32,
}

/// Called with every token. Returns whether to continue its sequence.
pub type TokenCallback<'a> = dyn FnMut(SampledToken) -> bool + 'a;

/// A prompt and the number of its completions.
#[derive(Clone, Copy, Debug)]
pub struct GenerateRequest<'a> {
    pub prompt: &'a [u32],
    pub completions: usize,
    /// The index that seeds the sampling of the first completion; the others have the next ones.
    pub first_sample: u32,
}

/// When a completion ends.
#[derive(Clone, Debug)]
pub struct DecodeLimits {
    pub max_new_tokens: usize,
    pub end_ids: Vec<u32>,
}
