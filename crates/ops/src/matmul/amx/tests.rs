use lockstep_core::DType;
use lockstep_device::{Amx, Queue, View};
use proptest::prelude::*;

use crate::Mat;
use crate::matmul::{Accumulate, KC, nn, nt, reference, scratch_bytes, tn};
use crate::testing::{Operands, TestArena, assert_near, bits, tolerance, values};

fn scratch<'b>(arena: &'b TestArena, queue: &Queue) -> View<'b> {
    arena.output(scratch_bytes(queue.num_threads()).0 as usize / 4, DType::F32)
}

/// Whether this machine has AMX.
fn tiles() -> bool {
    if Amx::detect().is_none() {
        println!("skipped: this machine has no AMX tiles");
    }
    Amx::detect().is_some()
}

/// The definition, element by element: what a tile instruction does with 32 steps, and how the results are combined.
fn defined(k: usize, init: Option<f32>, a: impl Fn(usize) -> f32, b: impl Fn(usize) -> f32) -> f32 {
    let steps: Vec<usize> = (0..k).collect();
    steps
        .chunks(KC)
        .fold(init, |value, block| {
            let sum = block.chunks(32).fold(0f32, |sum, tile| {
                let chain = |parity| {
                    let steps = tile.iter().skip(parity).step_by(2);
                    steps.fold(0f32, |sum, &l| a(l).mul_add(b(l), sum))
                };
                sum + (chain(0) + chain(1))
            });
            Some(value.map_or(sum, |value| value + sum))
        })
        .unwrap_or_default()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// All three layouts, every way to accumulate, odd shapes and strides, few rows and many, one thread and three:
    /// equal to the definition bit for bit, and to the reference up to rounding.
    #[test]
    fn matmul_follows_the_definition(
        m in 1usize..140, n in 1usize..140, k in 1usize..900, whole in any::<bool>(), pad in 0usize..5,
        narrow in any::<bool>(), init_kind in 0..3, threads in prop_oneof![Just(1), Just(3)], seed in any::<u64>(),
    ) {
        if !tiles() {
            return Ok(());
        }
        // Inner dimensions for which A is read in place would be rare otherwise.
        let k = if whole { k.next_multiple_of(32) } else { k };
        let arena = TestArena::new(seed);
        let queue = Queue::cpu(threads);
        let scratch = scratch(&arena, &queue);
        let [a, at, w, wt] = [(m, k), (k, m), (n, k), (k, n)].map(|(rows, cols)| {
            Mat::strided(arena.normals(rows * (cols + pad), DType::BF16), rows, cols, cols + pad)
        });
        let start = arena.normal_values(m * n);
        for form in ["nt", "nn", "tn"] {
            let out = if narrow && form != "tn" { DType::BF16 } else { DType::F32 };
            let base = arena.input(&start, out);
            let c = if init_kind == 1 { arena.input(&start, out) } else { arena.output(m * n, out) };
            let init = match init_kind {
                0 => Accumulate::Overwrite,
                1 => Accumulate::Add,
                _ => Accumulate::Residual(Mat::dense(base, m, n)),
            };
            let to = Mat::dense(c, m, n);
            let (left, right) = match form {
                "nt" => (a, w),
                "nn" => (a, wt),
                _ => (at, wt),
            };
            match form {
                "nt" => nt(&queue, to, left, right, init, scratch),
                "nn" => nn(&queue, to, left, right, init, scratch),
                _ => tn(&queue, to, left, right, init, scratch),
            }
            let (left_values, right_values, base) = (values(left.view), values(right.view), values(base));
            let left_at = |i: usize, l: usize| match form {
                "tn" => left_values[l * left.stride + i],
                _ => left_values[i * left.stride + l],
            };
            let right_at = |l: usize, j: usize| match form {
                "nt" => right_values[j * right.stride + l],
                _ => right_values[l * right.stride + j],
            };
            let mut close = reference::matmul(m, n, k, left_at, right_at);
            let mut same = Vec::new();
            for i in 0..m {
                for j in 0..n {
                    let init = (init_kind > 0).then(|| base[i * n + j] as f32);
                    same.push(defined(k, init, |l| left_at(i, l) as f32, |l| right_at(l, j) as f32));
                    close[i * n + j] += f64::from(init.unwrap_or_default());
                }
            }
            assert_near(&values(c), &close, n, ((m * n * k) as f64).sqrt(), tolerance(out));
            prop_assert!(bits(c) == bits(arena.input(&same, out)), "{form}: bits differ from the definition");
        }
    }

    /// Row contract: a row alone, and in any range of rows, has the same bits as in the whole.
    #[test]
    fn a_row_does_not_depend_on_the_others(
        m in 2usize..260, n in 1usize..100, k in 1usize..500, from in 0usize..260, len in 1usize..260,
        out in prop_oneof![Just(DType::F32), Just(DType::BF16)], seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let queue = Queue::cpu(2);
        let scratch = scratch(&arena, &queue);
        let (a, w) = (arena.normals(m * k, DType::BF16), arena.normals(n * k, DType::BF16));
        let whole = arena.output(m * n, out);
        nt(&queue, Mat::dense(whole, m, n), Mat::dense(a, m, k), Mat::dense(w, n, k), Accumulate::Overwrite, scratch);
        let from = from % m;
        let rows = len.min(m - from);
        let part = arena.output(rows * n, out);
        let a_part = Mat::dense(a, m, k).row_range(from, rows);
        nt(&queue, Mat::dense(part, rows, n), a_part, Mat::dense(w, n, k), Accumulate::Overwrite, scratch);
        prop_assert_eq!(bits(part), bits(whole.slice(from * n, rows * n)));
    }
}

/// Inner dimensions and widths beyond one slab, and few rows without scratch for a copy each.
#[test]
fn slabs_of_every_kind() {
    if !tiles() {
        return;
    }
    for (m, n, k, threads, out) in [
        (70, 5000, 300, 2, DType::F32),
        (70, 2900, 500, 2, DType::BF16),
        (66, 900, 2000, 2, DType::F32),
        (17, 50, 30_000, 9, DType::F32),
        (65, 80_000, 7, 2, DType::F32),
        (65, 80_000, 7, 2, DType::BF16),
    ] {
        let arena = TestArena::new(5);
        let queue = Queue::cpu(threads);
        let (a, b) = (arena.normals(m * k, DType::BF16), arena.normals(n * k, DType::BF16));
        let c = arena.output(m * n, out);
        let (a_mat, b_mat) = (Mat::dense(a, m, k), Mat::dense(b, n, k));
        nt(&queue, Mat::dense(c, m, n), a_mat, b_mat, Accumulate::Overwrite, scratch(&arena, &queue));
        let (av, bv) = (values(a), values(b));
        let want: Vec<f32> = (0..m * n)
            .map(|at| defined(k, None, |l| av[at / n * k + l] as f32, |l| bv[at % n * k + l] as f32))
            .collect();
        assert_eq!(bits(c), bits(arena.input(&want, out)), "{m} x {k} x {n}");
    }
}

/// NaN and infinity propagate, but only to their own row and column.
#[test]
fn non_finite_values_stay_in_their_row_and_column() {
    let arena = TestArena::new(7);
    let queue = Queue::cpu(1);
    for m in [3, 100] {
        let (n, k) = (40, 45);
        let mut a = vec![1f32; m * k];
        a[2 * k + 44] = f32::NAN;
        let (a, b) = (arena.input(&a, DType::BF16), arena.input(&vec![1f32; n * k], DType::BF16));
        let c = arena.output(m * n, DType::F32);
        let (a_mat, b_mat) = (Mat::dense(a, m, k), Mat::dense(b, n, k));
        nt(&queue, Mat::dense(c, m, n), a_mat, b_mat, Accumulate::Overwrite, scratch(&arena, &queue));
        for (at, value) in values(c).into_iter().enumerate() {
            assert!(if at / n == 2 { value.is_nan() } else { value == 45.0 }, "{value} at {at}");
        }
    }
}
