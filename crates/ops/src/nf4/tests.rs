use lockstep_core::DType;
use lockstep_device::{Pool, Queue, Real};
use proptest::prelude::*;

use super::*;
use crate::testing::{Operands, TestArena, bits, panic_message, queue, queues};

/// A tensor with blocks of different sizes, one of them zero.
fn weights(arena: &TestArena, elems: usize) -> Vec<f32> {
    let size = |i: usize| if i / BLOCK_ELEMS == 1 { 0.0 } else { 0.02 * (1 + i / BLOCK_ELEMS % 7) as f32 };
    arena.normal_values(elems).into_iter().enumerate().map(|(i, x)| size(i) * x).collect()
}

fn double<'m>(arena: &'m TestArena, scales: &QuantisedScales) -> Scales<'m> {
    Scales::Double {
        codes: arena.input_raw(&scales.codes, DType::U8),
        absmax: arena.input(&scales.absmax, DType::F32),
        offset: scales.offset,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn codes_are_those_of_the_nearest_values(elems in 1usize..2000, seed in any::<u64>()) {
        let arena = TestArena::new(seed);
        let weights = weights(&arena, elems);
        let got = quantise(&Pool::new(2), &weights);
        prop_assert_eq!(&block_scales(&Pool::new(2), &weights), &got.scales);
        for (i, weight) in weights.iter().enumerate() {
            let scale = got.scales[i / BLOCK_ELEMS];
            let block = &weights[i / BLOCK_ELEMS * BLOCK_ELEMS..];
            let largest = block.iter().take(BLOCK_ELEMS).fold(0f32, |max, x| max.max(x.abs()));
            prop_assert_eq!(scale, largest);
            let code = usize::from(reference::code(&got.codes, i));
            let off = |code: usize| (f64::from(VALUES[code]) * f64::from(scale) - f64::from(*weight)).abs();
            let nearest = reference::nearest_code(f64::from(*weight) / f64::from(scale).max(1e-30));
            prop_assert!(off(code) <= off(usize::from(nearest)) + 1e-6 * f64::from(scale), "element {}", i);
        }
    }

    /// A range has the bits of the reference, wherever it starts, with all types, scales, sets and threads.
    #[test]
    fn a_range_has_the_weights_of_the_reference(
        elems in prop_oneof![4 => 1usize..3000, 1 => 66_000usize..70_000], from in 0usize..12, len in 0usize..12,
        to_end in any::<bool>(), pick in 0usize..9, seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let quantised = quantise(&Pool::new(1), &weights(&arena, elems));
        let outer = quantised.quantise_scales();
        let of_double: Vec<f32> = (0..quantised.scales.len())
            .map(|block| reference::scale(&outer.codes, &outer.absmax, outer.offset, block))
            .collect();
        let codes = arena.input_raw(&quantised.codes, DType::U8);
        let start = from % elems.div_ceil(RANGE_ELEMS) * RANGE_ELEMS;
        let end = if to_end { elems } else { (start + len * RANGE_ELEMS).min(elems) };
        for (scales, values) in [
            (Scales::F32(arena.input(&quantised.scales, DType::F32)), &quantised.scales),
            (double(&arena, &outer), &of_double),
        ] {
            let want = reference::dequantise(&quantised.codes, values, elems);
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let out = arena.output(end - start, dtype);
                dequantise(&queue(pick), out, &Nf4 { elems, codes, scales }, start);
                prop_assert_eq!(bits(out), bits(arena.input(&want[start..end], dtype)));
            }
        }
    }
}

#[test]
fn all_queues_give_the_same_bits() {
    let (arena, elems) = (TestArena::new(4), 200_001);
    let quantised = quantise(&Pool::new(2), &weights(&arena, elems));
    let from = Nf4 {
        elems,
        codes: arena.input_raw(&quantised.codes, DType::U8),
        scales: double(&arena, &quantised.quantise_scales()),
    };
    let want: Vec<u32> = bits({
        let out = arena.output(elems, DType::BF16);
        dequantise(&Queue::cpu(1), out, &from, 0);
        out
    });
    for queue in queues() {
        let out = arena.output(elems, DType::BF16);
        dequantise(&queue, out, &from, 0);
        assert!(bits(out) == want, "bits differ on {queue:?}");
    }
}

/// The host reads what devices compute, wherever a range starts.
#[test]
fn the_host_reads_the_same_bits() {
    let (arena, elems) = (TestArena::new(9), 5_001);
    let quantised = quantise(&Pool::new(1), &weights(&arena, elems));
    let scales = quantised.quantise_scales();
    let codes = arena.input_raw(&quantised.codes, DType::U8);
    let from = Nf4 { elems, codes, scales: double(&arena, &scales) };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let out = arena.output(elems, dtype);
        dequantise(&Queue::cpu(1), out, &from, 0);
        let want = crate::testing::values(out);
        for (start, end) in [(0, elems), (2, 3), (62, 200), (1000, 5001), (4098, 4098)] {
            let mut got = vec![0f32; end - start];
            dequantise_on_host(dtype, &quantised.codes[start / 2..], &scales, start, &mut got);
            let got: Vec<f64> = got.into_iter().map(f64::from).collect();
            assert_eq!(got, want[start..end], "{dtype} [{start}, {end})");
        }
    }
}

/// The error of normal weights, relative to their size: 4 bits are this coarse, and 8-bit scales add little.
#[test]
fn double_quantisation_adds_little_error() {
    let (arena, elems) = (TestArena::new(6), 65_536);
    let weights = arena.normal_values(elems);
    let quantised = quantise(&Pool::new(2), &weights);
    let codes = arena.input_raw(&quantised.codes, DType::U8);
    let error = |scales: Scales| {
        let out = arena.output(elems, DType::F32);
        dequantise(&Queue::cpu(1), out, &Nf4 { elems, codes, scales }, 0);
        let got = crate::testing::values(out);
        let off: f64 = got.iter().zip(&weights).map(|(a, b)| (a - f64::from(*b)).powi(2)).sum();
        (off / elems as f64).sqrt()
    };
    let plain = error(Scales::F32(arena.input(&quantised.scales, DType::F32)));
    let twice = error(double(&arena, &quantised.quantise_scales()));
    assert!(plain < 0.1 && (twice - plain).abs() < 0.001, "{plain} and {twice}");
}

/// Weights of bf16 models are quantised from f32, which has all of them.
#[test]
fn dequantised_zeros_and_extremes_are_exact() {
    let mut weights = vec![0f32; 192];
    weights[3] = -2.0;
    weights[70] = 3.0;
    let arena = TestArena::new(1);
    let quantised = quantise(&Pool::new(1), &weights);
    let from = Nf4 {
        elems: 192,
        codes: arena.input_raw(&quantised.codes, DType::U8),
        scales: Scales::F32(arena.input(&quantised.scales, DType::F32)),
    };
    let out = arena.output(192, DType::BF16);
    dequantise(&Queue::cpu(1), out, &from, 0);
    let want: Vec<u32> =
        weights.iter().map(|x| Real::to_f32(<half::bf16 as Real>::from_f32(*x)).to_bits()).collect();
    assert_eq!(bits(out), want);
    assert_eq!(quantised.scales, [2.0, 3.0, 0.0]);
}

#[test]
fn wrong_operands_are_refused() {
    let arena = TestArena::new(1);
    let codes = arena.input_raw(&[0u8; 320], DType::U8);
    let scales = arena.input(&[1.0; 10], DType::F32);
    let good = Nf4 { elems: 640, codes, scales: Scales::F32(scales) };
    let out = arena.output(640, DType::F32);
    let refused = |from: Nf4, out: View, first: usize, expected: &str| {
        let message = panic_message(|| dequantise(&Queue::cpu(1), out, &from, first));
        assert!(message.contains(expected), "expected {expected:?}: {message}");
    };
    dequantise(&Queue::cpu(1), out, &good, 0);
    refused(Nf4 { codes: codes.first(319), ..good }, out, 0, "two NF4 codes per u8");
    refused(Nf4 { scales: Scales::F32(scales.first(9)), ..good }, out, 0, "one f32 scale per block of 64");
    let inner = Scales::Double { codes: codes.first(9), absmax: scales.first(1), offset: 0.0 };
    refused(Nf4 { scales: inner, ..good }, out, 0, "one u8 scale per block of 64");
    let inner = Scales::Double { codes: codes.first(10), absmax: scales, offset: 0.0 };
    refused(Nf4 { scales: inner, ..good }, out, 0, "one f32 for 256 scales");
    refused(good, out.first(256), 64, "not on multiples of 256");
    refused(good, out.first(255), 0, "not on multiples of 256");
    refused(good, out, 256, "of 640 quantised elements");
    refused(Nf4 { scales: Scales::F32(out.first(10)), ..good }, out, 0, "operands overlap");
}
