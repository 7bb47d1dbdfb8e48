//! What is optimised. Every algorithm is coefficients: for each token, how the loss changes with the
//! log-probability of its target; the model does the rest.

use lockstep_data::Batch;
use lockstep_engine::{Driver, Engine, EngineError, MicroBatch, StepReport, Updates};
use lockstep_plan::ModelId;

/// What a step is over: all its micro-batches, on all ranks. Denominators come from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowCounts {
    /// Tokens that are trained on.
    pub supervised: u64,
    /// All tokens.
    pub tokens: u64,
}

/// An objective: short, and free of ranks, memory and schedules.
///
/// In each step `begin` comes first; then for every micro-batch `coefficients` and `outputs`; then, from sums
/// over all ranks, `metrics`. Batches are called in their order, and nothing may depend on how rows were cut
/// into them. Between `begin` and `metrics` nothing should allocate, so that the step does not.
pub trait Objective {
    /// Whether coefficients are known before the head has run. Its forward and backward are then one pass,
    /// which saves one of its products.
    fn coefficients_ahead(&self) -> bool {
        false
    }

    /// A step begins.
    fn begin(&mut self, counts: &WindowCounts);

    /// Writes ∂L/∂log p of every target of the batch. `log_probs` is there unless coefficients are known
    /// ahead. Targets whose weight is zero must get zero.
    fn coefficients(&mut self, batch: &Batch, log_probs: Option<&[f32]>, out: &mut [f32]);

    /// Sees the log-probabilities of the batch's targets.
    fn outputs(&mut self, batch: &Batch, log_probs: &[f32]);

    /// What is to be summed over all ranks: always as many numbers.
    fn sums(&self) -> Vec<f64>;

    /// What the step is told as, from the sums over all ranks.
    fn metrics(&self, sums: &[f64]) -> Metrics;
}

/// What a step is told as.
#[derive(Clone, Debug, PartialEq)]
pub struct Metrics {
    pub loss: f64,
    /// Further numbers by name, for metrics.jsonl and TensorBoard.
    pub others: Vec<(&'static str, f64)>,
}

/// One optimizer step of an objective over a window of micro-batches, as many as the plan has. All ranks call
/// it alike, each with its own batches.
pub fn train_step(
    engine: &mut Engine,
    objective: &mut dyn Objective,
    window: &[Batch],
    counts: &WindowCounts,
    updates: &Updates,
) -> Result<(StepReport, Metrics), EngineError> {
    let (report, metrics, _) = train_step_asking(engine, objective, window, counts, updates, &|| false)?;
    Ok((report, metrics))
}

/// As [`train_step`]. `stop` tells at the end of the step whether this rank was asked to stop. The last value says whether any rank was, which all ranks
/// learn alike: the request is summed with the losses, so it costs no exchange of its own.
pub(crate) fn train_step_asking(
    engine: &mut Engine,
    objective: &mut dyn Objective,
    window: &[Batch],
    counts: &WindowCounts,
    updates: &Updates,
    stop: &dyn Fn() -> bool,
) -> Result<(StepReport, Metrics, bool), EngineError> {
    let ahead = engine.plan().input.coefficients_ahead;
    assert_eq!(ahead, objective.coefficients_ahead(), "the plan was made for an objective of the other kind");
    objective.begin(counts);
    let report = engine.model_mut(ModelId::FIRST).train_step(&mut Driven { objective, window }, updates)?;
    let mut sums = objective.sums();
    sums.push(f64::from(u8::from(stop())));
    let mut sums = engine.sum_all("the loss", &sums)?;
    let stops = sums.pop().is_some_and(|asked| asked > 0.0);
    Ok((report, objective.metrics(&sums), stops))
}

/// The engine's side of an objective.
struct Driven<'a> {
    objective: &'a mut dyn Objective,
    window: &'a [Batch],
}

impl Driver for Driven<'_> {
    fn batch(&self, micro: u32) -> MicroBatch<'_> {
        micro_batch(&self.window[micro as usize])
    }

    fn coefficients(&mut self, micro: u32, log_probs: Option<&[f32]>, out: &mut [f32]) {
        self.objective.coefficients(&self.window[micro as usize], log_probs, out);
    }

    fn outputs(&mut self, micro: u32, log_probs: &[f32]) {
        self.objective.outputs(&self.window[micro as usize], log_probs);
    }
}

pub(crate) fn micro_batch(batch: &Batch) -> MicroBatch<'_> {
    MicroBatch {
        tokens: &batch.tokens,
        targets: &batch.targets,
        positions: &batch.positions,
        cu_seqlens: &batch.cu_seqlens,
        samples: &batch.samples,
    }
}
