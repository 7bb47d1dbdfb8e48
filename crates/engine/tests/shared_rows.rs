//! Rows that documents have in common are computed once, and the head runs only where its outputs count. Log-probabilities
//! have the same bits as without that, and gradients differ by rounding alone.

use lockstep_config::StrategyName;
use lockstep_core::{DType, Mesh, Rank, Step};
use lockstep_engine::{UpdateRule, UpdateSettings};
use lockstep_plan::{AccumulationOrder, MemoryTier};
use lockstep_shape::{Architecture, Biases, ModelShape, Recompute, SlidingWindow};
use lockstep_testkit::{CarrierKind, TestBatch, TestSetup, TrainingTrace, train_world};

/// Updates that show the gradient.
const DESCENT: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 1e-2,
    rule: UpdateRule::AdamW { betas: (0.0, 0.0), eps: 1.0 },
    weight_decay: 0.0,
    max_norm: None,
};

fn shape() -> ModelShape {
    ModelShape { vocab: 101, layers: 2, ..ModelShape::named("tiny", 101).unwrap() }
}

/// Documents in families: a pair, a group of three of which two have more in common, one that stands alone, and two that
/// are equal up to the end. The first tokens of each do not count.
fn families(vocab: usize, seed: u64) -> TestBatch {
    // The length, the tokens in common with the document before, and the first position that counts.
    const DOCS: [(usize, usize, usize); 8] = [
        (70, 0, 40),
        (66, 41, 40),
        (50, 0, 9),
        (30, 10, 9),
        (75, 25, 9),
        (3, 0, 0),
        (12, 0, 11),
        (12, 12, 11),
    ];
    let lengths = DOCS.map(|(len, ..)| len);
    let mut batch = TestBatch::random(&lengths, vocab, seed);
    for (doc, (_, common, counted)) in DOCS.into_iter().enumerate() {
        let start = batch.cu_seqlens[doc] as usize;
        if doc > 0 {
            let before = batch.cu_seqlens[doc - 1] as usize;
            batch.tokens.copy_within(before..before + common, start);
        }
        batch.weights[start..start + counted].fill(0.0);
    }
    batch
}

fn train(shape: &ModelShape, setup: &TestSetup, carrier: CarrierKind, compact: bool) -> TrainingTrace {
    let setup = TestSetup { shares_rows: compact, tokens: 512, max_doc: 128, ..*setup };
    let batches = |step: Step, rank: Rank| {
        let micro_batches: Vec<TestBatch> = (0..setup.num_micro_batches)
            .map(|m| families(shape.vocab, 100 * step.0 + 10 * u64::from(rank.0) + u64::from(m)))
            .map(|batch| if compact { batch.compact() } else { batch })
            .collect();
        (micro_batches, 211.0)
    };
    train_world(shape, &setup, carrier, 2, DESCENT, &batches, None)
}

/// The log-probabilities of the first step's targets that count, in bits.
fn counted(trace: &TrainingTrace, vocab: usize) -> Vec<u32> {
    let weights = families(vocab, 0).weights;
    let first = weights.iter().zip(&trace.log_probs[0]);
    first.filter(|(weight, _)| **weight != 0.0).map(|(_, log_prob)| log_prob.to_bits()).collect()
}

fn assert_alike(
    full: &TrainingTrace,
    compact: &TrainingTrace,
    shape: &ModelShape,
    what: &str,
    tolerance: f32,
) {
    // The first step's parameters are the same, so its outputs must be.
    assert_eq!(counted(full, shape.vocab), counted(compact, shape.vocab), "{what}");
    let values =
        |trace: &TrainingTrace| trace.states.iter().map(|bits| f32::from_bits(*bits)).collect::<Vec<_>>();
    for (a, b) in values(full).into_iter().zip(values(compact)) {
        assert!((a - b).abs() <= tolerance * (0.1 + b.abs()), "{what}: {a} for {b}");
    }
    assert!(full.states != compact.states, "{what}: the sums of gradients have another order");
}

#[test]
fn shared_rows_change_only_the_rounding_of_gradients() {
    let tiny = shape();
    let biases = Biases { qkv: true, out: true, mlp: true };
    let shapes = [
        ModelShape { architecture: Architecture::Qwen3, tied: true, ..tiny.clone() },
        ModelShape {
            biases,
            window: Some(SlidingWindow { keys: 20, layers: vec![true, false] }),
            ..tiny.clone()
        },
        tiny,
    ];
    for shape in &shapes {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            for (separate_memory, coefficients_ahead) in [(false, true), (true, false), (false, false)] {
                let setup = TestSetup {
                    recompute,
                    separate_memory,
                    coefficients_ahead,
                    threads: 1,
                    ..TestSetup::default()
                };
                let [full, compact] =
                    [false, true].map(|compact| train(shape, &setup, CarrierKind::Thread, compact));
                let what = format!("{:?}, {recompute:?}, {separate_memory}", shape.architecture);
                assert_alike(&full, &compact, shape, &what, 1e-5);
            }
        }
    }
    let setup = TestSetup { storage: DType::BF16, threads: 1, ..TestSetup::default() };
    let [full, compact] =
        [false, true].map(|compact| train(&shapes[2], &setup, CarrierKind::Thread, compact));
    assert_alike(&full, &compact, &shapes[2], "bf16", 2e-2);
}

#[test]
fn strategies_agree_to_the_bit_with_shared_rows() {
    let shape = shape();
    let base = TestSetup {
        mesh: Mesh::on_one_node(2, 1),
        num_micro_batches: 2,
        order: AccumulationOrder::Reduced,
        recompute: Recompute::Selective,
        threads: 1,
        ..TestSetup::default()
    };
    let want = train(&shape, &base, CarrierKind::Thread, true);
    let sharded = TestSetup { mesh: Mesh::on_one_node(1, 2), ..base };
    let host = MemoryTier::Host;
    for (setup, carrier) in [
        (TestSetup { strategy: StrategyName::Zero1, ..sharded }, CarrierKind::Shm),
        (TestSetup { strategy: StrategyName::Zero2, ..sharded }, CarrierKind::Tcp),
        (
            TestSetup { strategy: StrategyName::Zero3, recompute: Recompute::Full, ..sharded },
            CarrierKind::Thread,
        ),
        (TestSetup { strategy: StrategyName::ShardGradOp, prefetch: 2, ..sharded }, CarrierKind::Thread),
        (
            TestSetup { strategy: StrategyName::Zero3, optimizer_tier: host, params_tier: host, ..sharded },
            CarrierKind::Shm,
        ),
        (TestSetup { optimizer_tier: host, separate_memory: true, ..base }, CarrierKind::Thread),
    ] {
        let got = train(&shape, &setup, carrier, true);
        assert!(got == want, "{:?} over {carrier:?} differs from ddp", setup.strategy);
    }
}
