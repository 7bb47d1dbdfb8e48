//! Starts a run: creates the engine, loads a checkpoint or weights, and opens the log.

use std::sync::Arc;

use lockstep_ckpt::Checkpoint;
use lockstep_comm::Nccl;
use lockstep_config::RunConfig;
use lockstep_core::{Bytes, Rank};
use lockstep_device::{Device, Machine, Memory, Queue};
use lockstep_engine::{Engine, EngineError, Measurement, Resources};
use lockstep_observe::Progress;
use lockstep_plan::RunPlan;

use crate::adapter;
use crate::error::TrainError;
use crate::journal::{Journal, RunDescription};
use crate::learner::Learner;
use crate::learning::{LearnerSources, Learning};
use crate::models::RunModels;
use crate::numerics::{CudaVersions, NumericsFingerprint};
use crate::objective::Objective;
use crate::output_dir::OutputDir;
use crate::position::Position;
use crate::profile::Profiler;
use crate::reference::reference_sync;
use crate::resume::{self, BytesLoaded};
use crate::save::{self, RunIdentity};
use crate::setup::PreparedRun;
use crate::status::StatusWriter;
use crate::step_meter::StepMeter;
use crate::train_state::TrainState;
use crate::trainer::{Connect, TrainOutcome, Trainer};

impl<'a> Trainer<'a> {
    /// Creates the engine, loads a checkpoint or weights, opens the log, and reports notes to the user. A collective
    /// call.
    pub(crate) fn open(
        state: TrainState<'a>,
        config_text: &str,
        prepared: PreparedRun,
        connect: Option<Connect<'_>>,
        objective: Option<&'a mut dyn Objective>,
        progress: &'a mut dyn Progress,
    ) -> Result<Trainer<'a>, TrainError> {
        let config = state.config;
        let mut identity = identity(&state, config_text, &prepared)?;
        let sources = LearnerSources::of(&prepared);
        let PreparedRun { rank, plan, machine, output, mut notes, stop, .. } = prepared;
        let (mut engine, nccl) = connect_engine(config, plan, machine, connect)?;
        let cuda = match machine.device {
            Device::Cpu => None,
            Device::Cuda(gpu) => Some(CudaVersions::of(gpu, nccl.map(Nccl::version_text))),
        };
        identity.numerics = NumericsFingerprint::of(config, engine.plan(), cuda.as_ref());
        let planned = engine.plan().arena_bytes + engine.plan().host_bytes;
        assert_eq!(engine.arena_bytes(), planned, "the engine holds what was planned");
        let (resume, candidates) = (&config.output.resume_from_checkpoint, &prepared.candidates);
        let mut note = |text: &str| notes.push(text.to_string());
        let checkpoint = resume::open_agreed(&engine, resume, &output.checkpoints(), candidates, &mut note)?;
        let objective = Learning::choose(config, &mut engine, &sources, objective, &mut note)?;
        let (position, read) =
            load_state(&mut engine, &state, checkpoint.as_ref(), &sources.models, &identity)?;
        let mut learner = objective.learner(&state, sources, position.step)?;
        if let Some(checkpoint) = &checkpoint {
            learner.restore(checkpoint)?;
        }
        notes.extend(identity.numerics.differing_ranks(&engine)?);
        // This exchange is also a barrier: no rank trains or deletes files before all ranks have loaded.
        let loaded = BytesLoaded::of_all(&engine, checkpoint.as_ref(), read)?;
        let log = if rank == Rank(0) {
            output.sweep(prepared.launch_id.as_deref())?;
            Journal::open(&RunDescription {
                dir: output.path(),
                config,
                config_text,
                plan: engine.plan(),
                machine,
                total_steps: state.total_steps,
                trackers: &prepared.trackers,
                command: &prepared.command,
                resume_step: checkpoint.as_ref().map(|_| position.step),
            })?
        } else {
            Journal::closed()
        };
        let outcome = TrainOutcome {
            steps: position.step,
            last_loss: None,
            model_dir: output.model(),
            checkpoint: checkpoint.as_ref().map(|c| c.path().to_path_buf()),
            stopped: false,
            memory: None,
        };
        let (meter, profiler) = measure(&mut engine, config, machine, &*learner, &output)?;
        let peak_memory = prepared.peak_memory;
        let status = StatusWriter::start(&engine, &output, position.step);
        let mut trainer = Trainer {
            state,
            engine,
            position,
            identity,
            learner,
            log,
            meter,
            profiler,
            status,
            progress,
            output,
            stop,
            machine,
            peak_memory,
            outcome,
        };
        let changes = checkpoint.map_or_else(Vec::new, |c| resume::changes_since(&c, &trainer.identity));
        trainer.announce(&notes, &changes)?;
        loaded.iter().try_for_each(|loaded| trainer.log.event(&loaded.log_line()))?;
        Ok(trainer)
    }

    /// Reports what the user should know before the first step.
    fn announce(&mut self, notes: &[String], changes: &[String]) -> Result<(), TrainError> {
        self.log.fingerprint(&self.identity.numerics)?;
        if let Some(carrier) = self.engine.carrier() {
            let world = self.state.config.plan.world_size();
            self.log.event(&format!("{world} ranks over {carrier}"))?;
        }
        if let Some(offload) = self.engine.nvme_io() {
            let bytes = self.engine.plan().nvme_bytes;
            self.log.event(&format!("states on a disk: {bytes} of each rank, {offload}"))?;
        }
        notes.iter().try_for_each(|note| self.report(note))?;
        let Some(path) = self.outcome.checkpoint.clone() else { return Ok(()) };
        let (step, total_steps) = (self.position.step, self.state.total_steps);
        self.report(&format!("resumed from {} at step {step}", path.display()))?;
        changes.iter().try_for_each(|change| self.report(change))?;
        if step >= total_steps {
            self.progress.note(&format!("there are no steps left: the run ends at step {total_steps}"));
        }
        Ok(())
    }
}

/// Sets how much of a step is measured.
fn measure(
    engine: &mut Engine,
    config: &RunConfig,
    machine: Machine,
    learner: &dyn Learner,
    output: &OutputDir,
) -> Result<(StepMeter, Option<Profiler>), TrainError> {
    let usual = match config.output.wall_clock_breakdown {
        true => Measurement::Operations,
        false => Measurement::Lanes,
    };
    engine.measure(usual)?;
    let meter = StepMeter::new(engine, machine, config.device.tf32, learner.trained());
    let profiler = config.output.profile_steps.map(|steps| Profiler::new(steps, usual, output.path()));
    Ok((meter, profiler))
}

/// What must stay the same when the run is resumed.
fn identity(
    state: &TrainState<'_>,
    config_text: &str,
    prepared: &PreparedRun,
) -> Result<RunIdentity, TrainError> {
    let (config, tokenizer) = (state.config, &prepared.tokenizer);
    let storage = prepared.plan.input.storage;
    let policy = prepared.models.policy();
    let mut model_files = save::model_files(&policy.shape, &prepared.folder_texts, tokenizer, storage);
    let mut settings = config.settings.clone();
    if let Some(lora) = &policy.shape.lora {
        // An adapter's folder has no `config.json`: PEFT would take it for a whole model.
        model_files.retain(|(name, _)| name != "config.json" && name != "generation_config.json");
        let text = adapter::config_text(lora, &policy.shape, &config.model.source);
        model_files.insert(0, ("adapter_config.json".into(), text.into_bytes()));
        // One rank hashes the weights, and compares the hash when the run is resumed.
        if let (Rank(0), Some(path)) = (prepared.rank, &policy.folder) {
            settings.insert(save::BASE_HASH.into(), adapter::base_hash(path)?);
        }
    }
    Ok(RunIdentity {
        data: state.cursor(&prepared.dataset),
        switches: [
            ("shuffle", config.data.shuffle),
            ("dataloader_drop_last", config.batch.dataloader_drop_last),
        ],
        config_hash: blake3::hash(config_text.as_bytes()).to_hex().to_string(),
        tokenizer_hash: tokenizer.fingerprint().to_string(),
        run_config: config_text.to_string(),
        numerics: NumericsFingerprint::default(),
        settings,
        model_files,
        syncs_reference: reference_sync(config).is_some(),
    })
}

/// Loads the initial state of all models: a checkpoint, the weights of model folders, or random weights. Returns also the
/// bytes that were read from model folders.
fn load_state(
    engine: &mut Engine,
    state: &TrainState<'_>,
    checkpoint: Option<&Checkpoint>,
    models: &RunModels,
    identity: &RunIdentity,
) -> Result<(Position, Bytes), TrainError> {
    let (seed, scale) = (state.config.batch.seed, state.scale_state());
    let mut read = Bytes::ZERO;
    for id in models.ids() {
        // A checkpoint of adapters does not have the weights they belong to.
        let has_adapters = engine.model(id).plan().shape.lora.is_some();
        let in_checkpoint =
            checkpoint.is_some() && !has_adapters && save::is_saved(engine, id, identity.syncs_reference);
        if !in_checkpoint {
            read += models.load(engine, id, seed)?;
        }
    }
    let position = match checkpoint {
        Some(checkpoint) => save::load_checkpoint(engine, checkpoint, identity, scale)?,
        None => Position::start(scale),
    };
    engine.set_seed(seed);
    Ok((position, read))
}

/// Allocates the plan's memory and connects to the other ranks.
pub(crate) fn make_engine(
    config: &RunConfig,
    plan: RunPlan,
    machine: Machine,
    connect: Option<Connect<'_>>,
) -> Result<Engine, TrainError> {
    connect_engine(config, plan, machine, connect).map(|(engine, _)| engine)
}

/// Like [`make_engine`]; also returns NCCL if the ranks use it.
fn connect_engine(
    config: &RunConfig,
    plan: RunPlan,
    machine: Machine,
    connect: Option<Connect<'_>>,
) -> Result<(Engine, Option<&'static Nccl>), TrainError> {
    let mut queue = machine.queue().map_err(EngineError::from)?;
    let taken = match (machine.device, &mut queue) {
        (Device::Cuda(gpu), Queue::Cuda(cuda)) => {
            cuda.tf32 = config.device.tf32;
            Memory::allocate_on(gpu, plan.arena_bytes)
        }
        _ if connect.is_some() => {
            Memory::allocate_exporting(plan.arena_bytes, plan.exported.clone(), queue.pool())
        }
        _ => Memory::allocate(plan.arena_bytes, queue.pool()),
    };
    let memory = Arc::new(taken.map_err(EngineError::from)?);
    // GPUs exchange tensors without host memory. Messages between ranks still need a small shared region.
    let exported = match machine.device {
        Device::Cpu if !plan.exported.is_empty() => Arc::clone(&memory),
        _ => Arc::new(Memory::allocate_shared(Bytes(4096), queue.pool()).map_err(EngineError::from)?),
    };
    let connection = connect.map(|connect| connect(&exported)).transpose()?;
    let (comms, nccl) = connection.map_or((None, None), |c| (Some(c.comms), c.nccl));
    let nvme_dir = Some(config.plan.nvme_path.clone().unwrap_or_else(|| config.output.output_dir.clone()));
    let library = nccl.as_ref().map(|spec| spec.nccl);
    Ok((Engine::new(plan, Resources { memory, comms, nccl, queue, nvme_dir })?, library))
}
