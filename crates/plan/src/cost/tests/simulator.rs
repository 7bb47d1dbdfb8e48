//! Properties of the simulator.

use lockstep_config::StrategyName;
use lockstep_shape::Recompute;
use proptest::prelude::*;

use crate::buffer::MemoryTier;
use crate::cost::{OpTime, STRATEGIES, Simulation, Straggler, Workload, simulate};
use crate::run_plan::PlanData;
use crate::{Lane, Schedule, Wait};

use super::{machine, plan_under, single, workload};

/// A small run under any strategy, with one or two nodes and any offload of the optimizer.
fn any_plan() -> impl Strategy<Value = PlanData> {
    let tiers = vec![MemoryTier::Device, MemoryTier::Host, MemoryTier::Nvme];
    let recompute = vec![Recompute::None, Recompute::Selective, Recompute::Full];
    let strategies = prop::sample::select(STRATEGIES.to_vec());
    let (tiers, recompute) = (prop::sample::select(tiers), prop::sample::select(recompute));
    (strategies, 1u32..=2, 1u32..=2, tiers, recompute, 0u32..=2).prop_map(
        |(name, nodes, rows, tier, recompute, prefetch)| {
            let machine = machine("h100-80g", nodes, 4, "100Gbps");
            let mut all = workload("tiny", 2, 256).with_rows(rows).with_recompute(recompute.into());
            all.input.prefetch = prefetch;
            all.input.models[0].placements.optimizer_tier = tier;
            let name =
                if nodes == 1 && name == StrategyName::HybridShard { StrategyName::Zero3 } else { name };
            plan_under(&all, name, &machine)
        },
    )
}

fn times_of(schedule: &Schedule, seed: &[u16]) -> Vec<OpTime> {
    let time = |(i, op): (usize, &crate::Op)| OpTime {
        seconds: f64::from(seed[i % seed.len()]) + 1.0,
        is_collective: op.lane == Lane::Comm,
    };
    schedule.ops.iter().enumerate().map(time).collect()
}

/// No operation starts before what it waits for, and lanes run in order.
fn assert_waits_are_kept(schedule: &Schedule, simulation: &Simulation) {
    let mut lane_free = [f64::NEG_INFINITY; Lane::COUNT];
    for (op, (start, end)) in schedule.ops.iter().zip(&simulation.times) {
        assert!(start <= end);
        assert!(lane_free[op.lane as usize] <= *start, "a lane runs in order");
        lane_free[op.lane as usize] = *end;
        for wait in &op.waits {
            if let Wait::SameRun(id) = wait {
                assert!(simulation.times[id.0 as usize].1 <= *start, "{:?} starts too early", op.kind);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_step_is_between_the_busiest_lane_and_the_sum(
        plan in any_plan(),
        seed in prop::collection::vec(any::<u16>(), 1..40),
    ) {
        let schedule = &plan.phases[0].schedule;
        let times = times_of(schedule, &seed);
        let simulation = simulate(schedule, &times, false, None);
        let busiest = simulation.busy_seconds.iter().copied().fold(0.0, f64::max);
        let sum: f64 = simulation.busy_seconds.iter().sum();
        prop_assert!(simulation.step_seconds >= busiest * (1.0 - 1e-9), "{} {busiest}", simulation.step_seconds);
        prop_assert!(simulation.step_seconds <= sum * (1.0 + 1e-9), "{} {sum}", simulation.step_seconds);
        assert_waits_are_kept(schedule, &simulation);
        // If lanes share the cores, nothing overlaps.
        let shared = simulate(schedule, &times, true, None);
        prop_assert!((shared.step_seconds / sum - 1.0).abs() < 1e-9, "{} {sum}", shared.step_seconds);
    }

    #[test]
    fn faster_operations_never_make_a_step_slower(
        plan in any_plan(),
        seed in prop::collection::vec(any::<u16>(), 1..40),
        lane in 0..Lane::COUNT,
    ) {
        let schedule = &plan.phases[0].schedule;
        let times = times_of(schedule, &seed);
        let faster: Vec<OpTime> = times
            .iter()
            .zip(&schedule.ops)
            .map(|(time, op)| match op.lane as usize == lane {
                true => OpTime { seconds: time.seconds / 2.0, ..*time },
                false => *time,
            })
            .collect();
        let step = |times: &[OpTime]| simulate(schedule, times, false, None).step_seconds;
        prop_assert!(step(&faster) <= step(&times) * (1.0 + 1e-9));
    }

    #[test]
    fn a_straggler_never_makes_a_step_faster(
        plan in any_plan(),
        seed in prop::collection::vec(any::<u16>(), 1..40),
        slowdown in 1.0f64..4.0,
    ) {
        let schedule = &plan.phases[0].schedule;
        let times = times_of(schedule, &seed);
        let step = |straggler| simulate(schedule, &times, false, straggler).step_seconds;
        let slower = step(Some(Straggler { slowdown }));
        prop_assert!(slower >= step(None) * (1.0 - 1e-9));
        let compute: f64 = simulate(schedule, &times, false, None).busy_seconds[Lane::Compute as usize];
        prop_assert!(slower >= slowdown * compute * (1.0 - 1e-9), "every rank waits for the straggler");
    }
}

fn step_of(workload: &Workload<'_>, change: impl Fn(&mut crate::cost::Machine)) -> f64 {
    let mut machine = machine("a100-80g", 2, 4, "10Gbps");
    change(&mut machine);
    machine.predict(&plan_under(workload, StrategyName::Zero3, &machine)).step_seconds
}

#[test]
fn predictions_are_monotone_in_every_rate() {
    let mut all = workload("15m", 2, 512);
    all.input.models[0].placements.optimizer_tier = MemoryTier::Nvme;
    let base = step_of(&all, |_| {});
    let changes: [fn(&mut crate::cost::Machine); 8] = [
        |m| m.rates.matmul.bf16 /= 4.0,
        |m| m.rates.memory_bytes_per_s /= 4.0,
        |m| m.rates.kernel_seconds *= 4.0,
        |m| m.rates.host_link_bytes_per_s /= 100.0,
        |m| m.rates.nvme_read_bytes_per_s /= 4.0,
        |m| m.rates.nvme_write_bytes_per_s /= 4.0,
        |m| m.rates.host_update_bytes_per_s /= 100.0,
        |m| m.cluster.inter.bytes_per_s /= 4.0,
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let slower = step_of(&all, change);
        assert!(slower >= base, "change {i}: {slower} is less than {base}");
    }
    assert!(step_of(&all, |m| m.cluster.inter.bytes_per_s /= 4.0) > base, "the network decides this step");
}

#[test]
fn one_rank_communicates_nothing() {
    let machine = single("h200");
    let prediction = machine.predict(&workload("15m", 1, 512).lay_out(&machine));
    assert_eq!((prediction.exposed_comm_seconds, prediction.sent.0), (0.0, 0));
    assert_eq!(prediction.busy_seconds[Lane::Comm as usize], 0.0);
    assert!(prediction.mfu > 0.0 && prediction.mfu < 1.0);
}

/// Communication is exposed on a slow network and hidden behind computation on a fast one.
#[test]
fn prefetch_hides_communication() {
    let exposed = |network: &str| {
        let machine = machine("h100-80g", 2, 8, network);
        let plan = plan_under(&workload("7b", 4, 2048), StrategyName::Zero3, &machine);
        let prediction = machine.predict(&plan);
        prediction.exposed_comm_seconds / prediction.step_seconds
    };
    assert!(exposed("400Gbps/gpu") < 0.1, "{}", exposed("400Gbps/gpu"));
    assert!(exposed("10Gbps") > 0.8, "{}", exposed("10Gbps"));
}
