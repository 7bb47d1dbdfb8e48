//! Evaluation on a data set by all ranks, and the best result so far.
//!
//! Text is measured by the mean loss over all supervised tokens, preference pairs by the objective itself: its loss and
//! metrics, without training.

use std::sync::Arc;
use std::time::Instant;

use lockstep_ckpt::ModelFolder;
use lockstep_config::{EvalMetric, ModelSource, RunConfig};
use lockstep_data::{Batch, Dataset};
use lockstep_device::{Device, Machine};
use lockstep_engine::{Coefficients, Engine, Outputs};
use lockstep_observe::EvalRecord;
use lockstep_plan::{BatchBounds, ModelId};

use crate::adapter;
use crate::algorithms::sft::{Sft, add_weighted};
use crate::chat::chat_encoder;
use crate::data_spec::prepare_eval;
use crate::error::TrainError;
use crate::inference::Inference;
use crate::objective::{Metrics, Objective, StepCounts, micro_batch, score_window};
use crate::save;
use crate::setup::{device_memory, load_tokenizer, model_shape, num_threads};

/// Evaluates a dataset. Rows are used in order, so that every evaluation sums in the same order.
pub(crate) struct Evaluator {
    dataset: Arc<Dataset>,
    /// Rows per rank and micro-batch.
    rows: usize,
    world: usize,
    batch: Batch,
}

impl Evaluator {
    pub(crate) fn new(config: &RunConfig, dataset: Arc<Dataset>) -> Evaluator {
        // The plan's buffers hold a training micro-batch. A token's log-probability does not depend on its batch.
        let trained = config.batch.per_device_train_batch_size;
        let rows = config.eval.per_device_batch_size.map_or(trained, |rows| rows.min(trained));
        let world = config.plan.world_size() as usize;
        Evaluator { dataset, rows: rows as usize, world, batch: Batch::default() }
    }

    /// Evaluates the model after `step` steps. A collective call.
    pub(crate) fn evaluate(
        &mut self,
        engine: &mut Engine,
        objective: &mut dyn Objective,
        step: u64,
        epoch: f64,
    ) -> Result<EvalRecord, TrainError> {
        let start = Instant::now();
        let record = match self.dataset.is_preference() {
            true => self.pairs(engine, objective)?,
            false => self.tokens(engine)?,
        };
        Ok(EvalRecord { step, epoch, seconds: start.elapsed().as_secs_f64(), ..record })
    }

    /// Fills the batch with this rank's rows of a round. A rank without rows runs an empty batch: other ranks may need
    /// its parameters. Returns all rows of the round.
    fn fill_round(&mut self, rank: usize, round: usize) -> Result<Vec<u32>, TrainError> {
        let (first, per_round) = (round * self.rows * self.world, self.rows * self.world);
        let end = (first + per_round).min(self.dataset.num_rows());
        let all: Vec<u32> = (first as u32..end as u32).collect();
        let mine = all.chunks(self.rows).nth(rank).unwrap_or(&[]);
        self.batch.fill(&self.dataset, mine)?;
        Ok(all)
    }

    fn rounds(&self) -> usize {
        self.dataset.num_rows().div_ceil(self.rows * self.world)
    }

    fn tokens(&mut self, engine: &mut Engine) -> Result<EvalRecord, TrainError> {
        let mut sum = 0.0;
        for round in 0..self.rounds() {
            self.fill_round(engine.rank().0 as usize, round)?;
            let batch = &self.batch;
            engine.model_mut(ModelId::FIRST).score(micro_batch(batch), &mut |outputs| {
                add_weighted(&mut sum, batch, outputs.log_probs())
            })?;
        }
        let [sum] = engine.all_reduce_sum("an evaluation", [sum])?;
        let tokens: u64 = (0..self.dataset.num_rows()).map(|row| self.dataset.row_supervised(row)).sum();
        let loss = Some(-sum / tokens as f64);
        Ok(EvalRecord { loss, tokens: Some(tokens), ..EvalRecord::default() })
    }

    /// Runs the objective on every pair. A round is a step of one micro-batch per rank; sums and extremes are over all
    /// rounds, so that the result does not depend on ranks and batch sizes.
    fn pairs(
        &mut self,
        engine: &mut Engine,
        objective: &mut dyn Objective,
    ) -> Result<EvalRecord, TrainError> {
        let (mut sums, mut maxima) = (Vec::new(), Vec::new());
        for round in 0..self.rounds() {
            let rows = self.fill_round(engine.rank().0 as usize, round)?;
            let (round_sums, round_maxima) = self.pair_round(engine, objective, &rows)?;
            combine(&mut sums, round_sums, |a, b| a + b);
            combine(&mut maxima, round_maxima, f64::max);
        }
        if sums.is_empty() {
            return Ok(EvalRecord::default());
        }
        let all: Vec<u32> = (0..self.dataset.num_rows() as u32).collect();
        objective.begin(&pair_counts(&self.dataset, &all));
        let Metrics { loss, others } = objective.metrics(&sums, &maxima);
        Ok(EvalRecord { loss: Some(loss), others, ..EvalRecord::default() })
    }

    /// The objective's sums and maxima of one round, over all ranks.
    fn pair_round(
        &mut self,
        engine: &mut Engine,
        objective: &mut dyn Objective,
        rows: &[u32],
    ) -> Result<(Vec<f64>, Vec<f64>), TrainError> {
        objective.begin(&pair_counts(&self.dataset, rows));
        score_window(engine, objective, std::slice::from_ref(&self.batch))?;
        let (batch, channels) = (&self.batch, objective.channels());
        let mut unused = vec![0.0; channels.count() * batch.num_tokens()];
        engine.model_mut(ModelId::FIRST).score(micro_batch(batch), &mut |outputs: Outputs<'_>| {
            let mut unused = Coefficients::new(channels, batch.num_tokens(), &mut unused);
            objective.coefficients(0, batch, Some(outputs), &mut unused);
            objective.outputs(batch, outputs);
        })?;
        Ok(engine.all_reduce_sums_and_maxima("an evaluation", &objective.sums(), &objective.maxima())?)
    }
}

/// Combines every value with that of another round.
fn combine(all: &mut Vec<f64>, round: Vec<f64>, with: impl Fn(f64, f64) -> f64) {
    match all.is_empty() {
        true => *all = round,
        false => all.iter_mut().zip(round).for_each(|(a, b)| *a = with(*a, b)),
    }
}

/// The counts of some rows of preference pairs.
fn pair_counts(dataset: &Dataset, rows: &[u32]) -> StepCounts {
    let rows = || rows.iter().map(|row| *row as usize);
    StepCounts {
        supervised: rows().map(|row| dataset.row_supervised(row)).sum(),
        tokens: rows().map(|row| dataset.row_tokens(row) as u64).sum(),
        pairs: rows().map(|row| dataset.row_docs(row).len() as u64 / 2).sum(),
        supervised_chosen: rows().map(|row| dataset.row_supervised_chosen(row)).sum(),
    }
}

/// Evaluates the configuration's model folder on its evaluation data.
pub fn evaluate(config: &RunConfig, device: Device) -> Result<EvalRecord, TrainError> {
    let ModelSource::Folder(path) = &config.model.source else {
        return Err(TrainError::NoFolder);
    };
    let mut tokenizer = load_tokenizer(config)?;
    let mut shape = model_shape(config, &tokenizer)?;
    let folder = ModelFolder::open(path)?;
    save::check_weights(&folder, &shape)?;
    shape.lora = adapter::configured(config, &shape)?;
    let chat = chat_encoder(config, &mut tokenizer)?;
    let dataset = prepare_eval(config, &tokenizer, chat.as_ref())?.ok_or(TrainError::NothingToEvaluate)?;
    let (rows, max_length) =
        (config.batch.per_device_train_batch_size as usize, config.data.max_length as usize);
    let machine = Machine { device, num_threads: num_threads(config) };
    let inference = Inference {
        shape: &shape,
        storage: lockstep_plan::storage(config.precision, device_memory(machine.into())),
        bounds: BatchBounds::of_rows(rows, max_length, true),
        machine,
        scores: true,
        slots: None,
    };
    let mut engine = inference.engine()?;
    save::load_weights(&mut engine, ModelId::FIRST, &folder, config.batch.seed)?;
    if let Some(adapter) = config.model.lora.as_ref().and_then(|lora| lora.folder.as_ref()) {
        adapter::load(&mut engine, ModelId::FIRST, adapter)?;
    }
    Evaluator::new(config, Arc::new(dataset)).evaluate(&mut engine, &mut Sft::default(), 0, 0.0)
}

/// The best evaluation so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BestEval {
    pub(crate) metric: f64,
    /// The step after which it was measured.
    pub(crate) step: u64,
}

impl BestEval {
    /// Replaces `best` with `found` if it is better. NaN is never better.
    pub(crate) fn update(best: &mut Option<BestEval>, found: &EvalRecord, config: &RunConfig) -> bool {
        let metric = match config.eval.metric {
            EvalMetric::Loss => found.loss,
            EvalMetric::Perplexity => found.perplexity(),
            EvalMetric::Accuracy => found.metric("accuracy").or_else(|| found.metric("rewards/accuracies")),
            EvalMetric::Reward => found.metric("reward"),
        }
        .unwrap_or(f64::NAN);
        let better = match best {
            None => !metric.is_nan(),
            Some(best) if config.eval.greater_is_better => metric > best.metric,
            Some(best) => metric < best.metric,
        };
        if better {
            *best = Some(BestEval { metric, step: found.step });
        }
        better
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_evaluation_follows_the_configured_metric() {
        let config = |more: &str| {
            let text = format!("model: tiny\noutput_dir: out\n{more}");
            lockstep_config::load(Some(lockstep_config::Source { name: "a", text: &text }), &[]).unwrap()
        };
        let record =
            |step, loss| EvalRecord { step, loss: Some(loss), tokens: Some(1), ..EvalRecord::default() };
        let best_of = |more: &str| {
            let mut best = None;
            let losses = [(1, f64::NAN), (2, 2.0), (3, 1.0), (4, 1.0), (5, 3.0), (6, f64::NAN)];
            let better =
                losses.map(|(step, loss)| BestEval::update(&mut best, &record(step, loss), &config(more)));
            (best.unwrap(), better)
        };
        let (best, better) = best_of("");
        assert_eq!((best.metric, best.step), (1.0, 3));
        assert_eq!(better, [false, true, true, false, false, false]);
        assert_eq!(best_of("greater_is_better: true\n").0.step, 5);
        assert_eq!(best_of("metric_for_best_model: perplexity\n").0.metric, 1f64.exp());
    }
}
