//! Tests that lanes overlap: what may run at the same time does, if every operation takes the same time.

use lockstep_config::StrategyName;
use lockstep_core::DType;

use crate::{CopyEnd, Lane, MemoryTier, OpKind, RunPlan, Schedule};

use super::{TestSetup, lane_simulator, train_phase};

const EQUAL: u64 = 100;

/// Every operation takes the same time, except releases, which take none.
fn equal_times(schedule: &Schedule) -> Vec<(u64, u64)> {
    lane_simulator::times(schedule, |i| match schedule.ops[i].kind {
        OpKind::Release(_) => 0,
        _ => EQUAL,
    })
}

fn find(schedule: &Schedule, wanted: impl Fn(&OpKind) -> bool) -> usize {
    schedule.ops.iter().position(|op| wanted(&op.kind)).expect("the operation is there")
}

fn find_last(schedule: &Schedule, wanted: impl Fn(&OpKind) -> bool) -> usize {
    schedule.ops.iter().rposition(|op| wanted(&op.kind)).expect("the operation is there")
}

fn unit_of(schedule: &Schedule, kind: &OpKind) -> Option<u32> {
    match kind {
        OpKind::Gather { span: s, .. }
        | OpKind::Copy { span: s, .. }
        | OpKind::AllGatherUpdated { span: s, .. } => Some(schedule.span(*s).parts[0].unit),
        OpKind::Reduce { span, .. } => Some(schedule.span(*span).parts[0].unit),
        _ => None,
    }
}

fn overlap(times: &[(u64, u64)], a: usize, b: usize) -> bool {
    times[a].0 < times[b].1 && times[b].0 < times[a].1
}

/// The duration of a run, the sum of its operations, and the sum of its busiest lane.
fn makespan(schedule: &Schedule) -> (u64, u64, u64) {
    let times = equal_times(schedule);
    let end = times.iter().map(|t| t.1).max().unwrap();
    let busy = |lane: Option<Lane>| {
        let ops = schedule.ops.iter().zip(&times).filter(|(op, _)| lane.is_none_or(|l| op.lane == l));
        ops.map(|(_, t)| t.1 - t.0).sum::<u64>()
    };
    let lanes = [Lane::Compute, Lane::Comm, Lane::Copy, Lane::Host];
    (end, busy(None), lanes.into_iter().map(|l| busy(Some(l))).max().unwrap())
}

fn deep(strategy: StrategyName) -> TestSetup {
    TestSetup::new("tiny", strategy, 1, 4).with(|s| s.shape.layers = 6)
}

fn assert_zero3_overlaps(plan: &RunPlan, prefetch: u32) {
    let schedule = &train_phase(plan).schedule;
    let times = equal_times(schedule);
    for unit in 1..6 {
        let forward = find(schedule, |k| matches!(k, OpKind::Forward { unit: u, .. } if *u == unit));
        let gather =
            find(schedule, |k| matches!(k, OpKind::Gather { .. }) && unit_of(schedule, k) == Some(unit + 1));
        let ahead = times[gather].0 < times[forward].1;
        assert_eq!(ahead, prefetch > 0, "gather of unit {} and forward of {unit}", unit + 1);
        let backward = find(schedule, |k| matches!(k, OpKind::Backward { unit: u, .. } if *u == unit));
        let reduce = find_last(schedule, |k| {
            matches!(k, OpKind::Reduce { .. }) && unit_of(schedule, k) == Some(unit + 1)
        });
        // Without prefetch, backward waits for its own gather, and the reduction runs after that.
        assert!(times[reduce].1 > times[backward].0, "reduce of {} and backward of {unit}", unit + 1);
    }
}

#[test]
fn zero3_prefetches_gathers_and_overlaps_reductions() {
    for prefetch in 0..3 {
        let plan = deep(StrategyName::Zero3).with(|s| s.prefetch = prefetch).plan();
        assert_zero3_overlaps(&plan, prefetch);
    }
}

#[test]
fn runs_are_shorter_than_the_sum_of_their_operations() {
    for strategy in [
        StrategyName::Ddp,
        StrategyName::Zero1,
        StrategyName::Zero2,
        StrategyName::ShardGradOp,
        StrategyName::Zero3,
    ] {
        for num_micro_batches in [1, 3] {
            let setup = deep(strategy).with(|s| {
                s.num_micro_batches = num_micro_batches;
                s.bucket_bytes = 64 << 10;
            });
            let (end, serial, busiest) = makespan(&train_phase(&setup.plan()).schedule);
            assert!(end < serial, "{strategy:?}: {end} of {serial}");
            assert!(end * 10 <= busiest * 16, "{strategy:?}: {end}, busiest lane {busiest}");
        }
    }
}

/// Small buckets do not delay backward: a unit's reductions run while the next unit is computed.
#[test]
fn small_buckets_in_reduced_order_overlap_backward() {
    let setup = deep(StrategyName::Ddp).with(|s| {
        s.num_micro_batches = 2;
        s.order = Some(crate::AccumulationOrder::Reduced);
        s.bucket_bytes = 16 << 10;
    });
    let plan = setup.plan();
    let schedule = &train_phase(&plan).schedule;
    // Reductions of a unit together take as long as its backward.
    let parts = schedule.ops.iter().filter(|op| matches!(op.kind, OpKind::Reduce { .. })).count() as u64;
    let per_unit = parts / (2 * 8);
    let times = lane_simulator::times(schedule, |i| match schedule.ops[i].kind {
        OpKind::Reduce { .. } => EQUAL,
        _ => EQUAL * per_unit,
    });
    let serial: u64 = times.iter().map(|t| t.1 - t.0).sum();
    let end = times.iter().map(|t| t.1).max().unwrap();
    assert!(end * 10 < serial * 8, "{end} of {serial}");
}

/// With parameters on the host, copy and comm lanes overlap each other and compute; reductions share no buffer with
/// fetches.
#[test]
fn fetching_parameters_does_not_delay_collectives() {
    let plan = deep(StrategyName::Zero3).with(|s| s.params_tier = MemoryTier::Host).plan();
    let schedule = &train_phase(&plan).schedule;
    let times = equal_times(schedule);
    for unit in 2..6 {
        let fetch = find(schedule, |k| {
            matches!(k, OpKind::Copy { to: CopyEnd::Buffer(_), .. }) && unit_of(schedule, k) == Some(unit)
        });
        let gather =
            find(schedule, |k| matches!(k, OpKind::Gather { .. }) && unit_of(schedule, k) == Some(unit - 1));
        assert!(times[fetch].0 <= times[gather].0, "fetch of {unit} waits for gather of {}", unit - 1);
    }
    let copies = |op: &crate::Op| matches!(op.kind, OpKind::Copy { .. });
    let reductions = |op: &crate::Op| matches!(op.kind, OpKind::Reduce { .. });
    for copy in schedule.ops.iter().filter(|op| copies(op)) {
        for reduce in schedule.ops.iter().filter(|op| reductions(op)) {
            let shared = copy.accesses.iter().find(|(id, _)| reduce.accesses.iter().any(|(o, _)| o == id));
            let what = shared.map(|(id, _)| plan.buffers[id.0 as usize].kind);
            assert!(what.is_none_or(|w| w.is_resident()), "{what:?}");
        }
    }
}

/// Copies of the next unit run while the host updates a unit, and updates wait for the norm.
#[test]
fn updates_on_the_host_overlap_copies() {
    for tier in [MemoryTier::Host, MemoryTier::Nvme] {
        let setup = deep(StrategyName::Zero2).with(|s| {
            s.optimizer_tier = tier;
            s.storage = DType::BF16;
        });
        let plan = setup.plan();
        let schedule = &train_phase(&plan).schedule;
        let times = equal_times(schedule);
        let update =
            |unit| find(schedule, |k| matches!(k, OpKind::Update { unit: u, start: 0, .. } if *u == unit));
        let norm = find(schedule, |k| matches!(k, OpKind::ClipNorm { .. }));
        for unit in 1..6 {
            assert!(times[update(unit)].0 >= times[norm].1);
            let copies = (0..schedule.ops.len()).filter(|i| schedule.ops[*i].lane == Lane::Copy);
            let overlapped = copies.filter(|i| overlap(&times, *i, update(unit))).count();
            assert!(overlapped > 0, "{tier}: nothing is copied while unit {unit} is updated");
        }
    }
}

/// The host updates later units while the next step's forward runs through earlier ones; no unit's forward starts before
/// its parameters are updated.
#[test]
fn updates_on_the_host_overlap_the_next_forward() {
    let plan = deep(StrategyName::Zero1).with(|s| s.optimizer_tier = MemoryTier::Host).plan();
    let schedule = &train_phase(&plan).schedule;
    let times = lane_simulator::times_of_runs(2, schedule, |_| EQUAL);
    let (first, second) = times.split_at(schedule.ops.len());
    let forward = |unit| find(schedule, |k| matches!(k, OpKind::Forward { unit: u, .. } if *u == unit));
    for unit in 0..6 {
        let gather_updated = find_last(schedule, |k| {
            matches!(k, OpKind::AllGatherUpdated { span: s, .. }
            if schedule.span(*s).parts.iter().any(|p| p.unit == unit))
        });
        assert!(
            second[forward(unit)].0 >= first[gather_updated].1,
            "unit {unit} is used before it is updated"
        );
    }
    let last = find_last(schedule, |k| matches!(k, OpKind::Update { .. }));
    assert!(second[forward(3)].1 <= first[last].0, "the forward waits for all updates");
}

/// The device updates the units whose states it holds while the host updates the others, and the next forward already
/// runs through them.
#[test]
fn the_next_forward_overlaps_updates_on_the_host() {
    let setup = deep(StrategyName::Ddp).with(|s| {
        (s.optimizer_tier, s.optimizer_units_on_device, s.storage) = (MemoryTier::Host, 3, DType::BF16)
    });
    let plan = setup.with(|s| s.mesh = lockstep_core::Mesh::SINGLE).plan();
    let schedule = &train_phase(&plan).schedule;
    let times = lane_simulator::times_of_runs(2, schedule, |i| match schedule.ops[i].lane {
        // A host much slower than the device.
        Lane::Host => 10 * EQUAL,
        _ => EQUAL,
    });
    let (first, second) = times.split_at(schedule.ops.len());
    let update = |unit| find(schedule, |k| matches!(k, OpKind::Update { unit: u, .. } if *u == unit));
    let forward = |unit| find(schedule, |k| matches!(k, OpKind::Forward { unit: u, .. } if *u == unit));
    for unit in 0..3 {
        assert_eq!(schedule.ops[update(unit)].lane, Lane::Compute);
        assert!(second[forward(unit)].1 <= first[update(3)].1, "unit {unit} waits for the host");
    }
    assert_eq!(schedule.ops[update(3)].lane, Lane::Host);
    assert!(second[forward(3)].0 >= first[update(3)].1);
}

/// With updates on the device only all-gathers of updated parameters overlap the next step.
#[test]
fn a_step_that_updates_on_the_device_has_finished_when_it_returns() {
    for strategy in [StrategyName::Ddp, StrategyName::Zero2, StrategyName::Zero3] {
        let plan = deep(strategy).plan();
        let schedule = &train_phase(&plan).schedule;
        let late = |op: &crate::Op| op.waits.iter().any(|wait| matches!(wait, crate::Wait::PreviousRun(_)));
        for op in schedule.ops.iter().filter(|op| late(op)) {
            assert!(
                strategy == StrategyName::Zero2 && op.lane == Lane::Compute,
                "{strategy:?}: {:?}",
                op.kind
            );
        }
    }
}

/// One gradient is being computed and one is being reduced.
#[test]
fn at_most_two_unsharded_gradients_are_in_flight() {
    let plan = deep(StrategyName::Zero3).with(|s| s.num_micro_batches = 2).plan();
    let schedule = &train_phase(&plan).schedule;
    for seed in 0..20 {
        let times = lane_simulator::random_times(schedule, seed);
        let mut events: Vec<(u64, i32)> = Vec::new();
        for (op, (start, end)) in schedule.ops.iter().zip(&times) {
            match op.kind {
                OpKind::Backward { .. } | OpKind::HeadStep { .. } => events.push((*start, 1)),
                OpKind::Reduce { .. } => events.push((*end, -1)),
                _ => {}
            }
        }
        events.sort_unstable();
        let mut whole = 0;
        for (_, change) in events {
            whole += change;
            assert!(whole <= 2);
        }
        assert_eq!(whole, 0);
    }
}
