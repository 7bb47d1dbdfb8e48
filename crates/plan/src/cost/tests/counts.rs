//! Counts against formulas computed by hand.

use lockstep_config::StrategyName;
use lockstep_core::DType;

use crate::cost::{Collective, Group, MatmulRates, OpDemand, demand, model_flops_per_token};
use crate::run_plan::PlanData;

use super::{machine, single, workload};

#[test]
fn print_h200() {
    for (size, rows, recompute) in [
        ("300m", 16, lockstep_shape::Recompute::Selective),
        ("1b", 8, lockstep_shape::Recompute::Selective),
        ("7b", 4, lockstep_shape::Recompute::Full),
    ] {
        let w = workload(size, rows, 2048).with_recompute(recompute.into());
        let mut m = single("h200");
        m.rates.matmul = MatmulRates { f32: 50e12, bf16: 790e12, f16: 790e12 };
        let plan = w.lay_out(m.budget);
        let p = m.predict(&plan);
        println!("{size} {:.0} tok/s mfu {:.3} {}", p.tokens_per_s, p.mfu, plan.device_bytes());
    }
    for name in crate::cost::STRATEGIES {
        let m = machine("l40s", 1, 8, "100Gbps");
        if let Some(w) = workload("7b", 4, 2048).with_strategy(name, &m.cluster) {
            let plan = w.lay_out(m.budget);
            let p = m.predict(&plan);
            println!(
                "{name} {:.3} s, exposed {:.3}, sent {} {}",
                p.step_seconds,
                p.exposed_comm_seconds,
                p.sent,
                plan.device_bytes()
            );
        }
    }
    let _ = (
        Collective::AllGather,
        Group { nodes: 1, ranks_per_node: 1, groups_per_node: 1 },
        StrategyName::Ddp,
        DType::F32,
    );
    let _: Option<(PlanData, OpDemand)> = None;
    let _ = (demand, model_flops_per_token);
}
