use lockstep_core::DType;
use lockstep_device::Queue;
use proptest::prelude::*;

use super::*;
use crate::errors::Errors;
use crate::testing::{
    Operands, PaddedMat, SameBits, TestArena, assert_close, assert_near, assert_within, bits, dot, dtype,
    finite_differences, norm, queue, queues, tolerance, values,
};

/// The norm of dx's terms before they cancel, for each group: ‖rstd · dy · w‖.
fn scales_of_dx(dy: &[f64], x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    let groups = dy.chunks_exact(w.len()).zip(x.chunks_exact(w.len()));
    let terms = |dy: &[f64]| norm(&dy.iter().zip(w).map(|(dy, w)| dy * w).collect::<Vec<_>>());
    groups.map(|(dy, x)| reference::rstd(x, eps) * terms(dy)).collect()
}

/// Random rows: all of magnitude one, or large, ordinary and small ones alternately.
fn rows_of_sizes(arena: &TestArena, rows: usize, cols: usize, mixed: bool) -> Vec<f32> {
    let sizes = if mixed { [1e3, 1.0, 1e-4] } else { [1.0; 3] };
    arena.normal_values(rows * cols).iter().enumerate().map(|(i, x)| x * sizes[i / cols % 3]).collect()
}

/// What happens to dx: it is written, added to, or written over dy.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Target {
    Fresh,
    Added,
    InPlace,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn forward_and_backward_match_the_reference(
        rows in 1usize..140, dim in 1usize..100, groups in 1usize..4, pad in 0usize..4,
        act in dtype(), weight in dtype(), eps in prop_oneof![Just(1e-5f32), Just(1e-6)],
        target in prop_oneof![Just(Target::Fresh), Just(Target::Added), Just(Target::InPlace)],
        mixed in any::<bool>(), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let cols = groups * dim;
        let x = arena.padded(&rows_of_sizes(&arena, rows, cols, mixed), cols, pad, act);
        let dy_values = arena.normal_values(rows * cols);
        let dx_before = arena.normal_values(rows * cols);
        let dw_before = arena.normal_values(dim);
        let w = arena.normals(dim, weight);
        let scratch = arena.output(scratch_elems(rows, dim), DType::F32);
        let (xv, wv, wide_eps) = (x.values(), values(w), f64::from(eps));
        let mut same = SameBits::new();
        for queue in queues() {
            let y = arena.padded_output(rows, cols, pad, act);
            let rstd = arena.output(rows * groups, DType::F32);
            forward(&queue, y.mat, rstd, x.mat, w, eps);
            let rstds: Vec<f64> = xv.chunks_exact(dim).map(|x| reference::rstd(x, wide_eps)).collect();
            assert_near(&y.values(), &reference::forward(&xv, &wv, wide_eps), dim, 0.0, tolerance(act));
            assert_close(rstd, &rstds, 1, tolerance(DType::F32));

            let dy = arena.padded(&dy_values, cols, pad, act);
            let dyv = dy.values();
            let dx = match target {
                Target::Fresh => arena.padded_output(rows, cols, pad, act),
                Target::Added => arena.padded(&dx_before, cols, pad, act),
                Target::InPlace => dy,
            };
            let (mut want_dx, mut want_dw) = reference::backward(&dyv, &xv, &wv, wide_eps);
            if target == Target::Added {
                want_dx.iter_mut().zip(dx.values()).for_each(|(want, before)| *want += before);
            }
            want_dw.iter_mut().zip(&dw_before).for_each(|(want, before)| *want += f64::from(*before));
            let dw = arena.input(&dw_before, DType::F32);
            let add = target == Target::Added;
            let call = BackwardArgs { dx: dx.mat, add, recompute: false, dw, dy: dy.mat, x: x.mat, rstd, w, scratch };
            backward(&queue, call);
            let scales = scales_of_dx(&dyv, &xv, &wv, wide_eps);
            let errors = Errors::of_rows(&dx.values(), &want_dx, dim, norm(&scales), |row| scales[row]);
            assert_within(&errors, tolerance(act));
            assert_near(&values(dw), &want_dw, dim, ((rows * cols) as f64).sqrt(), tolerance(DType::F32));
            // With recompute: the same gradients, and the output of forward.
            if target != Target::InPlace {
                let [grad, dx_recomputed] = [&dy_values, &dx_before].map(|x| arena.padded(x, cols, pad, act));
                let dw_recomputed = arena.input(&dw_before, DType::F32);
                backward(&queue, BackwardArgs { dx: dx_recomputed.mat, recompute: true, dw: dw_recomputed, dy: grad.mat, ..call });
                prop_assert!((dx_recomputed.bits(), bits(dw_recomputed)) == (dx.bits(), bits(dw)), "gradients differ");
                prop_assert!(grad.bits() == y.bits(), "outputs differ");
            }
            same.check(&queue, vec![y.bits(), bits(rstd), dx.bits(), bits(dw)]);
        }
    }

    #[test]
    fn backward_matches_finite_differences_of_the_reference(
        rows in 1usize..4, dim in 1usize..7, groups in 1usize..3, seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let (len, eps) = (rows * groups * dim, 0.05);
        let x = arena.padded_normals(rows, groups * dim, 0, DType::F32);
        let w = arena.normals(dim, DType::F32);
        let r = arena.padded_normals(rows, groups * dim, 0, DType::F32);
        let (xv, wv, rv) = (x.values(), values(w), r.values());
        let rstds: Vec<f32> = xv.chunks_exact(dim).map(|x| reference::rstd(x, eps) as f32).collect();
        let rstd = arena.input(&rstds, DType::F32);
        let dx = arena.padded_output(rows, groups * dim, 0, DType::F32);
        let dw = arena.input(&vec![0.0; dim], DType::F32);
        let scratch = arena.output(scratch_elems(rows, dim), DType::F32);
        let call = BackwardArgs { dx: dx.mat, add: false, recompute: false, dw, dy: r.mat, x: x.mat, rstd, w, scratch };
        backward(&Queue::cpu(1), call);
        let slope_x = finite_differences(&xv, |x| dot(&rv, &reference::forward(x, &wv, eps)));
        let slope_w = finite_differences(&wv, |w| dot(&rv, &reference::forward(&xv, w, eps)));
        let scales = scales_of_dx(&rv, &xv, &wv, eps);
        let errors = Errors::of_rows(&dx.values(), &slope_x, dim, norm(&scales), |row| scales[row]);
        assert_within(&errors, tolerance(DType::F32));
        assert_near(&values(dw), &slope_w, dim, (len as f64).sqrt(), tolerance(DType::F32));
    }

    /// Row contract: any range of rows has the same bits as in the whole, on any queue.
    #[test]
    fn a_row_does_not_depend_on_the_others(
        rows in 1usize..200, dim in 1usize..80, from in 0usize..200, len in 1usize..200,
        act in dtype(), picks in (0usize..9, 0usize..9), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let w = arena.normals(dim, DType::F32);
        let x = arena.padded_normals(rows, dim, 0, act);
        let dy = arena.padded_normals(rows, dim, 0, act);
        let run = |pick: usize, first: usize, rows: usize| {
            let (x, dy): (Mat, Mat) = (x.mat.row_range(first, rows), dy.mat.row_range(first, rows));
            let y: PaddedMat = arena.padded_output(rows, dim, 1, act);
            let dx: PaddedMat = arena.padded_output(rows, dim, 2, act);
            let rstd = arena.output(rows, DType::F32);
            let dw = arena.output(dim, DType::F32);
            let scratch = arena.output(scratch_elems(rows, dim), DType::F32);
            forward(&queue(pick), y.mat, rstd, x, w, 1e-6);
            backward(&queue(pick), BackwardArgs { dx: dx.mat, add: false, recompute: false, dw, dy, x, rstd, w, scratch });
            (y.bits(), bits(rstd), dx.bits())
        };
        let from = from % rows;
        let len = len.min(rows - from);
        let (y, rstd, dx) = run(picks.0, 0, rows);
        let part = run(picks.1, from, len);
        prop_assert_eq!(&part.0[..], &y[from * dim..][..len * dim]);
        prop_assert_eq!(&part.1[..], &rstd[from..][..len]);
        prop_assert_eq!(&part.2[..], &dx[from * dim..][..len * dim]);
    }
}

/// The gradient of a weight is summed over blocks of rows in order: accumulating whole blocks call by call gives the
/// same bits as one call.
#[test]
fn weight_gradients_accumulate_over_calls() {
    let arena = TestArena::new(11);
    let (rows, dim) = (3 * GRAD_ROWS + 7, 33);
    let w = arena.normals(dim, DType::F32);
    let x = arena.padded_normals(rows, dim, 0, DType::F32).mat;
    let dy = arena.padded_normals(rows, dim, 0, DType::F32).mat;
    let rstd = arena.normals(rows, DType::F32);
    let before = arena.normal_values(dim);
    let scratch = arena.output(scratch_elems(rows, dim), DType::F32);
    let run = |dw: View, first: usize, rows: usize| {
        let (x, dy) = (x.row_range(first, rows), dy.row_range(first, rows));
        let dx = arena.padded_output(rows, dim, 0, DType::F32).mat;
        let rstd = rstd.slice(first, rows);
        backward(
            &queue(first),
            BackwardArgs { dx, add: false, recompute: false, dw: dw.first(dim), dy, x, rstd, w, scratch },
        );
    };
    let (whole, parts) = (arena.input(&before, DType::F32), arena.input(&before, DType::F32));
    run(whole, 0, rows);
    run(parts, 0, GRAD_ROWS);
    run(parts, GRAD_ROWS, rows - GRAD_ROWS);
    assert_eq!(bits(whole), bits(parts));
}

#[test]
fn zero_rows_are_a_no_op() {
    let arena = TestArena::new(1);
    let (w, dw) = (arena.normals(5, DType::F32), arena.input(&[1.0; 5], DType::F32));
    let empty = arena.output(0, DType::F32);
    let mat = Mat::dense(empty, 0, 5);
    forward(&Queue::cpu(2), mat, empty, mat, w, 1e-6);
    let call = BackwardArgs {
        dx: mat,
        add: false,
        recompute: false,
        dw,
        dy: mat,
        x: mat,
        rstd: empty,
        w,
        scratch: empty,
    };
    backward(&Queue::cpu(2), call);
    assert_eq!(values(dw), [1.0; 5]);
}

#[test]
#[should_panic(expected = "operands overlap")]
fn adding_to_dx_in_place_of_dy_is_refused() {
    let arena = TestArena::new(1);
    let (dy, x) =
        (arena.padded_normals(2, 4, 0, DType::F32).mat, arena.padded_normals(2, 4, 0, DType::F32).mat);
    let (w, dw) = (arena.normals(4, DType::F32), arena.normals(4, DType::F32));
    let (rstd, scratch) = (arena.normals(2, DType::F32), arena.normals(4, DType::F32));
    backward(
        &Queue::cpu(1),
        BackwardArgs { dx: dy, add: true, recompute: false, dw, dy, x, rstd, w, scratch },
    );
}
