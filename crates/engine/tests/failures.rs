//! A panic or an error on any lane stops all lanes and all ranks at once, and the error says what happened and where.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use lockstep_config::StrategyName;
use lockstep_core::{Mesh, Rank, failpoint};
use lockstep_engine::{
    Coefficients, Engine, EngineError, MicroBatch, Outputs, StepDriver, UpdateRule, UpdateSettings,
};
use lockstep_plan::{MemoryTier, ModelId};
use lockstep_shape::ModelShape;
use lockstep_testkit::{CarrierKind, TestBatch, TestObjective, TestSetup, engine, run_in_world};

const UPDATES: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 1e-2,
    rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
    weight_decay: 0.1,
    max_norm: Some(1.0),
};

/// How long every rank may take to end after a failure.
const SOON: Duration = Duration::from_secs(3);

/// Failpoints and thread counts are global to the process, so tests run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn shape() -> ModelShape {
    ModelShape { vocab: 101, layers: 3, ..ModelShape::named("tiny", 101).unwrap() }
}

/// A driver whose objective panics from step `bad` on.
struct Panics {
    window: TestObjective,
    step: u64,
    bad: u64,
}

impl StepDriver for Panics {
    fn batch(&self, micro_batch: u32) -> MicroBatch<'_> {
        self.window.batch(micro_batch)
    }

    fn coefficients(&mut self, micro_batch: u32, outputs: Option<Outputs<'_>>, out: &mut Coefficients<'_>) {
        assert!(self.step < self.bad, "an objective of step {}", self.step);
        self.window.coefficients(micro_batch, outputs, out);
    }

    fn outputs(&mut self, micro_batch: u32, outputs: Outputs<'_>) {
        self.window.outputs(micro_batch, outputs);
    }
}

/// Runs steps until one fails. Returns its error and how long the failing step took. `tokens` is the length of a document.
fn until_failure(engine: &mut Engine, bad: u64, tokens: usize) -> (EngineError, Duration) {
    for step in 0..20 {
        let num_micro_batches =
            vec![TestBatch::random(&[50, tokens], 101, step), TestBatch::random(&[70], 101, step)];
        let mut driver = Panics { window: TestObjective::new(num_micro_batches), step, bad };
        let start = Instant::now();
        if let Err(error) = engine
            .model_mut(ModelId::FIRST)
            .train_step(&mut driver, &UpdateSettings { t: step + 1, ..UPDATES })
        {
            return (error, start.elapsed());
        }
    }
    panic!("no step failed");
}

/// The names of the lane threads that are still running.
#[cfg(target_os = "linux")]
fn lane_threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.map(|name| name.trim().to_string()).filter(|name| name.ends_with("-lane")).collect()
}

#[cfg(not(target_os = "linux"))]
fn lane_threads() -> Vec<String> {
    Vec::new()
}

fn one_rank(optimizer_tier: MemoryTier) -> TestSetup {
    TestSetup { num_micro_batches: 2, optimizer_tier, threads: 2, ..TestSetup::default() }
}

fn two_ranks(strategy: StrategyName) -> TestSetup {
    TestSetup {
        num_micro_batches: 2,
        strategy,
        mesh: Mesh::on_one_node(1, 2),
        threads: 1,
        ..TestSetup::default()
    }
}

#[test]
fn a_panic_in_an_objective_stops_a_rank_with_offload() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for tier in [MemoryTier::Device, MemoryTier::Host] {
        let mut engine = engine(&shape(), &one_rank(tier));
        let (error, _) = until_failure(&mut engine, 2, 20);
        let text = error.to_string();
        assert!(text.starts_with("the compute lane panicked at "), "{text}");
        assert!(text.contains("failures.rs:") && text.ends_with(": an objective of step 2"), "{text}");
        let start = Instant::now();
        drop(engine);
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        assert_eq!(lane_threads(), [""; 0], "of {tier}");
    }
}

/// Lets rank 1 fail, and returns what each rank reports.
fn failing_rank(
    setup: &TestSetup,
    carrier: CarrierKind,
    fail: &(dyn Fn(u64) -> (u64, usize) + Sync),
) -> Vec<String> {
    let start = Instant::now();
    let ended = run_in_world(&shape(), setup, carrier, None, &|engine| {
        let (bad, tokens) = fail(u64::from(engine.rank().0));
        let (error, _) = until_failure(engine, bad, tokens);
        error.to_string()
    });
    // This includes the start and the end of the engines.
    assert!(start.elapsed() < 2 * SOON, "{carrier:?}: {:?}", start.elapsed());
    assert_eq!(lane_threads(), [""; 0], "{carrier:?}");
    ended
}

#[test]
fn a_panic_on_one_rank_stops_all_ranks() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for carrier in [CarrierKind::Thread, CarrierKind::Shm, CarrierKind::Tcp] {
        for strategy in [StrategyName::Ddp, StrategyName::Zero1, StrategyName::Zero3] {
            let of = |rank| (if rank == 1 { 2 } else { u64::MAX }, 20);
            let reports = failing_rank(&two_ranks(strategy), carrier, &of);
            assert!(
                reports[1].ends_with(": an objective of step 2"),
                "{carrier:?} {strategy:?}: {reports:?}"
            );
            assert!(reports[0].contains("rank 1"), "{carrier:?} {strategy:?}: {reports:?}");
        }
    }
}

#[test]
fn an_error_on_one_rank_stops_all_ranks() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let of = |rank| (u64::MAX, if rank == 1 { 200 } else { 20 });
    let reports = failing_rank(&two_ranks(StrategyName::Zero3), CarrierKind::Thread, &of);
    assert!(reports[1].contains("200 tokens in one document"), "{reports:?}");
    assert!(reports[0].contains("rank 1"), "{reports:?}");
}

#[test]
fn a_panic_on_any_lane_stops_all_lanes() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let nvme_dir = tempfile::tempdir().unwrap();
    let offloaded = |optimizer_tier| TestSetup { optimizer_tier, ..two_ranks(StrategyName::Zero3) };
    let cases = [
        ("compute", two_ranks(StrategyName::Zero3)),
        ("comm", two_ranks(StrategyName::Zero3)),
        ("comm", two_ranks(StrategyName::Zero2)),
        ("copy", offloaded(MemoryTier::Nvme)),
        ("host", offloaded(MemoryTier::Host)),
        ("host", offloaded(MemoryTier::Nvme)),
    ];
    for (lane, setup) in cases {
        for passes in [0, 7, 50] {
            failpoint::arm(format!("lane.{lane}:{passes}").parse().unwrap());
            let start = Instant::now();
            let reports =
                run_in_world(&shape(), &setup, CarrierKind::Thread, Some(nvme_dir.path()), &|engine| {
                    until_failure(engine, u64::MAX, 20).0.to_string()
                });
            let what = format!("{lane} after {passes}: {reports:?}");
            assert!(start.elapsed() < 2 * SOON, "{:?}: {what}", start.elapsed());
            assert_eq!(lane_threads(), [""; 0], "{what}");
            let panicked = format!("the {lane} lane panicked at crates/engine/src/execute.rs");
            let guilty: Vec<usize> = (0..2).filter(|rank| reports[*rank].starts_with(&panicked)).collect();
            let [guilty] = guilty[..] else { panic!("one rank panicked: {what}") };
            assert!(reports[1 - guilty].contains(&Rank(guilty as u32).to_string()), "{what}");
        }
    }
}

/// The caller may panic between steps; the engine is then dropped while lanes are working.
#[test]
fn a_panic_between_steps_stops_the_lanes() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let start = Instant::now();
    let ended = std::panic::catch_unwind(|| {
        run_in_world(&shape(), &two_ranks(StrategyName::Zero1), CarrierKind::Thread, None, &|engine| {
            for step in 0..5 {
                let window = TestObjective::new(vec![
                    TestBatch::random(&[50], 101, step),
                    TestBatch::random(&[70], 101, step),
                ]);
                let mut driver = Panics { window, step, bad: u64::MAX };
                let stepped = engine
                    .model_mut(ModelId::FIRST)
                    .train_step(&mut driver, &UpdateSettings { t: step + 1, ..UPDATES });
                assert!(engine.rank() == Rank(0) || step < 2, "a metric of step {step}");
                if stepped.is_err() {
                    return;
                }
            }
            panic!("rank 0 went on alone");
        })
    });
    let payload = ended.expect_err("a rank panicked");
    assert!(start.elapsed() < 2 * SOON, "{:?}", start.elapsed());
    drop(payload);
    assert_eq!(lane_threads(), [""; 0]);
}
