//! The loop.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use lockstep_ckpt::DataCursor;
use lockstep_comm::{CommError, NcclSpec};
use lockstep_config::{EvalWhen, Precision, RunConfig, SaveWhen};
use lockstep_core::{Bytes, Rank, Step};
use lockstep_data::{Dataset, Order, Window};
use lockstep_device::{Device, Machine, Memory, Queue};
use lockstep_engine::{Comms, Engine, EngineError, Resources, Updates};
use lockstep_observe::{EvalRecord, Progress, StepRecord};
use lockstep_plan::RunPlan;

use crate::bad_step::Bad;
use crate::error::TrainError;
use crate::evaluate::{Best, Evaluator};
use crate::feed::Feed;
use crate::journal::Journal;
use crate::objective::{Objective, WindowCounts, train_step_asking};
use crate::position::Position;
use crate::rate::RateSchedule;
use crate::resume::{self, Loaded};
use crate::save::{self, Identity};
use crate::scaler::LossScaler;
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

/// What the plan said of memory, and what the system says of it: of the process, or of the GPU that a rank computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// The most that was resident at any time, on the rank that held most. Of a GPU, what the driver says is taken.
    pub peak: Bytes,
    /// On the device and on the host; of a GPU, on it alone.
    pub arena: Bytes,
    /// The plan's constant for code, libraries and data.
    pub foreign: Bytes,
}

impl MemoryUse {
    /// All ranks call it alike.
    fn of(engine: &Engine, peak: Option<Bytes>) -> Result<Option<MemoryUse>, EngineError> {
        let peaks = engine.exchange("peak memory", &peak.map_or(0, |p| p.0).to_le_bytes())?;
        let number = |bytes: &Vec<u8>| bytes[..].try_into().map(u64::from_le_bytes).unwrap_or(0);
        let peak = Bytes(peaks.iter().map(number).max().unwrap_or(0));
        let plan = engine.plan();
        let arena = if plan.input.is_separate() { plan.arena } else { engine.arena_bytes() };
        let foreign = plan.input.needs.foreign;
        Ok((peak > Bytes::ZERO).then_some(MemoryUse { peak, arena, foreign }))
    }

    /// To the byte, for the log.
    fn exact(&self) -> String {
        let [peak, planned, arena, foreign] =
            [self.peak, self.planned(), self.arena, self.foreign].map(|bytes| bytes.0);
        format!("peak memory {peak} bytes (planned {planned}: arena {arena}, foreign {foreign})")
    }

    pub fn planned(&self) -> Bytes {
        self.arena + self.foreign
    }
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
    prepared: Prepared,
    connect: Option<Connect<'_>>,
    objective: &mut dyn Objective,
    progress: &mut dyn Progress,
) -> Result<Outcome, TrainError> {
    let Prepared { rank, tokenizer, dataset, eval, shape, folder, plan, machine, output, mut notes, .. } =
        prepared;
    let mut run = Run::new(config, &dataset)?;
    let identity = Identity {
        data: run.cursor(&dataset),
        switches: [
            ("shuffle", config.data.shuffle),
            ("dataloader_drop_last", config.batch.dataloader_drop_last),
        ],
        config_hash: blake3::hash(config_text.as_bytes()).to_hex().to_string(),
        tokenizer_hash: tokenizer.fingerprint().to_string(),
        run_config: config_text.to_string(),
        model_files: save::model_files(&shape, &prepared.folder_texts, &tokenizer, plan.input.storage),
    };
    let mut evaluator = eval.as_ref().filter(|_| config.eval.evaluates()).map(|d| Evaluator::new(config, d));
    let mut engine = make_engine(config, plan, rank, machine, connect)?;
    let planned = engine.plan().arena + engine.plan().host_bytes;
    assert_eq!(engine.arena_bytes(), planned, "the engine holds what was planned");
    let scale = run.scaler.map(|scaler| scaler.state);
    let mut position = Position::start(scale);
    let (resume, candidates) = (&config.output.resume_from_checkpoint, &prepared.candidates);
    let mut note = |text: &str| notes.push(text.to_string());
    let checkpoint = resume::open_agreed(&engine, resume, &output.checkpoints(), candidates, &mut note)?;
    match (&checkpoint, &folder) {
        (Some(checkpoint), _) => position = save::load_checkpoint(&mut engine, checkpoint, &identity, scale)?,
        (None, Some(folder)) => save::load_weights(&mut engine, folder)?,
        (None, None) => engine.initialise(config.batch.seed)?,
    }
    engine.seed_dropout(config.batch.seed);
    // Nobody trains, and nothing is swept away, before everybody is ready to.
    let loaded = Loaded::of_all(&engine, checkpoint.as_ref(), folder.as_ref())?;
    let mut log = if rank == Rank(0) {
        output.sweep(prepared.launch_id.as_deref())?;
        let resume_step = checkpoint.as_ref().map(|_| position.step);
        Journal::open(output.path(), config.output.tensorboard.as_deref(), resume_step)?
    } else {
        Journal::closed()
    };
    announce(&engine, config, &notes, &mut log, progress)?;
    let checkpoint_path = checkpoint.as_ref().map(|c| c.path().to_path_buf());
    if let Some(path) = &checkpoint_path {
        tell(&format!("resumed from {} at step {}", path.display(), position.step), &mut log, progress)?;
        if position.step >= run.total_steps {
            progress.note(&format!("no step is left: the run ends at step {}", run.total_steps));
        }
    }
    loaded.iter().try_for_each(|loaded| log.event(&loaded.exact()))?;

    let mut outcome = Outcome {
        steps: position.step,
        last_loss: None,
        model_dir: output.model(),
        checkpoint: checkpoint_path.clone(),
        stopped: false,
        memory: None,
    };
    let mut feed = Feed::new(config, &dataset, &run.order, rank, position.step, run.total_steps);
    progress.start(position.step + 1, run.total_steps);
    let starts = checkpoint_path.is_none() && config.eval.on_start;
    if let Some(evaluator) = evaluator.as_mut().filter(|_| starts) {
        evaluate(evaluator, &mut engine, (0, 0.0), &mut log, progress)?;
    }
    if let Some(evaluator) = evaluator.as_mut().filter(|_| position.owes_evaluation) {
        let at = (position.step, run.order.epoch(Step(position.step)));
        let record = evaluate(evaluator, &mut engine, at, &mut log, progress)?;
        Best::update(&mut position.best, &record, config);
    }
    position.owes_evaluation = false;
    prepared.stop.steps_begin();
    while position.step < run.total_steps {
        let start = Instant::now();
        let stepped = feed.next().map_err(TrainError::from).and_then(|window| {
            let step = run.step(&mut engine, &window, start, objective, &prepared.stop, &mut position)?;
            Ok((window, step))
        });
        let (window, stepped) = match stepped {
            Ok(stepped) => stepped,
            Err(error) => {
                let error = error.with_checkpoint(outcome.checkpoint);
                log.event(&format!("stopped: {error}"))?;
                log.sync()?;
                return Err(error);
            }
        };
        outcome.steps = position.step;
        outcome.last_loss = Some(stepped.record.loss);
        let last = position.step == run.total_steps;
        let shown = position.step.is_multiple_of(config.output.logging_steps) || last;
        log.step(&stepped.record, &stepped.others, shown)?;
        if shown {
            progress.step(&stepped.record);
        }
        let note = feed.done(window, stepped.record.step_seconds);
        for text in stepped.warning.iter().chain(&note) {
            tell(text, &mut log, progress)?;
        }
        let sound = run.is_sound(&position);
        let mut improved = false;
        // An evaluation may take longer than the grace period: the resumed run makes it.
        position.owes_evaluation = stepped.stops && run.evaluates_after(position.step);
        let evaluates = !stepped.stops && run.evaluates_after(position.step);
        if let Some(evaluator) = evaluator.as_mut().filter(|_| evaluates) {
            let at = (position.step, stepped.record.epoch);
            let record = evaluate(evaluator, &mut engine, at, &mut log, progress)?;
            improved = sound && Best::update(&mut position.best, &record, config);
        }
        if sound && (stepped.stops || run.saves_after(position.step, improved)) {
            log.sync()?;
            let path = save::save_checkpoint(&engine, &output.checkpoints(), &position, &identity)?;
            log.event(&format!("checkpoint {}", path.display()))?;
            if rank == Rank(0) {
                run.retain(&output.checkpoints(), &position)?;
            }
            outcome.checkpoint = Some(path);
        }
        if stepped.stops {
            let text = prepared.stop.report(position.step, outcome.checkpoint.as_deref(), sound);
            tell(&text, &mut log, progress)?;
            log.sync()?;
            progress.finish();
            outcome.stopped = true;
            return Ok(outcome);
        }
    }
    run.check_trained(&position).map_err(|error| error.with_checkpoint(outcome.checkpoint.clone()))?;
    if let Some(best) = position.best.filter(|_| config.eval.load_best_model_at_end) {
        if best.step != position.step {
            let path = output.checkpoints().join(format!("step-{}", best.step));
            let best = resume::open_sound(&engine, &path)?;
            save::load_checkpoint(&mut engine, &best, &identity, scale)?;
        }
        tell(&format!("the model is that of step {}, the best one", best.step), &mut log, progress)?;
    }
    save::export(&engine, &identity.model_files, &output.model())?;
    log.event(&format!("model folder {}", output.model().display()))?;
    let peak = match machine.device {
        Device::Cpu => (prepared.peak_memory)(),
        // What others hold of a shared GPU is told with it.
        Device::Cuda(_) if config.device.share_gpus => None,
        Device::Cuda(gpu) => Some(gpu.total - gpu.free_bytes().map_err(EngineError::from)?),
    };
    outcome.memory = MemoryUse::of(&engine, peak)?;
    if let Some(memory) = outcome.memory {
        log.event(&memory.exact())?;
    }
    log.sync()?;
    progress.finish();
    Ok(outcome)
}

/// Says what is worth saying before the first step.
fn announce(
    engine: &Engine,
    config: &RunConfig,
    notes: &[String],
    log: &mut Journal,
    progress: &mut dyn Progress,
) -> Result<(), TrainError> {
    if let Some(carrier) = engine.carrier() {
        log.event(&format!("{} ranks over {carrier}", config.plan.world_size()))?;
    }
    if let Some(spill) = engine.spill() {
        log.event(&format!("states on a disk: {} of each rank, {spill}", engine.plan().nvme_bytes))?;
    }
    notes.iter().try_for_each(|note| tell(note, log, progress))
}

/// To whoever watches, and to the log.
fn tell(text: &str, log: &mut Journal, progress: &mut dyn Progress) -> Result<(), TrainError> {
    progress.note(text);
    Ok(log.event(text)?)
}

/// Evaluates after the step `at`, given with its epoch, and reports it.
fn evaluate(
    evaluator: &mut Evaluator<'_>,
    engine: &mut Engine,
    at: (u64, f64),
    log: &mut Journal,
    progress: &mut dyn Progress,
) -> Result<EvalRecord, TrainError> {
    let record = evaluator.evaluate(engine, at.0, at.1)?;
    log.evaluation(&record)?;
    progress.evaluation(&record);
    Ok(record)
}

/// Takes the plan's memory, reaches the other ranks, and is ready to run.
pub(crate) fn make_engine(
    config: &RunConfig,
    plan: RunPlan,
    rank: Rank,
    machine: Machine,
    connect: Option<Connect<'_>>,
) -> Result<Engine, TrainError> {
    let mut queue = machine.queue().map_err(EngineError::from)?;
    let taken = match (machine.device, &mut queue) {
        (Device::Cuda(gpu), Queue::Cuda(cuda)) => {
            cuda.tf32 = config.device.tf32;
            Memory::take_on(gpu, plan.arena)
        }
        _ if connect.is_some() => Memory::take_lending(plan.arena, plan.lent.clone(), queue.pool()),
        _ => Memory::take(plan.arena, queue.pool()),
    };
    let memory = Arc::new(taken.map_err(EngineError::from)?);
    // What passes between GPUs does not pass through the host's memory; what ranks tell each other does.
    let told = match machine.device {
        Device::Cpu if !plan.lent.is_empty() => Arc::clone(&memory),
        _ => Arc::new(Memory::take_shared(Bytes(4096), queue.pool()).map_err(EngineError::from)?),
    };
    let connection = connect.map(|connect| connect(&told)).transpose()?;
    let (comms, nccl) = connection.map_or((None, None), |c| (Some(c.comms), c.nccl));
    let spill_dir = Some(config.plan.nvme_path.clone().unwrap_or_else(|| config.output.output_dir.clone()));
    Ok(Engine::new(plan, Resources { rank, memory, comms, nccl, queue, spill_dir })?)
}

/// What the loop keeps between steps.
pub(crate) struct Run<'a> {
    config: &'a RunConfig,
    order: Arc<Order>,
    rates: RateSchedule,
    total_steps: u64,
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

    fn cursor(&self, dataset: &Dataset) -> DataCursor {
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
        let updates = Updates {
            t: position.updates + 1,
            // A step that is skipped does not move the schedule, as with the others.
            lr: self.rates.at(position.updates),
            betas: (optim.adam_beta1, optim.adam_beta2),
            eps: optim.adam_epsilon,
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
