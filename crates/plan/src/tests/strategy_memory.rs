//! How much memory each strategy needs.

use lockstep_config::StrategyName;
use lockstep_core::{Axis, Bytes, DType, Rank};
use lockstep_shape::Recompute;

use crate::{
    BufferKind, MemoryBreakdown, MemoryTier, ModelRole, OpKind, ParamState, Phase, RecomputePolicy, RunPlan,
    build,
};

use super::{TestSetup, lane_simulator, resident_bytes, train_phase};

const OPTIMIZER: [ParamState; 3] = [ParamState::Master, ParamState::Optimizer(0), ParamState::Optimizer(1)];

/// Equal up to rounding: shards are rounded up to blocks of 256 elements, per unit and state.
fn assert_about(found: u64, expected: u64, plan: &RunPlan) {
    let rounding = plan.input.models[0].units.len() as u64 * 3 * 1024;
    assert!(found >= expected && found <= expected + rounding, "{found} is not about {expected}");
}

fn device(plan: &RunPlan, states: &[ParamState]) -> u64 {
    resident_bytes(plan, MemoryTier::Device, states)
}

fn of_15m(strategy: StrategyName, replicate: u32, shard: u32) -> TestSetup {
    TestSetup::new("15m", strategy, replicate, shard).with(|s| s.storage = DType::BF16)
}

/// Bytes of the buffers of one kind, largest first.
fn sizes(plan: &RunPlan, wanted: impl Fn(&BufferKind) -> bool) -> Vec<u64> {
    let mut all: Vec<u64> = plan.buffers.iter().filter(|b| wanted(&b.kind)).map(|b| b.bytes().0).collect();
    all.sort_unstable_by(|a, b| b.cmp(a));
    all
}

#[test]
fn zero3_holds_a_quarter_of_everything_on_four_ranks() {
    let one = of_15m(StrategyName::Zero3, 1, 1).plan();
    let four = of_15m(StrategyName::Zero3, 1, 4).plan();
    for state in [
        ParamState::Working,
        ParamState::Grad,
        ParamState::Master,
        ParamState::Optimizer(0),
        ParamState::Optimizer(1),
    ] {
        assert_about(device(&four, &[state]), device(&one, &[state]) / 4, &four);
    }
}

/// Four ranks need no more than one rank plus the prefetched units, two unsharded gradients and the reduction scratch.
#[test]
fn zero3_adds_prefetched_units_and_two_gradients() {
    for (tied, prefetch, num_micro_batches) in [(false, 0, 1), (false, 1, 2), (false, 3, 1), (true, 1, 2)] {
        let setup = |shard| {
            of_15m(StrategyName::Zero3, 1, shard).with(|s| {
                s.prefetch = prefetch;
                s.num_micro_batches = num_micro_batches;
                s.shape.tied = tied;
                // One rank accumulates in place, so that only activations are compared.
                s.order = (shard == 1).then_some(crate::AccumulationOrder::Local);
            })
        };
        let (one, four) = (setup(1).plan(), setup(4).plan());
        let wholes = sizes(&four, |kind| matches!(kind, BufferKind::UnshardedParams { .. }));
        let grads = sizes(&four, |kind| matches!(kind, BufferKind::UnshardedGrad { .. }));
        let staging: u64 = sizes(&four, |kind| matches!(kind, BufferKind::ReduceScratch)).iter().sum();
        // A tied table is gathered with the head, and its gradient waits for the embedding's backward.
        let extra = usize::from(tied);
        let window: u64 = wholes.iter().take(prefetch as usize + 1 + extra).sum();
        let whole_grads: u64 = grads.iter().take(2 + extra).sum();
        let bound = train_phase(&one).memory.bytes.0 + window + whole_grads + staging + (64 << 10);
        let bytes = train_phase(&four).memory.bytes.0;
        assert!(bytes <= bound, "tied {tied}, prefetch {prefetch}: {bytes} over {bound}");
        for seed in 0..10 {
            let most = max_gathered(&four, train_phase(&four), seed);
            assert!(most <= prefetch as usize + 1 + extra, "{most} units gathered, prefetch {prefetch}");
        }
    }
}

/// The largest number of units gathered at once in a run, each from the start of its gather to its release.
fn max_gathered(plan: &RunPlan, phase: &Phase, seed: u64) -> usize {
    let times = lane_simulator::random_times(&phase.schedule, seed);
    assert!(plan.input.mesh.shard > 1);
    let mut events: Vec<(u64, i64)> = Vec::new();
    for (op, (start, end)) in phase.schedule.ops.iter().zip(&times) {
        match op.kind {
            OpKind::Gather { .. } => events.push((*start, 1)),
            OpKind::Release(_) => events.push((*end, -1)),
            _ => {}
        }
    }
    events.sort_unstable();
    let mut whole = 0;
    let counts = events.into_iter().map(|(_, change)| {
        whole += change;
        whole
    });
    counts.max().unwrap() as usize
}

#[test]
fn zero1_holds_a_quarter_of_the_optimizer() {
    let ddp = of_15m(StrategyName::Ddp, 1, 4).plan();
    let zero1 = of_15m(StrategyName::Zero1, 1, 4).plan();
    let zero2 = of_15m(StrategyName::Zero2, 1, 4).plan();
    assert_about(device(&zero1, &OPTIMIZER), device(&ddp, &OPTIMIZER) / 4, &ddp);
    for state in [ParamState::Working, ParamState::Grad] {
        assert_eq!(device(&zero1, &[state]), device(&ddp, &[state]));
    }
    assert_about(device(&zero2, &[ParamState::Grad]), device(&ddp, &[ParamState::Grad]) / 4, &ddp);
    assert_eq!(device(&zero2, &[ParamState::Working]), device(&ddp, &[ParamState::Working]));
}

#[test]
fn hybrid_shards_inside_a_node_and_replicates_across() {
    let zero3 = of_15m(StrategyName::Zero3, 1, 4).plan();
    let hybrid = of_15m(StrategyName::HybridShard, 2, 4).plan();
    assert_eq!(hybrid.residents[0].bytes, zero3.residents[0].bytes);
    let count = |plan: &RunPlan, wanted: Axis| {
        let ops = &train_phase(plan).schedule.ops;
        ops.iter().filter(|op| matches!(op.kind, OpKind::Reduce { axis, .. } if axis == wanted)).count()
    };
    let units = hybrid.input.models[0].units.len();
    assert_eq!((count(&hybrid, Axis::Shard), count(&hybrid, Axis::Replicate)), (units, units));
    assert_eq!((count(&zero3, Axis::Shard), count(&zero3, Axis::Replicate)), (units, 0));
}

#[test]
fn offload_moves_the_optimizer_to_its_tier() {
    let on_device = of_15m(StrategyName::Zero2, 1, 2).plan();
    let shared = device(&on_device, &OPTIMIZER);
    // On the host masters are whole; on the device they are remainders of two bytes.
    let moved = shared + device(&on_device, &[ParamState::Master]);
    for tier in [MemoryTier::Host, MemoryTier::Nvme] {
        let plan = of_15m(StrategyName::Zero2, 1, 2).with(|s| s.optimizer_tier = tier).plan();
        assert_eq!((device(&plan, &OPTIMIZER), resident_bytes(&plan, tier, &OPTIMIZER)), (0, moved));
        assert!(
            plan.arena_bytes.0 + shared <= on_device.arena_bytes.0,
            "the device arena shrinks by what was offloaded"
        );
        let column = if tier == MemoryTier::Host { plan.host_bytes } else { plan.nvme_bytes };
        assert!(column.0 >= moved);
    }
    // If f32 parameters are on the device, the host needs its own copy to update.
    let f32 = of_15m(StrategyName::Ddp, 1, 1).with(|s| {
        s.storage = DType::F32;
        s.optimizer_tier = MemoryTier::Host;
    });
    let plan = f32.plan();
    let master = resident_bytes(&plan, MemoryTier::Host, &[ParamState::Master]);
    assert_eq!(master, device(&plan, &[ParamState::Working]));
    let beside = f32.with(|s| s.optimizer_tier = MemoryTier::Device).plan();
    assert_eq!(resident_bytes(&beside, MemoryTier::Device, &[ParamState::Master]), 0);
}

#[test]
fn offload_moves_parameters_to_the_host() {
    let plan = of_15m(StrategyName::Zero3, 1, 4).with(|s| s.params_tier = MemoryTier::Host).plan();
    assert_eq!(device(&plan, &[ParamState::Working]), 0);
    assert!(resident_bytes(&plan, MemoryTier::Host, &[ParamState::Working]) > 0);
}

#[test]
fn frozen_tensors_have_no_gradients_or_moments() {
    let frozen = |patterns: &[&str]| {
        let patterns = patterns.iter().map(ToString::to_string).collect();
        of_15m(StrategyName::Zero3, 1, 1).with(|s| s.frozen = patterns).plan()
    };
    let plan = frozen(&["*embed_tokens", "model.layers.0", "*mlp*", "*k_proj", "lm_head"]);
    let trained: usize = plan.input.models[0].units.iter().map(|u| u.trained_elems).sum();
    let all: usize = plan.input.models[0].units.iter().map(|u| u.elems).sum();
    assert!(trained * 5 < all);
    assert_eq!(device(&plan, &[ParamState::Working]), 2 * all as u64);
    for (state, bytes) in [
        (ParamState::Grad, 4),
        (ParamState::Master, 2),
        (ParamState::Optimizer(0), 4),
        (ParamState::Optimizer(1), 4),
    ] {
        assert_eq!(device(&plan, &[state]), bytes * trained as u64);
    }
    // Nothing below the second block is trained, so backward stops there.
    let backs = |wanted: u32| {
        let is = |op: &crate::Op| matches!(op.kind, OpKind::Backward { unit, .. } if unit == wanted);
        train_phase(&plan).schedule.ops.iter().any(is)
    };
    assert_eq!([backs(0), backs(1), backs(2)], [false, false, true]);
    // Activations that only frozen weights would need are not saved.
    let kept = |plan: &RunPlan| {
        sizes(plan, |kind| matches!(kind, BufferKind::SavedActivations { unit: 3, .. })).iter().sum::<u64>()
    };
    assert!(kept(&plan) < kept(&frozen(&[])));

    let plan = of_15m(StrategyName::Ddp, 1, 1).with(|s| s.ppo = true).plan();
    for buffer in &plan.buffers {
        if let BufferKind::ParamState { model, state, .. } = buffer.kind {
            assert!(plan.input.model(model).trains() || state == ParamState::Working);
        }
    }
    let trained: Vec<u8> =
        plan.phases.iter().filter(|p| p.name.starts_with("train")).map(|p| p.model.0).collect();
    assert_eq!(trained, [0, 1]);
}

/// A reference model scores preference pairs without a rollout.
#[test]
fn a_frozen_model_has_a_score_phase() {
    let mut input = of_15m(StrategyName::Zero3, 1, 2).with(|s| s.ppo = true).input();
    input.models.retain(|m| matches!(m.role, ModelRole::Policy | ModelRole::Reference));
    input.models[0].generation = None;
    input.models[0].scores = false;
    let names: Vec<String> = build(input, Rank(0)).unwrap().phases.iter().map(|p| p.name.clone()).collect();
    assert_eq!(names, ["score reference", "train policy"]);
}

#[test]
fn recompute_saves_fewer_activations() {
    let of = |recompute: Recompute| {
        let plan = of_15m(StrategyName::Ddp, 1, 1).with(|s| s.recompute = recompute.into()).plan();
        let kept: u64 = sizes(&plan, |kind| matches!(kind, BufferKind::SavedActivations { .. })).iter().sum();
        (kept, train_phase(&plan).memory.bytes.0)
    };
    let [full, selective, none] = [Recompute::Full, Recompute::Selective, Recompute::None].map(of);
    assert!(full.0 < selective.0 && selective.0 < none.0, "{full:?} {selective:?} {none:?}");
    assert!(full.1 < selective.1 && selective.1 < none.1, "{full:?} {selective:?} {none:?}");
}

/// The plan becomes smaller with every block that recomputes more, and a budget selects the first that fits.
#[test]
fn a_budget_decides_how_much_is_recomputed() {
    let setup = of_15m(StrategyName::Ddp, 1, 1).with(|s| s.tokens = 4096);
    let bytes_of = |n: u32| {
        let plan = setup.clone().with(|s| s.recompute = RecomputePolicy::nth(n, 6)).plan();
        plan.device_bytes()
    };
    let sizes: Vec<Bytes> = (0..=12).map(bytes_of).collect();
    // The last choice saves nothing: the last block's backward needs as much memory as its recompute pass.
    assert!(sizes[..12].windows(2).all(|pair| pair[1] < pair[0]), "{sizes:?}");
    let like = |all: Recompute| setup.clone().with(|s| s.recompute = all.into()).plan().device_bytes();
    assert_eq!(
        (sizes[0], sizes[6], sizes[12]),
        (like(Recompute::None), like(Recompute::Selective), like(Recompute::Full))
    );
    for (n, size) in sizes[..12].iter().enumerate() {
        let chosen = setup.input().with_least_recompute(*size);
        assert_eq!(chosen.models[0].recompute, RecomputePolicy::nth(n as u32, 6));
        assert_eq!(build(chosen, Rank(0)).unwrap().device_bytes(), *size);
        let less = setup.input().with_least_recompute(*size - Bytes(1));
        assert_eq!(less.models[0].recompute, RecomputePolicy::nth(n as u32 + 1, 6));
    }
}

/// `Reduced` order needs only the unsharded gradients in flight; `Local` order needs those of all units.
#[test]
fn the_plan_shows_the_cost_of_the_accumulation_order() {
    let of = |order| {
        let setup = of_15m(StrategyName::Zero3, 1, 4).with(|s| {
            s.num_micro_batches = 4;
            s.order = Some(order);
        });
        train_phase(&setup.plan()).memory.bytes.0
    };
    let (local, reduced) = (of(crate::AccumulationOrder::Local), of(crate::AccumulationOrder::Reduced));
    assert!(local > reduced, "{local} {reduced}");
}

/// Parts add up to their group, and groups to the total, exactly and in every memory. No part is negative, because
/// `Bytes` cannot be, and subtracting too much panics.
#[test]
fn the_memory_table_adds_up() {
    for name in [StrategyName::Ddp, StrategyName::Zero1, StrategyName::Zero2, StrategyName::Zero3] {
        for (ranks, tier) in [(1, MemoryTier::Device), (4, MemoryTier::Device), (2, MemoryTier::Nvme)] {
            for ppo in [false, true] {
                let plan = of_15m(name, 1, ranks).with(|s| (s.optimizer_tier, s.ppo) = (tier, ppo)).plan();
                let memory = MemoryBreakdown::of(&plan);
                for group in memory.phases.iter().chain([&memory.residents]) {
                    for tier in 0..MemoryTier::COUNT {
                        let sum: Bytes = group.parts.iter().map(|(_, bytes)| bytes[tier]).sum();
                        assert_eq!(sum, group.bytes[tier], "{name}, {ranks} ranks: {group:?}");
                    }
                }
                for tier in 0..MemoryTier::COUNT {
                    let largest = memory.phases.iter().map(|phase| phase.bytes[tier]).max().unwrap();
                    let sum = memory.residents.bytes[tier] + largest + memory.overhead[tier];
                    assert_eq!(sum, memory.total[tier], "{name}, {ranks} ranks");
                }
                assert_eq!(memory.total[0], plan.device_bytes());
            }
        }
    }
}
