//! What is optimised. Every algorithm is coefficients: for each token, how the loss changes with what the head says of it,
//! the log-probability of its target for one; the model does the rest.

use lockstep_data::Batch;
use lockstep_engine::{
    Coefficients, Engine, EngineError, MicroBatch, Outputs, StepDriver, StepReport, UpdateSettings,
};
use lockstep_plan::{ModelId, ObjectiveNeeds};
use lockstep_shape::Channels;

/// The model that is trained.
const TRAINED: ModelId = ModelId::FIRST;

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
/// over all ranks, `metrics`. An objective that needs the whole window before it can give a coefficient sees its scores
/// first (`sees_window`): `scored` for every micro-batch, then, from sums over all ranks, `window`. Batches are called in their order, and nothing may depend on how rows were cut
/// into them. Between `begin` and `metrics` nothing should allocate, so that the step does not.
pub trait Objective {
    /// Whether coefficients are known before the head has run. Its forward and backward are then one pass,
    /// which saves one of its products.
    fn coefficients_ahead(&self) -> bool {
        false
    }

    /// What it needs of every token.
    fn channels(&self) -> Channels {
        Channels::LOG_PROB
    }

    /// Whether the whole window is scored, with the weights before the step and without dropout, before coefficients
    /// are asked for. These are then known ahead.
    fn sees_window(&self) -> bool {
        false
    }

    /// A step begins.
    fn begin(&mut self, counts: &WindowCounts);

    /// Sees the scores of a micro-batch of the window, `index` of them having come before.
    fn scored(&mut self, _index: usize, _batch: &Batch, _outputs: Outputs<'_>) {}

    /// What is to be summed over all ranks once the window is scored: always as many numbers.
    fn window_sums(&self) -> Vec<f64> {
        Vec::new()
    }

    /// The window is scored; the sums are over all ranks.
    fn window(&mut self, _sums: &[f64]) {}

    /// Writes the derivative of the loss by every output of every token of the batch, the `index`-th of its window.
    /// `outputs` are there unless coefficients are known ahead. Tokens whose weight is zero must get zero.
    fn coefficients(
        &mut self,
        index: usize,
        batch: &Batch,
        outputs: Option<Outputs<'_>>,
        out: &mut Coefficients<'_>,
    );

    /// Sees what the head said of the batch's tokens.
    fn outputs(&mut self, batch: &Batch, outputs: Outputs<'_>);

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
    updates: &UpdateSettings,
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
    updates: &UpdateSettings,
    stop: &dyn Fn() -> bool,
) -> Result<(StepReport, Metrics, bool), EngineError> {
    let input = &engine.plan().input;
    let planned = (input.coefficients_ahead, input.model(TRAINED).channels);
    let needs = objective_needs(objective);
    assert_eq!(
        planned,
        (needs.coefficients_ahead, needs.channels),
        "the plan was made for another objective"
    );
    objective.begin(counts);
    if objective.sees_window() {
        for (index, batch) in window.iter().enumerate() {
            let scored = &mut |outputs: Outputs<'_>| objective.scored(index, batch, outputs);
            engine.model_mut(TRAINED).score(micro_batch(batch), scored)?;
        }
        let sums = engine.all_reduce_sum_slice("the window's scores", &objective.window_sums())?;
        objective.window(&sums);
    }
    let report = engine.model_mut(TRAINED).train_step(&mut Driven { objective, window }, updates)?;
    let mut sums = objective.sums();
    sums.push(f64::from(u8::from(stop())));
    let mut sums = engine.all_reduce_sum_slice("the loss", &sums)?;
    let stops = sums.pop().is_some_and(|asked| asked > 0.0);
    Ok((report, objective.metrics(&sums), stops))
}

/// What a plan has to have for an objective.
pub fn objective_needs(objective: &dyn Objective) -> ObjectiveNeeds {
    ObjectiveNeeds {
        channels: objective.channels(),
        coefficients_ahead: objective.coefficients_ahead() || objective.sees_window(),
        scores: objective.sees_window(),
    }
}

/// The engine's side of an objective.
struct Driven<'a> {
    objective: &'a mut dyn Objective,
    window: &'a [Batch],
}

impl StepDriver for Driven<'_> {
    fn batch(&self, micro: u32) -> MicroBatch<'_> {
        micro_batch(&self.window[micro as usize])
    }

    fn coefficients(&mut self, micro: u32, outputs: Option<Outputs<'_>>, out: &mut Coefficients<'_>) {
        let index = micro as usize;
        self.objective.coefficients(index, &self.window[index], outputs, out);
    }

    fn outputs(&mut self, micro: u32, outputs: Outputs<'_>) {
        self.objective.outputs(&self.window[micro as usize], outputs);
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
