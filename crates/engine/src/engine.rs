//! The engine: a plan, its memory, and the lanes that run it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use lockstep_comm::{NcclSpec, NcclWorld};
use lockstep_core::{Bytes, DType, Rank, panics};
use lockstep_device::{Device, Memory, Queue};
use lockstep_plan::{Lane, ModelId, ModelPlan, Phase, PhaseKind, RunPlan};

use crate::addresses::{Memories, UnitResidents};
use crate::driver::PhaseDriver;
use crate::error::EngineError;
use crate::lanes::{Lanes, ScheduleRun};
use crate::norm::NormScratch;
use crate::phases::PreparedPhase;
use crate::poison::Poison;
use crate::step::{StepState, StepStates};
use crate::transport::{Comms, Transport};

/// How long lanes may take to end after a failure. Every wait of theirs ends at once; what is left is the operation
/// they are in.
const LANES_END: Duration = Duration::from_millis(500);

/// What a rank runs a plan with.
#[derive(Debug)]
pub struct Resources {
    pub rank: Rank,
    /// The plan's arena.
    pub memory: Arc<Memory>,
    /// `None` in a world of one.
    pub comms: Option<Comms>,
    /// Of ranks that compute on GPUs: what carries between those.
    pub nccl: Option<NcclSpec>,
    pub queue: Queue,
    /// Where states may be spilled to, for plans that do.
    pub nvme_dir: Option<PathBuf>,
}

impl Resources {
    /// One rank, with memory of its own.
    pub fn single_rank(plan: &RunPlan, queue: Queue) -> Result<Resources, EngineError> {
        let memory = Arc::new(queue.device().allocate(plan.arena_bytes, queue.pool())?);
        Ok(Resources { rank: Rank(0), memory, comms: None, nccl: None, queue, nvme_dir: None })
    }
}

/// Runs the phases of a plan.
pub struct Engine {
    pub(crate) shared: Arc<Shared>,
    pub(crate) queue: Queue,
    lanes: Vec<JoinHandle<()>>,
    pub(crate) loss_scale: f64,
}

/// What all lanes share.
pub(crate) struct Shared {
    // Dropped first: peers may read the memory until a carrier is gone.
    pub(crate) transport: Transport,
    pub(crate) plan: RunPlan,
    /// Where each model's states live.
    residents: Vec<Vec<UnitResidents>>,
    /// The plan's phases, with addresses.
    phases: Vec<PreparedPhase>,
    /// The one that runs. Changes only while all lanes are at rest.
    current: AtomicUsize,
    pub(crate) memories: Memories,
    pub(crate) lanes: Lanes,
    pub(crate) rank: Rank,
    pub(crate) host_calls: AtomicU64,
    pub(crate) dropout_seed: AtomicU64,
    pub(crate) steps: StepStates,
    pub(crate) norm: Mutex<NormScratch>,
    /// Micro-batches whose outputs are on their way to the host, and their tokens.
    pub(crate) pending_outputs: Mutex<Vec<(u32, usize)>>,
    /// By phase, in tests.
    pub(crate) poison: OnceLock<Vec<Poison>>,
}

impl Engine {
    /// Prepares a plan to run. Parameters are zero until they are initialised or loaded.
    pub fn new(plan: RunPlan, resources: Resources) -> Result<Engine, EngineError> {
        panics::install_hook();
        let Resources { rank, memory, comms, nccl, queue, nvme_dir } = resources;
        let memories = Memories::take(&plan, memory, &queue, nvme_dir)?;
        let device = queue.device();
        if let Device::Cuda(gpu) = device {
            for model in &plan.input.models {
                let storage = plan.input.storage;
                let mut sources = lockstep_model::kernel_sources(&model.shape, storage, gpu.sm);
                let updates = || lockstep_ops::optimizer_kernel_source(model.optimizer.name, storage);
                sources.extend(model.trains().then(updates));
                gpu.compile_ahead(&sources)?;
            }
        }
        let models = (0..plan.input.models.len()).map(|i| ModelId(i as u8));
        let residents: Vec<_> = models.map(|id| UnitResidents::of_model(&plan, id, rank)).collect();
        let of = |phase| PreparedPhase::of(&plan, phase, &residents[phase.model.0 as usize], rank, device);
        let phases: Vec<PreparedPhase> = plan.phases.iter().map(of).collect::<Result<_, _>>()?;
        // Phases of one model have the same tables.
        for (phase, addresses) in plan.phases.iter().zip(&phases) {
            let shape = &plan.input.model(phase.model).shape;
            lockstep_model::fill_rope_tables(shape, addresses.addresses.rope_tables.view(&memories))?;
        }
        let nccl = nccl.filter(|_| matches!(device, Device::Cuda(_)));
        assert!(
            comms.is_none() || matches!(device, Device::Cpu) || nccl.is_some(),
            "ranks on GPUs have NCCL"
        );
        let runs_on =
            |lane: &Lane| plan.phases.iter().any(|p| p.schedule.ops.iter().any(|op| op.lane == *lane));
        let threads: Vec<Lane> = [Lane::Comm, Lane::Copy, Lane::Host].into_iter().filter(runs_on).collect();
        let shared = Arc::new(Shared {
            transport: Transport::new(&plan.input.mesh, rank, comms, nccl)?,
            residents,
            norm: Mutex::new(NormScratch::of(&plan, &phases)),
            phases,
            current: AtomicUsize::new(0),
            memories,
            lanes: Lanes::new(&threads),
            rank,
            host_calls: AtomicU64::new(1),
            dropout_seed: AtomicU64::new(0),
            steps: StepStates::new(),
            pending_outputs: Mutex::new(Vec::with_capacity(plan.input.num_micro_batches as usize)),
            poison: OnceLock::new(),
            plan,
        });
        let lanes = threads
            .into_iter()
            .map(|lane| {
                // Copies and sums of the comm lane are bound by memory; updates on the host are work.
                let lane_queue = match lane {
                    Lane::Host => Queue::cpu(queue.num_threads()),
                    _ => device.queue(1)?,
                };
                Ok(shared.clone().spawn(lane, lane_queue))
            })
            .collect::<Result<_, EngineError>>()?;
        Ok(Engine { shared, queue, lanes, loss_scale: 1.0 })
    }

    pub fn plan(&self) -> &RunPlan {
        &self.shared.plan
    }

    /// What masks of dropout are drawn from, with the step and the samples: alike on all ranks.
    pub fn set_dropout_seed(&mut self, seed: u64) {
        self.shared.dropout_seed.store(seed, std::sync::atomic::Ordering::Relaxed);
    }

    pub fn rank(&self) -> Rank {
        self.shared.rank
    }

    /// Bytes taken, on the device and on the host: what the plan said.
    pub fn arena_bytes(&self) -> Bytes {
        self.shared.memories.device.bytes() + self.shared.memories.host.bytes()
    }

    /// From the next step on, losses are multiplied by `scale`, so that small gradients survive a storage type
    /// of few exponents; norms and updates are of the gradients without it. A power of two changes no bit of
    /// them, as long as nothing overflows or falls below the smallest number.
    pub fn set_loss_scale(&mut self, scale: f64) {
        assert!(scale > 0.0 && scale.is_finite(), "a loss scale of {scale}");
        self.loss_scale = scale;
    }

    /// Runs a phase once, on all lanes, with the step's numbers where it is a step. Returns when the schedule
    /// says so; lanes may still be at work then ([`Engine::settle`]).
    pub(crate) fn run_phase(
        &mut self,
        kind: PhaseKind,
        model: ModelId,
        step: Option<StepState>,
        caller: &mut PhaseDriver,
    ) -> Result<ScheduleRun, EngineError> {
        let shared = &self.shared;
        let phase = shared.plan.phase(kind, model);
        let phase = phase.unwrap_or_else(|| panic!("the plan has no {kind} phase of model {}", model.0));
        let schedule = &shared.plan.phases[phase].schedule;
        let again = schedule.returns_after.is_some() && shared.current.load(Ordering::SeqCst) == phase;
        if !again {
            self.synchronize()?;
            shared.current.store(phase, Ordering::SeqCst);
        }
        let run = shared.lanes.begin(schedule.ops.len(), again, |run| {
            if let Some(step) = step {
                *shared.steps.of(run) = step;
            }
        })?;
        shared.run_guarded(Lane::Compute, || shared.compute_lane(run, caller, &self.queue));
        shared.lanes.returned(run, schedule)?;
        Ok(run)
    }

    /// Waits until nothing of what was run goes on any more: after a step, updates on the host may, until the
    /// next one needs what they write. Whatever reads or writes states waits by itself.
    pub fn synchronize(&self) -> Result<(), EngineError> {
        self.shared.lanes.synchronize(&Lane::ALL)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let shared = &self.shared;
        if std::thread::panicking() {
            // The lanes may wait for operations that this thread will not run any more.
            shared.fail(EngineError::Stopped);
        }
        shared.lanes.quit();
        if shared.lanes.is_stopped() {
            // Takes the communicators down, and with them kernels that wait for other ranks.
            let _ = shared.transport.nccl().map(NcclWorld::check);
            if !shared.lanes.end_within(LANES_END) {
                // One hangs in a driver or a disk; it ends with the process.
                return;
            }
        }
        for lane in self.lanes.drain(..) {
            let _ = lane.join();
        }
    }
}

impl Shared {
    /// The index of the phase that runs.
    pub(crate) fn current_phase(&self) -> usize {
        self.current.load(Ordering::SeqCst)
    }

    /// The phase that runs, as planned.
    pub(crate) fn schedule_phase(&self) -> &Phase {
        &self.plan.phases[self.current_phase()]
    }

    /// The phase that runs, with addresses.
    pub(crate) fn prepared_phase(&self) -> &PreparedPhase {
        &self.phases[self.current_phase()]
    }

    /// The model of the phase that runs.
    pub(crate) fn model(&self) -> &ModelPlan {
        self.plan.input.model(self.schedule_phase().model)
    }

    /// Where a model's states live.
    pub(crate) fn residents(&self, model: ModelId) -> &[UnitResidents] {
        &self.residents[model.0 as usize]
    }

    /// Runs a lane's part of a phase. An error or a panic ends all lanes.
    pub(crate) fn run_guarded(&self, lane: Lane, part: impl FnOnce() -> Result<(), EngineError>) {
        match catch_unwind(AssertUnwindSafe(part)) {
            Ok(Ok(())) => {}
            Ok(Err(cause)) => self.fail(cause),
            Err(payload) => {
                let panic = panics::from_payload(&*payload);
                self.fail(EngineError::LanePanicked { lane: lane.to_string(), panic });
            }
        }
    }

    /// Ends all lanes, and every wait for another rank. The first cause stays.
    pub(crate) fn fail(&self, cause: EngineError) {
        let why = cause.to_string();
        self.lanes.stop(cause);
        self.transport.abort(&why);
    }

    pub(crate) fn storage(&self) -> DType {
        self.plan.input.storage
    }
}
