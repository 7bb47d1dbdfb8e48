//! The state of the training loop between steps: the data order, the learning-rate schedule and the loss scaler, and
//! when to evaluate and save.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use lockstep_ckpt::DataCursor;
use lockstep_config::{EvalStrategy, Precision, RunConfig, SaveStrategy};
use lockstep_core::Step;
use lockstep_data::{Dataset, SampleOrder, StepBatches};
use lockstep_engine::{Engine, UpdateSettings};
use lockstep_observe::StepRecord;

use crate::bad_step::BadStep;
use crate::error::TrainError;
use crate::lr_schedule::LrSchedule;
use crate::objective::{Objective, StepCounts, train_step_with_stop};
use crate::optimizer::update_rule;
use crate::position::Position;
use crate::scaler::{LossScaler, ScaleState};
use crate::stop::StopRequest;

/// What the training loop keeps between steps, besides the engine and the position.
pub(crate) struct TrainState<'a> {
    pub(crate) config: &'a RunConfig,
    pub(crate) order: Arc<SampleOrder>,
    schedule: LrSchedule,
    pub(crate) total_steps: u64,
    pub(crate) scaler: Option<LossScaler>,
    pub(crate) last_bad: Option<BadStep>,
}

/// The result of one step.
pub(crate) struct StepOutcome {
    pub(crate) record: StepRecord,
    /// Additional metrics of the objective.
    pub(crate) others: Vec<(&'static str, f64)>,
    pub(crate) warning: Option<String>,
    /// Whether any rank was asked to stop. All ranks learn this in the same step.
    pub(crate) stops: bool,
}

impl<'a> TrainState<'a> {
    pub(crate) fn new(config: &'a RunConfig, dataset: &Dataset) -> Result<TrainState<'a>, TrainError> {
        let batch = &config.batch;
        let rows_per_step = config.global_batch_rows() as usize;
        let order = SampleOrder::new(
            batch.data_seed,
            dataset.num_rows(),
            rows_per_step,
            batch.dataloader_drop_last,
            config.data.shuffle,
        )?;
        let epochs = (batch.num_train_epochs * order.steps_per_epoch() as f64).ceil() as u64;
        let total_steps = batch.max_steps.unwrap_or(epochs);
        let schedule = LrSchedule::new(config, total_steps);
        let scaler = match config.precision {
            Precision::F16(scaling) => Some(LossScaler::new(scaling)),
            Precision::Auto | Precision::F32 | Precision::Bf16 => None,
        };
        Ok(TrainState { config, order: Arc::new(order), schedule, total_steps, scaler, last_bad: None })
    }

    /// The state of the loss scaler, in fp16.
    pub(crate) fn scale_state(&self) -> Option<ScaleState> {
        self.scaler.map(|scaler| scaler.state)
    }

    fn ends_epoch(&self, step: u64) -> bool {
        step.is_multiple_of(self.order.steps_per_epoch()) || step == self.total_steps
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
            rows_per_step: self.config.global_batch_rows(),
            num_rows: dataset.num_rows() as u64,
            fingerprint: dataset.fingerprint(),
        }
    }

    /// Runs one optimizer step: forward, objective, backward, update. `start` is when the loop began to wait for its
    /// batches.
    pub(crate) fn step(
        &mut self,
        engine: &mut Engine,
        batches: &StepBatches,
        start: Instant,
        objective: &mut dyn Objective,
        stop: &StopRequest,
        position: &mut Position,
    ) -> Result<StepOutcome, TrainError> {
        let step = position.step;
        assert_eq!(step, batches.step, "the batches belong to this step");
        let (supervised, tokens) = (batches.supervised, batches.tokens);
        let counts = StepCounts { supervised, tokens };
        let optim = &self.config.optim;
        let updates = UpdateSettings {
            t: position.updates + 1,
            // As in PyTorch trainers, a skipped step does not advance the schedule.
            lr: self.schedule.at(position.updates),
            rule: update_rule(optim),
            weight_decay: optim.weight_decay,
            max_norm: optim.max_grad_norm,
        };
        let loss_scale = position.scale.map(|scale| scale.scale);
        if let Some(scale) = loss_scale {
            engine.set_loss_scale(scale);
        }
        let stop_requested = || stop.is_raised();
        let (report, metrics, stops) = train_step_with_stop(
            engine,
            objective,
            &batches.micro_batches,
            &counts,
            &updates,
            &stop_requested,
        )?;
        position.step += 1;
        position.tokens_total += tokens;
        let (loss, rows) = (metrics.loss, &batches.rows);
        if !report.skipped {
            self.applied(position, loss);
        }
        let warning = match report.skipped {
            true => Some(self.skipped(engine, position, &report, loss, rows)?),
            false if !loss.is_finite() => Some(self.bad_loss(position, &report, loss, rows)?),
            false => None,
        };
        let seconds = start.elapsed().as_secs_f64();
        let record = StepRecord {
            step: position.step,
            epoch: self.order.epoch(Step(position.step)),
            loss: metrics.loss,
            grad_norm: report.grad_norm,
            learning_rate: updates.lr,
            tokens: supervised,
            tokens_total: position.tokens_total,
            tokens_per_second: tokens as f64 / seconds,
            step_seconds: seconds,
            skipped: report.skipped,
            loss_scale,
        };
        Ok(StepOutcome { record, others: metrics.others, warning, stops })
    }
}
