//! A whole world of ranks in one process: a thread and an engine each.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lockstep_comm::{Comm, thread_world};
use lockstep_core::{Rank, Step};
use lockstep_device::{Memory, Queue};
use lockstep_engine::{Engine, Resources, Updates};
use lockstep_plan::State;
use lockstep_shape::ModelShape;

use crate::setup::{Setup, plan};
use crate::window::{Micro, Window};

/// The micro-batches of step `s` on a rank, and the window's denominator over all ranks.
pub type Batches<'a> = dyn Fn(Step, Rank) -> (Vec<Micro>, f64) + Sync + 'a;

/// What a run left behind: the same on every rank, or the test fails.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Bits of each step's gradient norm.
    pub norms: Vec<u64>,
    /// Log-probabilities of every rank and step.
    pub log_probs: Vec<Vec<f32>>,
    /// Bits of parameters and moments, tensor by tensor.
    pub states: Vec<u32>,
}

const DEADLINE: Duration = Duration::from_secs(60);

/// Trains `steps` steps on a world of threads.
pub fn train_world(
    shape: &ModelShape,
    setup: &Setup,
    steps: u64,
    updates: Updates,
    batches: &Batches,
    spill_dir: Option<&Path>,
) -> Trace {
    let world = setup.mesh.world();
    let carriers = thread_world(world, DEADLINE);
    let traces: Vec<Trace> = std::thread::scope(|scope| {
        let ranks: Vec<_> = carriers
            .into_iter()
            .enumerate()
            .map(|(rank, carrier)| {
                scope.spawn(move || {
                    let rank = Rank(rank as u32);
                    let comm = (world > 1).then(|| Comm::new(Box::new(carrier)));
                    let mut engine = rank_engine(shape, setup, rank, comm, spill_dir);
                    run_rank(&mut engine, steps, updates, batches)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank's thread")).collect()
    });
    for (rank, trace) in traces.iter().enumerate() {
        assert!(trace.norms == traces[0].norms, "rank {rank} has other norms than rank 0");
        assert!(trace.states == traces[0].states, "rank {rank} has other states than rank 0");
    }
    let log_probs = traces.iter().flat_map(|t| t.log_probs.clone()).collect();
    Trace { log_probs, ..traces.into_iter().next().expect("a world has a rank") }
}

/// One rank's engine, with random parameters.
pub fn rank_engine(
    shape: &ModelShape,
    setup: &Setup,
    rank: Rank,
    comm: Option<Comm>,
    spill_dir: Option<&Path>,
) -> Engine {
    let plan = plan(shape, setup);
    let queue = Queue::cpu(setup.threads);
    let Queue::Cpu(cpu) = &queue else { unreachable!("only CPU queues exist") };
    let memory = Arc::new(Memory::take(plan.arena, &cpu.pool).expect("the memory of a small model"));
    let spill_dir = spill_dir.map(Path::to_path_buf);
    let mut engine = Engine::new(plan, Resources { rank, memory, comm, queue, spill_dir }).expect("a plan");
    engine.initialise(7).expect("room on the disk");
    engine
}

/// Runs the steps of one rank.
pub fn run_rank(engine: &mut Engine, steps: u64, updates: Updates, batches: &Batches) -> Trace {
    let mut trace = Trace { norms: Vec::new(), log_probs: Vec::new(), states: Vec::new() };
    for s in 0..steps {
        let (micros, denominator) = batches(Step(s), engine.rank());
        let mut window = Window { denominator, ..Window::new(micros) };
        let report = engine.train_step(&mut window, &Updates { t: s + 1, ..updates }).expect("a step");
        trace.norms.push(report.grad_norm.to_bits());
        trace.log_probs.extend(window.log_probs);
    }
    let units = engine.units().to_vec();
    for (u, unit) in units.iter().enumerate() {
        for segment in &unit.segments {
            for state in [State::Working, State::ExpAvg, State::ExpAvgSq] {
                let mut values = vec![0f32; segment.elems()];
                engine.read_whole(u, segment, state, 0..segment.elems(), &mut values).expect("a state");
                trace.states.extend(values.iter().map(|v| v.to_bits()));
            }
        }
    }
    trace
}
