use lockstep_core::DType;
use lockstep_device::Queue;
use proptest::prelude::*;

use super::*;
use crate::testing::{
    Bench, SameBits, assert_close, assert_near, bits, differences, dot, dtype, queue, queues, tolerance,
    values,
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Short lengths, and lengths of several pool items.
    #[test]
    fn both_directions_match_the_reference(
        len in prop_oneof![4 => 1usize..500, 1 => 16_000usize..40_000], spread in 1f32..8.0, act in dtype(),
        seed in any::<u64>(),
    ) {
        let bench = Bench::with_mebibytes(8, seed);
        let gates: Vec<f32> = bench.normal_values(len).iter().map(|g| g * spread).collect();
        let ups = bench.normal_values(len);
        let dy = bench.normals(len, act);
        let mut same = SameBits::new();
        for queue in queues() {
            let (g, u, y) = (bench.input(&gates, act), bench.input(&ups, act), bench.output(len, act));
            let (gv, uv) = (values(g), values(u));
            forward(&queue, y, g, u);
            assert_close(y, &reference::forward(&gv, &uv), tolerance(act));
            let (want_g, want_u) = reference::backward(&values(dy), &gv, &uv);
            backward_in_place(&queue, g, u, dy);
            assert_close(g, &want_g, tolerance(act));
            assert_close(u, &want_u, tolerance(act));
            same.check(&queue, vec![bits(y), bits(g), bits(u)]);
        }
    }

    #[test]
    fn backward_is_the_slope_of_the_forward_reference(len in 1usize..20, seed in any::<u64>()) {
        let bench = Bench::small(seed);
        let [g, u, r] = [(); 3].map(|()| bench.normals(len, DType::F32));
        let (gv, uv, rv) = (values(g), values(u), values(r));
        backward_in_place(&Queue::cpu(1), g, u, r);
        let slope_g = differences(&gv, |g| dot(&rv, &reference::forward(g, &uv)));
        let slope_u = differences(&uv, |u| dot(&rv, &reference::forward(&gv, u)));
        assert_near(&values(g), &slope_g, (len as f64).sqrt(), tolerance(DType::F32));
        assert_near(&values(u), &slope_u, (len as f64).sqrt(), tolerance(DType::F32));
    }

    /// The row contract: any range of elements, on any queue, has the bits it has in the whole.
    #[test]
    fn an_element_does_not_depend_on_the_others(
        len in 1usize..600, from in 0usize..600, part in 1usize..600, act in dtype(),
        picks in (0usize..9, 0usize..9), seed in any::<u64>(),
    ) {
        let bench = Bench::small(seed);
        let [g, u, dy] = [(); 3].map(|()| bench.normal_values(len));
        let run = |pick: usize, from: usize, len: usize| {
            let [g, u, dy] = [&g, &u, &dy].map(|x| bench.input(&x[from..from + len], act));
            let y = bench.output(len, act);
            forward(&queue(pick), y, g, u);
            backward_in_place(&queue(pick), g, u, dy);
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

/// Saturated gates: the unit becomes u · g or nothing, and never infinite or NaN.
#[test]
fn extreme_gates_saturate() {
    let bench = Bench::small(1);
    let gates =
        [0.0, -0.0, 20.0, -20.0, 88.5, -88.5, 100.0, -100.0, 1000.0, -1000.0, 60_000.0, -60_000.0, 1e-30];
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for queue in queues() {
            let (g, y) = (bench.input(&gates, dtype), bench.output(gates.len(), dtype));
            let (u, dy) = (bench.input(&[0.5; 13], dtype), bench.input(&[0.25; 13], dtype));
            let (gv, uv, dyv) = (values(g), values(u), values(dy));
            forward(&queue, y, g, u);
            let (want_g, want_u) = reference::backward(&dyv, &gv, &uv);
            backward_in_place(&queue, g, u, dy);
            let pairs = [(y, reference::forward(&gv, &uv)), (g, want_g), (u, want_u)];
            for (got, want) in pairs.iter().flat_map(|(got, want)| values(*got).into_iter().zip(want)) {
                assert!((got - want).abs() <= tolerance(dtype) * want.abs().max(1e-4), "{got} for {want}");
            }
        }
    }
}
