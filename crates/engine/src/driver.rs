//! The interface between a step and its caller: batches and coefficients in, the head's outputs out.

use lockstep_plan::OptimizerSpec;
use lockstep_shape::{Channel, Channels};

/// One micro-batch of packed documents in host memory: \[T\] each, `cu_seqlens` \[documents + 1\].
#[derive(Clone, Copy, Debug)]
pub struct MicroBatch<'a> {
    pub tokens: &'a [u32],
    pub targets: &'a [u32],
    pub positions: &'a [u32],
    pub cu_seqlens: &'a [u32],
    /// The index of each document in the data set, \[documents\], which dropout masks depend on. May be empty without
    /// dropout.
    pub samples: &'a [u32],
    /// Zero where the head's outputs are not needed, \[T\]: the head does not run there, outputs are zero, and
    /// coefficients are ignored. Empty: all outputs are needed.
    pub weights: &'a [f32],
    /// The number of first tokens that each document has in common with the one before it, \[documents\]. If the plan
    /// lets documents share rows, these are computed once. May be empty.
    pub shared: &'a [u32],
}

impl MicroBatch<'_> {
    /// Whether the head's output at a position is needed.
    pub(crate) fn needs_output(&self, position: usize) -> bool {
        self.weights.get(position).is_none_or(|weight| *weight != 0.0)
    }
}

/// Provides a training step with batches and with the objective. Methods are called from the compute lane; they must not
/// allocate if the step must not.
pub trait StepDriver {
    fn batch(&self, micro_batch: u32) -> MicroBatch<'_>;

    /// Writes the derivative of the loss with respect to every output of every token. `outputs` is `Some` if the plan
    /// runs the head's forward first, for objectives whose coefficients depend on outputs.
    fn coefficients(&mut self, micro_batch: u32, outputs: Option<Outputs<'_>>, out: &mut Coefficients<'_>);

    /// Receives the head's outputs, for each micro-batch of the window in turn, after the last of them: while the step
    /// still runs on a CPU, at its end on a GPU.
    fn outputs(&mut self, micro_batch: u32, outputs: Outputs<'_>);
}

/// The head's outputs for the tokens of a micro-batch, by channel.
#[derive(Clone, Copy, Debug)]
pub struct Outputs<'a> {
    pub(crate) channels: Channels,
    /// Distance from one channel to the next, in elements.
    pub(crate) stride: usize,
    pub(crate) tokens: usize,
    pub(crate) values: &'a [f32],
}

impl<'a> Outputs<'a> {
    /// One number per token.
    pub fn get(&self, channel: Channel) -> &'a [f32] {
        let index = self.channels.index(channel);
        let start = index.unwrap_or_else(|| panic!("the model has no {channel:?}")) * self.stride;
        &self.values[start..start + self.tokens]
    }

    pub fn log_probs(&self) -> &'a [f32] {
        self.get(Channel::LogProb)
    }
}

/// The coefficients of a micro-batch, by channel. They are zero until written.
#[derive(Debug)]
pub struct Coefficients<'a> {
    pub(crate) channels: Channels,
    pub(crate) stride: usize,
    pub(crate) tokens: usize,
    pub(crate) values: &'a mut [f32],
}

impl<'a> Coefficients<'a> {
    /// Coefficients outside of a training step, for example to evaluate an objective without training. `values` has
    /// `tokens` numbers for each channel.
    pub fn new(channels: Channels, tokens: usize, values: &'a mut [f32]) -> Coefficients<'a> {
        assert_eq!(values.len(), channels.count() * tokens, "one number per token and channel");
        Coefficients { channels, stride: tokens, tokens, values }
    }

    /// One number per token.
    pub fn get(&mut self, channel: Channel) -> &mut [f32] {
        let index = self.channels.index(channel);
        let start = index.unwrap_or_else(|| panic!("the model has no {channel:?}")) * self.stride;
        &mut self.values[start..start + self.tokens]
    }

    pub fn log_probs(&mut self) -> &mut [f32] {
        self.get(Channel::LogProb)
    }
}

/// New tokens of the sequences being generated: packed, \[T\] each, at least one per sequence. Prefill has many per
/// sequence, decode has one.
#[derive(Clone, Copy, Debug)]
pub struct DecodeBatch<'a> {
    pub tokens: &'a [u32],
    /// The position of each token in its sequence; the KV cache holds all earlier ones.
    pub positions: &'a [u32],
    /// \[documents + 1\]
    pub cu_seqlens: &'a [u32],
    /// Each sequence's pages of the KV cache, in the order of its tokens: \[documents, N\], where N is the plan's
    /// `GenerationBounds::pages_per_doc`. Entries after the last token are ignored. Sequences may share pages, except
    /// those that new tokens are stored in.
    pub page_tables: &'a [u32],
    /// Pages to copy before the tokens run, one after the other, each as (from, to): for sequences that share a prompt
    /// which does not end where a page ends.
    pub page_copies: &'a [(u32, u32)],
}

/// Decides which tokens run next and samples new ones. Called from the compute lane.
pub trait DecodeDriver {
    /// The next tokens to run; `None` ends the phase.
    fn next_batch(&mut self) -> Option<DecodeBatch<'_>>;

    /// Samples the next token of sequence `doc` of the batch from its logits, which are not divided by the model's
    /// temperature and must not be changed.
    fn sample(&mut self, doc: usize, logits: &[f32]) -> u32;

    /// Receives the log-probability, at the model's temperature, of the token sampled for each sequence.
    fn sampled(&mut self, log_probs: &[f32]);
}

/// The driver of a phase.
pub(crate) enum PhaseDriver<'a> {
    Step(&'a mut dyn StepDriver),
    Decode(&'a mut dyn DecodeDriver),
}

/// The optimizer's hyperparameters for one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateSettings {
    /// The step, counted from 1: the exponent of the bias corrections.
    pub t: u64,
    pub lr: f64,
    pub rule: UpdateRule,
    pub weight_decay: f64,
    /// Gradients are clipped to this global norm.
    pub max_norm: Option<f64>,
}

/// How a parameter is updated from its gradient and its states. The plan must have the states of the same optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UpdateRule {
    AdamW { betas: (f64, f64), eps: f64 },
    Sgd { momentum: f64, nesterov: bool },
    Lion { betas: (f64, f64) },
}

impl UpdateRule {
    /// The optimizer states that the rule needs.
    pub fn spec(&self) -> OptimizerSpec {
        match *self {
            UpdateRule::AdamW { .. } => OptimizerSpec::ADAMW,
            UpdateRule::Sgd { momentum: 0.0, .. } => OptimizerSpec::SGD,
            UpdateRule::Sgd { .. } => OptimizerSpec::SGD_MOMENTUM,
            UpdateRule::Lion { .. } => OptimizerSpec::LION,
        }
    }
}

impl UpdateSettings {
    /// A placeholder before the first step.
    pub(crate) const NONE: UpdateSettings = UpdateSettings {
        t: 0,
        lr: 0.0,
        rule: UpdateRule::Sgd { momentum: 0.0, nesterov: false },
        weight_decay: 0.0,
        max_norm: None,
    };
}

/// The result of a training step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// The global gradient norm before clipping.
    pub grad_norm: f64,
    /// Whether the update was skipped because the gradient was not finite.
    pub skipped: bool,
}
