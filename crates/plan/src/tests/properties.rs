//! Property tests: plans of random configurations pass `check`, and random interleavings of their lanes in the
//! simulator.

use lockstep_config::StrategyName;
use lockstep_core::{DType, Mesh};
use lockstep_shape::{Architecture, Biases, ModelShape, Recompute, WeightFormat};
use proptest::prelude::*;

use crate::check::{check, check_training};
use crate::{
    Access, AccumulationOrder, BufferKind, MemoryTier, OpKind, OptimizerSpec, RecomputePolicy, RunPlan,
};

use super::{TestSetup, lane_simulator};

const STRATEGIES: [StrategyName; 6] = [
    StrategyName::Ddp,
    StrategyName::Zero1,
    StrategyName::Zero2,
    StrategyName::Zero3,
    StrategyName::ShardGradOp,
    StrategyName::HybridShard,
];
const MESHES: [(u32, u32); 7] = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 4)];
const BUCKETS: [u64; 4] = [8 << 10, 100_000, 1 << 20, 1 << 40];
const ORDERS: [Option<AccumulationOrder>; 3] =
    [None, Some(AccumulationOrder::Local), Some(AccumulationOrder::Reduced)];

fn any_shape() -> impl Strategy<Value = ModelShape> {
    let biases = any::<[bool; 3]>().prop_map(|[qkv, out, mlp]| Biases { qkv, out, mlp });
    let vocab = prop::sample::select(vec![40usize, 300, 2000]);
    let formats = prop_oneof![2 => Just(WeightFormat::Storage), 1 => Just(WeightFormat::Nf4)];
    (1usize..=6, any::<bool>(), any::<bool>(), biases, vocab, formats).prop_map(
        |(layers, tied, qwen, biases, vocab, frozen_projections)| ModelShape {
            layers,
            tied,
            biases,
            frozen_projections,
            architecture: if qwen { Architecture::Qwen3 } else { Architecture::Llama },
            ..ModelShape::named("tiny", vocab).unwrap()
        },
    )
}

/// Mostly nothing; otherwise single tensors of every block, whole blocks, or everything but the head.
fn any_frozen() -> impl Strategy<Value = Vec<String>> {
    let patterns: [&[&str]; 6] = [
        &[],
        &["*norm*"],
        &["*k_proj", "*down_proj*"],
        &["model.layers.0", "model.layers.2", "lm_head"],
        &["*embed_tokens", "model.layers.1"],
        &["model.layers.*", "*embed_tokens"],
    ];
    let patterns = patterns.map(|list| list.iter().map(ToString::to_string).collect::<Vec<String>>());
    prop_oneof![2 => Just(vec![]), 1 => prop::sample::select(patterns.to_vec())]
}

fn any_optimizer() -> impl Strategy<Value = OptimizerSpec> {
    let all = [OptimizerSpec::ADAMW, OptimizerSpec::SGD, OptimizerSpec::SGD_MOMENTUM, OptimizerSpec::LION];
    prop::sample::select(all.to_vec())
}

fn any_setup() -> impl Strategy<Value = TestSetup> {
    let place = (
        prop::sample::select(STRATEGIES.to_vec()),
        prop::sample::select(MESHES.to_vec()),
        prop::sample::select(vec![MemoryTier::Device, MemoryTier::Host]),
        prop::sample::select(vec![MemoryTier::Device, MemoryTier::Host, MemoryTier::Nvme]),
        // None, some, all but the head, all.
        prop_oneof![2 => Just(0u32), 1 => 1u32..=8],
    );
    let time =
        (1u32..=4, 0u32..=3, prop::sample::select(ORDERS.to_vec()), prop::sample::select(BUCKETS.to_vec()));
    let recompute = || prop::sample::select(vec![Recompute::None, Recompute::Selective, Recompute::Full]);
    let compute = (
        (recompute(), recompute(), 0u32..=6).prop_map(|(early, late, late_blocks)| RecomputePolicy {
            early,
            late,
            late_blocks,
        }),
        prop::sample::select(vec![DType::F32, DType::BF16]),
        any::<bool>(),
    );
    let models = (any_frozen(), prop::bool::weighted(0.15), any_optimizer());
    (any_shape(), place, time, compute, models).prop_map(|(shape, place, time, compute, models)| {
        let (strategy, (replicate, shard), params_tier, optimizer_tier, stay) = place;
        let sharded =
            matches!(strategy, StrategyName::Zero3 | StrategyName::ShardGradOp | StrategyName::HybridShard);
        // Weights in 4 bits are on the device.
        let moves_params = sharded && shape.frozen_projections == WeightFormat::Storage;
        let (num_micro_batches, prefetch, order, bucket) = time;
        let (recompute, storage, coefficients_ahead) = compute;
        TestSetup {
            shape,
            mesh: Mesh::on_one_node(replicate, shard),
            order,
            num_micro_batches,
            prefetch,
            recompute,
            storage,
            params_tier: if moves_params { params_tier } else { MemoryTier::Device },
            optimizer_tier,
            optimizer_units_on_device: stay,
            bucket_bytes: bucket,
            // Each unit by itself, some joined, all joined.
            bucket_elems: [0, 40_000, usize::MAX][bucket.trailing_zeros() as usize % 3],
            coefficients_ahead,
            frozen: models.0,
            optimizer: models.2,
            ppo: models.1,
            ..TestSetup::new("tiny", strategy, 1, 1)
        }
    })
}

/// The arena ends where the last buffer ends, and is not smaller than the lower bound.
fn assert_arena_is_tight(plan: &RunPlan) {
    let mut largest = 0;
    for phase in &plan.phases {
        for memory in [&phase.memory, &phase.host] {
            let end = memory
                .offsets
                .iter()
                .map(|(id, at)| at.0 + plan.buffers[id.0 as usize].bytes().align_to(4096).0);
            assert_eq!(end.max().unwrap_or(0), memory.bytes.0);
            assert!(memory.live_peak <= memory.bytes);
        }
        largest = largest.max(phase.memory.bytes.0);
    }
    assert_eq!(plan.arena_bytes.0, plan.residents[0].bytes.0 + largest);
}

/// All buffers that collectives send from are exported, and only states, unsharded gradients and parameter staging are.
fn assert_exported_range_is_exact(plan: &RunPlan) {
    for phase in &plan.phases {
        for op in &phase.schedule.ops {
            let sends = matches!(
                op.kind,
                OpKind::Gather { .. } | OpKind::Reduce { .. } | OpKind::AllGatherUpdated { .. }
            );
            for (id, access) in &op.accesses {
                let buffer = &plan.buffers[id.0 as usize];
                if buffer.tier != MemoryTier::Device {
                    continue;
                }
                let start = plan.offset(phase, *id).expect("a buffer in use has an offset");
                let is_exported = plan.exported.start <= start && start + buffer.bytes() <= plan.exported.end;
                let must = sends && *access != Access::Define && plan.input.mesh.world_size() > 1;
                assert!(is_exported || !must, "{:?} is sent from by {:?}", buffer.kind, op.kind);
                let may = matches!(
                    buffer.kind,
                    BufferKind::ParamState { .. }
                        | BufferKind::UnshardedGrad { .. }
                        | BufferKind::ParamStaging { .. }
                );
                assert!(may || !is_exported || buffer.elems == 0, "{:?} is exported", buffer.kind);
            }
        }
    }
    assert!(plan.input.mesh.world_size() > 1 || plan.exported.is_empty(), "a single rank exports nothing");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_plan_keeps_its_invariants(setup in any_setup(), seed in any::<u64>()) {
        let plan = setup.plan();
        for phase in &plan.phases {
            prop_assert_eq!(check(&phase.schedule, &plan.buffers, &phase.memory), vec![]);
            prop_assert_eq!(check(&phase.schedule, &plan.buffers, &phase.host), vec![]);
            if phase.name.starts_with("train") {
                prop_assert_eq!(check_training(&phase.schedule, &plan.input), vec![]);
            }
            for n in 0..6 {
                // Two runs that overlap, and a third that uses what they leave.
                let times = lane_simulator::random_times_of_runs(3, &phase.schedule, seed.wrapping_add(n));
                lane_simulator::run(&plan, phase, &times);
            }
        }
        assert_arena_is_tight(&plan);
        assert_exported_range_is_exact(&plan);
    }
}
