//! The engine: a plan, its memory, and the lanes that run it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use lockstep_comm::{Abort, Call, Comm, Group, NcclSpec, NcclWorld};
use lockstep_core::{Axis, Bytes, DType, Rank, panics};
use lockstep_device::cuda::{Event, Gpu};
use lockstep_device::{Device, Memory, Queue, Spill};
use lockstep_plan::{Lane, ModelId, ModelPlan, Phase, PhaseKind, RunPlan, Schedule, State, Tier, Wait, What};

use crate::driver::{Caller, Updates};
use crate::error::EngineError;
use crate::lanes::{Lanes, Run};
use crate::norm::NormWork;
use crate::places::{Memories, Places, UnitHomes};
use crate::poison::Poison;
use crate::task::{Squares, Task, tasks};

/// How long lanes may take to end after a failure. Every wait of theirs ends at once; what is left is the operation
/// they are in.
const LANES_END: Duration = Duration::from_millis(500);

/// How a rank reaches the others. Both connect the same ranks.
#[derive(Debug)]
pub struct Comms {
    /// For the collectives of a schedule, on the comm lane.
    pub lane: Comm,
    /// For calls between steps, on the caller's thread: they need not wait for what the comm lane still sends.
    pub host: Comm,
}

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
    pub spill_dir: Option<PathBuf>,
}

impl Resources {
    /// One rank, with memory of its own.
    pub fn alone(plan: &RunPlan, queue: Queue) -> Result<Resources, EngineError> {
        let memory = Arc::new(queue.device().take(plan.arena, queue.pool())?);
        Ok(Resources { rank: Rank(0), memory, comms: None, nccl: None, queue, spill_dir: None })
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
    lane_comm: Option<Mutex<Comm>>,
    host_comm: Option<Mutex<Comm>>,
    nccl: Option<NcclWorld>,
    pub(crate) plan: RunPlan,
    /// Where each model's states live.
    homes: Vec<Vec<UnitHomes>>,
    /// The plan's phases, with addresses.
    phases: Vec<PhasePlaces>,
    /// The one that runs. Changes only while all lanes are at rest.
    current: AtomicUsize,
    pub(crate) memories: Memories,
    pub(crate) lanes: Lanes,
    pub(crate) rank: Rank,
    pub(crate) host_calls: AtomicU64,
    pub(crate) dropout_seed: AtomicU64,
    /// End the waits for other ranks when this one fails.
    aborts: Vec<Abort>,
    groups: [Group; 3],
    /// Of the run that computes, and of the one before, which may still update.
    steps: [Mutex<StepState>; 2],
    pub(crate) norm: Mutex<NormWork>,
    /// Micro-batches whose outputs are on their way to the host, and their tokens.
    pub(crate) on_their_way: Mutex<Vec<(u32, usize)>>,
    /// By phase, in tests.
    pub(crate) poison: OnceLock<Vec<Poison>>,
}

/// Where a phase's buffers are, and what its operations come to on this rank.
pub(crate) struct PhasePlaces {
    pub(crate) places: Places,
    pub(crate) tasks: Vec<Task>,
    pub(crate) squares: Vec<Squares>,
    /// For each operation, a mark in its lane's stream, if one of another lane waits for it. Runs take turns with
    /// two of them.
    pub(crate) marks: [Vec<Option<Event>>; 2],
}

impl PhasePlaces {
    fn of(
        plan: &RunPlan,
        phase: &Phase,
        homes: &[UnitHomes],
        rank: Rank,
        device: Device,
    ) -> Result<PhasePlaces, EngineError> {
        let places = Places::of(plan, phase, homes);
        let tasks = tasks(plan, phase, &places, homes, rank);
        let squares = tasks.iter().filter_map(|task| match task {
            Task::Squares(list) => Some(&list[..]),
            _ => None,
        });
        let squares = squares.flatten().copied().collect();
        let marks = match device {
            Device::Cpu => [0, 1].map(|_| phase.schedule.ops.iter().map(|_| None).collect()),
            Device::Cuda(gpu) => [marks(&phase.schedule, gpu)?, marks(&phase.schedule, gpu)?],
        };
        Ok(PhasePlaces { places, tasks, squares, marks })
    }
}

/// Marks for the operations of streams that another lane waits for. What the host's cores do needs none: it is
/// done when it is said to be.
fn marks(schedule: &Schedule, gpu: &'static Gpu) -> Result<Vec<Option<Event>>, EngineError> {
    let mut marks: Vec<Option<Event>> = schedule.ops.iter().map(|_| None).collect();
    for wait in schedule.ops.iter().flat_map(|op| &op.waits) {
        let (Wait::This(id) | Wait::Previous(id)) = wait;
        let (op, mark) = (&schedule.ops[id.0 as usize], &mut marks[id.0 as usize]);
        if op.lane != Lane::Host && mark.is_none() {
            *mark = Some(Event::new(gpu)?);
        }
    }
    Ok(marks)
}

/// Takes the host's part of a plan. What a GPU copies from or to is pinned: all but the states that only the host's
/// cores touch.
fn host_memory(plan: &RunPlan, queue: &Queue) -> Result<Memory, EngineError> {
    let mut memory = Memory::take(plan.host_bytes, queue.pool())?;
    let Device::Cuda(gpu) = queue.device() else { return Ok(memory) };
    let residents = &plan.residents[Tier::Host as usize];
    let only_host =
        |what: What| matches!(what, What::State { state: State::Master | State::Optimizer(_), .. });
    let starts = residents.offsets.iter().map(|(_, start)| start.0 as usize);
    let ends = starts.clone().skip(1).chain([residents.bytes.0 as usize]);
    let mut pinned: Vec<(usize, usize)> = Vec::new();
    let all = residents.offsets.iter().zip(starts.zip(ends));
    let crossed =
        all.filter(|((id, _), _)| !only_host(plan.buffers[id.0 as usize].what)).map(|(_, range)| range);
    for (start, end) in crossed.chain([(residents.bytes.0 as usize, plan.host_bytes.0 as usize)]) {
        match pinned.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => pinned.push((start, end)),
        }
    }
    for (start, end) in pinned {
        memory.pin(gpu, start, end)?;
    }
    Ok(memory)
}

/// What one operation leaves for later ones of the same step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepState {
    pub(crate) updates: Updates,
    pub(crate) grad_norm: f64,
    /// What gradients are multiplied by before the update: clips them and takes the scale away.
    pub(crate) clip: f32,
    pub(crate) skip: bool,
    /// What coefficients were multiplied by, and so all gradients.
    pub(crate) loss_scale: f64,
}

impl StepState {
    pub(crate) fn new(updates: Updates, loss_scale: f64) -> StepState {
        StepState { updates, grad_norm: 0.0, clip: 1.0, skip: false, loss_scale }
    }
}

impl Engine {
    /// Prepares a plan to run. Parameters are zero until they are initialised or loaded.
    pub fn new(plan: RunPlan, resources: Resources) -> Result<Engine, EngineError> {
        panics::record();
        let Resources { rank, memory, mut comms, nccl, queue, spill_dir } = resources;
        assert_eq!(memory.bytes(), plan.arena, "the arena is the plan's");
        let (world, here) = (plan.input.mesh.world(), comms.as_ref().map_or(1, |c| c.lane.world()));
        assert_eq!(world, here, "the plan is for {world} ranks, the carrier for {here}");
        let spill = match (plan.nvme_bytes, spill_dir) {
            (Bytes::ZERO, _) => None,
            (bytes, Some(dir)) => Some(Spill::make(&dir, bytes)?),
            (bytes, None) => return Err(EngineError::NoSpillDir { bytes }),
        };
        let memories = Memories { device: memory, host: host_memory(&plan, &queue)?, spill };
        let device = queue.device();
        if let Device::Cuda(gpu) = device {
            for model in &plan.input.models {
                gpu.compile_ahead(&lockstep_model::kernel_sources(&model.shape, plan.input.storage, gpu.sm))?;
            }
        }
        let models = (0..plan.input.models.len()).map(|i| ModelId(i as u8));
        let homes: Vec<_> = models.map(|id| UnitHomes::of_model(&plan, id, rank)).collect();
        let phases: Vec<PhasePlaces> = plan
            .phases
            .iter()
            .map(|phase| PhasePlaces::of(&plan, phase, &homes[phase.model.0 as usize], rank, device))
            .collect::<Result<_, _>>()?;
        // Phases of one model have the same tables.
        for (phase, places) in plan.phases.iter().zip(&phases) {
            let shape = &plan.input.model(phase.model).shape;
            lockstep_model::fill_tables(shape, places.places.tables.view(&memories))?;
        }
        let mesh = plan.input.mesh;
        let groups = [Axis::Replicate, Axis::Shard, Axis::World].map(|axis| Group::along(&mesh, axis, rank));
        let mut aborts: Vec<Abort> =
            comms.iter().flat_map(|comms| [comms.lane.abort(), comms.host.abort()]).collect();
        let nccl = match (queue.device(), &mut comms) {
            (Device::Cuda(_), Some(comms)) => {
                let spec = nccl.expect("ranks on GPUs have NCCL");
                aborts.push(spec.abort.clone());
                let failed = |cause| EngineError::Comm { op: "setting up NCCL".into(), cause };
                Some(NcclWorld::connect(&spec, &groups, &mut comms.host, Call::HOST).map_err(failed)?)
            }
            _ => None,
        };
        let runs_on =
            |lane: &Lane| plan.phases.iter().any(|p| p.schedule.ops.iter().any(|op| op.lane == *lane));
        let threads: Vec<Lane> = [Lane::Comm, Lane::Copy, Lane::Host].into_iter().filter(runs_on).collect();
        // Ranks that hold different gradients exchange their subtrees.
        let apart = |phase: &Phase| mesh.size_of(plan.input.cut_over(phase.model, State::Grad));
        let most_apart = plan.phases.iter().map(apart).max().unwrap_or(1);
        let most_squares = phases.iter().map(|p| p.squares.len()).max().unwrap_or(0);
        let (lane_comm, host_comm) = match comms {
            Some(Comms { lane, host }) => (Some(Mutex::new(lane)), Some(Mutex::new(host))),
            None => (None, None),
        };
        let shared = Arc::new(Shared {
            homes,
            phases,
            current: AtomicUsize::new(0),
            norm: Mutex::new(NormWork::new(most_squares, most_apart)),
            memories,
            lanes: Lanes::new(&threads),
            rank,
            host_calls: AtomicU64::new(1),
            dropout_seed: AtomicU64::new(0),
            lane_comm,
            host_comm,
            nccl,
            aborts,
            groups,
            steps: [0, 1].map(|_| Mutex::new(StepState::new(Updates::NONE, 1.0))),
            on_their_way: Mutex::new(Vec::with_capacity(plan.input.micros as usize)),
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
    pub fn seed_dropout(&mut self, seed: u64) {
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
        caller: &mut Caller,
    ) -> Result<Run, EngineError> {
        let shared = &self.shared;
        let phase = shared.plan.phase(kind, model);
        let phase = phase.unwrap_or_else(|| panic!("the plan has no {kind} phase of model {}", model.0));
        let schedule = &shared.plan.phases[phase].schedule;
        let again = schedule.returns_after.is_some() && shared.current.load(Ordering::SeqCst) == phase;
        if !again {
            self.settle()?;
            shared.current.store(phase, Ordering::SeqCst);
        }
        let run = shared.lanes.begin(schedule.ops.len(), again, |run| {
            if let Some(step) = step {
                *shared.step_state(run) = step;
            }
        })?;
        shared.run_guarded(Lane::Compute, || shared.compute_lane(run, caller, &self.queue));
        shared.lanes.returned(run, schedule)?;
        Ok(run)
    }

    /// Waits until nothing of what was run goes on any more: after a step, updates on the host may, until the
    /// next one needs what they write. Whatever reads or writes states waits by itself.
    pub fn settle(&self) -> Result<(), EngineError> {
        self.shared.lanes.settle(&Lane::ALL)
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
            let _ = shared.nccl.as_ref().map(NcclWorld::check);
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
    pub(crate) fn at(&self) -> &PhasePlaces {
        &self.phases[self.current_phase()]
    }

    /// The model of the phase that runs.
    pub(crate) fn model(&self) -> &ModelPlan {
        self.plan.input.model(self.schedule_phase().model)
    }

    /// Where a model's states live.
    pub(crate) fn homes(&self, model: ModelId) -> &[UnitHomes] {
        &self.homes[model.0 as usize]
    }

    pub(crate) fn group(&self, axis: Axis) -> &Group {
        match axis {
            Axis::Replicate => &self.groups[0],
            Axis::Shard => &self.groups[1],
            Axis::World => &self.groups[2],
        }
    }

    /// Runs a lane's part of a phase. An error or a panic ends all lanes.
    pub(crate) fn run_guarded(&self, lane: Lane, part: impl FnOnce() -> Result<(), EngineError>) {
        match catch_unwind(AssertUnwindSafe(part)) {
            Ok(Ok(())) => {}
            Ok(Err(cause)) => self.fail(cause),
            Err(payload) => {
                let panic = panics::describe(&*payload);
                self.fail(EngineError::LanePanicked { lane: lane.to_string(), panic });
            }
        }
    }

    /// Ends all lanes, and every wait for another rank. The first cause stays.
    pub(crate) fn fail(&self, cause: EngineError) {
        let why = cause.to_string();
        self.lanes.stop(cause);
        self.aborts.iter().for_each(|abort| abort.raise(why.as_str()));
    }

    /// For the collectives of a schedule.
    pub(crate) fn lane_comm(&self) -> MutexGuard<'_, Comm> {
        lock_comm(&self.lane_comm)
    }

    /// For the calls between steps.
    pub(crate) fn host_comm(&self) -> MutexGuard<'_, Comm> {
        lock_comm(&self.host_comm)
    }

    /// What carries between GPUs.
    pub(crate) fn nccl(&self) -> Option<&NcclWorld> {
        self.nccl.as_ref()
    }

    pub(crate) fn is_alone(&self) -> bool {
        self.lane_comm.is_none()
    }

    pub(crate) fn step_state(&self, run: Run) -> MutexGuard<'_, StepState> {
        self.steps[run.parity()].lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(crate) fn storage(&self) -> DType {
        self.plan.input.storage
    }
}

fn lock_comm(comm: &Option<Mutex<Comm>>) -> MutexGuard<'_, Comm> {
    let comm = comm.as_ref().expect("a world of several ranks has a carrier");
    comm.lock().unwrap_or_else(|e| e.into_inner())
}
