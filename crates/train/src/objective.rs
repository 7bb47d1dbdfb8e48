//! Training objectives. An objective gives one coefficient per token and output channel: the derivative of the loss
//! with respect to that output, such as the log-probability of the target. The engine computes all gradients from
//! them.

use lockstep_data::Batch;
use lockstep_engine::{
    Coefficients, Engine, EngineError, MicroBatch, Outputs, StepDriver, StepReport, UpdateSettings,
};
use lockstep_plan::{ModelId, ObjectiveNeeds};
use lockstep_shape::Channels;

/// The model that is trained.
const TRAINED: ModelId = ModelId::FIRST;

/// Token counts over all micro-batches of a step on all ranks. They are the denominators of the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCounts {
    /// Tokens that count in the loss.
    pub supervised: u64,
    /// All tokens.
    pub tokens: u64,
}

/// A training objective. It does not deal with ranks, memory or schedules.
///
/// Each step calls `begin` first, then `coefficients` and `outputs` for every micro-batch, then `metrics` with sums
/// over all ranks. An objective that needs the outputs of the whole step before it can compute a coefficient sets
/// `needs_scores`: then `scored` is called for every micro-batch, and `scores_done` with sums over all ranks, before
/// the first `coefficients`. Micro-batches come in order, and results must not depend on how rows are divided into
/// them. Avoid allocations between `begin` and `metrics`, so that the step does not allocate.
pub trait Objective {
    /// Whether coefficients are known before the head has run. Its forward and backward are then one pass, which saves
    /// one of its matmuls.
    fn coefficients_ahead(&self) -> bool {
        false
    }

    /// The outputs that the objective needs for every token.
    fn channels(&self) -> Channels {
        Channels::LOG_PROB
    }

    /// Whether to score all micro-batches of the step, with the weights before the step and without dropout, before the
    /// first call of `coefficients`. Coefficients are then known ahead.
    fn needs_scores(&self) -> bool {
        false
    }

    /// Called at the start of a step.
    fn begin(&mut self, counts: &StepCounts);

    /// Called with the scores of micro-batch `index` of the step, if `needs_scores`.
    fn scored(&mut self, _index: usize, _batch: &Batch, _outputs: Outputs<'_>) {}

    /// The values to sum over all ranks after scoring. The number of values must always be the same.
    fn score_sums(&self) -> Vec<f64> {
        Vec::new()
    }

    /// Called after scoring, with `score_sums` summed over all ranks.
    fn scores_done(&mut self, _sums: &[f64]) {}

    /// Writes the derivative of the loss with respect to every output of every token of micro-batch `index`. `outputs`
    /// is `None` if coefficients are known ahead. Tokens with weight zero must get zero.
    fn coefficients(
        &mut self,
        index: usize,
        batch: &Batch,
        outputs: Option<Outputs<'_>>,
        out: &mut Coefficients<'_>,
    );

    /// Called with the head's outputs for a micro-batch.
    fn outputs(&mut self, batch: &Batch, outputs: Outputs<'_>);

    /// The values to sum over all ranks at the end of the step. The number of values must always be the same.
    fn sums(&self) -> Vec<f64>;

    /// The metrics of the step, from `sums` summed over all ranks.
    fn metrics(&self, sums: &[f64]) -> Metrics;
}

/// The metrics of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Metrics {
    pub loss: f64,
    /// Additional metrics by name, for metrics.jsonl and TensorBoard.
    pub others: Vec<(&'static str, f64)>,
}

/// Runs one optimizer step over the micro-batches of this rank, as many as the plan has. A collective call.
pub fn train_step(
    engine: &mut Engine,
    objective: &mut dyn Objective,
    batches: &[Batch],
    counts: &StepCounts,
    updates: &UpdateSettings,
) -> Result<(StepReport, Metrics), EngineError> {
    let (report, metrics, _) = train_step_with_stop(engine, objective, batches, counts, updates, &|| false)?;
    Ok((report, metrics))
}

/// Like [`train_step`], and also agrees on stopping. `stop` is called at the end of the step and returns whether this
/// rank was asked to stop. The last value returned is whether any rank was, and is the same on all ranks: the requests
/// are summed together with the losses, so they need no collective of their own.
pub(crate) fn train_step_with_stop(
    engine: &mut Engine,
    objective: &mut dyn Objective,
    batches: &[Batch],
    counts: &StepCounts,
    updates: &UpdateSettings,
    stop: &dyn Fn() -> bool,
) -> Result<(StepReport, Metrics, bool), EngineError> {
    let input = &engine.plan().input;
    let planned = (input.coefficients_ahead, input.model(TRAINED).channels);
    let needs = objective_needs(objective);
    assert_eq!(
        planned,
        (needs.coefficients_ahead, needs.channels),
        "the plan was built for another objective"
    );
    objective.begin(counts);
    if objective.needs_scores() {
        for (index, batch) in batches.iter().enumerate() {
            let scored = &mut |outputs: Outputs<'_>| objective.scored(index, batch, outputs);
            engine.model_mut(TRAINED).score(micro_batch(batch), scored)?;
        }
        let sums = engine.all_reduce_sum_slice("the scores of the step", &objective.score_sums())?;
        objective.scores_done(&sums);
    }
    let report =
        engine.model_mut(TRAINED).train_step(&mut ObjectiveDriver { objective, batches }, updates)?;
    let mut sums = objective.sums();
    sums.push(f64::from(u8::from(stop())));
    let mut sums = engine.all_reduce_sum_slice("the loss", &sums)?;
    let stops = sums.pop().is_some_and(|requests| requests > 0.0);
    Ok((report, objective.metrics(&sums), stops))
}

/// What the plan must provide for an objective.
pub fn objective_needs(objective: &dyn Objective) -> ObjectiveNeeds {
    ObjectiveNeeds {
        channels: objective.channels(),
        coefficients_ahead: objective.coefficients_ahead() || objective.needs_scores(),
        scores: objective.needs_scores(),
    }
}

/// Connects an objective to the engine.
struct ObjectiveDriver<'a> {
    objective: &'a mut dyn Objective,
    batches: &'a [Batch],
}

impl StepDriver for ObjectiveDriver<'_> {
    fn batch(&self, micro: u32) -> MicroBatch<'_> {
        micro_batch(&self.batches[micro as usize])
    }

    fn coefficients(&mut self, micro: u32, outputs: Option<Outputs<'_>>, out: &mut Coefficients<'_>) {
        let index = micro as usize;
        self.objective.coefficients(index, &self.batches[index], outputs, out);
    }

    fn outputs(&mut self, micro: u32, outputs: Outputs<'_>) {
        self.objective.outputs(&self.batches[micro as usize], outputs);
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
