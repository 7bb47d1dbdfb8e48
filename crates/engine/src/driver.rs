//! What a step asks of its caller: batches and coefficients in, the head's outputs out.

use lockstep_plan::OptimizerSpec;
use lockstep_shape::{Channel, Channels};

/// One micro-batch in host memory: packed documents, \[T\] each, `cu_seqlens` \[documents + 1\].
#[derive(Clone, Copy, Debug)]
pub struct MicroBatch<'a> {
    pub tokens: &'a [u32],
    pub targets: &'a [u32],
    pub positions: &'a [u32],
    pub cu_seqlens: &'a [u32],
    /// Which sample of the data set each document is, \[documents\]: masks of dropout depend on it. May be
    /// empty where nothing is dropped.
    pub samples: &'a [u32],
}

/// The algorithm's side of a training step. Methods are called from the compute lane and must not
/// allocate if the step is to be free of allocation.
pub trait StepDriver {
    fn batch(&self, micro_batch: u32) -> MicroBatch<'_>;

    /// Writes the derivative of the loss by every output of every token. `outputs` are there when the plan runs the
    /// head's forward first (objectives whose coefficients depend on outputs).
    fn coefficients(&mut self, micro_batch: u32, outputs: Option<Outputs<'_>>, out: &mut Coefficients<'_>);

    /// Sees the outputs after the head has run.
    fn outputs(&mut self, micro_batch: u32, outputs: Outputs<'_>);
}

/// What a head said of the tokens of a micro-batch, by channel.
#[derive(Clone, Copy, Debug)]
pub struct Outputs<'a> {
    pub(crate) channels: Channels,
    /// Elements from one channel to the next.
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

/// The coefficients of a micro-batch, by channel: zero until they are written.
#[derive(Debug)]
pub struct Coefficients<'a> {
    pub(crate) channels: Channels,
    pub(crate) stride: usize,
    pub(crate) tokens: usize,
    pub(crate) values: &'a mut [f32],
}

impl Coefficients<'_> {
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

/// New tokens of growing documents: packed, \[T\] each, every document with at least one.
#[derive(Clone, Copy, Debug)]
pub struct DecodeBatch<'a> {
    pub tokens: &'a [u32],
    /// Where each stands in its document; the cache has all before it.
    pub positions: &'a [u32],
    /// \[documents + 1\]
    pub cu_seqlens: &'a [u32],
    /// Each document's slot in the cache. A slot whose document starts again at position 0 is new.
    pub slots: &'a [u32],
}

/// Decides what grows, and how. Called from the compute lane.
pub trait DecodeDriver {
    /// The next tokens to run; `None` ends the phase.
    fn next_batch(&mut self) -> Option<DecodeBatch<'_>>;

    /// Draws a token for document `doc` of the extension from its logits, which must stay as they are.
    fn sample(&mut self, doc: usize, logits: &[f32]) -> u32;

    /// The log-probability, at temperature 1, of what was drawn for each document.
    fn sampled(&mut self, log_probs: &[f32]);
}

/// Whom a phase works for.
pub(crate) enum PhaseDriver<'a> {
    Step(&'a mut dyn StepDriver),
    Decode(&'a mut dyn DecodeDriver),
}

/// The optimizer's numbers for one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateSettings {
    /// Counted from 1: the exponent of the bias corrections.
    pub t: u64,
    pub lr: f64,
    pub rule: UpdateRule,
    pub weight_decay: f64,
    /// Clips the global norm to this, if given.
    pub max_norm: Option<f64>,
}

/// How a parameter is updated from its gradient and its states. The plan has the states of the same optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UpdateRule {
    AdamW { betas: (f64, f64), eps: f64 },
    Sgd { momentum: f64, nesterov: bool },
    Lion { betas: (f64, f64) },
}

impl UpdateRule {
    /// The states that the rule needs.
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
    /// Before the first step.
    pub(crate) const NONE: UpdateSettings = UpdateSettings {
        t: 0,
        lr: 0.0,
        rule: UpdateRule::Sgd { momentum: 0.0, nesterov: false },
        weight_decay: 0.0,
        max_norm: None,
    };
}

/// What a step says of itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Before clipping.
    pub grad_norm: f64,
    /// The gradient was not finite, and nothing was updated.
    pub skipped: bool,
}
