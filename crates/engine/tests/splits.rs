//! The same global batch, split over ranks, rows and gradient accumulation in four ways, gives the same gradient up to
//! rounding, even with documents of different lengths: the loss is divided by the tokens of the whole global batch.

use lockstep_config::StrategyName;
use lockstep_core::{Mesh, Rank, Step};
use lockstep_engine::{UpdateRule, UpdateSettings};
use lockstep_plan::AccumulationOrder;
use lockstep_shape::ModelShape;
use lockstep_testkit::{CarrierKind, TestBatch, TestSetup, TrainingTrace, train_world};

/// Eight documents of very different lengths.
const LENGTHS: [usize; 8] = [70, 3, 41, 1, 120, 9, 17, 60];

/// Plain SGD, so that the parameters after one step show the gradient.
const DESCENT: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 1e-2,
    rule: UpdateRule::AdamW { betas: (0.0, 0.0), eps: 1.0 },
    weight_decay: 0.0,
    max_norm: None,
};

fn run(
    shape: &ModelShape,
    (strategy, order): (StrategyName, AccumulationOrder),
    ranks: u32,
    rows: usize,
    num_micro_batches: u32,
) -> TrainingTrace {
    let all = TestBatch::random(&LENGTHS, shape.vocab, 11);
    let mesh = match strategy {
        StrategyName::Ddp => Mesh::on_one_node(ranks, 1),
        _ => Mesh::on_one_node(1, ranks),
    };
    let setup = TestSetup {
        strategy,
        mesh,
        num_micro_batches,
        order,
        tokens: 512,
        threads: 1,
        max_doc: 128,
        ..TestSetup::default()
    };
    let batches = |_: Step, rank: Rank| {
        let docs = |micro_batch: u32| {
            let first = (micro_batch * ranks + rank.0) as usize * rows;
            (first..first + rows).collect::<Vec<_>>()
        };
        let micro_batches = (0..num_micro_batches).map(|m| all.select(&docs(m))).collect();
        (micro_batches, all.tokens.len() as f64)
    };
    train_world(shape, &setup, CarrierKind::Thread, 1, DESCENT, &batches, None)
}

#[test]
fn the_split_over_ranks_rows_and_accumulation_changes_only_rounding() {
    let shape = ModelShape { vocab: 101, layers: 2, ..ModelShape::named("tiny", 101).unwrap() };
    let values =
        |trace: &TrainingTrace| trace.states.iter().map(|bits| f32::from_bits(*bits)).collect::<Vec<_>>();
    let norm = |trace: &TrainingTrace| f64::from_bits(trace.norms[0]);
    use AccumulationOrder::{Local, Reduced};
    let whole = run(&shape, (StrategyName::Ddp, Local), 1, 8, 1);
    let (ddp, zero3) = (StrategyName::Ddp, StrategyName::Zero3);
    for how in [(ddp, Local), (ddp, Reduced), (zero3, Local), (zero3, Reduced)] {
        for (ranks, rows, num_micro_batches) in [(1, 8, 1), (2, 2, 2), (4, 1, 2), (2, 1, 4)] {
            let split = run(&shape, how, ranks, rows, num_micro_batches);
            let what = format!("{how:?}, {ranks} ranks x {rows} rows x {num_micro_batches} micro-batches");
            let off = (norm(&split) - norm(&whole)).abs() / norm(&whole);
            assert!(off < 1e-6, "{what}: the norm is off by {off:e}");
            for (a, b) in values(&split).iter().zip(values(&whole)) {
                assert!((a - b).abs() <= 1e-6 + 1e-5 * b.abs(), "{what}: {a} for {b}");
            }
        }
    }
}

/// A common bug is to divide by the tokens of each rank and to average over ranks. This test shows that it would be
/// found.
#[test]
fn averaging_over_ranks_gives_another_gradient() {
    let shape = ModelShape { vocab: 101, layers: 2, ..ModelShape::named("tiny", 101).unwrap() };
    let all = TestBatch::random(&LENGTHS, shape.vocab, 11);
    let setup = TestSetup { mesh: Mesh::on_one_node(2, 1), tokens: 512, threads: 1, ..TestSetup::default() };
    let averaged = |_: Step, rank: Rank| {
        let first = rank.0 as usize * 4;
        let mine = all.select(&(first..first + 4).collect::<Vec<_>>());
        let denominator = 2.0 * mine.tokens.len() as f64;
        (vec![mine], denominator)
    };
    let wrong = train_world(&shape, &setup, CarrierKind::Thread, 1, DESCENT, &averaged, None);
    let right = run(&shape, (StrategyName::Ddp, AccumulationOrder::Local), 2, 4, 1);
    let norm = |trace: &TrainingTrace| f64::from_bits(trace.norms[0]);
    assert!((norm(&wrong) - norm(&right)).abs() > 1e-3 * norm(&right));
}
