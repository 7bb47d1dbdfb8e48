//! Every strategy gives the same bits. The cases cover every pair of settings, and each is compared with plain ddp on its
//! mesh. `cargo run --release -p lockstep-engine --example all_worlds` runs all cases.

use lockstep_config::StrategyName;
use lockstep_core::{Bytes, DType, Mesh, Rank, Step};
use lockstep_engine::{Engine, UpdateRule, UpdateSettings};
use lockstep_plan::{AccumulationOrder, MemoryTier, ModelId, ParamState};
use lockstep_shape::ModelShape;
use lockstep_testkit::{
    CarrierKind, TestBatch, TestObjective, TestSetup, pairwise_cases, run_case, run_in_world, train_world,
};

const UPDATES: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 1e-2,
    rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
    weight_decay: 0.1,
    max_norm: Some(1.0),
};

#[test]
fn every_pair_of_settings_has_the_bits_of_plain_ddp() {
    let mut plain = Vec::new();
    for case in pairwise_cases() {
        let base = case.baseline();
        if !plain.iter().any(|(known, _)| *known == base) {
            plain.push((base, run_case(&base)));
        }
        let (_, want) = plain.iter().find(|(known, _)| *known == base).expect("just run");
        let got = run_case(&case);
        assert!(got.norms == want.norms, "{case}: gradient norms differ from plain ddp");
        assert!(got.log_probs == want.log_probs, "{case}: log-probabilities differ from plain ddp");
        assert!(got.states == want.states, "{case}: weights or optimizer states differ from plain ddp");
    }
}

/// Where optimizer states are, and for how many units they are on the device nevertheless.
const PLACEMENTS: [(MemoryTier, u32); 4] =
    [(MemoryTier::Device, 0), (MemoryTier::Host, 0), (MemoryTier::Nvme, 0), (MemoryTier::Host, 1)];

/// If the gradient of one rank is not finite, no rank updates anything, wherever its states are, and all ranks report it.
#[test]
fn all_ranks_skip_a_step_with_a_non_finite_gradient() {
    let shape = ModelShape { vocab: 101, layers: 2, ..ModelShape::named("tiny", 101).unwrap() };
    for strategy in [StrategyName::Ddp, StrategyName::Zero1, StrategyName::Zero3] {
        for (tier, stay) in PLACEMENTS {
            let mesh = match strategy {
                StrategyName::Ddp => Mesh::on_one_node(3, 1),
                _ => Mesh::on_one_node(1, 3),
            };
            let params_tier = if strategy == StrategyName::Zero3 { tier } else { MemoryTier::Device };
            let setup = TestSetup {
                strategy,
                mesh,
                optimizer_tier: tier,
                optimizer_units_on_device: stay,
                params_tier,
                threads: 1,
                ..TestSetup::default()
            };
            let dir = tempfile::tempdir().unwrap();
            let skipped = run_in_world(&shape, &setup, CarrierKind::Thread, Some(dir.path()), &|engine| {
                let before = states(engine);
                let mut window = TestObjective::new(vec![TestBatch::random(&[20, 9], 101, 3)]);
                if engine.rank().0 == 1 {
                    window.denominator = 0.0;
                }
                let report = engine.model_mut(ModelId::FIRST).train_step(&mut window, &UPDATES).unwrap();
                assert!(states(engine) == before, "{strategy:?}, {tier}: a skipped step changed a state");
                (report.skipped, engine.model(ModelId::FIRST).first_non_finite_gradient().unwrap())
            });
            // All ranks get the same answer, whichever rank holds the bad gradient.
            let first = Some("model.norm.weight".to_string());
            assert_eq!(skipped, vec![(true, first); 3], "{strategy:?}, {tier}");
        }
    }
}

/// Skipped steps directly before and after others, so that the updates of one overlap the next.
#[test]
fn skipped_steps_do_not_disturb_their_neighbours() {
    let shape = ModelShape { vocab: 101, layers: 2, ..ModelShape::named("tiny", 101).unwrap() };
    let run = |(tier, stay): (MemoryTier, u32)| {
        let setup = TestSetup {
            optimizer_tier: tier,
            optimizer_units_on_device: stay,
            storage: DType::BF16,
            ..TestSetup::default()
        };
        let dir = tempfile::tempdir().unwrap();
        run_in_world(&shape, &setup, CarrierKind::Thread, Some(dir.path()), &|engine| {
            let mut norms = Vec::new();
            for (t, bad) in [false, true, false, false, true, true, false].into_iter().enumerate() {
                let mut window = TestObjective::new(vec![TestBatch::random(&[20, 9], 101, t as u64)]);
                if bad {
                    window.denominator = 0.0;
                }
                let updates = UpdateSettings { t: t as u64 + 1, ..UPDATES };
                let report = engine.model_mut(ModelId::FIRST).train_step(&mut window, &updates).unwrap();
                assert_eq!(report.skipped, bad);
                norms.extend((!bad).then_some(report.grad_norm.to_bits()));
            }
            (norms, states(engine))
        })
    };
    let want = run(PLACEMENTS[0]);
    for placement in PLACEMENTS {
        assert!(run(placement) == want, "{placement:?}");
    }
}

/// Offloading gradients does not change their bits, in either accumulation order. The model has a tied table, whose
/// gradient comes from two units and is so large that it is added in pieces.
#[test]
fn offloaded_gradients_have_the_same_bits() {
    let shape = ModelShape { vocab: 9000, layers: 2, tied: true, ..ModelShape::named("tiny", 9000).unwrap() };
    let meshes = [
        (StrategyName::Ddp, Mesh::on_one_node(1, 1)),
        (StrategyName::Ddp, Mesh::on_one_node(2, 1)),
        (StrategyName::Zero1, Mesh::on_one_node(1, 2)),
        (StrategyName::Zero2, Mesh::on_one_node(1, 1)),
        (StrategyName::Zero3, Mesh::on_one_node(1, 2)),
        (StrategyName::HybridShard, Mesh { replicate: 2, shard: 2, per_node: 2 }),
    ];
    for (strategy, mesh) in meshes {
        for (num_micro_batches, order) in
            [(1, AccumulationOrder::Local), (3, AccumulationOrder::Local), (3, AccumulationOrder::Reduced)]
        {
            let run = |(tier, stay): (MemoryTier, u32)| {
                let setup = TestSetup {
                    strategy,
                    mesh,
                    num_micro_batches,
                    order,
                    optimizer_tier: tier,
                    optimizer_units_on_device: stay,
                    threads: 2,
                    ddp_bucket_bytes: Bytes(1 << 20),
                    ..TestSetup::default()
                };
                let batches = |s: Step, rank: Rank| {
                    let seed = |m| 100 * s.0 + u64::from(10 * m + rank.0);
                    let all = (0..num_micro_batches)
                        .map(|m| TestBatch::random(&[20, 9], shape.vocab, seed(m)))
                        .collect();
                    (all, f64::from(29 * num_micro_batches * mesh.world_size()))
                };
                let dir = tempfile::tempdir().unwrap();
                train_world(&shape, &setup, CarrierKind::Thread, 2, UPDATES, &batches, Some(dir.path()))
            };
            let here = run(PLACEMENTS[0]);
            for placement in &PLACEMENTS[1..] {
                let offloaded = run(*placement);
                assert!(
                    offloaded == here,
                    "{strategy:?} on {mesh:?}, {num_micro_batches} micro-batches {order:?}, {placement:?}"
                );
            }
        }
    }
}

fn states(engine: &Engine) -> Vec<u32> {
    let mut bits = Vec::new();
    for (u, unit) in engine.model(ModelId::FIRST).units().iter().enumerate() {
        for segment in &unit.segments {
            for state in std::iter::once(ParamState::Working)
                .chain(engine.model(ModelId::FIRST).plan().optimizer.states())
            {
                let numbers = segment.elems().div_ceil(state.params_per_number());
                let mut values = vec![0f32; numbers];
                engine.model(ModelId::FIRST).read_whole(u, segment, state, 0..numbers, &mut values).unwrap();
                bits.extend(values.iter().map(|v| v.to_bits()));
            }
        }
    }
    bits
}
