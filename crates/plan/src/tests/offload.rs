//! Offload of gradients: how many are on the device at a time, and what their copies overlap.

use std::collections::HashMap;

use lockstep_config::StrategyName;
use lockstep_core::{Bytes, DType, Rank};
use lockstep_shape::Recompute;

use crate::AccumulationOrder::{Local, Reduced};
use crate::check::{check, check_training};
use crate::{
    Access, BufferId, BufferKind, CopyEnd, CopyPayload, Lane, MemoryTier, OpKind, ParamState, RunPlan,
    Schedule, StepBuilder, build, memory_table,
};

use super::{TestSetup, lane_simulator, resident_bytes, train_phase};

fn deep(strategy: StrategyName, shard: u32) -> TestSetup {
    TestSetup::new("tiny", strategy, 1, shard).with(|s| {
        s.shape.layers = 6;
        s.optimizer_tier = MemoryTier::Host;
        s.storage = DType::BF16;
    })
}

fn phase_bytes(plan: &RunPlan, wanted: impl Fn(&BufferKind) -> bool) -> Vec<u64> {
    let ids = train_phase(plan).memory.offsets.iter().map(|(id, _)| &plan.buffers[id.0 as usize]);
    ids.filter(|b| wanted(&b.kind)).map(|b| b.bytes().0).collect()
}

/// The largest number of unsharded gradients on the device at once in a run, each from the operation that defines it to
/// the last that reads it.
fn max_unsharded_grads(plan: &RunPlan, seed: u64) -> usize {
    let schedule = &train_phase(plan).schedule;
    let times = lane_simulator::random_times(schedule, seed);
    let mut lives: HashMap<BufferId, Vec<(u64, u64)>> = HashMap::new();
    for (op, (start, end)) in schedule.ops.iter().zip(&times) {
        for (id, access) in &op.accesses {
            if !matches!(plan.buffers[id.0 as usize].kind, BufferKind::UnshardedGrad { .. }) {
                continue;
            }
            let lives = lives.entry(*id).or_default();
            if *access == Access::Define {
                lives.push((*start, *end));
            }
            let life = lives.last_mut().expect("the first access defines the gradient");
            life.1 = life.1.max(*end);
        }
    }
    let mut events: Vec<(u64, i32)> =
        lives.into_values().flatten().flat_map(|(start, end)| [(start, 1), (end, -1)]).collect();
    events.sort_unstable();
    let mut alive = 0;
    let counts = events.into_iter().map(|(_, change)| {
        alive += change;
        alive
    });
    counts.max().unwrap_or(0) as usize
}

/// One is being computed and one is being offloaded; a tied table's also waits from the head's backward to its own.
#[test]
fn at_most_two_gradients_are_on_the_device() {
    for (strategy, shard) in
        [(StrategyName::Ddp, 1), (StrategyName::Ddp, 2), (StrategyName::Zero1, 2), (StrategyName::Zero3, 2)]
    {
        for (num_micro_batches, order) in [(1, Local), (3, Local), (3, Reduced)] {
            for tied in [false, true] {
                let setup = deep(strategy, shard).with(|s| {
                    (s.num_micro_batches, s.order, s.shape.tied) = (num_micro_batches, Some(order), tied);
                    // Smaller than any unit, so that units are not joined and offloaded together.
                    s.bucket_bytes = 1 << 10;
                });
                let plan = setup.plan();
                let most = (0..20).map(|seed| max_unsharded_grads(&plan, seed)).max().unwrap();
                // Local sums of sharded gradients stay on the device until the end of the accumulation window.
                let all_on_device =
                    strategy == StrategyName::Zero3 && num_micro_batches > 1 && order == Local;
                let expected = if all_on_device { 8 } else { 2 + usize::from(tied) };
                let words = format!(
                    "{strategy:?} on {shard}, {num_micro_batches} micro-batches {order:?}, tied {tied}"
                );
                assert!(most <= expected && (most == 8) == all_on_device, "{words}: {most}");
            }
        }
    }
}

#[test]
fn offloaded_gradients_free_device_memory() {
    for (num_micro_batches, order) in [(1, Local), (3, Local), (3, Reduced)] {
        let of = |tier| {
            let setup = TestSetup::new("15m", StrategyName::Ddp, 1, 1).with(|s| {
                (s.num_micro_batches, s.order, s.optimizer_tier) = (num_micro_batches, Some(order), tier);
                s.storage = DType::BF16;
                s.recompute = Recompute::Full.into();
            });
            setup.plan()
        };
        let (stay, leave) = (of(MemoryTier::Device), of(MemoryTier::Host));
        let states =
            [ParamState::Grad, ParamState::Master, ParamState::Optimizer(0), ParamState::Optimizer(1)];
        let moved = resident_bytes(&stay, MemoryTier::Device, &states);
        assert_eq!(resident_bytes(&leave, MemoryTier::Device, &states), 0);
        // On the host masters are whole; on the device they are remainders of two bytes.
        let remainders = resident_bytes(&stay, MemoryTier::Device, &[ParamState::Master]);
        assert_eq!(resident_bytes(&leave, MemoryTier::Host, &states), moved + remainders);
        let mut in_flight = phase_bytes(&leave, |kind| matches!(kind, BufferKind::UnshardedGrad { .. }));
        in_flight.sort_unstable_by(|a, b| b.cmp(a));
        let two: u64 = in_flight.iter().take(2).sum();
        assert!(
            leave.arena_bytes.0 + moved <= stay.arena_bytes.0 + two + (64 << 10),
            "{order:?}: {}",
            leave.arena_bytes
        );
    }
}

/// A gradient is offloaded while the next unit's is computed; a gradient that backward adds to is fetched back while the
/// previous unit's is computed.
#[test]
fn copies_of_gradients_overlap_backward() {
    for (num_micro_batches, order) in [(1, Local), (2, Local), (2, Reduced)] {
        let setup = deep(StrategyName::Ddp, 1)
            .with(|s| (s.num_micro_batches, s.order) = (num_micro_batches, Some(order)));
        let plan = setup.plan();
        let schedule = &train_phase(&plan).schedule;
        let times = lane_simulator::times(schedule, |i| match schedule.ops[i].lane {
            Lane::Compute => 200,
            _ => 100,
        });
        let backward = |unit: u32| {
            let is = |kind: &OpKind| match kind {
                OpKind::Backward { unit: u, micro_batch, .. } => {
                    (*u, *micro_batch) == (unit, num_micro_batches - 1)
                }
                _ => false,
            };
            schedule.ops.iter().position(|op| is(&op.kind)).unwrap()
        };
        let overlaps = |i: usize, other: usize| times[i].0 < times[other].1 && times[other].0 < times[i].1;
        for unit in 2..5 {
            let offload = last_copy(&plan, schedule, unit + 1, true);
            assert!(overlaps(offload, backward(unit)), "{order:?}: unit {} is offloaded late", unit + 1);
            if num_micro_batches > 1 && order == Local {
                let fetch = last_copy(&plan, schedule, unit - 1, false);
                assert!(overlaps(fetch, backward(unit)), "unit {} is fetched late", unit - 1);
            }
        }
        // The norm is known soon after the last gradient is offloaded.
        let norm = schedule.ops.iter().position(|op| matches!(op.kind, OpKind::ClipNorm { .. })).unwrap();
        assert!(times[norm].0 <= times[backward(0)].1 + 300, "{order:?}");
    }
}

/// The last copy of a unit's gradient, from the device or back to it.
fn last_copy(plan: &RunPlan, schedule: &Schedule, unit: u32, from_device: bool) -> usize {
    let is = |op: &crate::Op| match op.kind {
        OpKind::Copy { payload: CopyPayload::Grad, from, span, .. } => {
            let on_device =
                matches!(from, CopyEnd::Buffer(id) if plan.buffers[id.0 as usize].tier == MemoryTier::Device);
            on_device == from_device && schedule.span(span).parts[0].unit == unit
        }
        _ => false,
    };
    schedule.ops.iter().rposition(is).expect("the gradient is copied")
}

/// A custom strategy that reduces gradients only after the whole backward.
#[test]
fn gradients_may_be_offloaded_late() {
    fn reduce_last(b: &mut StepBuilder) {
        for micro_batch in 0..b.num_micro_batches() {
            let passes = b.micro_batch_passes(micro_batch);
            b.run_with_prefetch(&passes, &mut |_, _| {});
            for unit in (0..=b.head_unit()).rev() {
                if b.reduces_after(unit, micro_batch) {
                    b.add_to_bucket(unit, micro_batch);
                }
            }
            b.flush_bucket(micro_batch);
        }
        b.clip_and_update();
    }
    for shard in [1, 2] {
        for (num_micro_batches, order) in [(1, Local), (3, Local), (3, Reduced)] {
            let setup = deep(StrategyName::Ddp, shard)
                .with(|s| (s.num_micro_batches, s.order) = (num_micro_batches, Some(order)));
            let plan = build(crate::PlanInput { strategy: reduce_last, ..setup.input() }, Rank(0)).unwrap();
            let phase = train_phase(&plan);
            assert_eq!(check(&phase.schedule, &plan.buffers, &phase.memory), []);
            assert_eq!(check_training(&phase.schedule, &plan.input), []);
            for seed in 0..10 {
                lane_simulator::run(&plan, phase, &lane_simulator::random_times(&phase.schedule, seed));
            }
        }
    }
}

/// LLaMA 7b on one GPU of 44 GiB: 4 rows of 2048 tokens, full recompute, optimizer on the host.
#[test]
fn seven_billion_parameters_fit_one_gpu() {
    const MIB: u64 = 1 << 20;
    for (num_micro_batches, order) in [(1, Local), (8, Local), (8, Reduced)] {
        let setup = TestSetup::new("7b", StrategyName::Ddp, 1, 1).with(|s| {
            s.shape.vocab = 32_000;
            (s.num_micro_batches, s.order, s.tokens) = (num_micro_batches, Some(order), 4 * 2048);
            (s.storage, s.recompute, s.optimizer_tier) =
                (DType::BF16, Recompute::Full.into(), MemoryTier::Host);
        });
        let plan = setup.plan();
        let params: u64 = plan.input.models[0].units.iter().map(|u| u.elems as u64).sum();
        let table = memory_table(&plan);
        assert!(params > 6_700_000_000, "{params}");
        assert_eq!(resident_bytes(&plan, MemoryTier::Device, &[ParamState::Working]), 2 * params);
        assert_eq!(
            resident_bytes(
                &plan,
                MemoryTier::Device,
                &[ParamState::Grad, ParamState::Master, ParamState::Optimizer(0)]
            ),
            0
        );
        assert_eq!(resident_bytes(&plan, MemoryTier::Host, &[ParamState::Grad]), 4 * params);
        let block = 4 * plan.input.models[0].units[1].elems as u64;
        assert_eq!(block.div_ceil(MIB), 773, "a block's gradient in f32");
        // The phase needs 33 residual streams of 64 MiB, two gradients, one block's activations, and scratch.
        let phase = train_phase(&plan).memory.bytes;
        let streams: u64 =
            phase_bytes(&plan, |kind| matches!(kind, BufferKind::Residual { .. })).into_iter().sum::<u64>();
        let recomputed = phase_bytes(&plan, |kind| matches!(kind, BufferKind::RecomputedActivations { .. }))
            .into_iter()
            .max();
        let scratch: u64 = phase_bytes(&plan, |kind| *kind == BufferKind::Scratch).into_iter().sum();
        let alive = streams + 2 * block + recomputed.unwrap() + scratch;
        assert!(phase.0 <= alive + 200 * MIB, "{phase} is more than {}:\n{table}", Bytes(alive));
        assert!(plan.arena_bytes < Bytes(20 << 30), "{order:?}, {num_micro_batches}:\n{table}");
        // The host holds all states, and little else.
        assert!(plan.host_bytes.0 < 16 * params + 512 * MIB, "{order:?}, {num_micro_batches}:\n{table}");
    }
}

/// With a budget of 44 GiB as many units as fit keep their optimizer states on the device.
#[test]
fn optimizer_states_fill_the_budget() {
    let budget = Bytes(44 << 30);
    let setup = TestSetup::new("7b", StrategyName::Ddp, 1, 1).with(|s| {
        s.shape.vocab = 32_000;
        s.tokens = 4 * 2048;
        (s.storage, s.recompute, s.optimizer_tier) = (DType::BF16, Recompute::Full.into(), MemoryTier::Host);
    });
    let plan = build(setup.input().with_most_units_on_device(budget), Rank(0)).unwrap();
    let stay = plan.input.models[0].placements.optimizer_units_on_device;
    let words = format!("{stay} units, {}:\n{}", plan.device_bytes(), memory_table(&plan));
    assert!(stay > 6 && plan.device_bytes() <= budget, "{words}");
    let one_more = setup.clone().with(|s| s.optimizer_units_on_device = stay + 1).plan();
    assert!(one_more.device_bytes() > budget, "{words}");
    // Nothing changes if the budget is too small anyway, or if nothing is offloaded.
    assert_eq!(
        setup.input().with_most_units_on_device(Bytes(10 << 30)).models[0]
            .placements
            .optimizer_units_on_device,
        0
    );
    let on_device = setup.with(|s| s.optimizer_tier = MemoryTier::Device);
    assert_eq!(
        on_device.input().with_most_units_on_device(Bytes(1 << 40)).models[0]
            .placements
            .optimizer_units_on_device,
        0
    );
}

#[test]
fn the_offload_ratio_limits_the_units_on_the_device() {
    let setup = TestSetup::new("tiny", StrategyName::Zero1, 1, 2).with(|s| s.shape.layers = 6);
    let input = setup.input();
    let elems: Vec<f64> = input.models[0].units.iter().map(|u| u.trained_elems as f64).collect();
    let total: f64 = elems.iter().sum();
    for ratio in [0.01, 0.3, 0.5, 0.9, 1.0] {
        let stay =
            input.clone().offloading_at_least(ratio).models[0].placements.optimizer_units_on_device as usize;
        let left = |stay: usize| elems[stay..].iter().sum::<f64>() / total;
        assert!(left(stay) >= ratio && (stay == elems.len() || left(stay + 1) < ratio), "{ratio}: {stay}");
    }
    assert_eq!(input.offloading_at_least(1.0).models[0].placements.optimizer_units_on_device, 0);
}
