//! The same global batch cut into (ranks x rows x accumulation) in four ways gives the same gradient to
//! rounding, with ragged documents: denominators are those of the whole window on all ranks.

use lockstep_config::StrategyName;
use lockstep_core::{Mesh, Rank, Step};
use lockstep_engine::{UpdateRule, Updates};
use lockstep_plan::AccumulationOrder;
use lockstep_shape::ModelShape;
use lockstep_testkit::{CarrierKind, Micro, Setup, Trace, train_world};

/// Eight documents of very different lengths.
const LENGTHS: [usize; 8] = [70, 3, 41, 1, 120, 9, 17, 60];

/// Plain descent, so that the parameters after one step are the gradient.
const DESCENT: Updates = Updates {
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
    micros: u32,
) -> Trace {
    let all = Micro::random(&LENGTHS, shape.vocab, 11);
    let mesh = match strategy {
        StrategyName::Ddp => Mesh::on_one_node(ranks, 1),
        _ => Mesh::on_one_node(1, ranks),
    };
    let setup =
        Setup { strategy, mesh, micros, order, tokens: 512, threads: 1, max_doc: 128, ..Setup::default() };
    let batches = |_: Step, rank: Rank| {
        let docs = |micro: u32| {
            let first = (micro * ranks + rank.0) as usize * rows;
            (first..first + rows).collect::<Vec<_>>()
        };
        let micros = (0..micros).map(|m| all.select(&docs(m))).collect();
        (micros, all.tokens.len() as f64)
    };
    train_world(shape, &setup, CarrierKind::Thread, 1, DESCENT, &batches, None)
}

#[test]
fn the_sharded_over_ranks_rows_and_accumulation_changes_only_rounding() {
    let shape = ModelShape { vocab: 101, layers: 2, ..ModelShape::named("tiny", 101).unwrap() };
    let values = |trace: &Trace| trace.states.iter().map(|bits| f32::from_bits(*bits)).collect::<Vec<_>>();
    let norm = |trace: &Trace| f64::from_bits(trace.norms[0]);
    use AccumulationOrder::{Local, Reduced};
    let whole = run(&shape, (StrategyName::Ddp, Local), 1, 8, 1);
    let (ddp, zero3) = (StrategyName::Ddp, StrategyName::Zero3);
    for how in [(ddp, Local), (ddp, Reduced), (zero3, Local), (zero3, Reduced)] {
        for (ranks, rows, micros) in [(1, 8, 1), (2, 2, 2), (4, 1, 2), (2, 1, 4)] {
            let cut = run(&shape, how, ranks, rows, micros);
            let what = format!("{how:?}, {ranks} ranks x {rows} rows x {micros} micro-batches");
            let off = (norm(&cut) - norm(&whole)).abs() / norm(&whole);
            assert!(off < 1e-6, "{what}: the norm is off by {off:e}");
            for (a, b) in values(&cut).iter().zip(values(&whole)) {
                assert!((a - b).abs() <= 1e-6 + 1e-5 * b.abs(), "{what}: {a} for {b}");
            }
        }
    }
}

/// The bug that others shipped for years: each rank divides by its own tokens, and ranks are averaged.
#[test]
fn averaging_ranks_would_be_seen() {
    let shape = ModelShape { vocab: 101, layers: 2, ..ModelShape::named("tiny", 101).unwrap() };
    let all = Micro::random(&LENGTHS, shape.vocab, 11);
    let setup = Setup { mesh: Mesh::on_one_node(2, 1), tokens: 512, threads: 1, ..Setup::default() };
    let averaged = |_: Step, rank: Rank| {
        let first = rank.0 as usize * 4;
        let mine = all.select(&(first..first + 4).collect::<Vec<_>>());
        let denominator = 2.0 * mine.tokens.len() as f64;
        (vec![mine], denominator)
    };
    let wrong = train_world(&shape, &setup, CarrierKind::Thread, 1, DESCENT, &averaged, None);
    let right = run(&shape, (StrategyName::Ddp, AccumulationOrder::Local), 2, 4, 1);
    let norm = |trace: &Trace| f64::from_bits(trace.norms[0]);
    assert!((norm(&wrong) - norm(&right)).abs() > 1e-3 * norm(&right));
}
