use lockstep_core::DType;
use lockstep_device::{Queue, View};
use proptest::prelude::*;

use super::*;
use crate::Mat;
use crate::testing::{Operands, TestArena, assert_close, assert_near, bits, queues, tolerance, values};

fn scratch<'b>(arena: &'b TestArena, queue: &Queue) -> View<'b> {
    arena.output(scratch_bytes(queue.num_threads()).0 as usize / 4, DType::F32)
}

fn dtype() -> impl Strategy<Value = DType> {
    prop_oneof![3 => Just(DType::F32), 1 => Just(DType::BF16), 1 => Just(DType::F16)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// All three layouts, every way to accumulate, odd shapes and strides, every instruction set and thread count:
    /// equal to the reference up to rounding, and to each other bit for bit.
    #[test]
    fn matmul_matches_the_reference(
        m in 1usize..140, n in 1usize..140, k in 1usize..900,
        pad in 0usize..5, act in dtype(), weight in dtype(), init_kind in 0..3, seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let a = arena.normals(m * (k + pad), act);
        let at = arena.normals(k * (m + pad), act);
        let w = arena.normals(n * (k + pad), weight);
        let wt = arena.normals(k * (n + pad), weight);
        let start = arena.normal_values(m * n);
        let (av, atv, wv, wtv) = (values(a), values(at), values(w), values(wt));
        let a_rows = Mat::strided(a, m, k, k + pad);
        let a_cols = Mat::strided(at, k, m, m + pad);
        let w_rows = Mat::strided(w, n, k, k + pad);
        let w_nat = Mat::strided(wt, k, n, n + pad);
        let mut first: Option<[Vec<u32>; 3]> = None;
        for queue in queues() {
            let scratch = scratch(&arena, &queue);
            let mut all = Vec::new();
            for form in 0..3 {
                let out_dtype = if form == 2 { DType::F32 } else { act };
                let base = arena.input(&start, out_dtype);
                let c = if init_kind == 1 { arena.input(&start, out_dtype) } else { arena.output(m * n, out_dtype) };
                let c_mat = Mat::dense(c, m, n);
                let init = match init_kind {
                    0 => Accumulate::Overwrite,
                    1 => Accumulate::Add,
                    _ => Accumulate::Residual(Mat::dense(base, m, n)),
                };
                let mut want = match form {
                    0 => {
                        nt(&queue, c_mat, a_rows, w_rows, init, scratch);
                        reference::matmul(m, n, k, |i, l| av[i * (k + pad) + l], |l, j| wv[j * (k + pad) + l])
                    }
                    1 => {
                        nn(&queue, c_mat, a_rows, w_nat, init, scratch);
                        reference::matmul(m, n, k, |i, l| av[i * (k + pad) + l], |l, j| wtv[l * (n + pad) + j])
                    }
                    _ => {
                        tn(&queue, c_mat, a_cols, w_nat, init, scratch);
                        reference::matmul(m, n, k, |i, l| atv[l * (m + pad) + i], |l, j| wtv[l * (n + pad) + j])
                    }
                };
                if init_kind > 0 {
                    want.iter_mut().zip(values(base)).for_each(|(w, b)| *w += b);
                }
                // Terms may cancel, above all if a row has one element.
                assert_near(&values(c), &want, n, ((m * n * k) as f64).sqrt(), tolerance(out_dtype));
                all.push(bits(c));
            }
            let all: [Vec<u32>; 3] = all.try_into().unwrap();
            prop_assert!(first.get_or_insert_with(|| all.clone()) == &all, "bits differ between queues");
        }
    }

    /// Row contract: a row alone, and in any range of rows, has the same bits as in the whole.
    #[test]
    fn a_row_does_not_depend_on_the_others(
        m in 2usize..150, n in 1usize..100, k in 1usize..500, from in 0usize..150, len in 1usize..150,
        act in dtype(), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let queue = Queue::cpu(2);
        let scratch = scratch(&arena, &queue);
        let (a, w) = (arena.normals(m * k, act), arena.normals(n * k, DType::F32));
        let whole = arena.output(m * n, act);
        nt(&queue, Mat::dense(whole, m, n), Mat::dense(a, m, k), Mat::dense(w, n, k), Accumulate::Overwrite, scratch);
        let from = from % m;
        let rows = len.min(m - from);
        let part = arena.output(rows * n, act);
        let a_part = Mat::dense(a, m, k).row_range(from, rows);
        nt(&queue, Mat::dense(part, rows, n), a_part, Mat::dense(w, n, k), Accumulate::Overwrite, scratch);
        prop_assert_eq!(bits(part), bits(whole.slice(from * n, rows * n)));
    }
}

#[test]
fn long_inner_dimensions_and_wide_outputs_cross_slabs() {
    let arena = TestArena::new(3);
    let queue = Queue::cpu(2);
    let scratch = scratch(&arena, &queue);
    let (m, n, k) = (13, 70, 40_000);
    let (a, b) = (arena.normals(k * m, DType::F32), arena.normals(k * n, DType::F32));
    let c = arena.output(m * n, DType::F32);
    tn(&queue, Mat::dense(c, m, n), Mat::dense(a, k, m), Mat::dense(b, k, n), Accumulate::Overwrite, scratch);
    let (av, bv) = (values(a), values(b));
    assert_close(c, &reference::matmul(m, n, k, |i, l| av[l * m + i], |l, j| bv[l * n + j]), n, 3e-6);
}

#[test]
fn slabs_of_every_kind() {
    let queue = Queue::cpu(2);
    for (m, n, k, out) in
        [(3, 5000, 288, DType::F32), (3, 2900, 500, DType::BF16), (2, 4000, 800, DType::F32)]
    {
        let arena = TestArena::new(5);
        let scratch = scratch(&arena, &queue);
        let (a, b) = (arena.normals(m * k, out), arena.normals(n * k, DType::F32));
        let c = arena.output(m * n, out);
        nt(
            &queue,
            Mat::dense(c, m, n),
            Mat::dense(a, m, k),
            Mat::dense(b, n, k),
            Accumulate::Overwrite,
            scratch,
        );
        let (av, bv) = (values(a), values(b));
        assert_close(
            c,
            &reference::matmul(m, n, k, |i, l| av[i * k + l], |l, j| bv[j * k + l]),
            n,
            tolerance(out),
        );
    }
}

/// As large as in training, compared on some rows and some columns.
#[test]
fn matmul_of_training_size() {
    let queue = Queue::cpu(2);
    let (m, n, k) = (512, 1024, 1536);
    for dtype in [DType::F32, DType::BF16] {
        let arena = TestArena::new(7);
        let scratch = scratch(&arena, &queue);
        let (a, b) = (arena.normals(m * k, dtype), arena.normals(n * k, dtype));
        let c = arena.output(m * n, DType::F32);
        nt(
            &queue,
            Mat::dense(c, m, n),
            Mat::dense(a, m, k),
            Mat::dense(b, n, k),
            Accumulate::Overwrite,
            scratch,
        );
        let (av, bv, cv) = (values(a), values(b), values(c));
        assert!(cv.iter().all(|c| c.is_finite()), "every element is written");
        let [rows, columns] = [m, n].map(|count| reference::some_of(count, 8));
        let got: Vec<f64> = rows.iter().flat_map(|i| &cv[i * n..][..n]).copied().collect();
        let want = reference::matmul(rows.len(), n, k, |i, l| av[rows[i] * k + l], |l, j| bv[j * k + l]);
        assert_near(&got, &want, n, 0.0, 3e-6);
        let got: Vec<f64> = columns.iter().flat_map(|j| cv[*j..].iter().step_by(n)).copied().collect();
        let want =
            reference::matmul(columns.len(), m, k, |j, l| bv[columns[j] * k + l], |l, i| av[i * k + l]);
        assert_near(&got, &want, m, 0.0, 3e-6);
    }
}

/// Few rows over an inner dimension so long that threads have no scratch for a copy each.
#[test]
fn few_rows_are_packed_once_or_per_thread() {
    for k in [300, 30_000] {
        let arena = TestArena::new(11);
        let (m, n) = (17, 50);
        let (a, b) = (arena.normals(m * k, DType::F32), arena.normals(n * k, DType::F32));
        let [one, many] = [1, 9].map(|threads| {
            let queue = Queue::cpu(threads);
            let c = arena.output(m * n, DType::F32);
            let scratch = scratch(&arena, &queue);
            nt(
                &queue,
                Mat::dense(c, m, n),
                Mat::dense(a, m, k),
                Mat::dense(b, n, k),
                Accumulate::Overwrite,
                scratch,
            );
            c
        });
        assert_eq!(bits(one), bits(many), "{k}");
        let (av, bv) = (values(a), values(b));
        assert_close(many, &reference::matmul(m, n, k, |i, l| av[i * k + l], |l, j| bv[j * k + l]), n, 3e-6);
    }
}

#[test]
fn an_empty_batch_is_a_no_op_and_an_empty_sum_is_zero() {
    let arena = TestArena::new(3);
    let queue = Queue::cpu(2);
    let scratch = scratch(&arena, &queue);
    let empty = arena.output(0, DType::F32);
    let w = arena.normals(8 * 4, DType::F32);
    nt(
        &queue,
        Mat::dense(empty, 0, 8),
        Mat::dense(empty, 0, 4),
        Mat::dense(w, 8, 4),
        Accumulate::Overwrite,
        scratch,
    );
    let c = arena.output(6, DType::F32);
    tn(
        &queue,
        Mat::dense(c, 2, 3),
        Mat::dense(empty, 0, 2),
        Mat::dense(empty, 0, 3),
        Accumulate::Overwrite,
        scratch,
    );
    assert_eq!(values(c), [0.0; 6]);
}
