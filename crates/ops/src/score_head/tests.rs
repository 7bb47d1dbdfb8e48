use lockstep_core::DType;
use lockstep_device::Queue;
use proptest::prelude::*;

use super::*;
use crate::testing::{
    Operands, PaddedMat, SameBits, TestArena, assert_near, bits, dot, dtype, finite_differences, norm, queue,
    queues, tolerance, values,
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn forward_and_backward_match_the_reference(
        rows in 1usize..200, dim in 1usize..90, pad in 0usize..4, act in dtype(), param in dtype(),
        [add_dx, add_dw, frozen] in any::<[bool; 3]>(), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let (x, w) = (arena.padded_normals(rows, dim, pad, act), arena.normals(dim, param));
        let (c, before) = (arena.normals(rows, DType::F32), arena.normal_values(rows * dim));
        let dw_before = arena.normal_values(dim);
        let [xv, wv, cv] = [x.values(), values(w), values(c)];
        let mut same = SameBits::new();
        for queue in queues() {
            let y = arena.output(rows, DType::F32);
            forward(&queue, y, x.mat, w);
            // Products of opposite signs cancel.
            let want = reference::forward(&xv, &wv);
            assert_near(&values(y), &want, 1, norm(&wv) * (rows as f64).sqrt(), tolerance(DType::F32));

            let dx = match add_dx {
                true => arena.padded(&before, dim, pad, act),
                false => arena.padded_output(rows, dim, pad, act),
            };
            let dw = match add_dw {
                true => arena.input(&dw_before, DType::F32),
                false => arena.output(dim, DType::F32),
            };
            let (mut want_dx, mut want_dw) = reference::backward(&cv, &xv, &wv);
            if add_dx {
                want_dx.iter_mut().zip(dx.values()).for_each(|(sum, before)| *sum += before);
            }
            if add_dw {
                want_dw.iter_mut().zip(values(dw)).for_each(|(sum, before)| *sum += before);
            }
            let scratch = arena.output(if frozen { 0 } else { scratch_elems(rows, dim) }, DType::F32);
            let call =
                BackwardArgs { dx: dx.mat, add_dx, dw: (!frozen).then_some(dw), add_dw, c, x: x.mat, w, scratch };
            backward(&queue, call);
            let size = norm(&cv) * norm(&wv);
            assert_near(&dx.values(), &want_dx, dim, size, tolerance(act));
            if !frozen {
                assert_near(&values(dw), &want_dw, dim, norm(&cv) * (dim as f64).sqrt(), tolerance(DType::F32));
            }
            same.check(&queue, vec![bits(y), dx.bits(), if frozen { vec![] } else { bits(dw) }]);
        }
    }

    #[test]
    fn backward_matches_finite_differences_of_the_reference(
        rows in 1usize..4, dim in 1usize..7, seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let [x, dx] = [(); 2].map(|()| arena.padded_normals(rows, dim, 0, DType::F32));
        let (w, c) = (arena.normals(dim, DType::F32), arena.normals(rows, DType::F32));
        let (dw, scratch) = (arena.output(dim, DType::F32), arena.output(scratch_elems(rows, dim), DType::F32));
        let call =
            BackwardArgs { dx: dx.mat, add_dx: false, dw: Some(dw), add_dw: false, c, x: x.mat, w, scratch };
        backward(&Queue::cpu(1), call);
        let [xv, wv, cv] = [x.values(), values(w), values(c)];
        let slope = finite_differences(&xv, |x| dot(&cv, &reference::forward(x, &wv)));
        assert_near(&dx.values(), &slope, dim, 1.0, tolerance(DType::F32));
        let slope = finite_differences(&wv, |w| dot(&cv, &reference::forward(&xv, w)));
        assert_near(&values(dw), &slope, dim, 1.0, tolerance(DType::F32));
    }

    /// Row contract: any range of rows has the same bits as in the whole, on any queue.
    #[test]
    fn a_row_does_not_depend_on_the_others(
        rows in 1usize..150, dim in 1usize..60, from in 0usize..150, len in 1usize..150, act in dtype(),
        picks in (0usize..9, 0usize..9), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let (x, w) = (arena.padded_normals(rows, dim, 0, act), arena.normals(dim, DType::F32));
        let c = arena.normals(rows, DType::F32);
        let run = |pick: usize, from: usize, len: usize| {
            let (y, dx): (View, PaddedMat) = (arena.output(len, DType::F32), arena.padded_output(len, dim, pick, act));
            let (x, c) = (x.mat.row_range(from, len), c.slice(from, len));
            forward(&queue(pick), y, x, w);
            let scratch = View::empty();
            let call = BackwardArgs { dx: dx.mat, add_dx: false, dw: None, add_dw: false, c, x, w, scratch };
            backward(&queue(pick), call);
            (bits(y), dx.bits())
        };
        let from = from % rows;
        let len = len.min(rows - from);
        let (whole, part) = (run(picks.0, 0, rows), run(picks.1, from, len));
        prop_assert_eq!(&part.0[..], &whole.0[from..][..len]);
        prop_assert_eq!(&part.1[..], &whole.1[from * dim..][..len * dim]);
    }
}

#[test]
fn zero_rows_have_a_zero_gradient() {
    let arena = TestArena::new(1);
    let (empty, none) = (Mat::dense(arena.output(0, DType::F32), 0, 5), View::empty());
    let w = arena.input(&[1.0; 5], DType::F32);
    for (add_dw, want) in [(true, [2.0; 5]), (false, [0.0; 5])] {
        for queue in queues() {
            let dw = arena.input(&[2.0; 5], DType::F32);
            let none = none.cast(DType::F32);
            forward(&queue, none, empty, w);
            let call = BackwardArgs {
                dx: empty,
                add_dx: false,
                dw: Some(dw),
                add_dw,
                c: none,
                x: empty,
                w,
                scratch: none,
            };
            backward(&queue, call);
            assert_eq!(values(dw), want);
        }
    }
}
