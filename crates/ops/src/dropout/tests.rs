use lockstep_core::DType;
use proptest::prelude::*;

use super::*;
use crate::testing::{
    Operands, SameBits, TestArena, assert_near, dot, dtype, finite_differences, queue, queues, tolerance,
};

fn mask<'b>(arena: &'b TestArena, rate: f64, samples: &[u32]) -> Mask<'b> {
    let samples = arena.input_u32(samples);
    Mask { rate, seed: 7, step: 3, layer: 1, site: Site::MlpOut, samples }
}

fn bounds(lens: &[usize]) -> Vec<u32> {
    let ends = lens.iter().scan(0, |end, len| {
        *end += *len as u32;
        Some(*end)
    });
    [0].into_iter().chain(ends).collect()
}

/// The mask of a whole batch, element by element.
fn factors(mask: &Mask, samples: &[u32], lens: &[usize], cols: usize) -> Vec<f64> {
    let mut all = Vec::new();
    for (sample, len) in samples.iter().zip(lens) {
        for at in 0..len * cols {
            all.push(reference::factor(mask, *sample, 0, at / cols, at % cols));
        }
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn forward_and_backward_match_the_reference(
        lens in prop::collection::vec(0usize..70, 1..5), cols in 1usize..150, pad in 0usize..3,
        rate in prop_oneof![Just(0.0), Just(0.1), Just(0.5), Just(0.9)], act in dtype(), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let rows: usize = lens.iter().sum();
        let samples = arena.indices(lens.len(), 1000);
        let (mask, cu) = (mask(&arena, rate, &samples), arena.input_u32(&bounds(&lens)));
        let factors = factors(&mask, &samples, &lens, cols);
        let start = arena.normal_values(rows * cols);
        let [residual, dy] = [(); 2].map(|()| arena.padded_normals(rows, cols, pad, act));
        let size = ((rows * cols) as f64).sqrt();
        let mut same = SameBits::new();
        for queue in queues() {
            let y = arena.padded(&start, cols, pad, act);
            let want = reference::forward(&residual.values(), &y.values(), &factors);
            forward(&queue, y.mat, residual.mat, cu, Some(&mask));
            assert_near(&y.values(), &want, cols, size, tolerance(act));
            let dx = arena.padded_output(rows, cols, pad, act);
            backward(&queue, dx.mat, dy.mat, cu, Some(&mask));
            assert_near(&dx.values(), &reference::backward(&dy.values(), &factors), cols, size, tolerance(act));
            same.check(&queue, vec![y.bits(), dx.bits()]);
        }
    }

    #[test]
    fn backward_matches_finite_differences_of_the_reference(
        lens in prop::collection::vec(1usize..4, 1..3), cols in 1usize..9, seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let rows: usize = lens.iter().sum();
        let samples = arena.indices(lens.len(), 1000);
        let (mask, cu) = (mask(&arena, 0.4, &samples), arena.input_u32(&bounds(&lens)));
        let factors = factors(&mask, &samples, &lens, cols);
        let [y, residual, r] = [(); 3].map(|()| arena.padded_normals(rows, cols, 0, DType::F32));
        let dx = arena.padded_output(rows, cols, 0, DType::F32);
        backward(&Queue::cpu(1), dx.mat, r.mat, cu, Some(&mask));
        let (residual, r) = (residual.values(), r.values());
        let slope = finite_differences(&y.values(), |y| dot(&r, &reference::forward(&residual, y, &factors)));
        assert_near(&dx.values(), &slope, cols, 1.0, tolerance(DType::F32));
    }

    /// Row contract: a document has the same bits in any pack, on any queue.
    #[test]
    fn a_document_does_not_depend_on_its_pack(
        before in prop::collection::vec(0usize..50, 0..3), len in 1usize..80, cols in 1usize..90,
        act in dtype(), picks in (0usize..9, 0usize..9), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let (y, residual) = (arena.normal_values(len * cols), arena.normal_values(len * cols));
        let alone = arena.padded(&y, cols, 0, act);
        let cu = arena.input_u32(&[0, len as u32]);
        forward(&queue(picks.0), alone.mat, arena.padded(&residual, cols, 0, act).mat, cu, Some(&mask(&arena, 0.3, &[77])));

        let others: usize = before.iter().sum();
        let with = |own: &[f32]| [vec![1.0; others * cols], own.to_vec()].concat();
        let packed = arena.padded(&with(&y), cols, 0, act);
        let lens: Vec<usize> = before.iter().copied().chain([len]).collect();
        let samples: Vec<u32> = (0..before.len() as u32).chain([77]).collect();
        let cu = arena.input_u32(&bounds(&lens));
        forward(&queue(picks.1), packed.mat, arena.padded(&with(&residual), cols, 0, act).mat, cu, Some(&mask(&arena, 0.3, &samples)));
        prop_assert_eq!(&packed.bits()[others * cols..], &alone.bits()[..]);
    }
}

/// Without a mask it is plain addition. With one, the mean is preserved and the fraction of zeros is the rate.
#[test]
fn masks_preserve_the_mean() {
    let arena = TestArena::new(1);
    let (rows, cols) = (400, 500);
    let (zero, cu) =
        (arena.padded(&vec![0.0; rows * cols], cols, 0, DType::F32), arena.input_u32(&[0, rows as u32]));
    for rate in [0.1, 0.5, 0.8] {
        let y = arena.padded(&vec![1.0; rows * cols], cols, 0, DType::F32);
        forward(&Queue::cpu(2), y.mat, zero.mat, cu, Some(&mask(&arena, rate, &[5])));
        let all = y.values();
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        let dropped = all.iter().filter(|y| **y == 0.0).count() as f64 / all.len() as f64;
        let spread = (rate * (1.0 - rate) / all.len() as f64).sqrt();
        assert!((dropped - rate).abs() < 5.0 * spread, "{dropped} dropped at {rate}");
        assert!((mean - 1.0).abs() < 5.0 * spread / (1.0 - rate), "mean {mean} at {rate}");
    }
    let y = arena.padded(&vec![1.0; rows * cols], cols, 0, DType::F32);
    forward(&Queue::cpu(2), y.mat, zero.mat, cu, None);
    assert!(y.values().iter().all(|y| *y == 1.0));
}

/// Masks differ if any part of their key does.
#[test]
fn masks_differ_by_everything_they_depend_on() {
    let arena = TestArena::new(1);
    let base = mask(&arena, 0.5, &[0]);
    let row = |mask: &Mask, sample, head, position| {
        let mut out = [0.0; 64];
        DocMask::new(mask, sample).fill(head, position, 0, &mut out);
        out.map(f32::to_bits)
    };
    let all = [
        row(&base, 0, 0, 0),
        row(&Mask { seed: 8, ..base }, 0, 0, 0),
        row(&Mask { step: 4, ..base }, 0, 0, 0),
        row(&Mask { layer: 2, ..base }, 0, 0, 0),
        row(&Mask { site: Site::AttentionOut, ..base }, 0, 0, 0),
        row(&base, 1, 0, 0),
        row(&base, 0, 1, 0),
        row(&base, 0, 0, 1),
    ];
    for (i, a) in all.iter().enumerate() {
        assert!(all[..i].iter().all(|b| a != b), "mask {i} repeats");
    }
}
