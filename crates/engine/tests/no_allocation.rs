//! A step does not allocate, neither on the calling thread nor on the threads of the pool and the lanes.

use std::sync::Barrier;

use lockstep_config::StrategyName;
use lockstep_core::{DType, Mesh};
use lockstep_device::CountingAllocator;
use lockstep_engine::{UpdateRule, UpdateSettings};
use lockstep_plan::{AccumulationOrder, MemoryTier, ModelId};
use lockstep_shape::{
    Architecture, Biases, Dropout, Lora, ModelShape, Recompute, SlidingWindow, WeightFormat,
};
use lockstep_testkit::{CarrierKind, TestBatch, TestObjective, TestSetup, engine, run_in_world};

const UPDATES: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 1e-3,
    rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
    weight_decay: 0.1,
    max_norm: Some(1.0),
};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// This executable has only one test, so that no other test allocates at the same time.
#[test]
fn steps_do_not_allocate() {
    let llama = ModelShape::named("tiny", 101).unwrap();
    let qwen = ModelShape { architecture: Architecture::Qwen3, tied: true, ..llama.clone() };
    let sliding = ModelShape {
        biases: Biases { qkv: true, out: true, mlp: true },
        window: Some(SlidingWindow { keys: 20, layers: vec![true, false] }),
        dropout: Dropout { attention: 0.1, residual: 0.1 },
        ..llama.clone()
    };
    let base = TestSetup { num_micro_batches: 2, threads: 3, ..TestSetup::default() };
    let targets = Lora::targets_of(&["q_proj".into(), "mlp.*".into()], llama.layers).unwrap();
    let lora =
        Lora { rank: 4, alpha: 8.0, dropout: 0.1, rank_stabilized: false, targets, modules_to_save: vec![] };
    let quantised = ModelShape { lora: Some(lora), frozen_projections: WeightFormat::Nf4, ..llama.clone() };
    for shape in [llama, qwen, sliding, quantised] {
        for setup in [
            base,
            TestSetup { storage: DType::BF16, recompute: Recompute::Full, ..base },
            TestSetup { recompute: Recompute::Selective, order: AccumulationOrder::Reduced, ..base },
            TestSetup { coefficients_ahead: false, ..base },
        ] {
            let mut engine = engine(&shape, &setup);
            let num_micro_batches =
                vec![TestBatch::random(&[50, 3, 70], 101, 1), TestBatch::random(&[1, 65, 64], 101, 2)];
            let mut window = TestObjective::new(num_micro_batches);
            let mut step = |t| {
                engine
                    .model_mut(ModelId::FIRST)
                    .train_step(&mut window, &UpdateSettings { t, ..UPDATES })
                    .unwrap();
            };
            // Threads allocate when they run for the first time.
            step(1);
            let before = ALLOCATOR.calls();
            (2..=4).for_each(&mut step);
            assert_eq!(ALLOCATOR.calls() - before, 0, "{setup:?}");
        }
    }
    assert!(ALLOCATOR.calls() > 0, "the allocator is installed");
    steps_of_several_ranks_do_not_allocate();
}

/// The same with several ranks: other lanes, carriers and NVMe files do not allocate either.
fn steps_of_several_ranks_do_not_allocate() {
    let shape = ModelShape::named("tiny", 101).unwrap();
    let (ddp, zero3) = (StrategyName::Ddp, StrategyName::Zero3);
    for (strategy, mesh, tier, carrier) in [
        (ddp, Mesh::on_one_node(3, 1), MemoryTier::Device, CarrierKind::Shm),
        (zero3, Mesh::on_one_node(1, 3), MemoryTier::Nvme, CarrierKind::Shm),
        (zero3, Mesh::on_one_node(1, 2), MemoryTier::Host, CarrierKind::Tcp),
        (
            StrategyName::HybridShard,
            Mesh { replicate: 2, shard: 2, per_node: 2 },
            MemoryTier::Device,
            CarrierKind::Shm,
        ),
    ] {
        let setup = TestSetup {
            strategy,
            mesh,
            optimizer_tier: tier,
            params_tier: if strategy == ddp { MemoryTier::Device } else { tier },
            num_micro_batches: 2,
            threads: 1,
            ..TestSetup::default()
        };
        let quiet = Barrier::new(mesh.world_size() as usize);
        let dir = tempfile::tempdir().unwrap();
        run_in_world(&shape, &setup, carrier, Some(dir.path()), &|engine| {
            let seed = u64::from(engine.rank().0);
            let num_micro_batches =
                vec![TestBatch::random(&[50, 3], 101, seed), TestBatch::random(&[1, 65], 101, seed + 9)];
            let mut window = TestObjective::new(num_micro_batches);
            let mut step = |t| {
                engine
                    .model_mut(ModelId::FIRST)
                    .train_step(&mut window, &UpdateSettings { t, ..UPDATES })
                    .unwrap()
            };
            // Threads allocate when they run for the first time.
            step(1);
            quiet.wait();
            let before = ALLOCATOR.calls();
            quiet.wait();
            step(2);
            step(3);
            quiet.wait();
            assert_eq!(ALLOCATOR.calls() - before, 0, "{setup:?} over {carrier:?}");
            quiet.wait();
        });
    }
}
