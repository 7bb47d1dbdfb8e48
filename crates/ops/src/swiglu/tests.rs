use lockstep_core::DType;
use lockstep_device::Queue;
use proptest::prelude::*;

use super::*;
use crate::testing::{
    Operands, PaddedMat, SameBits, TestArena, assert_near, bits, dot, dtype, finite_differences, queue,
    queues, tolerance, values,
};

/// Gate and up as columns of one matrix, as a block has them, with padding.
fn side_by_side<'b>(
    arena: &'b TestArena,
    g: &[f32],
    u: &[f32],
    cols: usize,
    pad: usize,
    act: DType,
) -> PaddedMat<'b> {
    let rows = g.chunks_exact(cols).zip(u.chunks_exact(cols));
    let values: Vec<f32> = rows.flat_map(|(g, u)| [g, u].concat()).collect();
    arena.padded(&values, 2 * cols, pad, act)
}

/// The output of a saturated gate may be too small for the full precision of f16.
const SMALL: f64 = 1e-3;

fn halves<'b>(both: &PaddedMat<'b>) -> [Mat<'b>; 2] {
    let cols = both.mat.cols / 2;
    [both.mat.columns(0, cols), both.mat.columns(cols, cols)]
}

fn mat_values(mat: &Mat) -> Vec<f64> {
    (0..mat.rows).flat_map(|row| values(mat.row(row))).collect()
}

/// A matrix of one row.
fn one_row(view: lockstep_device::View<'_>) -> Mat<'_> {
    Mat::dense(view, 1, view.len())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// A few short rows, and matrices of several pool items.
    #[test]
    fn forward_and_backward_match_the_reference(
        (rows, cols) in prop_oneof![4 => (1usize..9, 1usize..60), 1 => (1usize..5, 7_000usize..20_000)],
        pad in 0usize..4, spread in 1f32..8.0, act in dtype(), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let gates: Vec<f32> = arena.normal_values(rows * cols).iter().map(|g| g * spread).collect();
        let ups = arena.normal_values(rows * cols);
        let grads = arena.normal_values(rows * cols);
        let dy = arena.padded(&grads, cols, pad, act);
        let mut same = SameBits::new();
        for queue in queues() {
            let both = side_by_side(&arena, &gates, &ups, cols, pad, act);
            let ([g, u], y) = (halves(&both), arena.padded_output(rows, cols, pad, act));
            let (gv, uv) = (mat_values(&g), mat_values(&u));
            forward(&queue, y.mat, g, u);
            assert_near(&y.values(), &reference::forward(&gv, &uv), cols, SMALL, tolerance(act));
            let (want_g, want_u) = reference::backward(&dy.values(), &gv, &uv);
            backward_in_place(&queue, g, u, dy.mat);
            // The derivative of the gate has a zero.
            assert_near(&mat_values(&g), &want_g, cols, 0.1 * ((rows * cols) as f64).sqrt(), tolerance(act));
            assert_near(&mat_values(&u), &want_u, cols, SMALL, tolerance(act));
            // With recompute: the same gradients, and the output of forward.
            let all = side_by_side(&arena, &gates, &ups, cols, pad, act);
            let ([g, u], grad) = (halves(&all), arena.padded(&grads, cols, pad, act));
            backward_and_recompute_in_place(&queue, g, u, grad.mat);
            prop_assert!(all.bits() == both.bits(), "gradients differ");
            prop_assert!(grad.bits() == y.bits(), "outputs differ");
            same.check(&queue, vec![y.bits(), both.bits()]);
        }
    }

    #[test]
    fn backward_matches_finite_differences_of_the_reference(len in 1usize..20, seed in any::<u64>()) {
        let arena = TestArena::new(seed);
        let [g, u, r] = [(); 3].map(|()| arena.normals(len, DType::F32));
        let (gv, uv, rv) = (values(g), values(u), values(r));
        backward_in_place(&Queue::cpu(1), one_row(g), one_row(u), one_row(r));
        let slope_g = finite_differences(&gv, |g| dot(&rv, &reference::forward(g, &uv)));
        let slope_u = finite_differences(&uv, |u| dot(&rv, &reference::forward(&gv, u)));
        assert_near(&values(g), &slope_g, len, (len as f64).sqrt(), tolerance(DType::F32));
        assert_near(&values(u), &slope_u, len, (len as f64).sqrt(), tolerance(DType::F32));
    }

    /// Row contract: any range of elements has the same bits as in the whole, on any queue.
    #[test]
    fn an_element_does_not_depend_on_the_others(
        len in 1usize..600, from in 0usize..600, part in 1usize..600, act in dtype(),
        picks in (0usize..9, 0usize..9), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let [g, u, dy] = [(); 3].map(|()| arena.normal_values(len));
        let run = |pick: usize, from: usize, len: usize| {
            let [g, u, dy] = [&g, &u, &dy].map(|x| arena.input(&x[from..from + len], act));
            let y = arena.output(len, act);
            forward(&queue(pick), one_row(y), one_row(g), one_row(u));
            backward_in_place(&queue(pick), one_row(g), one_row(u), one_row(dy));
            [bits(y), bits(g), bits(u)]
        };
        let from = from % len;
        let part_len = part.min(len - from);
        let (whole, part) = (run(picks.0, 0, len), run(picks.1, from, part_len));
        for (whole, part) in whole.iter().zip(&part) {
            prop_assert_eq!(&part[..], &whole[from..][..part_len]);
        }
    }
}

/// Column ranges of one matrix are disjoint unless they share a column.
#[test]
fn overlapping_column_ranges_are_refused() {
    let arena = TestArena::new(1);
    let whole = arena.padded_normals(5, 12, 3, DType::BF16).mat;
    whole.columns(0, 6).assert_disjoint(&whole.columns(6, 6));
    whole.columns(6, 6).assert_disjoint(&whole.columns(0, 6));
    // Starting one row further down makes no difference.
    whole.row_range(1, 4).columns(6, 6).assert_disjoint(&whole.columns(2, 4));
    whole.row_range(0, 2).assert_disjoint(&whole.row_range(2, 3));
    for (start, cols) in [(5, 7), (0, 12), (0, 1), (3, 2)] {
        let overlap = || whole.columns(0, 6).assert_disjoint(&whole.row_range(2, 2).columns(start, cols));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(overlap)).is_err(), "{start}, {cols}");
    }
}

/// Saturated gates: y becomes u · g or zero, and never infinite or NaN.
#[test]
fn extreme_gates_saturate() {
    let arena = TestArena::new(1);
    let gates =
        [0.0, -0.0, 20.0, -20.0, 88.5, -88.5, 100.0, -100.0, 1000.0, -1000.0, 60_000.0, -60_000.0, 1e-30];
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for queue in queues() {
            let (g, y) = (arena.input(&gates, dtype), arena.output(gates.len(), dtype));
            let (u, dy) = (arena.input(&[0.5; 13], dtype), arena.input(&[0.25; 13], dtype));
            let (gv, uv, dyv) = (values(g), values(u), values(dy));
            forward(&queue, one_row(y), one_row(g), one_row(u));
            let (want_g, want_u) = reference::backward(&dyv, &gv, &uv);
            backward_in_place(&queue, one_row(g), one_row(u), one_row(dy));
            let pairs = [(y, reference::forward(&gv, &uv)), (g, want_g), (u, want_u)];
            for (got, want) in pairs.iter().flat_map(|(got, want)| values(*got).into_iter().zip(want)) {
                assert!((got - want).abs() <= tolerance(dtype) * want.abs().max(1e-4), "{got} for {want}");
            }
        }
    }
}
