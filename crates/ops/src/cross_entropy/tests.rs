use lockstep_core::DType;
use lockstep_device::Queue;
use proptest::prelude::*;

use super::*;
use crate::testing::{
    Operands, SameBits, TestArena, assert_near, bits, dot, finite_differences, norm, queue, queues,
    tolerance, values,
};

fn inverse_temperature() -> impl Strategy<Value = f32> {
    prop_oneof![Just(1.0f32), 0.3f32..3.0]
}

fn vocab() -> impl Strategy<Value = usize> {
    prop_oneof![Just(1usize), Just(5), Just(16), Just(17), Just(1000), 1usize..300]
}

/// The gradient of all channels, given a coefficient for each.
fn reference_gradient(logits: &[f64], vocab: usize, targets: &[u32], c: &[Vec<f64>; 3]) -> Vec<f64> {
    let parts = [
        reference::backward(logits, vocab, targets, &c[0]),
        reference::entropy_backward(logits, vocab, &c[1]),
        reference::mean_log_prob_backward(logits, vocab, &c[2]),
    ];
    (0..logits.len()).map(|i| parts.iter().map(|part| part[i]).sum()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// From nearly uniform to nearly certain distributions. Both calls give the same log-probabilities, and the
    /// gradient of a token with coefficient zero is exactly zero.
    #[test]
    fn forward_and_backward_match_the_reference(
        rows in 1usize..40, vocab in vocab(), pad in 0usize..4,
        spread in prop_oneof![Just(0.01f32), Just(1.0), Just(10.0), Just(1e4)],
        inverse in inverse_temperature(), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let start: Vec<f32> = arena.normal_values(rows * vocab).iter().map(|x| x * spread).collect();
        let targets = arena.indices(rows, vocab);
        let targets_view = arena.input_u32(&targets);
        let zeroed = arena.indices(rows, 3);
        let coefficients: Vec<f32> =
            arena.normal_values(rows).iter().zip(&zeroed).map(|(c, z)| if *z == 0 { 0.0 } else { *c }).collect();
        let c = arena.input(&coefficients, DType::F32);
        let mut same = SameBits::new();
        for queue in queues() {
            let logits = arena.padded(&start, vocab, pad, DType::F32);
            let (before, before_bits) = (logits.values(), logits.bits());
            let (logp, second) = (arena.output(rows, DType::F32), arena.output(rows, DType::F32));
            forward(&queue, logp, logits.mat, targets_view, inverse);
            prop_assert!(logits.bits() == before_bits, "forward wrote to the logits");
            let before = reference::scaled(&before, inverse);
            let want = reference::forward(&before, vocab, &targets);
            assert_near(&values(logp), &want, rows, (rows as f64).sqrt(), tolerance(DType::F32));

            forward_backward(&queue, second, logits.mat, targets_view, c, inverse, DType::F32);
            prop_assert_eq!(bits(logp), bits(second));
            let cv = reference::scaled(&values(c), inverse);
            let want = reference::backward(&before, vocab, &targets, &cv);
            assert_near(&logits.values(), &want, vocab, norm(&cv), tolerance(DType::F32));
            for (c, gradient) in cv.iter().zip(logits.values().chunks_exact(vocab)) {
                prop_assert!(*c != 0.0 || gradient.iter().all(|g| *g == 0.0), "gradient without coefficient");
            }
            same.check(&queue, vec![bits(logp), logits.bits()]);
        }
    }

    /// Every combination of channels for outputs and coefficients. Log-probabilities have the same bits as without
    /// channels, and the other outputs have the same bits in both calls.
    #[test]
    fn channels_match_the_reference(
        rows in 1usize..20, vocab in vocab(), pad in 0usize..4,
        spread in prop_oneof![Just(0.01f32), Just(1.0), Just(10.0), Just(1e3)],
        written in any::<[bool; 2]>(), with in any::<[bool; 2]>(),
        inverse in inverse_temperature(), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let start: Vec<f32> = arena.normal_values(rows * vocab).iter().map(|x| x * spread).collect();
        let targets = arena.indices(rows, vocab);
        let targets_view = arena.input_u32(&targets);
        let zeroed = arena.indices(rows, 3);
        let coefficients = |asked: bool| {
            let values = arena.normal_values(rows);
            let values = values.iter().zip(&zeroed).map(|(c, z)| if asked && *z != 0 { *c } else { 0.0 });
            arena.input(&values.collect::<Vec<f32>>(), DType::F32)
        };
        let [c, c_entropy, c_mean] = [true, with[0], with[1]].map(coefficients);
        let c_channels = Channels {
            log_prob: c,
            entropy: with[0].then_some(c_entropy),
            mean_log_prob: with[1].then_some(c_mean),
        };
        let mut same = SameBits::new();
        for queue in queues() {
            let logits = arena.padded(&start, vocab, pad, DType::F32);
            let before = logits.values();
            let [out, second] = [(); 2].map(|()| Channels {
                log_prob: arena.output(rows, DType::F32),
                entropy: written[0].then(|| arena.output(rows, DType::F32)),
                mean_log_prob: written[1].then(|| arena.output(rows, DType::F32)),
            });
            let plain = arena.output(rows, DType::F32);
            forward(&queue, plain, logits.mat, targets_view, inverse);
            forward(&queue, out, logits.mat, targets_view, inverse);
            prop_assert_eq!(&logits.values(), &before, "forward wrote to the logits");
            let before = reference::scaled(&before, inverse);
            prop_assert_eq!(bits(plain), bits(out.log_prob));
            let size = (rows as f64).sqrt();
            if let Some(entropy) = out.entropy {
                assert_near(&values(entropy), &reference::entropy(&before, vocab), rows, size, tolerance(DType::F32));
            }
            if let Some(mean) = out.mean_log_prob {
                let want = reference::mean_log_prob(&before, vocab);
                assert_near(&values(mean), &want, rows, size, tolerance(DType::F32));
            }

            forward_backward(&queue, second, logits.mat, targets_view, c_channels, inverse, DType::F32);
            prop_assert_eq!(out.views().map(bits), second.views().map(bits));
            let all = [c, c_entropy, c_mean].map(|c| reference::scaled(&values(c), inverse));
            let want = reference_gradient(&before, vocab, &targets, &all);
            let size = all.iter().map(|c| norm(c)).sum::<f64>();
            assert_near(&logits.values(), &want, vocab, size, tolerance(DType::F32));
            for (zeroed, gradient) in zeroed.iter().zip(logits.values().chunks_exact(vocab)) {
                prop_assert!(*zeroed != 0 || gradient.iter().all(|g| *g == 0.0), "gradient without coefficient");
            }
            same.check(&queue, out.views().map(bits).into_iter().chain([logits.bits()]).collect());
        }
    }

    #[test]
    fn gradients_of_channels_match_finite_differences_of_the_reference(
        rows in 1usize..4, vocab in 1usize..9, inverse in inverse_temperature(), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let logits = arena.padded_normals(rows, vocab, 0, DType::F32);
        let (start, targets) = (logits.values(), arena.indices(rows, vocab));
        let [c, c_entropy, c_mean] = [(); 3].map(|()| arena.normals(rows, DType::F32));
        let with = Channels { log_prob: c, entropy: Some(c_entropy), mean_log_prob: Some(c_mean) };
        let (logp, targets_view) = (arena.output(rows, DType::F32), arena.input_u32(&targets));
        forward_backward(&Queue::cpu(1), logp, logits.mat, targets_view, with, inverse, DType::F32);
        let all = [c, c_entropy, c_mean].map(values);
        let slope = finite_differences(&start, |logits| {
            let logits = &reference::scaled(logits, inverse);
            dot(&all[0], &reference::forward(logits, vocab, &targets))
                + dot(&all[1], &reference::entropy(logits, vocab))
                + dot(&all[2], &reference::mean_log_prob(logits, vocab))
        });
        let size = all.iter().map(|c| norm(c)).sum();
        assert_near(&logits.values(), &slope, vocab, size, tolerance(DType::F32));
        let (start, all) = (reference::scaled(&start, inverse), all.map(|c| reference::scaled(&c, inverse)));
        assert_near(&reference_gradient(&start, vocab, &targets, &all), &slope, vocab, size, 1e-8);
    }

    #[test]
    fn backward_matches_finite_differences_of_the_reference(
        rows in 1usize..4, vocab in 1usize..9, inverse in inverse_temperature(), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let logits = arena.padded_normals(rows, vocab, 0, DType::F32);
        let (start, targets) = (logits.values(), arena.indices(rows, vocab));
        let (r, logp) = (arena.normals(rows, DType::F32), arena.output(rows, DType::F32));
        forward_backward(&Queue::cpu(1), logp, logits.mat, arena.input_u32(&targets), r, inverse, DType::F32);
        let rv = values(r);
        let slope = finite_differences(&start, |logits| {
            dot(&rv, &reference::forward(&reference::scaled(logits, inverse), vocab, &targets))
        });
        assert_near(&logits.values(), &slope, vocab, norm(&rv), tolerance(DType::F32));
    }

    /// Row contract: any range of rows has the same bits as in the whole, on any queue.
    #[test]
    fn a_row_does_not_depend_on_the_others(
        rows in 1usize..40, vocab in vocab(), from in 0usize..40, len in 1usize..40,
        picks in (0usize..9, 0usize..9), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let start = arena.normal_values(rows * vocab);
        let targets = arena.input_u32(&arena.indices(rows, vocab));
        let c = arena.normals(rows, DType::F32);
        let run = |pick: usize, from: usize, len: usize| {
            let logits = arena.padded(&start[from * vocab..][..len * vocab], vocab, pick, DType::F32);
            let logp = arena.output(len, DType::F32);
            forward_backward(&queue(pick), logp, logits.mat, targets.slice(from, len), c.slice(from, len), 0.7, DType::F32);
            (bits(logp), logits.bits())
        };
        let from = from % rows;
        let len = len.min(rows - from);
        let (logp, gradient) = run(picks.0, 0, rows);
        let part = run(picks.1, from, len);
        prop_assert_eq!(&part.0[..], &logp[from..][..len]);
        prop_assert_eq!(&part.1[..], &gradient[from * vocab..][..len * vocab]);
    }
}

/// Logits near the limits of f32, equal logits, and tokens masked by negative infinity.
#[test]
fn extreme_logits_stay_finite() {
    let arena = TestArena::new(1);
    let infinity = f32::INFINITY;
    let rows: [([f32; 5], u32); 8] = [
        ([1e37, -1e37, 0.0, 1.0, -1.0], 0),
        ([1e37, -1e37, 0.0, 1.0, -1.0], 1),
        ([-1e37; 5], 2),
        ([3e38; 5], 4),
        ([-3e38; 5], 3),
        ([0.0, -infinity, -infinity, -infinity, -infinity], 0),
        ([1.0, 2.0, -infinity, 3.0, -infinity], 3),
        ([-200.0, -100.0, -90.0, -88.0, 0.0], 0),
    ];
    let start: Vec<f32> = rows.iter().flat_map(|(logits, _)| *logits).collect();
    let targets: Vec<u32> = rows.iter().map(|(_, target)| *target).collect();
    for queue in queues() {
        let logits = arena.padded(&start, 5, 1, DType::F32);
        let before = logits.values();
        let (logp, second) = (arena.output(8, DType::F32), arena.output(8, DType::F32));
        let c = arena.input(&[-0.5; 8], DType::F32);
        let targets_view = arena.input_u32(&targets);
        forward(&queue, logp, logits.mat, targets_view, 1.0);
        forward_backward(&queue, second, logits.mat, targets_view, c, 1.0, DType::F32);
        assert_eq!(bits(logp), bits(second));
        let want = reference::forward(&before, 5, &targets);
        for (got, want) in values(logp).iter().zip(&want) {
            assert!((got - want).abs() <= 1e-6 * want.abs().max(1.0), "{got} for {want}");
        }
        let want = reference::backward(&before, 5, &targets, &[-0.5; 8]);
        for (got, want) in logits.values().iter().zip(&want) {
            assert!((got - want).abs() <= 1e-7, "{got} for {want}");
        }
    }
}

/// Masked tokens contribute nothing to the entropy and get no gradient from it.
#[test]
fn channels_of_extreme_logits() {
    let arena = TestArena::new(1);
    let infinity = f32::INFINITY;
    let rows = [
        [1e37, -1e37, 0.0, 1.0],
        [-3e38; 4],
        [0.0, -infinity, -infinity, -infinity],
        [1.0, 1.0, -infinity, -infinity],
        [-200.0, -100.0, -90.0, 0.0],
    ];
    let targets = arena.input_u32(&[0, 1, 0, 1, 3]);
    for queue in queues() {
        let logits = arena.padded(rows.as_flattened(), 4, 1, DType::F32);
        let before = logits.values();
        let [log_prob, entropy] = [(); 2].map(|()| arena.output(5, DType::F32));
        let [c, c_entropy] = [0.5, -2.0].map(|c| arena.input(&[c; 5], DType::F32));
        let out = Channels { log_prob, entropy: Some(entropy), mean_log_prob: None };
        let with = Channels { log_prob: c, entropy: Some(c_entropy), mean_log_prob: None };
        forward_backward(&queue, out, logits.mat, targets, with, 1.0, DType::F32);
        for (got, want) in values(entropy).iter().zip(reference::entropy(&before, 4)) {
            assert!((got - want).abs() <= 1e-6, "{got} for {want}");
        }
        let all = [0.5, -2.0, 0.0].map(|c| vec![c; 5]);
        for (got, want) in logits.values().iter().zip(reference_gradient(&before, 4, &[0, 1, 0, 1, 3], &all))
        {
            assert!((got - want).abs() <= 1e-6, "{got} for {want}");
        }
    }
}

#[test]
fn a_nan_logit_is_not_hidden() {
    let arena = TestArena::new(1);
    for queue in queues() {
        let logits = arena.padded(&[0.0, f32::NAN, 1.0], 3, 0, DType::F32);
        let logp = arena.output(1, DType::F32);
        logp.write_f32(&[0.0]).unwrap();
        forward(&queue, logp, logits.mat, arena.input_u32(&[0]), 1.0);
        assert!(values(logp)[0].is_nan());
        let [entropy, mean] = [(); 2].map(|()| arena.input(&[0.0], DType::F32));
        let all = Channels { log_prob: logp, entropy: Some(entropy), mean_log_prob: Some(mean) };
        forward(&queue, all, logits.mat, arena.input_u32(&[0]), 1.0);
        assert!([logp, entropy, mean].iter().all(|view| values(*view)[0].is_nan()));
    }
}

#[test]
fn zero_rows_are_a_no_op() {
    let arena = TestArena::new(1);
    let empty = arena.output(0, DType::F32);
    let targets = arena.input_u32(&[]);
    forward(&Queue::cpu(2), empty, Mat::dense(empty, 0, 9), targets, 1.0);
    forward_backward(&Queue::cpu(2), empty, Mat::dense(empty, 0, 9), targets, empty, 1.0, DType::F32);
}
