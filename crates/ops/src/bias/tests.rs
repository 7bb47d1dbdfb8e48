use lockstep_core::DType;
use lockstep_device::Queue;
use proptest::prelude::*;

use super::*;
use crate::testing::{
    Bench, Operands, SameBits, assert_near, bits, differences, dot, dtype, queue, queues, tolerance, values,
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn both_directions_match_the_reference(
        rows in 1usize..200, dim in 1usize..90, pad in 0usize..4, act in dtype(), param in dtype(),
        seed in any::<u64>(),
    ) {
        let bench = Bench::new(seed);
        let start = bench.normal_values(rows * dim);
        let (b, dy) = (bench.normals(dim, param), bench.framed_normals(rows, dim, pad, act));
        let before = bench.normal_values(dim);
        let mut same = SameBits::new();
        for queue in queues() {
            let y = bench.framed(&start, dim, pad, act);
            let want = reference::forward(&y.values(), &values(b));
            forward(&queue, y.mat, b);
            assert_near(&y.values(), &want, dim, 0.0, tolerance(act));

            let db = bench.input(&before, DType::F32);
            let mut want = reference::backward(&dy.values(), dim);
            want.iter_mut().zip(values(db)).for_each(|(sum, before)| *sum += before);
            backward(&queue, db, dy.mat, bench.output(scratch_elems(rows, dim), DType::F32));
            assert_near(&values(db), &want, dim, (rows as f64 * dim as f64).sqrt(), tolerance(DType::F32));
            same.check(&queue, vec![y.bits(), bits(db)]);
        }
    }

    #[test]
    fn backward_is_the_slope_of_the_forward_reference(
        rows in 1usize..4, dim in 1usize..7, seed in any::<u64>(),
    ) {
        let bench = Bench::new(seed);
        let [y, r] = [(); 2].map(|()| bench.framed_normals(rows, dim, 0, DType::F32));
        let b = values(bench.normals(dim, DType::F32));
        let db = bench.input(&vec![0.0; dim], DType::F32);
        backward(&Queue::cpu(1), db, r.mat, bench.output(scratch_elems(rows, dim), DType::F32));
        let slope = differences(&b, |b| dot(&r.values(), &reference::forward(&y.values(), b)));
        assert_near(&values(db), &slope, dim, 1.0, tolerance(DType::F32));
    }

    /// The row contract: any range of rows, on any queue, has the bits it has in the whole.
    #[test]
    fn a_row_does_not_depend_on_the_others(
        rows in 1usize..150, dim in 1usize..60, from in 0usize..150, len in 1usize..150, act in dtype(),
        picks in (0usize..9, 0usize..9), seed in any::<u64>(),
    ) {
        let bench = Bench::new(seed);
        let (start, b) = (bench.normal_values(rows * dim), bench.normals(dim, DType::F32));
        let (whole, part) = (bench.framed(&start, dim, 0, act), bench.framed(&start, dim, 0, act));
        let from = from % rows;
        let len = len.min(rows - from);
        forward(&queue(picks.0), whole.mat, b);
        forward(&queue(picks.1), part.mat.row_range(from, len), b);
        let at = from * dim..(from + len) * dim;
        prop_assert_eq!(&part.bits()[at.clone()], &whole.bits()[at]);
    }
}

#[test]
fn no_rows_leave_the_gradient_as_it_was() {
    let bench = Bench::new(1);
    let (empty, db) = (Mat::dense(bench.output(0, DType::F32), 0, 5), bench.input(&[1.0; 5], DType::F32));
    for queue in queues() {
        forward(&queue, empty, bench.input(&[1.0; 5], DType::F32));
        backward(&queue, db, empty, bench.output(0, DType::F32));
    }
    assert_eq!(values(db), [1.0; 5]);
}
