//! The training loop: steps, evaluations, checkpoints, and how a run ends.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use lockstep_comm::{CommError, NcclSpec};
use lockstep_config::RunConfig;
use lockstep_core::{Bytes, Rank};
use lockstep_device::{Machine, Memory};
use lockstep_engine::{Comms, Engine};
use lockstep_observe::{EvalRecord, Progress};

use crate::error::TrainError;
use crate::evaluate::BestEval;
use crate::finish::MemoryUse;
use crate::journal::Journal;
use crate::learner::Learner;
use crate::objective::Objective;
use crate::output_dir::OutputDir;
use crate::position::Position;
use crate::profile::Profiler;
use crate::save::{self, RunIdentity};
use crate::setup::PreparedRun;
use crate::status::StatusWriter;
use crate::step_meter::StepMeter;
use crate::stop::StopRequest;
use crate::train_state::{StepOutcome, TrainState};

/// How a run ended.
#[derive(Clone, Debug)]
pub struct TrainOutcome {
    /// Steps completed, including those before a resume.
    pub steps: u64,
    pub last_loss: Option<f64>,
    pub model_dir: PathBuf,
    /// The newest checkpoint.
    pub checkpoint: Option<PathBuf>,
    /// The run was asked to stop and stopped before its last step. No model folder was written.
    pub stopped: bool,
    /// `None` if the system does not report memory use.
    pub memory: Option<MemoryUse>,
}

/// Connects a rank to the others, which may read the given memory.
pub type Connect<'a> = Box<dyn FnOnce(&Arc<Memory>) -> Result<Connection, CommError> + 'a>;

/// How a rank communicates with the others.
pub struct Connection {
    pub comms: Comms,
    /// Set for ranks that compute on GPUs.
    pub nccl: Option<NcclSpec>,
}

/// Trains with the configured algorithm. See [`train_with`].
pub fn train(
    config: &RunConfig,
    config_text: &str,
    prepared: PreparedRun,
    connect: Option<Connect<'_>>,
    progress: &mut dyn Progress,
) -> Result<TrainOutcome, TrainError> {
    run(config, config_text, prepared, connect, None, progress)
}

/// Trains until the last step, or until [`PreparedRun::stop`] is raised; then a checkpoint is saved after the current
/// step. `objective` replaces that of the algorithm, which must be `sft` or `clm`. Checkpoints contain `config_text`
/// for people to read. With several ranks this is a collective call; rank 0 keeps the log and writes the model folder.
pub fn train_with(
    config: &RunConfig,
    config_text: &str,
    prepared: PreparedRun,
    connect: Option<Connect<'_>>,
    objective: &mut dyn Objective,
    progress: &mut dyn Progress,
) -> Result<TrainOutcome, TrainError> {
    run(config, config_text, prepared, connect, Some(objective), progress)
}

fn run<'a>(
    config: &'a RunConfig,
    config_text: &str,
    prepared: PreparedRun,
    connect: Option<Connect<'_>>,
    objective: Option<&'a mut dyn Objective>,
    progress: &'a mut dyn Progress,
) -> Result<TrainOutcome, TrainError> {
    let state = TrainState::new(config, &prepared.dataset)?;
    let mut trainer = Trainer::open(state, config_text, prepared, connect, objective, progress)?;
    trainer.start()?;
    while trainer.position.step < trainer.state.total_steps {
        let stepped = match trainer.next_step() {
            Ok(stepped) => stepped,
            Err(error) => return Err(trainer.fail(error)?),
        };
        trainer.log_step(&stepped)?;
        stepped.notes.iter().try_for_each(|text| trainer.report(text))?;
        let improved = trainer.evaluate_after(&stepped)?;
        trainer.save_after(&stepped, improved)?;
        if stepped.stops {
            return trainer.stop();
        }
    }
    trainer.finish()
}

/// A run in progress. [`Trainer::open`] creates it, [`Trainer::finish`] ends it.
pub(crate) struct Trainer<'a> {
    pub(crate) state: TrainState<'a>,
    pub(crate) engine: Engine,
    pub(crate) position: Position,
    pub(crate) identity: RunIdentity,
    pub(crate) learner: Box<dyn Learner + 'a>,
    pub(crate) log: Journal,
    pub(crate) meter: StepMeter,
    pub(crate) profiler: Option<Profiler>,
    pub(crate) status: Option<StatusWriter>,
    pub(crate) progress: &'a mut dyn Progress,
    pub(crate) output: OutputDir,
    pub(crate) stop: StopRequest,
    pub(crate) machine: Machine,
    pub(crate) peak_memory: fn() -> Option<Bytes>,
    pub(crate) outcome: TrainOutcome,
}

impl Trainer<'_> {
    /// Evaluates if that is due before the first step. From here on, a stop request takes effect after a step.
    fn start(&mut self) -> Result<(), TrainError> {
        self.progress.start(self.position.step + 1, self.state.total_steps);
        if self.outcome.checkpoint.is_none() && self.state.config.eval.on_start {
            self.evaluate(0, 0.0)?;
        }
        if self.position.owes_evaluation {
            let step = self.position.step;
            if let Some(record) = self.evaluate(step, self.state.epoch(step))? {
                BestEval::update(&mut self.position.best, &record, self.state.config);
            }
        }
        self.position.owes_evaluation = false;
        self.stop.steps_begin();
        Ok(())
    }

    /// Waits for the batches of the next step and runs it.
    fn next_step(&mut self) -> Result<StepOutcome, TrainError> {
        let (engine, learner, meter) = (&mut self.engine, &mut *self.learner, &mut self.meter);
        if let Some(profiler) = &mut self.profiler {
            profiler.before_step(engine, self.position.step + 1)?;
        }
        meter.begin(engine);
        let work = learner.next_work(engine)?;
        meter.ready(&work.seconds);
        let mut stepped = self.state.step(engine, learner, &work, meter, &self.stop, &mut self.position)?;
        if let Some(profiler) = &mut self.profiler {
            let profile = profiler.after_step(engine, self.position.step, &meter.times)?;
            stepped.notes.extend(profile.map(|path| format!("profile in {}", path.display())));
        }
        learner.after_step(engine, self.position.step)?;
        stepped.notes.extend(learner.done(work, stepped.record.step_seconds));
        Ok(stepped)
    }

    fn log_step(&mut self, stepped: &StepOutcome) -> Result<(), TrainError> {
        let step = self.position.step;
        self.outcome.steps = step;
        self.status.iter().for_each(|status| status.step(step));
        self.outcome.last_loss = Some(stepped.record.loss);
        let every = self.state.config.output.logging_steps;
        let shown = step.is_multiple_of(every) || step == self.state.total_steps;
        self.log.step(&stepped.record, shown)?;
        if shown {
            self.progress.step(&stepped.record);
        }
        if let Some(samples) = self.learner.samples() {
            self.log.samples(step, &samples);
        }
        let breakdown = stepped.record.cost.breakdown(stepped.record.step_seconds);
        if let Some(breakdown) = breakdown.filter(|_| shown && self.state.config.output.wall_clock_breakdown)
        {
            self.report(&format!("step {step} | time | {breakdown}"))?;
        }
        self.log.tracker_warnings().iter().try_for_each(|warning| self.report(warning))
    }

    /// Evaluates after a step if that is due. Returns whether the model is the best so far.
    fn evaluate_after(&mut self, stepped: &StepOutcome) -> Result<bool, TrainError> {
        let due = self.state.evaluates_after(self.position.step);
        // An evaluation may take longer than the grace period, so the resumed run does it.
        self.position.owes_evaluation = stepped.stops && due;
        if stepped.stops || !due {
            return Ok(false);
        }
        let Some(record) = self.evaluate(self.position.step, stepped.record.epoch)? else { return Ok(false) };
        let sound = self.state.is_sound(&self.position);
        Ok(sound && BestEval::update(&mut self.position.best, &record, self.state.config))
    }

    /// Evaluates the model after `step` steps and reports the result. `None`: there is no evaluation data.
    fn evaluate(&mut self, step: u64, epoch: f64) -> Result<Option<EvalRecord>, TrainError> {
        let Some(record) = self.learner.evaluate(&mut self.engine, step, epoch)? else { return Ok(None) };
        self.log.evaluation(&record)?;
        self.progress.evaluation(&record);
        Ok(Some(record))
    }

    /// Saves a checkpoint after a step if one is due and the last steps were sound.
    fn save_after(&mut self, stepped: &StepOutcome, improved: bool) -> Result<(), TrainError> {
        let due = stepped.stops || self.state.saves_after(self.position.step, improved);
        if !due || !self.state.is_sound(&self.position) {
            return Ok(());
        }
        self.log.sync()?;
        let start = Instant::now();
        let checkpoints = self.output.checkpoints();
        let files = self.learner.checkpoint_files();
        let path = save::save_checkpoint(&self.engine, &checkpoints, &self.position, &self.identity, &files)?;
        self.log.event(&format!("checkpoint {}", path.display()))?;
        if self.engine.rank() == Rank(0) {
            self.state.retain(&checkpoints, &self.position)?;
        }
        self.outcome.checkpoint = Some(path);
        self.meter.saved(start.elapsed().as_secs_f64());
        Ok(())
    }

    /// Ends a run that was asked to stop.
    fn stop(mut self) -> Result<TrainOutcome, TrainError> {
        let sound = self.state.is_sound(&self.position);
        let text = self.stop.report(self.position.step, self.outcome.checkpoint.as_deref(), sound);
        self.report(&text)?;
        self.end_measuring(false)?;
        self.log.sync()?;
        self.progress.finish();
        self.outcome.stopped = true;
        Ok(self.outcome)
    }

    /// Writes a profile that is not complete, and ends the run for trackers. `completed`: it was not stopped.
    pub(crate) fn end_measuring(&mut self, completed: bool) -> Result<(), TrainError> {
        if let Some(profiler) = &mut self.profiler
            && let Some(path) = profiler.finish(&mut self.engine)?
        {
            self.report(&format!("profile in {}", path.display()))?;
        }
        let warnings = self.log.finish_trackers(completed);
        warnings.iter().try_for_each(|warning| self.report(warning))
    }

    /// Adds the newest checkpoint to the error that ends the run, and logs it.
    fn fail(mut self, error: TrainError) -> Result<TrainError, TrainError> {
        let error = error.with_checkpoint(self.outcome.checkpoint);
        self.log.finish_trackers(false);
        self.log.event(&format!("stopped: {error}"))?;
        self.log.sync()?;
        Ok(error)
    }

    /// Writes a note to the log and shows it to the user.
    pub(crate) fn report(&mut self, text: &str) -> Result<(), TrainError> {
        self.progress.note(text);
        Ok(self.log.event(text)?)
    }
}
