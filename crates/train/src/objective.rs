//! Training objectives. An objective gives one coefficient per token and output channel: the derivative of the loss
//! with respect to that output, such as the log-probability of the target. The engine computes all gradients from
//! them.

use std::borrow::Cow;

use lockstep_data::Batch;
use lockstep_engine::{
    Coefficients, Engine, EngineError, Exchanged, MicroBatch, Outputs, StepDriver, StepReport, UpdateSettings,
};
use lockstep_plan::ModelId;
use lockstep_shape::Channels;

use crate::step_meter::StepMeter;

/// Counts over all micro-batches of a step on all ranks. They are the denominators of the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepCounts {
    /// Tokens that count in the loss.
    pub supervised: u64,
    /// All tokens.
    pub tokens: u64,
    /// Preference pairs; 0 for other data.
    pub pairs: u64,
    /// Tokens of chosen completions that count in the loss; 0 for other data.
    pub supervised_chosen: u64,
}

/// A training objective. It does not deal with ranks, memory or schedules.
///
/// Each step calls `begin` first, then `coefficients` and `outputs` for every micro-batch, then `metrics` with sums
/// over all ranks. An objective that compares the trained model with another one, or that needs the outputs of the
/// whole step before it can compute a coefficient, names the models that score the step (`scorers`): then `scored` is
/// called for every one of them and every micro-batch, and `scores_done` with numbers of all ranks, before the first
/// `coefficients`. Micro-batches come in order, and results must not depend on how rows are divided into them. Avoid
/// allocations between `begin` and `metrics`, so that the step does not allocate.
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

    /// The models that score all micro-batches of the step, with their weights before the step and without dropout,
    /// before the first call of `coefficients`. If the trained model is one of them, coefficients are known ahead.
    fn scorers(&self) -> &[ModelId] {
        &[]
    }

    /// Called at the start of a step.
    fn begin(&mut self, counts: &StepCounts);

    /// Called with the outputs of one of the `scorers` for micro-batch `index` of the step.
    fn scored(&mut self, _model: ModelId, _index: usize, _batch: &Batch, _outputs: Outputs<'_>) {}

    /// Whether ranks exchange numbers after scoring: `score_exchange` and `scores_done` are then about all ranks.
    fn exchanges_scores(&self) -> bool {
        false
    }

    /// The numbers of this rank that all ranks get after scoring.
    fn score_exchange(&self) -> Vec<f64> {
        Vec::new()
    }

    /// Called after scoring, with the `score_exchange` of every rank in rank order, and which of them is this rank's.
    fn scores_done(&mut self, _of_ranks: &[Vec<f64>], _own: usize) {}

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

    /// The values whose maximum over all ranks the metrics need. The number of values must always be the same.
    fn maxima(&self) -> Vec<f64> {
        Vec::new()
    }

    /// The metrics of the step, from `sums` and `maxima` over all ranks.
    fn metrics(&self, sums: &[f64], maxima: &[f64]) -> Metrics;
}

/// The metrics of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Metrics {
    pub loss: f64,
    /// Additional metrics by name, for metrics.jsonl and TensorBoard.
    pub others: Vec<(Cow<'static, str>, f64)>,
}

/// Runs one optimizer step of `model` over the micro-batches of this rank, as many as the plan has. A collective call.
pub fn train_step(
    engine: &mut Engine,
    model: ModelId,
    objective: &mut dyn Objective,
    batches: &[Batch],
    counts: &StepCounts,
    updates: &UpdateSettings,
) -> Result<(StepReport, Metrics), EngineError> {
    let (report, metrics, _) = train_step_in_run(
        engine,
        model,
        objective,
        batches,
        counts,
        updates,
        &mut StepEnd { stop: &|| false, meter: None },
    )?;
    Ok((report, metrics))
}

/// What ranks exchange at the end of a step of a run, together with the losses, so that it needs no collective of its own.
pub(crate) struct StepEnd<'a> {
    /// Returns whether this rank was asked to stop.
    pub(crate) stop: &'a dyn Fn() -> bool,
    pub(crate) meter: Option<&'a mut StepMeter>,
}

/// Like [`train_step`], and also agrees on stopping and exchanges what the step has cost. The last value returned is
/// whether any rank was asked to stop, and is the same on all ranks.
pub(crate) fn train_step_in_run(
    engine: &mut Engine,
    model: ModelId,
    objective: &mut dyn Objective,
    batches: &[Batch],
    counts: &StepCounts,
    updates: &UpdateSettings,
    end: &mut StepEnd<'_>,
) -> Result<(StepReport, Metrics, bool), EngineError> {
    let input = &engine.plan().input;
    let planned = (input.coefficients_ahead, input.model(model).channels);
    let needed = (coefficients_ahead(objective, model), objective.channels());
    assert_eq!(planned, needed, "the plan was built for another objective");
    objective.begin(counts);
    score_window(engine, objective, batches)?;
    let report = engine.model_mut(model).train_step(&mut ObjectiveDriver { objective, batches }, updates)?;
    let mut sums = objective.sums();
    sums.push(f64::from(u8::from((end.stop)())));
    let own = end.meter.as_mut().map_or_else(Vec::new, |meter| meter.rank_numbers(engine));
    let Exchanged { mut sums, maxima, of_ranks } =
        engine.exchange("the loss", &sums, &objective.maxima(), &own)?;
    if let Some(meter) = &mut end.meter {
        meter.exchanged(&of_ranks);
    }
    let stops = sums.pop().is_some_and(|requests| requests > 0.0);
    Ok((report, objective.metrics(&sums, &maxima), stops))
}

/// Runs the score phases of an objective's scorers over all micro-batches.
pub(crate) fn score_window(
    engine: &mut Engine,
    objective: &mut dyn Objective,
    batches: &[Batch],
) -> Result<(), EngineError> {
    let scorers = objective.scorers().to_vec();
    if scorers.is_empty() {
        return Ok(());
    }
    for model in scorers {
        for (index, batch) in batches.iter().enumerate() {
            let scored = &mut |outputs: Outputs<'_>| objective.scored(model, index, batch, outputs);
            engine.model_mut(model).score(micro_batch(batch), scored)?;
        }
    }
    let exchanges = objective.exchanges_scores();
    let mine = objective.score_exchange();
    let of_ranks =
        if exchanges { engine.all_gather_f64("the scores of the step", &mine)? } else { vec![mine] };
    objective.scores_done(&of_ranks, if exchanges { engine.rank().0 as usize } else { 0 });
    Ok(())
}

/// Whether the coefficients of an objective that trains `model` are known before the head runs.
pub fn coefficients_ahead(objective: &dyn Objective, model: ModelId) -> bool {
    objective.coefficients_ahead() || objective.scorers().contains(&model)
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
        weights: &batch.weights,
        shared: &batch.shared,
    }
}
