//! What the lanes did is measured: seconds by activity, bytes between ranks, and on request every operation.

use lockstep_config::StrategyName;
use lockstep_core::Mesh;
use lockstep_engine::{Activity, Engine, Measurement, UpdateRule, UpdateSettings};
use lockstep_plan::{Lane, ModelId};
use lockstep_shape::ModelShape;
use lockstep_testkit::{CarrierKind, TestBatch, TestObjective, TestSetup, run_in_world};

const UPDATES: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 1e-3,
    rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
    weight_decay: 0.1,
    max_norm: Some(1.0),
};

fn step(engine: &mut Engine, t: u64) {
    let rank = u64::from(engine.rank().0);
    let batches = vec![TestBatch::random(&[50, 3], 101, rank), TestBatch::random(&[1, 65], 101, rank + 9)];
    let mut window = TestObjective::new(batches);
    engine.model_mut(ModelId::FIRST).train_step(&mut window, &UpdateSettings { t, ..UPDATES }).unwrap();
}

#[test]
fn ranks_measure_their_lanes() {
    let shape = ModelShape::named("tiny", 101).unwrap();
    let setup = TestSetup {
        strategy: StrategyName::Zero3,
        mesh: Mesh::on_one_node(1, 2),
        num_micro_batches: 2,
        threads: 1,
        ..TestSetup::default()
    };
    run_in_world(&shape, &setup, CarrierKind::Tcp, None, &|engine| {
        assert!(engine.measures_lanes());
        assert!(engine.take_spans().unwrap().is_empty(), "nobody has asked for a timeline");
        engine.take_lane_seconds();
        let before = engine.traffic();
        let start = std::time::Instant::now();
        step(engine, 1);
        engine.synchronize().unwrap();
        let elapsed = start.elapsed().as_secs_f64();
        let seconds = engine.take_lane_seconds();
        for activity in [
            Activity::Forward,
            Activity::Backward,
            Activity::Head,
            Activity::Gather,
            Activity::Reduce,
            Activity::Update,
        ] {
            assert!(seconds.busy(activity) > 0.0, "{activity:?}: {seconds:?}");
        }
        let computing = [Activity::Forward, Activity::Backward, Activity::Head, Activity::Objective];
        let compute: f64 = computing.iter().map(|activity| seconds.busy(*activity)).sum();
        let waiting: f64 = seconds.waiting.iter().sum();
        assert!(compute + waiting <= elapsed, "one lane: {compute} + {waiting} in {elapsed}");
        assert_eq!(engine.take_lane_seconds().busy(Activity::Forward), 0.0, "taken once");

        // Every rank of two sends what the other one receives.
        let after = engine.traffic();
        assert!(after.0 - before.0 > 10_000 && after.1 - before.1 > 10_000, "{before:?} {after:?}");

        engine.measure(Measurement::Timeline).unwrap();
        step(engine, 2);
        let spans = engine.take_spans().unwrap();
        let plan = engine.plan();
        let ops = &plan.phases[0].schedule.ops;
        assert_eq!(spans.len(), ops.len(), "each operation once");
        for lane in Lane::ALL {
            let mut of_lane: Vec<_> = spans.iter().filter(|span| span.lane == lane).collect();
            of_lane.sort_by_key(|span| span.start);
            for pair in of_lane.windows(2) {
                let gap = pair[1].start.duration_since(pair[0].start).as_secs_f64();
                assert!(pair[0].seconds <= gap + 1e-9, "operations of a lane do not overlap: {pair:?}");
            }
        }
        engine.measure(Measurement::Lanes).unwrap();
        step(engine, 3);
        assert!(engine.take_spans().unwrap().is_empty());
    });
}
