use lockstep_config::StrategyName as S;
use lockstep_core::{Bytes, Mesh, Rank, Step};
use lockstep_engine::Updates;
use lockstep_plan::{AccumulationOrder, Tier};
use lockstep_shape::ModelShape;
use lockstep_testkit::{Micro, Setup, Trace, train_world};

const UPDATES: Updates =
    Updates { t: 1, lr: 1e-2, betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1, max_norm: Some(1.0) };

fn shape() -> ModelShape {
    ModelShape { vocab: 101, layers: 3, ..ModelShape::named("tiny", 101).unwrap() }
}

fn run(setup: &Setup) -> Trace {
    let shape = shape();
    let (micros, world) = (setup.micros, setup.mesh.world());
    let micro = |s: Step, rank: Rank, m: u32| {
        let seed = s.0 * 1000 + u64::from(m * world + rank.0);
        Micro::random(&[20 + (seed % 7) as usize, 3, 30], shape.vocab, seed)
    };
    let batches = |s: Step, rank: Rank| {
        let all = (0..world).flat_map(|r| (0..micros).map(move |m| (Rank(r), m)));
        let denominator = all.map(|(r, m)| micro(s, r, m).tokens.len() as f64).sum();
        ((0..micros).map(|m| micro(s, rank, m)).collect(), denominator)
    };
    let dir = tempfile::tempdir().unwrap();
    train_world(&shape, setup, 3, UPDATES, &batches, Some(dir.path()))
}

#[test]
fn strategies_agree() {
    for (nodes, per_node) in [(1u32, 2u32), (1, 3), (2, 2)] {
        let world = nodes * per_node;
        for order in [AccumulationOrder::Local, AccumulationOrder::Reduced] {
            let base = Setup {
                micros: 2,
                order,
                threads: 1,
                bucket: Bytes(100 << 10),
                mesh: Mesh { replicate: world, shard: 1, per_node },
                ..Setup::default()
            };
            let want = run(&base);
            for strategy in [S::Zero1, S::Zero2, S::ShardGradOp, S::Zero3, S::HybridShard] {
                let mesh = match strategy {
                    S::HybridShard if nodes > 1 => Mesh { replicate: nodes, shard: per_node, per_node },
                    S::HybridShard => continue,
                    _ => Mesh { replicate: 1, shard: world, per_node },
                };
                for tier in [Tier::Device, Tier::Host, Tier::Nvme] {
                    for params_tier in [Tier::Device, Tier::Host, Tier::Nvme] {
                        if params_tier != Tier::Device && matches!(strategy, S::Zero1 | S::Zero2) {
                            continue;
                        }
                        let setup = Setup { strategy, mesh, optimizer_tier: tier, params_tier, ..base };
                        let got = run(&setup);
                        let what = format!("{strategy:?} {mesh:?} {order:?} opt {tier} params {params_tier}");
                        assert!(got.norms == want.norms, "{what}: norms");
                        assert!(got.log_probs == want.log_probs, "{what}: log probs");
                        assert!(got.states == want.states, "{what}: states");
                    }
                }
            }
        }
    }
}
