//! The engine: a plan, its memory, and the lanes that run it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use lockstep_comm::NcclSpec;
use lockstep_core::{Bytes, DType, Rank, panics};
use lockstep_device::{Device, Memory, Queue};
use lockstep_ops::optimizer::{ParamFormat, StateFormat, UpdateFormat};
use lockstep_plan::{Lane, LaneProcessor, LaneThreads, ModelId, ModelPlan, Phase, PhaseKind, RunPlan};

use crate::addresses::{Memories, UnitResidents};
use crate::driver::PhaseDriver;
use crate::error::EngineError;
use crate::inputs::BatchSize;
use crate::lanes::{Lanes, ScheduleRun};
use crate::meter::Meter;
use crate::norm::NormScratch;
use crate::poison::Poison;
use crate::prepared_phase::PreparedPhase;
use crate::quantised::ScaleOffsets;
use crate::running::RunningOps;
use crate::step::{StepState, StepStates};
use crate::transport::{Comms, Transport};

/// How long to wait for lanes to end after a failure. All their waits end at once; only the operation they are running
/// is left.
const LANE_SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(500);

/// The resources that a rank runs a plan with.
#[derive(Debug)]
pub struct Resources {
    /// The plan's device arena.
    pub memory: Arc<Memory>,
    /// `None` for a single rank.
    pub comms: Option<Comms>,
    /// Communication between GPUs, for ranks that compute on them.
    pub nccl: Option<NcclSpec>,
    pub queue: Queue,
    /// The folder for states that are offloaded to NVMe.
    pub nvme_dir: Option<PathBuf>,
}

impl Resources {
    /// A single rank; allocates the arena.
    pub fn single_rank(plan: &RunPlan, queue: Queue) -> Result<Resources, EngineError> {
        let memory = Arc::new(queue.device().allocate(plan.arena_bytes, queue.pool())?);
        Ok(Resources { memory, comms: None, nccl: None, queue, nvme_dir: None })
    }
}

/// Runs the phases of a plan.
pub struct Engine {
    pub(crate) shared: Arc<Shared>,
    pub(crate) queue: Queue,
    lanes: Vec<JoinHandle<()>>,
    pub(crate) loss_scale: f64,
}

/// The state that all lanes share.
pub(crate) struct Shared {
    // Dropped first: other ranks may read this rank's memory until the carrier is closed.
    pub(crate) transport: Transport,
    pub(crate) plan: RunPlan,
    /// For each model, where its states live.
    residents: Vec<Vec<UnitResidents>>,
    /// The plan's phases, with addresses.
    phases: Vec<PreparedPhase>,
    /// The index of the current phase. It changes only while all lanes are idle.
    current: AtomicUsize,
    pub(crate) memories: Memories,
    pub(crate) lanes: Lanes,
    pub(crate) meter: Meter,
    /// Read by other threads, also after the engine is dropped.
    pub(crate) running: Arc<RunningOps>,
    pub(crate) host_calls: AtomicU64,
    pub(crate) seed: AtomicU64,
    pub(crate) steps: StepStates,
    pub(crate) scale_offsets: ScaleOffsets,
    pub(crate) norm: Mutex<NormScratch>,
    /// Micro-batches whose outputs the driver has not seen.
    pub(crate) pending_outputs: Mutex<Vec<BatchSize>>,
    /// For each phase; set only in tests.
    pub(crate) poison: OnceLock<Vec<Poison>>,
}

impl Engine {
    /// Prepares a plan to run. Parameters are zero until they are initialised or loaded.
    pub fn new(plan: RunPlan, resources: Resources) -> Result<Engine, EngineError> {
        panics::install_hook();
        let Resources { memory, comms, nccl, queue, nvme_dir } = resources;
        let memories = Memories::take(&plan, memory, &queue, nvme_dir)?;
        let device = queue.device();
        if let Device::Cuda(gpu) = device {
            for model in &plan.input.models {
                let storage = plan.input.storage;
                let mut sources = lockstep_model::kernel_sources(&model.shape, storage, gpu.sm);
                let format = UpdateFormat {
                    params: ParamFormat::Master { working: storage },
                    states: StateFormat::F32,
                    grads: DType::F32,
                };
                let updates = || lockstep_ops::optimizer_kernel_source(model.optimizer.name, format);
                sources.extend(model.trains().then(updates));
                gpu.compile_ahead(&sources)?;
            }
        }
        let models = (0..plan.input.models.len()).map(|i| ModelId(i as u8));
        let residents: Vec<_> = models.map(|id| UnitResidents::of_model(&plan, id)).collect();
        let of = |phase| PreparedPhase::of(&plan, phase, &residents[phase.model.0 as usize], device);
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
        let own_thread = |lane: &Lane| *lane != Lane::Compute && runs_on(lane);
        let threads: Vec<Lane> = Lane::ALL.into_iter().filter(own_thread).collect();
        let shared = Arc::new(Shared {
            transport: Transport::new(&plan.input.mesh, plan.rank, comms, nccl)?,
            residents,
            norm: Mutex::new(NormScratch::of(&plan, &phases)),
            phases,
            current: AtomicUsize::new(0),
            memories,
            lanes: Lanes::new(&threads),
            meter: Meter::default(),
            running: Arc::default(),
            host_calls: AtomicU64::new(1),
            seed: AtomicU64::new(0),
            steps: StepStates::new(),
            scale_offsets: ScaleOffsets::of(&plan),
            pending_outputs: Mutex::new(Vec::with_capacity(plan.input.num_micro_batches as usize)),
            poison: OnceLock::new(),
            plan,
        });
        let lanes = threads
            .into_iter()
            .map(|lane| {
                let threads = match lane.spec().threads {
                    LaneThreads::One => 1,
                    LaneThreads::All => queue.num_threads(),
                };
                let lane_queue = match lane.spec().processor {
                    LaneProcessor::Host => Queue::cpu(threads),
                    LaneProcessor::Device => device.queue(threads)?,
                };
                Ok(shared.clone().spawn(lane, lane_queue))
            })
            .collect::<Result<_, EngineError>>()?;
        Ok(Engine { shared, queue, lanes, loss_scale: 1.0 })
    }

    pub fn plan(&self) -> &RunPlan {
        &self.shared.plan
    }

    /// Sets the seed of dropout masks, which also depend on the step and the samples, and of stochastic rounding, which also
    /// depends on the update and the tensor. It must be the same on all ranks.
    pub fn set_seed(&mut self, seed: u64) {
        self.shared.seed.store(seed, std::sync::atomic::Ordering::Relaxed);
    }

    pub fn rank(&self) -> Rank {
        self.shared.plan.rank
    }

    /// Bytes allocated on the device and on the host, as planned.
    pub fn arena_bytes(&self) -> Bytes {
        self.shared.memories.device.bytes() + self.shared.memories.host.bytes()
    }

    /// Multiplies losses by `scale` from the next step on, so that small gradients do not underflow in fp16. Norms and
    /// updates use the unscaled gradients. A power of two does not change their bits, unless a number overflows or
    /// underflows.
    pub fn set_loss_scale(&mut self, scale: f64) {
        assert!(scale > 0.0 && scale.is_finite(), "the loss scale must be positive and finite, not {scale}");
        self.loss_scale = scale;
    }

    /// Runs a phase once on all lanes; `step` is set for training steps. Returns when [`Schedule::returns_after`] says
    /// so, while other lanes may still be working ([`Engine::synchronize`]).
    ///
    /// [`Schedule::returns_after`]: lockstep_plan::Schedule::returns_after
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
        let same_schedule =
            schedule.returns_after.is_some() && shared.current.load(Ordering::SeqCst) == phase;
        if !same_schedule {
            self.synchronize()?;
            shared.current.store(phase, Ordering::SeqCst);
        }
        shared.begin_measuring(self.queue.cuda())?;
        let run = shared.lanes.begin(schedule.ops.len(), same_schedule, |run| {
            if let Some(step) = step {
                *shared.steps.of(run) = step;
            }
        })?;
        shared.run_guarded(Lane::Compute, || shared.compute_lane(run, caller, &self.queue));
        shared.lanes.wait_for_return(run, schedule, &shared.meter)?;
        if shared.measures_on_gpu() {
            self.synchronize()?;
            shared.finish_measuring()?;
        }
        Ok(run)
    }

    /// Waits until all lanes are idle. After a step, updates on the host may still be running. Methods that read or
    /// write states call this themselves.
    pub fn synchronize(&self) -> Result<(), EngineError> {
        self.shared.lanes.synchronize(&Lane::ALL)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let shared = &self.shared;
        if std::thread::panicking() {
            // The lanes may be waiting for operations that this thread will not run.
            shared.fail(EngineError::Stopped);
        }
        shared.lanes.quit();
        if shared.lanes.is_stopped() {
            shared.transport.abort_failed_nccl();
            if !shared.lanes.ended_within(LANE_SHUTDOWN_TIMEOUT) {
                // A lane hangs in a driver or in disk I/O; it ends with the process.
                return;
            }
        }
        for lane in self.lanes.drain(..) {
            let _ = lane.join();
        }
    }
}

impl Shared {
    /// The index of the current phase.
    pub(crate) fn current_phase(&self) -> usize {
        self.current.load(Ordering::SeqCst)
    }

    /// The current phase, as planned.
    pub(crate) fn schedule_phase(&self) -> &Phase {
        &self.plan.phases[self.current_phase()]
    }

    /// The current phase, with addresses.
    pub(crate) fn prepared_phase(&self) -> &PreparedPhase {
        &self.phases[self.current_phase()]
    }

    /// The model of the current phase.
    pub(crate) fn model(&self) -> &ModelPlan {
        self.plan.input.model(self.schedule_phase().model)
    }

    /// Where a model's states live.
    pub(crate) fn residents(&self, model: ModelId) -> &[UnitResidents] {
        &self.residents[model.0 as usize]
    }

    /// Runs a lane's part of a phase. An error or a panic stops all lanes.
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

    /// Stops all lanes and aborts every wait for another rank. The first cause is the one reported.
    pub(crate) fn fail(&self, cause: EngineError) {
        let why = cause.to_string();
        self.lanes.stop(cause);
        self.transport.abort(&why);
    }

    pub(crate) fn storage(&self) -> DType {
        self.plan.input.storage
    }
}
