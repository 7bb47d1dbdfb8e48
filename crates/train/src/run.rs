//! The training loop.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use lockstep_ckpt::DataCursor;
use lockstep_comm::{CommError, NcclSpec};
use lockstep_config::{EvalWhen, Precision, RunConfig, SaveWhen};
use lockstep_core::{Bytes, Rank, Step};
use lockstep_data::{Dataset, Order, Window};
use lockstep_device::{Machine, Memory};
use lockstep_engine::{Comms, Engine, UpdateSettings};
use lockstep_observe::{EvalRecord, Progress, StepRecord};

use crate::bad_step::Bad;
use crate::error::TrainError;
use crate::evaluate::{Best, Evaluator};
use crate::feed::Feed;
use crate::finish::MemoryUse;
use crate::journal::Journal;
use crate::objective::{Objective, WindowCounts, train_step_asking};
use crate::optimizer::update_rule;
use crate::output_dir::OutputDir;
use crate::position::Position;
use crate::rate::RateSchedule;
use crate::save::{self, Identity};
use crate::scaler::{LossScaler, ScaleState};
use crate::setup::Prepared;
use crate::sft::Sft;
use crate::stop::StopRequest;

/// How a run ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub steps: u64,
    pub last_loss: Option<f64>,
    pub model_dir: PathBuf,
    pub checkpoint: Option<PathBuf>,
    /// The run was asked to stop and did, before its end. There is no model folder of it.
    pub stopped: bool,
    /// Where the system can say.
    pub memory: Option<MemoryUse>,
}

/// Connects a rank to the others, which may read the memory given.
pub type Connect<'a> = Box<dyn FnOnce(&Arc<Memory>) -> Result<Connection, CommError> + 'a>;

/// What a rank reaches others by.
pub struct Connection {
    pub comms: Comms,
    /// Of ranks that compute on GPUs.
    pub nccl: Option<NcclSpec>,
}

/// Trains to the end with the objective that the configuration names. See [`train_with`].
pub fn train(
    config: &RunConfig,
    config_text: &str,
    prepared: Prepared,
    connect: Option<Connect<'_>>,
    progress: &mut dyn Progress,
) -> Result<Outcome, TrainError> {
    train_with(config, config_text, prepared, connect, &mut Sft::default(), progress)
}

/// Trains to the end, or until [`Prepared::stop`] is raised: then a checkpoint is saved after the step in progress.
/// `config_text` goes into checkpoints, for people. In a world of several ranks all call it alike; rank 0 keeps the
/// log and writes the model folder.
pub fn train_with(
    config: &RunConfig,
    config_text: &str,
    mut prepared: Prepared,
    connect: Option<Connect<'_>>,
    objective: &mut dyn Objective,
    progress: &mut dyn Progress,
) -> Result<Outcome, TrainError> {
    let (rank, dataset, eval) = (prepared.rank, Arc::clone(&prepared.dataset), prepared.eval.take());
    let run = Run::new(config, &dataset)?;
    let evaluator = eval.as_ref().filter(|_| config.eval.evaluates()).map(|d| Evaluator::new(config, d));
    let mut trainer = Trainer::open(run, config_text, prepared, connect, evaluator, progress)?;
    let (step, total_steps) = (trainer.position.step, trainer.run.total_steps);
    let mut feed = Feed::new(config, &dataset, &trainer.run.order, rank, step, total_steps);
    trainer.start()?;
    while trainer.position.step < total_steps {
        let (window, stepped) = match trainer.next_step(&mut feed, objective) {
            Ok(stepped) => stepped,
            Err(error) => return Err(trainer.fail(error)?),
        };
        trainer.log_step(&stepped)?;
        let note = feed.done(window, stepped.record.step_seconds);
        stepped.warning.iter().chain(&note).try_for_each(|text| trainer.report(text))?;
        let improved = trainer.evaluate_after(&stepped)?;
        trainer.save_after(&stepped, improved)?;
        if stepped.stops {
            return trainer.stop();
        }
    }
    trainer.finish()
}

/// A run from its start to its end. [`Trainer::open`] makes it, [`Trainer::finish`] ends it.
pub(crate) struct Trainer<'a> {
    pub(crate) run: Run<'a>,
    pub(crate) engine: Engine,
    pub(crate) position: Position,
    pub(crate) identity: Identity,
    pub(crate) evaluator: Option<Evaluator<'a>>,
    pub(crate) log: Journal,
    pub(crate) progress: &'a mut dyn Progress,
    pub(crate) output: OutputDir,
    pub(crate) stop: StopRequest,
    pub(crate) machine: Machine,
    pub(crate) peak_memory: fn() -> Option<Bytes>,
    pub(crate) outcome: Outcome,
}

impl Trainer<'_> {
    /// Evaluates where that is due before the first step, and lets stop requests wait for a step from here on.
    fn start(&mut self) -> Result<(), TrainError> {
        self.progress.start(self.position.step + 1, self.run.total_steps);
        if self.outcome.checkpoint.is_none() && self.run.config.eval.on_start {
            self.evaluate(0, 0.0)?;
        }
        if self.position.owes_evaluation {
            let step = self.position.step;
            if let Some(record) = self.evaluate(step, self.run.order.epoch(Step(step)))? {
                Best::update(&mut self.position.best, &record, self.run.config);
            }
        }
        self.position.owes_evaluation = false;
        self.stop.steps_begin();
        Ok(())
    }

    /// Takes the next step's window and runs the step.
    fn next_step(
        &mut self,
        feed: &mut Feed,
        objective: &mut dyn Objective,
    ) -> Result<(Window, StepOutcome), TrainError> {
        let start = Instant::now();
        let window = feed.next()?;
        let stepped =
            self.run.step(&mut self.engine, &window, start, objective, &self.stop, &mut self.position)?;
        Ok((window, stepped))
    }

    fn log_step(&mut self, stepped: &StepOutcome) -> Result<(), TrainError> {
        let step = self.position.step;
        self.outcome.steps = step;
        self.outcome.last_loss = Some(stepped.record.loss);
        let every = self.run.config.output.logging_steps;
        let shown = step.is_multiple_of(every) || step == self.run.total_steps;
        self.log.step(&stepped.record, &stepped.others, shown)?;
        if shown {
            self.progress.step(&stepped.record);
        }
        Ok(())
    }

    /// Evaluates after a step, where that is due. Returns whether the model is the best so far.
    fn evaluate_after(&mut self, stepped: &StepOutcome) -> Result<bool, TrainError> {
        let due = self.run.evaluates_after(self.position.step);
        // An evaluation may take longer than the grace period: the resumed run makes it.
        self.position.owes_evaluation = stepped.stops && due;
        if stepped.stops || !due {
            return Ok(false);
        }
        let Some(record) = self.evaluate(self.position.step, stepped.record.epoch)? else { return Ok(false) };
        let sound = self.run.is_sound(&self.position);
        Ok(sound && Best::update(&mut self.position.best, &record, self.run.config))
    }

    /// Evaluates the model as it is after `step` steps, and reports it. `None`: there is nothing to evaluate on.
    fn evaluate(&mut self, step: u64, epoch: f64) -> Result<Option<EvalRecord>, TrainError> {
        let Some(evaluator) = &mut self.evaluator else { return Ok(None) };
        let record = evaluator.evaluate(&mut self.engine, step, epoch)?;
        self.log.evaluation(&record)?;
        self.progress.evaluation(&record);
        Ok(Some(record))
    }

    /// Saves a checkpoint after a step, where one is due and the step was sound.
    fn save_after(&mut self, stepped: &StepOutcome, improved: bool) -> Result<(), TrainError> {
        let due = stepped.stops || self.run.saves_after(self.position.step, improved);
        if !due || !self.run.is_sound(&self.position) {
            return Ok(());
        }
        self.log.sync()?;
        let checkpoints = self.output.checkpoints();
        let path = save::save_checkpoint(&self.engine, &checkpoints, &self.position, &self.identity)?;
        self.log.event(&format!("checkpoint {}", path.display()))?;
        if self.engine.rank() == Rank(0) {
            self.run.retain(&checkpoints, &self.position)?;
        }
        self.outcome.checkpoint = Some(path);
        Ok(())
    }

    /// Ends a run that was asked to stop.
    fn stop(mut self) -> Result<Outcome, TrainError> {
        let sound = self.run.is_sound(&self.position);
        let text = self.stop.report(self.position.step, self.outcome.checkpoint.as_deref(), sound);
        self.report(&text)?;
        self.log.sync()?;
        self.progress.finish();
        self.outcome.stopped = true;
        Ok(self.outcome)
    }

    /// Logs the error that ends the run, and adds the newest checkpoint to it.
    fn fail(mut self, error: TrainError) -> Result<TrainError, TrainError> {
        let error = error.with_checkpoint(self.outcome.checkpoint);
        self.log.event(&format!("stopped: {error}"))?;
        self.log.sync()?;
        Ok(error)
    }

    /// Writes a line to the log and shows it to the user.
    pub(crate) fn report(&mut self, text: &str) -> Result<(), TrainError> {
        self.progress.note(text);
        Ok(self.log.event(text)?)
    }
}

/// What the loop keeps between steps.
pub(crate) struct Run<'a> {
    pub(crate) config: &'a RunConfig,
    order: Arc<Order>,
    rates: RateSchedule,
    pub(crate) total_steps: u64,
    pub(crate) scaler: Option<LossScaler>,
    pub(crate) last_bad: Option<Bad>,
}

/// What a step reports.
struct StepOutcome {
    record: StepRecord,
    others: Vec<(&'static str, f64)>,
    warning: Option<String>,
    /// A rank was asked to stop; all ranks learn it in the same step.
    stops: bool,
}

impl<'a> Run<'a> {
    fn new(config: &'a RunConfig, dataset: &Dataset) -> Result<Run<'a>, TrainError> {
        let batch = &config.batch;
        let rows_per_step = config.global_batch_rows() as usize;
        let order = Order::new(
            batch.data_seed,
            dataset.num_rows(),
            rows_per_step,
            batch.dataloader_drop_last,
            config.data.shuffle,
        )?;
        let epochs = (batch.num_train_epochs * order.steps_per_epoch() as f64).ceil() as u64;
        let total_steps = batch.max_steps.unwrap_or(epochs);
        let rates = RateSchedule::new(config, total_steps);
        let scaler = match config.precision {
            Precision::F16(scaling) => Some(LossScaler::new(scaling)),
            Precision::Auto | Precision::F32 | Precision::Bf16 => None,
        };
        Ok(Run { config, order: Arc::new(order), rates, total_steps, scaler, last_bad: None })
    }

    /// Where the loss scale is, in fp16.
    pub(crate) fn scale_state(&self) -> Option<ScaleState> {
        self.scaler.map(|scaler| scaler.state)
    }

    fn ends_epoch(&self, step: u64) -> bool {
        step.is_multiple_of(self.order.steps_per_epoch()) || step == self.total_steps
    }

    fn evaluates_after(&self, step: u64) -> bool {
        match self.config.eval.when {
            EvalWhen::No => false,
            EvalWhen::Steps(every) => step.is_multiple_of(every),
            EvalWhen::Epoch => self.ends_epoch(step),
        }
    }

    /// Whether the best checkpoint stays, whatever `save_total_limit` says.
    fn keeps_best(&self) -> bool {
        self.config.eval.load_best_model_at_end || self.config.output.save == SaveWhen::Best
    }

    /// Removes checkpoints beyond the limit.
    fn retain(&self, checkpoints: &Path, position: &Position) -> Result<(), TrainError> {
        if let Some(keep) = self.config.output.save_total_limit {
            let best = position.best.filter(|_| self.keeps_best()).map(|best| Step(best.step));
            lockstep_ckpt::retain(checkpoints, keep.max(1) as usize, best)?;
        }
        Ok(())
    }

    /// `improved`: the evaluation after this step was better than all before.
    fn saves_after(&self, step: u64, improved: bool) -> bool {
        let due = match self.config.output.save {
            SaveWhen::No | SaveWhen::Best => false,
            SaveWhen::Steps(every) => step.is_multiple_of(every) || step == self.total_steps,
            SaveWhen::Epoch => self.ends_epoch(step),
        };
        due || improved && self.keeps_best()
    }

    pub(crate) fn cursor(&self, dataset: &Dataset) -> DataCursor {
        DataCursor {
            seed: self.config.batch.data_seed,
            next_step: 0,
            rows_per_step: self.config.global_batch_rows(),
            num_rows: dataset.num_rows() as u64,
            fingerprint: dataset.fingerprint(),
        }
    }

    /// One optimizer step: forward, objective, backward, update. It began at `start`, with its window.
    fn step(
        &mut self,
        engine: &mut Engine,
        window: &Window,
        start: Instant,
        objective: &mut dyn Objective,
        stop: &StopRequest,
        position: &mut Position,
    ) -> Result<StepOutcome, TrainError> {
        let step = position.step;
        assert_eq!(step, window.step, "the window is this step's");
        let (supervised, tokens) = (window.supervised, window.tokens);
        let counts = WindowCounts { supervised, tokens };
        let optim = &self.config.optim;
        let updates = UpdateSettings {
            t: position.updates + 1,
            // A step that is skipped does not move the schedule, as with the others.
            lr: self.rates.at(position.updates),
            rule: update_rule(optim),
            weight_decay: optim.weight_decay,
            max_norm: optim.max_grad_norm,
        };
        let loss_scale = position.scale.map(|scale| scale.scale);
        if let Some(scale) = loss_scale {
            engine.set_loss_scale(scale);
        }
        let asked = || stop.is_raised();
        let (report, metrics, stops) =
            train_step_asking(engine, objective, &window.batches, &counts, &updates, &asked)?;
        position.step += 1;
        position.tokens_total += tokens;
        let (loss, rows) = (metrics.loss, &window.rows);
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
