use super::*;
use lockstep_config::StrategyName;
use lockstep_core::DType;
use lockstep_shape::Recompute;
#[test]
fn explore() {
    let mut worst = vec![];
    for size in ["tiny", "15m", "1b", "7b"] {
        for strategy in [
            StrategyName::Ddp,
            StrategyName::Zero1,
            StrategyName::Zero2,
            StrategyName::Zero3,
            StrategyName::ShardGradOp,
        ] {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
                for (micros, order) in [(1, None), (2, None), (2, Some(AccumulationOrder::Reduced))] {
                    for (storage, prefetch, tied) in
                        [(DType::F32, 1, false), (DType::BF16, 2, false), (DType::BF16, 1, true)]
                    {
                        for tier in [Tier::Device, Tier::Host] {
                            let s = Setup::new(size, strategy, 1, 4).with(|s| {
                                s.recompute = recompute;
                                s.micros = micros;
                                s.order = order;
                                s.storage = storage;
                                s.prefetch = prefetch;
                                s.tokens = 4096;
                                s.shape.vocab = 32000;
                                s.shape.tied = tied;
                                s.ppo = false;
                                if strategy == StrategyName::Zero3 {
                                    s.params_tier = tier;
                                }
                                s.optimizer_tier = tier;
                            });
                            let plan = s.plan();
                            let m = &train_phase(&plan).memory;
                            let ratio = m.bytes.0 as f64 / m.live_peak.0 as f64;
                            worst.push((ratio, format!("{size} {strategy:?} {recompute:?} micros {micros} {order:?} {storage:?} prefetch {prefetch} tied {tied} {tier:?} {} {}", m.bytes, m.live_peak)));
                        }
                    }
                }
            }
        }
    }
    worst.sort_by(|a, b| b.0.total_cmp(&a.0));
    let over = worst.iter().filter(|w| w.0 > 1.02).count();
    eprintln!("{} of {} over", over, worst.len());
    for w in worst.iter().take(40) {
        eprintln!("{:.3} {}", w.0, w.1);
    }
}
