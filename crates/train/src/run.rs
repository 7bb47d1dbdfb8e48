//! The loop.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use lockstep_ckpt::DataCursor;
use lockstep_comm::{Comm, CommError};
use lockstep_config::RunConfig;
use lockstep_core::{Bytes, Rank, Step};
use lockstep_data::{Dataset, Order, Window};
use lockstep_device::{Memory, Queue};
use lockstep_engine::{Engine, EngineError, Resources, Updates};
use lockstep_observe::{Progress, StepRecord};
use lockstep_plan::RunPlan;

use crate::error::TrainError;
use crate::feed::Feed;
use crate::journal::Journal;
use crate::rate::RateSchedule;
use crate::save::{self, Identity, Position};
use crate::setup::Prepared;
use crate::sft::Sft;

/// How a run ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub steps: u64,
    pub last_loss: Option<f64>,
    pub model_dir: PathBuf,
    pub checkpoint: Option<PathBuf>,
    /// Where the system can say.
    pub memory: Option<MemoryUse>,
}

/// What the plan said of a process's memory, and what the system says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// The most that was resident at any time, on the rank that held most.
    pub peak: Bytes,
    /// On the device and on the host.
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
        let (arena, foreign) = (engine.arena_bytes(), engine.plan().input.needs.foreign);
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
pub type Connect<'a> = Box<dyn FnOnce(&Arc<Memory>) -> Result<Comm, CommError> + 'a>;

/// Trains to the end. `config_text` goes into checkpoints, for people. In a world of several ranks all call
/// it alike; rank 0 keeps the log and writes the model folder.
pub fn train(
    config: &RunConfig,
    config_text: &str,
    prepared: Prepared,
    connect: Option<Connect<'_>>,
    progress: &mut dyn Progress,
) -> Result<Outcome, TrainError> {
    let Prepared { rank, tokenizer, dataset, shape, folder, plan, num_threads, output, checkpoint, .. } =
        prepared;
    let run = Run::new(config, &dataset)?;
    let identity = Identity {
        data: run.cursor(&dataset),
        switches: [
            ("shuffle", config.data.shuffle),
            ("dataloader_drop_last", config.batch.dataloader_drop_last),
        ],
        config_hash: blake3::hash(config_text.as_bytes()).to_hex().to_string(),
        tokenizer_hash: tokenizer.fingerprint().to_string(),
        run_config: config_text.to_string(),
    };
    let mut engine = make_engine(config, plan, rank, num_threads, connect)?;
    let planned = engine.plan().arena + engine.plan().host_bytes;
    assert_eq!(engine.arena_bytes(), planned, "the engine holds what was planned");
    let mut position = Position { step: 0, updates: 0, tokens_total: 0 };
    match (&checkpoint, &folder) {
        (Some(checkpoint), _) => position = save::load_checkpoint(&mut engine, checkpoint, &identity)?,
        (None, Some(folder)) => save::load_weights(&mut engine, folder)?,
        (None, None) => engine.initialise(config.batch.seed)?,
    }
    // Nobody trains, and nothing is swept away, before everybody is ready to.
    engine.barrier("the start")?;
    let mut log = if rank == Rank(0) {
        output.sweep()?;
        Journal::open(output.path(), checkpoint.as_ref().map(|_| position.step))?
    } else {
        Journal::closed()
    };
    if let Some(carrier) = engine.carrier() {
        log.event(&format!("{} ranks over {carrier}", config.plan.world_size()))?;
    }
    if let Some(spill) = engine.spill() {
        log.event(&format!("states on a disk: {} of each rank, {spill}", engine.plan().nvme_bytes))?;
    }
    for note in &prepared.notes {
        progress.note(note);
        log.event(note)?;
    }
    if let Some(checkpoint) = &checkpoint {
        let text = format!("resumed from {} at step {}", checkpoint.path().display(), position.step);
        progress.note(&text);
        log.event(&text)?;
        if position.step >= run.total_steps {
            progress.note(&format!("no step is left: the run ends at step {}", run.total_steps));
        }
    }

    let mut outcome = Outcome {
        steps: position.step,
        last_loss: None,
        model_dir: output.model(),
        checkpoint: checkpoint.map(|c| c.path().to_path_buf()),
        memory: None,
    };
    let mut feed = Feed::new(config, &dataset, &run.order, rank, position.step, run.total_steps);
    progress.start(position.step + 1, run.total_steps);
    while position.step < run.total_steps {
        let start = Instant::now();
        let stepped = feed.next().map_err(TrainError::from).and_then(|window| {
            run.step(&mut engine, &window, start, &mut position).map(|record| (window, record))
        });
        let (window, record) = match stepped {
            Ok(stepped) => stepped,
            Err(error) => {
                let error = error.with_checkpoint(outcome.checkpoint);
                log.event(&format!("stopped: {error}"))?;
                log.sync()?;
                return Err(error);
            }
        };
        outcome.steps = position.step;
        outcome.last_loss = Some(record.loss);
        log.step(&record)?;
        if position.step.is_multiple_of(config.output.logging_steps) || position.step == run.total_steps {
            progress.step(&record);
        }
        if let Some(note) = feed.done(window, record.step_seconds) {
            progress.note(&note);
            log.event(&note)?;
        }
        let due = config.output.save_steps.is_some_and(|every| position.step.is_multiple_of(every));
        let last = config.output.save_steps.is_some() && position.step == run.total_steps;
        if due || last {
            log.sync()?;
            let path = save::save_checkpoint(&engine, &output.checkpoints(), &position, &identity)?;
            log.event(&format!("checkpoint {}", path.display()))?;
            if let Some(keep) = config.output.save_total_limit.filter(|_| rank == Rank(0)) {
                lockstep_ckpt::retain(&output.checkpoints(), keep.max(1) as usize)?;
            }
            outcome.checkpoint = Some(path);
        }
    }
    save::export(&engine, &shape, &prepared.folder_texts, &tokenizer, &output.model())?;
    log.event(&format!("model folder {}", output.model().display()))?;
    outcome.memory = MemoryUse::of(&engine, (prepared.peak_memory)())?;
    if let Some(memory) = outcome.memory {
        log.event(&memory.exact())?;
    }
    log.sync()?;
    progress.finish();
    Ok(outcome)
}

/// Takes the plan's memory, reaches the other ranks, and is ready to run.
fn make_engine(
    config: &RunConfig,
    plan: RunPlan,
    rank: Rank,
    num_threads: usize,
    connect: Option<Connect<'_>>,
) -> Result<Engine, TrainError> {
    let queue = Queue::cpu(num_threads);
    let take = if connect.is_some() { Memory::take_shared } else { Memory::take };
    let memory = Arc::new(take(plan.arena, queue.pool()).map_err(EngineError::from)?);
    let comm = connect.map(|connect| connect(&memory)).transpose()?;
    let spill_dir = Some(config.plan.nvme_path.clone().unwrap_or_else(|| config.output.output_dir.clone()));
    Ok(Engine::new(plan, Resources { rank, memory, comm, queue, spill_dir })?)
}

/// What the loop keeps between steps.
struct Run<'a> {
    config: &'a RunConfig,
    order: Arc<Order>,
    rates: RateSchedule,
    total_steps: u64,
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
        let rates = RateSchedule::new(&config.optim, total_steps);
        Ok(Run { config, order: Arc::new(order), rates, total_steps })
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
        &self,
        engine: &mut Engine,
        window: &Window,
        start: Instant,
        position: &mut Position,
    ) -> Result<StepRecord, TrainError> {
        let step = position.step;
        assert_eq!(step, window.step, "the window is this step's");
        let (supervised, tokens) = (window.supervised, window.tokens);
        let optim = &self.config.optim;
        let updates = Updates {
            t: position.updates + 1,
            lr: self.rates.at(step),
            betas: (optim.adam_beta1, optim.adam_beta2),
            eps: optim.adam_epsilon,
            weight_decay: optim.weight_decay,
            max_norm: optim.max_grad_norm,
        };
        let mut objective = Sft::new(&window.batches, supervised);
        let report = engine.train_step(&mut objective, &updates)?;
        let [sum] = engine.sum("the loss", [objective.weighted_log_probs()])?;
        let loss = -sum / supervised as f64;
        if !loss.is_finite() || report.skipped {
            let rows = window.rows.iter().copied().take(16).collect();
            let (step, grad_norm) = (step + 1, report.grad_norm);
            return Err(TrainError::Diverged { step, loss, grad_norm, rows, checkpoint: None });
        }
        *position = Position {
            step: step + 1,
            updates: position.updates + 1,
            tokens_total: position.tokens_total + tokens,
        };
        let seconds = start.elapsed().as_secs_f64();
        Ok(StepRecord {
            step: position.step,
            epoch: self.order.epoch(Step(position.step)),
            loss,
            grad_norm: report.grad_norm,
            learning_rate: updates.lr,
            tokens: supervised,
            tokens_total: position.tokens_total,
            tokens_per_second: tokens as f64 / seconds,
            step_seconds: seconds,
            skipped: false,
        })
    }
}
