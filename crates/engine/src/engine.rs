//! The engine: a plan, its memory, and the lanes that run it.

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use lockstep_comm::{Comm, Group};
use lockstep_core::{Axis, Bytes, DType, Rank};
use lockstep_device::{Memory, Queue, Spill, View};
use lockstep_plan::{Lane, ModelPlan, Phase, RunPlan, State};

use crate::driver::{MicroBatch, Updates};
use crate::error::EngineError;
use crate::lanes::Lanes;
use crate::norm::NormWork;
use crate::places::{Memories, Places};
use crate::task::{Squares, Task, tasks};

/// What a rank runs a plan with.
#[derive(Debug)]
pub struct Resources {
    pub rank: Rank,
    /// The plan's arena.
    pub memory: Arc<Memory>,
    /// `None` in a world of one.
    pub comm: Option<Comm>,
    pub queue: Queue,
    /// Where states may be spilled to, for plans that do.
    pub spill_dir: Option<PathBuf>,
}

impl Resources {
    /// One rank, with memory of its own.
    pub fn alone(plan: &RunPlan, queue: Queue) -> Result<Resources, EngineError> {
        let memory = Arc::new(Memory::take(plan.arena, queue.pool())?);
        Ok(Resources { rank: Rank(0), memory, comm: None, queue, spill_dir: None })
    }
}

/// Runs the training phase of a plan.
pub struct Engine {
    pub(crate) shared: Arc<Shared>,
    pub(crate) queue: Queue,
    lanes: Vec<JoinHandle<()>>,
}

/// What all lanes share.
pub(crate) struct Shared {
    pub(crate) plan: RunPlan,
    pub(crate) phase: usize,
    pub(crate) places: Places,
    pub(crate) tasks: Vec<Task>,
    pub(crate) squares: Vec<Squares>,
    pub(crate) memories: Memories,
    pub(crate) lanes: Lanes,
    pub(crate) rank: Rank,
    pub(crate) host_calls: AtomicU64,
    comm: Option<Mutex<Comm>>,
    groups: [Group; 3],
    pub(crate) step: Mutex<StepState>,
    pub(crate) norm: Mutex<NormWork>,
}

/// What one operation leaves for later ones of the same step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepState {
    pub(crate) updates: Updates,
    pub(crate) grad_norm: f64,
    pub(crate) clip: f32,
    pub(crate) skip: bool,
}

impl Engine {
    /// Prepares a plan to run. Parameters are zero until they are initialised or loaded.
    pub fn new(plan: RunPlan, resources: Resources) -> Result<Engine, EngineError> {
        let Resources { rank, memory, comm, queue, spill_dir } = resources;
        let phase =
            plan.phases.iter().position(|p| p.name.starts_with("train")).expect("a plan has a train phase");
        assert_eq!(memory.bytes(), plan.arena, "the arena is the plan's");
        let (world, here) = (plan.input.mesh.world(), comm.as_ref().map_or(1, |c| c.world()));
        assert_eq!(world, here, "the plan is for {world} ranks, the carrier for {here}");
        let spill = match (plan.nvme_bytes, spill_dir) {
            (Bytes::ZERO, _) => None,
            (bytes, Some(dir)) => Some(Spill::make(&dir, bytes)?),
            (bytes, None) => return Err(EngineError::NoSpillDir { bytes }),
        };
        let memories = Memories { device: memory, host: Memory::take(plan.host_bytes, queue.pool())?, spill };
        let places = Places::of(&plan, &plan.phases[phase], rank);
        let model = &plan.input.models[plan.phases[phase].model.0 as usize];
        lockstep_model::fill_tables(&model.shape, places.tables.view(&memories));
        let tasks = tasks(&plan, &plan.phases[phase], &places, rank);
        let squares = tasks
            .iter()
            .find_map(|task| match task {
                Task::Squares(list) => Some(list.clone()),
                _ => None,
            })
            .unwrap_or_default();
        let mesh = plan.input.mesh;
        let shared = Arc::new(Shared {
            phase,
            places,
            tasks,
            norm: Mutex::new(NormWork::new(squares.len(), mesh.shard)),
            squares,
            memories,
            lanes: Lanes::new(),
            rank,
            host_calls: AtomicU64::new(0),
            comm: comm.map(Mutex::new),
            groups: [Axis::Replicate, Axis::Shard, Axis::World].map(|axis| Group::along(&mesh, axis, rank)),
            step: Mutex::new(StepState { updates: Updates::NONE, grad_norm: 0.0, clip: 1.0, skip: false }),
            plan,
        });
        let lanes = [Lane::Comm, Lane::Copy, Lane::Host]
            .into_iter()
            .filter(|lane| shared.schedule_phase().schedule.ops.iter().any(|op| op.lane == *lane))
            .map(|lane| {
                // Copies and sums of the comm lane are bound by memory; updates on the host are work.
                let threads = if lane == Lane::Host { queue.num_threads() } else { 1 };
                shared.clone().spawn(lane, Queue::cpu(threads))
            })
            .collect();
        Ok(Engine { shared, queue, lanes })
    }

    pub fn plan(&self) -> &RunPlan {
        &self.shared.plan
    }

    pub fn rank(&self) -> Rank {
        self.shared.rank
    }

    /// Whether this rank is the one to write down what it holds of a state: of several that hold the
    /// same, the first.
    pub fn keeps(&self, state: State) -> bool {
        let (input, rank) = (&self.shared.plan.input, self.shared.rank);
        input.mesh.replica(rank) == 0 && (input.is_sharded(state) || input.mesh.shard_idx(rank) == 0)
    }

    /// Bytes taken, on the device and on the host: what the plan said.
    pub fn arena_bytes(&self) -> Bytes {
        self.shared.memories.device.bytes() + self.shared.memories.host.bytes()
    }

    pub(crate) fn num_lane_threads(&self) -> u32 {
        self.lanes.len() as u32
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // After a failure a lane may wait for a peer that never comes; it ends with its process.
        if !self.shared.lanes.is_stopped() {
            self.shared.lanes.quit();
            for lane in self.lanes.drain(..) {
                let _ = lane.join();
            }
        }
    }
}

impl Shared {
    pub(crate) fn schedule_phase(&self) -> &Phase {
        &self.plan.phases[self.phase]
    }

    pub(crate) fn model(&self) -> &ModelPlan {
        &self.plan.input.models[self.schedule_phase().model.0 as usize]
    }

    pub(crate) fn group(&self, axis: Axis) -> &Group {
        match axis {
            Axis::Replicate => &self.groups[0],
            Axis::Shard => &self.groups[1],
            Axis::World => &self.groups[2],
            Axis::Tensor => unreachable!("tensors are not split"),
        }
    }

    /// The carrier: the comm lane's during a step, the host's between steps.
    pub(crate) fn comm(&self) -> MutexGuard<'_, Comm> {
        let comm = self.comm.as_ref().expect("a world of several ranks has a carrier");
        comm.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(crate) fn is_alone(&self) -> bool {
        self.comm.is_none()
    }

    pub(crate) fn step_state(&self) -> MutexGuard<'_, StepState> {
        self.step.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The parts of the inputs buffer, at a batch's own lengths: tokens, targets, positions, bounds.
    pub(crate) fn input_views(&self, tokens: usize, docs: usize) -> [View<'_>; 4] {
        let all = self.places.inputs.view(&self.memories);
        let room = self.plan.input.bounds.tokens;
        [
            all.slice(0, tokens),
            all.slice(room, tokens),
            all.slice(2 * room, tokens),
            all.slice(3 * room, docs + 1),
        ]
    }

    /// Copies a micro-batch to the device.
    pub(crate) fn feed(&self, batch: &MicroBatch) -> Result<(), EngineError> {
        let bounds = self.plan.input.bounds;
        let docs = batch.cu_seqlens.len().saturating_sub(1);
        let longest = batch.cu_seqlens.windows(2).map(|w| (w[1] - w[0]) as usize).max().unwrap_or(0);
        for (what, found, planned) in [
            ("tokens", batch.tokens.len(), bounds.tokens),
            ("documents", docs, bounds.docs),
            ("tokens in one document", longest, bounds.max_doc),
        ] {
            if found > planned {
                return Err(EngineError::TooLarge { what, found, planned });
            }
        }
        let [tokens, targets, positions, cu_seqlens] = self.input_views(batch.tokens.len(), docs);
        tokens.write(batch.tokens);
        targets.write(batch.targets);
        positions.write(batch.positions);
        cu_seqlens.write(if batch.cu_seqlens.is_empty() { &[0] } else { batch.cu_seqlens });
        Ok(())
    }

    pub(crate) fn storage(&self) -> DType {
        self.plan.input.storage
    }
}
