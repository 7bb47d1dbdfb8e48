//! A step allocates nothing: not on the calling thread, not on the pool's.

use lockstep_core::DType;
use lockstep_device::CountingAllocator;
use lockstep_engine::Updates;
use lockstep_plan::AccumulationOrder;
use lockstep_shape::{Architecture, ModelShape, Recompute};
use lockstep_testkit::{Micro, Setup, Window, engine};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// One test in this executable, so that no other test allocates meanwhile.
#[test]
fn steps_allocate_nothing() {
    let llama = ModelShape::named("tiny", 101).unwrap();
    let qwen = ModelShape { architecture: Architecture::Qwen3, tied: true, ..llama.clone() };
    let base = Setup { micros: 2, threads: 3, ..Setup::default() };
    for shape in [llama, qwen] {
        for setup in [
            base,
            Setup { storage: DType::BF16, recompute: Recompute::Full, ..base },
            Setup { recompute: Recompute::Selective, order: AccumulationOrder::Reduced, ..base },
            Setup { coefficients_ahead: false, ..base },
        ] {
            let mut engine = engine(&shape, &setup);
            let micros = vec![Micro::random(&[50, 3, 70], 101, 1), Micro::random(&[1, 65, 64], 101, 2)];
            let mut window = Window::new(micros);
            let updates = Updates {
                t: 1,
                lr: 1e-3,
                betas: (0.9, 0.95),
                eps: 1e-8,
                weight_decay: 0.1,
                max_norm: Some(1.0),
            };
            let before = ALLOCATOR.calls();
            for t in 1..=3 {
                engine.train_step(&mut window, &Updates { t, ..updates }).unwrap();
            }
            assert_eq!(ALLOCATOR.calls() - before, 0, "{setup:?}");
        }
    }
    assert!(ALLOCATOR.calls() > 0, "the allocator is installed");
}
