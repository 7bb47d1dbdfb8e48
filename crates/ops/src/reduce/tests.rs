use lockstep_core::sum::{fold_range, merge};
use proptest::prelude::*;

use super::*;
use crate::testing::{Operands, SameBits, TestArena, assert_near, bits, queue, queues, values};

fn leaves_of(view: View) -> Vec<f64> {
    let mut leaves = vec![0.0; view.len()];
    view.read_host(&mut leaves);
    leaves
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Up to three pool items of 128 blocks. The fold over the leaves equals the plain sum up to rounding, and has the
    /// same bits if the range is split into shards, each computed on its own queue.
    #[test]
    fn leaves_fold_to_the_squared_norm(
        blocks in 1usize..300, cut in 0usize..300, picks in (0usize..9, 0usize..9), seed in any::<u64>(),
        halves in any::<bool>(),
    ) {
        let arena = TestArena::new(seed);
        let x = arena.normals(blocks * ALIGN_ELEMS, if halves { DType::BF16 } else { DType::F32 });
        let want = reference::square_sums(&values(x), ALIGN_ELEMS);
        let mut whole = Vec::new();
        for queue in queues() {
            let leaves = arena.output(blocks, DType::F64);
            squared_sum_leaves(&queue, leaves, x);
            let leaves = leaves_of(leaves);
            assert_near(&leaves, &want, 1, 0.0, 1e-14);
            let all: Vec<u64> = leaves.iter().map(|leaf| leaf.to_bits()).collect();
            prop_assert!(whole.is_empty() || whole == all, "bits differ on {:?}", queue);
            whole = all;
        }
        let cut = cut % (blocks + 1);
        let mut nodes = Vec::new();
        for (first, len, pick) in [(0, cut, picks.0), (cut, blocks - cut, picks.1)] {
            let leaves = arena.output(len, DType::F64);
            squared_sum_leaves(&queue(pick), leaves, x.slice(first * ALIGN_ELEMS, len * ALIGN_ELEMS));
            fold_range(&leaves_of(leaves), first as u64, &mut nodes);
        }
        let mut whole_nodes = Vec::new();
        let whole: Vec<f64> = whole.into_iter().map(f64::from_bits).collect();
        fold_range(&whole, 0, &mut whole_nodes);
        let root = merge(&mut nodes);
        prop_assert_eq!(root.to_bits(), merge(&mut whole_nodes).to_bits());
        assert_near(&[root], &[want.iter().sum::<f64>()], 1, 0.0, 1e-13);
    }

    /// `add` is elementwise f32 addition.
    #[test]
    fn add_adds_and_zero_clears(
        len in prop_oneof![4 => 1usize..500, 1 => 32_000usize..70_000], seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let (start, x) = (arena.normal_values(len), arena.normal_values(len));
        let want: Vec<u32> = start.iter().zip(&x).map(|(a, b)| (a + b).to_bits()).collect();
        let mut same = SameBits::new();
        for queue in queues() {
            let (sum, x) = (arena.padded(&start, len, 3, DType::F32), arena.input(&x, DType::F32));
            add(&queue, sum.mat.view, x);
            prop_assert!(sum.bits() == want, "sums differ");
            same.check(&queue, vec![sum.bits(), bits(x)]);
            let rounded = arena.output(len, DType::BF16);
            copy(&queue, rounded, x);
            let nearest = values(x).into_iter().map(|x| f64::from(half::bf16::from_f32(x as f32).to_f32()));
            prop_assert!(values(rounded) == nearest.collect::<Vec<f64>>(), "not rounded to nearest");
            zero(&queue, sum.mat.view);
            prop_assert!(sum.bits().iter().all(|bits| *bits == 0), "not cleared");
        }
    }
}

/// In f32 the plain sum of squares would overflow or underflow.
#[test]
fn leaves_cover_the_whole_range_of_f32() {
    let arena = TestArena::new(1);
    for size in [1e30f32, 1e-30] {
        let x = arena.input(&[size; ALIGN_ELEMS], DType::F32);
        let leaves = arena.output(1, DType::F64);
        squared_sum_leaves(&queue(0), leaves, x);
        assert_near(&leaves_of(leaves), &[f64::from(size).powi(2) * ALIGN_ELEMS as f64], 1, 0.0, 1e-14);
    }
}

#[test]
fn zero_clears_every_dtype() {
    let arena = TestArena::new(1);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let x = arena.output(1000, dtype);
        zero(&queue(1), x);
        assert!(bits(x).iter().all(|bits| *bits == 0));
    }
}

#[test]
fn leaves_are_summed() {
    let arena = TestArena::new(1);
    let (leaves, out) = (arena.output(5, DType::F64), arena.output(2, DType::F64));
    leaves.write_host(&[1.0, 2.0, 4.0, 8.0, 0.5f64]);
    sum_leaves(&Queue::cpu(1), out, leaves);
    let sums = leaves_of(out);
    assert!(sums[0] == 15.5 && sums[1].is_nan(), "{sums:?}");
}

#[test]
fn a_decision_clips_unscales_and_skips() {
    let arena = TestArena::new(1);
    let clip_state = |sum: f64, max_norm| {
        let decision = arena.output(4, DType::F64);
        decision.write_host(&[sum]);
        decide_step(&Queue::cpu(1), decision, max_norm, 4.0);
        leaves_of(decision)
    };
    // A norm of 8 with a loss scale of 4.
    assert_eq!(clip_state(64.0, None), [64.0, 2.0, 0.25, 0.0]);
    assert_eq!(clip_state(64.0, Some(3.0)), [64.0, 2.0, 0.25, 0.0]);
    let clipped = clip_state(64.0, Some(0.5));
    assert!((clipped[2] - 0.0625).abs() < 1e-6 && clipped[3] == 0.0, "{clipped:?}");
    assert_eq!(clip_state(f64::INFINITY, Some(1.0))[3], 1.0);
    assert_eq!(clip_state(f64::NAN, None)[3], 1.0);
}

#[test]
fn indices_are_copied_too() {
    let arena = TestArena::new(1);
    let to = arena.output(3, DType::U32);
    copy(&Queue::cpu(2), to, arena.input_u32(&[7, 0, u32::MAX]));
    let mut out = [0u32; 3];
    to.read_host(&mut out);
    assert_eq!(out, [7, 0, u32::MAX]);
}
