//! What a rank is doing can be read while it waits for another.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use lockstep_config::StrategyName;
use lockstep_core::{Mesh, Rank};
use lockstep_engine::{Engine, LaneMonitor, LaneOperation, UpdateRule, UpdateSettings};
use lockstep_plan::ModelId;
use lockstep_shape::ModelShape;
use lockstep_testkit::{CarrierKind, TestBatch, TestObjective, TestSetup, run_in_world};

const UPDATES: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 1e-2,
    rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
    weight_decay: 0.1,
    max_norm: Some(1.0),
};

/// Waits until rank 0 is in an operation of a lane.
fn wait_for(monitor: &Mutex<Option<LaneMonitor>>, lane: &str) -> LaneOperation {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let monitor = monitor.lock().unwrap().clone();
        let operations = monitor.map_or_else(Vec::new, |monitor| monitor.operations());
        if let Some(found) = operations.into_iter().find(|one| one.lane == lane) {
            return found;
        }
        assert!(Instant::now() < deadline, "rank 0 does nothing on its lane {lane}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_collective_is_named_while_it_waits() {
    let shape = ModelShape { vocab: 101, layers: 2, ..ModelShape::named("tiny", 101).unwrap() };
    let mesh = Mesh::on_one_node(2, 1);
    let setup = TestSetup { strategy: StrategyName::Ddp, mesh, threads: 1, ..TestSetup::default() };
    let monitor = Mutex::new(None);
    let body = |engine: &mut Engine| {
        let mut seen = Vec::new();
        match engine.rank() {
            Rank(0) => *monitor.lock().unwrap() = Some(engine.lane_monitor()),
            // Rank 0 cannot go on without this rank.
            _ => seen.push(wait_for(&monitor, "comm")),
        }
        let mut window = TestObjective::new(vec![TestBatch::random(&[20, 3], 101, 1)]);
        engine.model_mut(ModelId::FIRST).train_step(&mut window, &UPDATES).unwrap();
        engine.synchronize().unwrap();
        if engine.rank() == Rank(1) {
            seen.push(wait_for(&monitor, "between steps"));
        }
        engine.barrier("a barrier").unwrap();
        assert!(engine.rank() == Rank(1) || engine.lane_monitor().operations().is_empty());
        seen
    };
    let seen = run_in_world(&shape, &setup, CarrierKind::Thread, None, &body).remove(1);
    let names: Vec<&str> = seen.iter().map(|one| one.operation.as_str()).collect();
    assert!(names[0].starts_with('#') && names[0].contains("all-reduce"), "{names:?}");
    assert_eq!(names[1], "a barrier");
}
