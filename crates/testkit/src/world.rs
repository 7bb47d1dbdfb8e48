//! Runs with all ranks in one process: a thread and an engine for each.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use lockstep_comm::{Abort, CarrierChoice, Comm, ConnectSpec, connect};
use lockstep_core::proof::Secret;
use lockstep_core::{Rank, Step};
use lockstep_device::{Memory, Pool, Queue};
use lockstep_engine::{CommUse, Comms, Engine, Resources, UpdateSettings};
use lockstep_plan::{ModelId, ParamState, RunPlan, build};
use lockstep_shape::ModelShape;

use crate::cases::CarrierKind;
use crate::setup::{TestSetup, plan};
use crate::test_objective::{TestBatch, TestObjective};

/// Returns the micro-batches of a step on a rank, and the loss denominator over all ranks.
pub type BatchSource<'a> = dyn Fn(Step, Rank) -> (Vec<TestBatch>, f64) + Sync + 'a;

/// The results of a run. They must be the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingTrace {
    /// The bits of each step's gradient norm.
    pub norms: Vec<u64>,
    /// The log-probabilities of every rank and step.
    pub log_probs: Vec<Vec<f32>>,
    /// The bits of parameters and optimizer states, tensor by tensor.
    pub states: Vec<u32>,
}

const DEADLINE: Duration = Duration::from_secs(60);

/// Runs `body` on every rank, each on a thread, and returns the results by rank.
pub fn run_in_world<R: Send>(
    shape: &ModelShape,
    setup: &TestSetup,
    carrier: CarrierKind,
    nvme_dir: Option<&Path>,
    body: &(dyn Fn(&mut Engine) -> R + Sync),
) -> Vec<R> {
    run_plan_in_world(&plan(shape, setup), setup, carrier, nvme_dir, body)
}

/// Like [`run_in_world`], with any plan on the same mesh, for example of several models.
pub fn run_plan_in_world<R: Send>(
    plan: &RunPlan,
    setup: &TestSetup,
    carrier: CarrierKind,
    nvme_dir: Option<&Path>,
    body: &(dyn Fn(&mut Engine) -> R + Sync),
) -> Vec<R> {
    let world = setup.mesh.world_size();
    let threads = Comms::between_threads(world, DEADLINE);
    let table = ExchangeTable::new(world as usize);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .zip(threads)
            .map(|(rank, threads)| {
                let (rank, table) = (Rank(rank), &table);
                scope.spawn(move || {
                    let plan = build(plan.input.clone(), rank).expect("the same plan for another rank");
                    let memory = arena(&plan);
                    let connected = |choice| {
                        Comms::connect(|purpose| {
                            let regions = match purpose {
                                CommUse::Lane(_) => vec![memory.clone()],
                                CommUse::BetweenSteps => vec![],
                            };
                            Ok::<_, ()>(connected(setup, rank, regions, choice, table))
                        })
                        .unwrap()
                    };
                    let comms = (world > 1).then(|| match carrier {
                        CarrierKind::Thread => threads,
                        CarrierKind::Shm => connected(CarrierChoice::Auto),
                        CarrierKind::Tcp => connected(CarrierChoice::Tcp),
                    });
                    body(&mut rank_engine(plan, setup, memory, comms, nvme_dir))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank's thread")).collect()
    })
}

/// Trains `steps` steps on all ranks, each on a thread.
pub fn train_world(
    shape: &ModelShape,
    setup: &TestSetup,
    carrier: CarrierKind,
    steps: u64,
    updates: UpdateSettings,
    batches: &BatchSource,
    nvme_dir: Option<&Path>,
) -> TrainingTrace {
    let run = |engine: &mut Engine| run_rank(engine, steps, updates, batches);
    merged(run_in_world(shape, setup, carrier, nvme_dir, &run))
}

/// The trace of a run from those of its ranks.
pub(crate) fn merged(traces: Vec<TrainingTrace>) -> TrainingTrace {
    for (rank, trace) in traces.iter().enumerate() {
        assert!(trace.norms == traces[0].norms, "the norms of rank {rank} differ from those of rank 0");
        assert!(trace.states == traces[0].states, "the states of rank {rank} differ from those of rank 0");
    }
    let log_probs = traces.iter().flat_map(|t| t.log_probs.clone()).collect();
    TrainingTrace { log_probs, ..traces.into_iter().next().expect("a world has a rank") }
}

/// Connects a rank as a process would be connected; every node is a host.
fn connected(
    setup: &TestSetup,
    rank: Rank,
    regions: Vec<Arc<Memory>>,
    carrier: CarrierChoice,
    table: &ExchangeTable,
) -> Comm {
    let spec = ConnectSpec {
        rank,
        world: setup.mesh.world_size(),
        host: Some(format!("host {}", setup.mesh.node(rank))),
        regions,
        bind: (Ipv4Addr::LOCALHOST, 0).into(),
        advertise: None,
        session: &Secret::from_text("a test"),
        run_id: "test",
        deadline: DEADLINE,
        abort: Abort::default(),
        carrier,
        spin: None,
    };
    connect(&spec, &mut |mine| Ok(table.exchange(rank, mine))).expect("ranks of one process reach each other")
}

/// Does what the rendezvous does for processes: an all-gather of bytes.
struct ExchangeTable {
    slots: Mutex<Vec<Vec<u8>>>,
    barrier: Barrier,
}

impl ExchangeTable {
    fn new(world: usize) -> ExchangeTable {
        ExchangeTable { slots: Mutex::new(vec![Vec::new(); world]), barrier: Barrier::new(world) }
    }

    fn exchange(&self, rank: Rank, mine: &[u8]) -> Vec<Vec<u8>> {
        self.slots.lock().expect("no rank panicked")[rank.0 as usize] = mine.to_vec();
        self.barrier.wait();
        let all = self.slots.lock().expect("no rank panicked").clone();
        self.barrier.wait();
        all
    }
}

/// The device arena of one rank, of which other ranks can read the exported part.
fn arena(plan: &RunPlan) -> Arc<Memory> {
    let memory = Memory::allocate_exporting(plan.arena_bytes, plan.exported.clone(), &Pool::new(1));
    Arc::new(memory.expect("the memory of a small model"))
}

/// The engine of one rank, with random parameters in all models.
fn rank_engine(
    plan: RunPlan,
    setup: &TestSetup,
    memory: Arc<Memory>,
    comms: Option<Comms>,
    nvme_dir: Option<&Path>,
) -> Engine {
    let queue = Queue::cpu(setup.threads);
    let models = plan.input.models.len();
    let nvme_dir = nvme_dir.map(Path::to_path_buf);
    let mut engine =
        Engine::new(plan, Resources { memory, comms, nccl: None, queue, nvme_dir }).expect("a plan");
    for model in 0..models {
        let seed = 7 + model as u64;
        engine.model_mut(ModelId(model as u8)).initialise(seed).expect("room on the disk");
    }
    if setup.poison {
        engine.poison_buffers();
    }
    engine
}

/// Runs the steps of one rank.
pub(crate) fn run_rank(
    engine: &mut Engine,
    steps: u64,
    updates: UpdateSettings,
    batches: &BatchSource,
) -> TrainingTrace {
    let mut trace = TrainingTrace { norms: Vec::new(), log_probs: Vec::new(), states: Vec::new() };
    for s in 0..steps {
        let (micro_batches, denominator) = batches(Step(s), engine.rank());
        let mut window = TestObjective { denominator, ..TestObjective::new(micro_batches) };
        let report = engine
            .model_mut(ModelId::FIRST)
            .train_step(&mut window, &UpdateSettings { t: s + 1, ..updates })
            .expect("a step");
        trace.norms.push(report.grad_norm.to_bits());
        trace.log_probs.extend(window.log_probs);
    }
    let units = engine.model(ModelId::FIRST).units().to_vec();
    for (u, unit) in units.iter().enumerate() {
        for segment in &unit.segments {
            for state in std::iter::once(ParamState::Working)
                .chain(engine.model(ModelId::FIRST).plan().optimizer.states())
            {
                if state != ParamState::Working && !segment.is_trained() {
                    continue;
                }
                let numbers = segment.elems().div_ceil(state.params_per_number());
                let mut values = vec![0f32; numbers];
                engine
                    .model(ModelId::FIRST)
                    .read_whole(u, segment, state, 0..numbers, &mut values)
                    .expect("a state");
                trace.states.extend(values.iter().map(|v| v.to_bits()));
            }
        }
    }
    trace
}
