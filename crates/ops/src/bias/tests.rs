use lockstep_core::DType;
use lockstep_device::Queue;
use proptest::prelude::*;

use super::*;
use crate::testing::{
    Operands, SameBits, TestArena, assert_near, bits, dot, dtype, finite_differences, queue, queues,
    tolerance, values,
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn forward_and_backward_match_the_reference(
        rows in 1usize..200, dim in 1usize..90, pad in 0usize..4, act in dtype(), param in dtype(),
        seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let start = arena.normal_values(rows * dim);
        let (b, dy) = (arena.normals(dim, param), arena.padded_normals(rows, dim, pad, act));
        let before = arena.normal_values(dim);
        let mut same = SameBits::new();
        for queue in queues() {
            let y = arena.padded(&start, dim, pad, act);
            let want = reference::forward(&y.values(), &values(b));
            forward(&queue, y.mat, b);
            assert_near(&y.values(), &want, dim, 0.0, tolerance(act));

            let db = arena.input(&before, DType::F32);
            let mut want = reference::backward(&dy.values(), dim);
            want.iter_mut().zip(values(db)).for_each(|(sum, before)| *sum += before);
            backward(&queue, db, dy.mat, arena.output(scratch_elems(rows, dim), DType::F32));
            assert_near(&values(db), &want, dim, (rows as f64 * dim as f64).sqrt(), tolerance(DType::F32));
            same.check(&queue, vec![y.bits(), bits(db)]);
        }
    }

    #[test]
    fn backward_matches_finite_differences_of_the_reference(
        rows in 1usize..4, dim in 1usize..7, seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let [y, r] = [(); 2].map(|()| arena.padded_normals(rows, dim, 0, DType::F32));
        let b = values(arena.normals(dim, DType::F32));
        let db = arena.input(&vec![0.0; dim], DType::F32);
        backward(&Queue::cpu(1), db, r.mat, arena.output(scratch_elems(rows, dim), DType::F32));
        let slope = finite_differences(&b, |b| dot(&r.values(), &reference::forward(&y.values(), b)));
        assert_near(&values(db), &slope, dim, 1.0, tolerance(DType::F32));
    }

    /// Row contract: any range of rows has the same bits as in the whole, on any queue.
    #[test]
    fn a_row_does_not_depend_on_the_others(
        rows in 1usize..150, dim in 1usize..60, from in 0usize..150, len in 1usize..150, act in dtype(),
        picks in (0usize..9, 0usize..9), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let (start, b) = (arena.normal_values(rows * dim), arena.normals(dim, DType::F32));
        let (whole, part) = (arena.padded(&start, dim, 0, act), arena.padded(&start, dim, 0, act));
        let from = from % rows;
        let len = len.min(rows - from);
        forward(&queue(picks.0), whole.mat, b);
        forward(&queue(picks.1), part.mat.row_range(from, len), b);
        let at = from * dim..(from + len) * dim;
        prop_assert_eq!(&part.bits()[at.clone()], &whole.bits()[at]);
    }
}

#[test]
fn zero_rows_leave_the_gradient_unchanged() {
    let arena = TestArena::new(1);
    let (empty, db) = (Mat::dense(arena.output(0, DType::F32), 0, 5), arena.input(&[1.0; 5], DType::F32));
    for queue in queues() {
        forward(&queue, empty, arena.input(&[1.0; 5], DType::F32));
        backward(&queue, db, empty, arena.output(0, DType::F32));
    }
    assert_eq!(values(db), [1.0; 5]);
}
