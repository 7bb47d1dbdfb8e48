//! The state of the training loop between steps: the data order, the learning-rate schedule and the loss scaler, and
//! when to evaluate and save.

use std::path::Path;
use std::sync::Arc;

use lockstep_ckpt::DataCursor;
use lockstep_config::{EvalStrategy, Precision, RunConfig, SaveStrategy};
use lockstep_core::Step;
use lockstep_data::{Dataset, SampleOrder};
use lockstep_engine::{Engine, StepReport, UpdateSettings};
use lockstep_observe::StepRecord;
use lockstep_plan::ModelId;

use crate::bad_step::BadStep;
use crate::error::TrainError;
use crate::learner::{Learner, StepWork};
use crate::lr_schedule::LrSchedule;
use crate::objective::{Metrics, StepEnd, train_step_in_run};
use crate::optimizer::update_rule;
use crate::position::Position;
use crate::rollout::schedule::RolloutSchedule;
use crate::scaler::{LossScaler, ScaleState};
use crate::step_meter::StepMeter;
use crate::stop::StopRequest;

/// What the training loop keeps between steps, besides the engine and the position.
pub(crate) struct TrainState<'a> {
    pub(crate) config: &'a RunConfig,
    /// The order of the data set's rows: rows of a step, or prompts of a rollout.
    pub(crate) order: Arc<SampleOrder>,
    /// Optimizer steps that use the rows of one step of `order`: more than one with rollouts.
    steps_per_draw: u64,
    schedule: LrSchedule,
    pub(crate) total_steps: u64,
    pub(crate) scaler: Option<LossScaler>,
    pub(crate) last_bad: Option<BadStep>,
}

/// The result of one step.
pub(crate) struct StepOutcome {
    pub(crate) record: StepRecord,
    /// What to report to the user.
    pub(crate) notes: Vec<String>,
    /// Whether any rank was asked to stop. All ranks learn this in the same step.
    pub(crate) stops: bool,
}

impl<'a> TrainState<'a> {
    pub(crate) fn new(config: &'a RunConfig, dataset: &Dataset) -> Result<TrainState<'a>, TrainError> {
        let batch = &config.batch;
        let rollouts = config.algorithm.algorithm().generates().then(|| RolloutSchedule::of(config));
        let order = SampleOrder::new(
            batch.data_seed,
            dataset.num_rows(),
            rows_per_draw(config) as usize,
            // A rollout always has the same number of prompts.
            batch.dataloader_drop_last || rollouts.is_some(),
            config.data.shuffle,
        )?;
        let steps_per_draw = rollouts.map_or(1, |schedule| schedule.steps());
        let draws = (batch.num_train_epochs * order.steps_per_epoch() as f64).ceil() as u64;
        let total_steps = batch.max_steps.unwrap_or(draws * steps_per_draw);
        let schedule = LrSchedule::new(config, total_steps);
        let scaler = match config.precision {
            Precision::F16(scaling) => Some(LossScaler::new(scaling)),
            Precision::Auto | Precision::F32 | Precision::Bf16 => None,
        };
        let order = Arc::new(order);
        Ok(TrainState { config, order, steps_per_draw, schedule, total_steps, scaler, last_bad: None })
    }

    /// The number of epochs completed after `step` steps, as a fraction.
    pub(crate) fn epoch(&self, step: u64) -> f64 {
        step as f64 / (self.order.steps_per_epoch() * self.steps_per_draw) as f64
    }

    /// The state of the loss scaler, in fp16.
    pub(crate) fn scale_state(&self) -> Option<ScaleState> {
        self.scaler.map(|scaler| scaler.state)
    }

    fn ends_epoch(&self, step: u64) -> bool {
        step.is_multiple_of(self.order.steps_per_epoch() * self.steps_per_draw) || step == self.total_steps
    }

    pub(crate) fn evaluates_after(&self, step: u64) -> bool {
        match self.config.eval.when {
            EvalStrategy::No => false,
            EvalStrategy::Steps(every) => step.is_multiple_of(every),
            EvalStrategy::Epoch => self.ends_epoch(step),
        }
    }

    /// Whether the best checkpoint is kept regardless of `save_total_limit`.
    fn keeps_best(&self) -> bool {
        self.config.eval.load_best_model_at_end || self.config.output.save == SaveStrategy::Best
    }

    /// Removes checkpoints beyond `save_total_limit`.
    pub(crate) fn retain(&self, checkpoints: &Path, position: &Position) -> Result<(), TrainError> {
        if let Some(keep) = self.config.output.save_total_limit {
            let best = position.best.filter(|_| self.keeps_best()).map(|best| Step(best.step));
            lockstep_ckpt::retain(checkpoints, keep.max(1) as usize, best)?;
        }
        Ok(())
    }

    /// Whether to save a checkpoint after `step`. `improved`: the evaluation after it was the best so far.
    pub(crate) fn saves_after(&self, step: u64, improved: bool) -> bool {
        let due = match self.config.output.save {
            SaveStrategy::No | SaveStrategy::Best => false,
            SaveStrategy::Steps(every) => step.is_multiple_of(every) || step == self.total_steps,
            SaveStrategy::Epoch => self.ends_epoch(step),
        };
        due || improved && self.keeps_best()
    }

    /// The position in the data that a checkpoint records.
    pub(crate) fn cursor(&self, dataset: &Dataset) -> DataCursor {
        DataCursor {
            seed: self.config.batch.data_seed,
            next_step: 0,
            rows_per_step: rows_per_draw(self.config),
            num_rows: dataset.num_rows() as u64,
            fingerprint: dataset.fingerprint(),
        }
    }

    /// Runs one optimizer step of every trained model: forward, objective, backward, update. `meter`
    /// began when the loop began to wait for the batches.
    pub(crate) fn step(
        &mut self,
        engine: &mut Engine,
        learner: &mut dyn Learner,
        work: &StepWork,
        meter: &mut StepMeter,
        stop: &StopRequest,
        position: &mut Position,
    ) -> Result<StepOutcome, TrainError> {
        let batches = &work.batches;
        assert_eq!(position.step, batches.step, "the batches belong to this step");
        let updates = self.updates(position);
        let loss_scale = position.scale.map(|scale| scale.scale);
        if let Some(scale) = loss_scale {
            engine.set_loss_scale(scale);
        }
        let results = self.train_models(engine, learner, work, &updates, (meter, stop))?;
        position.step += 1;
        position.tokens_total += batches.tokens;
        let ModelResults { report, skipped_model, metrics, stops } = results;
        let (loss, rows) = (metrics.loss, &batches.rows);
        if !report.skipped {
            self.applied(position, loss);
        }
        let warning = match report.skipped {
            true => Some(self.skipped(engine, skipped_model, position, &report, loss, rows)?),
            false if !loss.is_finite() => Some(self.bad_loss(position, &report, loss, rows)?),
            false => None,
        };
        let seconds = meter.times.start.elapsed().as_secs_f64();
        let record = StepRecord {
            step: position.step,
            epoch: self.epoch(position.step),
            loss,
            grad_norm: report.grad_norm,
            learning_rate: updates.lr,
            tokens: batches.supervised,
            tokens_total: position.tokens_total,
            tokens_per_second: batches.tokens as f64 / seconds,
            step_seconds: seconds,
            skipped: report.skipped,
            loss_scale,
            others: metrics.others.into_iter().chain(work.seconds.iter().cloned()).collect(),
            cost: meter.cost(batches.tokens, seconds),
        };
        Ok(StepOutcome { record, notes: warning.into_iter().collect(), stops })
    }

    /// The optimizer's hyperparameters for the next step.
    fn updates(&self, position: &Position) -> UpdateSettings {
        let optim = &self.config.optim;
        UpdateSettings {
            t: position.updates + 1,
            // As in PyTorch trainers, a skipped step does not advance the schedule.
            lr: self.schedule.at(position.updates),
            rule: update_rule(optim),
            weight_decay: optim.weight_decay,
            max_norm: optim.max_grad_norm,
        }
    }

    /// Trains all models of the run on the same batches, one after the other.
    fn train_models(
        &self,
        engine: &mut Engine,
        learner: &mut dyn Learner,
        work: &StepWork,
        updates: &UpdateSettings,
        (meter, stop): (&mut StepMeter, &StopRequest),
    ) -> Result<ModelResults, TrainError> {
        let counts = work.counts();
        let mut total: Option<ModelResults> = None;
        for model in learner.trained().to_vec() {
            let updates = UpdateSettings { lr: updates.lr * learner.learning_rate_factor(model), ..*updates };
            let (report, metrics, stops) = train_step_in_run(
                engine,
                model,
                learner.objective(model),
                work.micro_batches(model),
                &counts,
                &updates,
                &mut StepEnd { stop: &|| stop.is_raised(), meter: Some(&mut *meter) },
            )?;
            let one = ModelResults { report, skipped_model: model, metrics, stops };
            total = Some(match total {
                None => one,
                Some(first) => first.with(one),
            });
        }
        Ok(total.expect("a run trains a model"))
    }
}

/// The results of a step of one model, or of several.
struct ModelResults {
    /// The first model's gradient norm, and whether any model's update was skipped.
    report: StepReport,
    /// The first model whose update was skipped, if any was.
    skipped_model: ModelId,
    metrics: Metrics,
    stops: bool,
}

impl ModelResults {
    /// Adds the results of another model: losses add up, and a skipped update of one is a skipped step.
    fn with(mut self, other: ModelResults) -> ModelResults {
        if other.report.skipped && !self.report.skipped {
            self.skipped_model = other.skipped_model;
        }
        self.report.skipped |= other.report.skipped;
        self.metrics.loss += other.metrics.loss;
        self.metrics.others.extend(other.metrics.others);
        self.metrics.others.push(("value/grad_norm".into(), other.report.grad_norm));
        self.stops |= other.stops;
        self
    }
}

/// Rows of the data set per step, or prompts per rollout, over all ranks.
fn rows_per_draw(config: &RunConfig) -> u64 {
    match config.algorithm.algorithm().generates() {
        true => RolloutSchedule::of(config).prompts() as u64,
        false => config.global_batch_rows(),
    }
}
