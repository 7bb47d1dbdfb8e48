//! Evaluation: the mean loss over all supervised tokens of a dataset, computed by all ranks, and the best result so
//! far.

use std::time::Instant;

use lockstep_ckpt::ModelFolder;
use lockstep_config::{EvalMetric, ModelSource, RunConfig};
use lockstep_data::{Batch, Dataset};
use lockstep_device::{Device, Machine};
use lockstep_engine::Engine;
use lockstep_observe::EvalRecord;
use lockstep_plan::{BatchBounds, ModelId};

use crate::chat::chat_encoder;
use crate::data_spec::prepare_eval;
use crate::error::TrainError;
use crate::inference::Inference;
use crate::objective::micro_batch;
use crate::save;
use crate::setup::{device_memory, load_tokenizer, model_shape, num_threads};
use crate::sft::add_weighted;

/// Evaluates a dataset. Rows are used in order, so that every evaluation sums in the same order.
pub(crate) struct Evaluator<'a> {
    dataset: &'a Dataset,
    /// Rows per rank and micro-batch.
    rows: usize,
    world: usize,
    batch: Batch,
}

impl<'a> Evaluator<'a> {
    pub(crate) fn new(config: &RunConfig, dataset: &'a Dataset) -> Evaluator<'a> {
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
        step: u64,
        epoch: f64,
    ) -> Result<EvalRecord, TrainError> {
        let start = Instant::now();
        let all: Vec<u32> = (0..self.dataset.num_rows() as u32).collect();
        let rounds = all.len().div_ceil(self.rows * self.world);
        let mut sum = 0.0;
        for round in 0..rounds {
            // A rank without rows runs an empty batch: other ranks may need its parameters.
            let mine = all.chunks(self.rows).nth(round * self.world + engine.rank().0 as usize);
            self.batch.fill(self.dataset, mine.unwrap_or(&[]))?;
            let batch = &self.batch;
            engine.model_mut(ModelId::FIRST).score(micro_batch(batch), &mut |outputs| {
                add_weighted(&mut sum, batch, outputs.log_probs())
            })?;
        }
        let [sum] = engine.all_reduce_sum("an evaluation", [sum])?;
        let tokens: u64 = all.iter().map(|row| self.dataset.row_supervised(*row as usize)).sum();
        let seconds = start.elapsed().as_secs_f64();
        Ok(EvalRecord { step, epoch, loss: -sum / tokens as f64, tokens, seconds })
    }
}

/// Evaluates the configuration's model folder on its evaluation data.
pub fn evaluate(config: &RunConfig, device: Device) -> Result<EvalRecord, TrainError> {
    let ModelSource::Folder(path) = &config.model.source else {
        return Err(TrainError::NoFolder);
    };
    let mut tokenizer = load_tokenizer(config)?;
    let shape = model_shape(config, &tokenizer)?;
    let folder = ModelFolder::open(path)?;
    save::check_weights(&folder, &shape)?;
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
    save::load_weights(&mut engine, &folder)?;
    Evaluator::new(config, &dataset).evaluate(&mut engine, 0, 0.0)
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
        };
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
        let record = |step, loss| EvalRecord { step, epoch: 0.0, loss, tokens: 1, seconds: 0.0 };
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
