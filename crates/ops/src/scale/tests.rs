use lockstep_core::DType;
use proptest::prelude::*;

use super::*;
use crate::testing::{Operands, SameBits, TestArena, assert_near, dtype, queues, tolerance};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// On every queue, for columns of a wider matrix too. What is next to the columns does not change.
    #[test]
    fn matches_the_reference(
        rows in 1usize..150, dim in 1usize..90, pad in 0usize..9, act in dtype(), factor in -3f32..3.0,
        seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let start = arena.normal_values(rows * dim);
        let mut same = SameBits::new();
        for queue in queues() {
            let x = arena.padded(&start, dim, pad, act);
            let want = reference::in_place(&x.values(), f64::from(factor));
            in_place(&queue, x.mat, factor);
            assert_near(&x.values(), &want, dim, 0.0, tolerance(act));
            same.check(&queue, vec![x.bits()]);
        }
    }
}

#[test]
fn one_changes_nothing() {
    let arena = TestArena::new(7);
    let x = arena.padded_normals(5, 7, 1, DType::BF16);
    let before = x.bits();
    in_place(&lockstep_device::Queue::cpu(2), x.mat, 1.0);
    assert_eq!(x.bits(), before);
}
