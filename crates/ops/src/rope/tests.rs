use lockstep_core::DType;
use lockstep_device::Queue;
use proptest::prelude::*;

use super::*;
use crate::testing::{
    Operands, SameBits, TestArena, assert_near, dot, dtype, finite_differences, queue, queues, tolerance,
    values,
};

const POSITIONS: usize = 300;

/// The usual frequencies: base^(−i / half).
fn frequencies(half: usize) -> Vec<f64> {
    (0..half).map(|i| 10_000f64.powf(-(i as f64) / half as f64)).collect()
}

fn table(arena: &TestArena, half: usize) -> Table<'_> {
    scaled_table(arena, half, 1.0)
}

fn scaled_table(arena: &TestArena, half: usize, scale: f64) -> Table<'_> {
    let angles = || arena.output(POSITIONS * half, DType::F32);
    let table = Table { cos: angles(), sin: angles(), half };
    fill(table, &frequencies(half), scale).unwrap();
    table
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn forward_and_backward_match_the_reference(
        rows in 1usize..110, heads in 1usize..5, half in 1usize..40, pad in 0usize..4, act in dtype(),
        seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let cols = heads * 2 * half;
        let table = table(&arena, half);
        let positions = arena.indices(rows, POSITIONS);
        let positions_view = arena.input_u32(&positions);
        let start = arena.normal_values(rows * cols);
        let frequencies = frequencies(half);
        let mut same = SameBits::new();
        for queue in queues() {
            let mut results = Vec::new();
            for direction in [Direction::Forward, Direction::Backward] {
                let x = arena.padded(&start, cols, pad, act);
                let xv = x.values();
                let want = match direction {
                    Direction::Forward => reference::forward(&xv, cols, &positions, &frequencies),
                    Direction::Backward => reference::backward(&xv, cols, &positions, &frequencies),
                };
                apply(&queue, x.mat, positions_view, table, direction);
                assert_near(&x.values(), &want, 2 * half, 0.0, tolerance(act));
                results.push(x.bits());
            }
            same.check(&queue, results);
        }
    }

    #[test]
    fn backward_matches_finite_differences_of_the_reference(
        rows in 1usize..4, heads in 1usize..3, half in 1usize..5, scale in 0.5f64..2.0, seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let (cols, frequencies) = (heads * 2 * half, frequencies(half));
        let positions = arena.indices(rows, POSITIONS);
        let x: Vec<f64> = arena.normal_values(rows * cols).into_iter().map(f64::from).collect();
        let gradient = arena.padded_normals(rows, cols, 0, DType::F32);
        let r = gradient.values();
        let table = scaled_table(&arena, half, scale);
        apply(&Queue::cpu(1), gradient.mat, arena.input_u32(&positions), table, Direction::Backward);
        let turned = |x: &[f64]| reference::forward(x, cols, &positions, &frequencies);
        let slope = finite_differences(&x, |x| scale * dot(&r, &turned(x)));
        assert_near(&gradient.values(), &slope, 2 * half, 0.0, tolerance(DType::F32));
    }

    /// Row contract: any range of rows has the same bits as in the whole, on any queue. So do heads that are columns of
    /// a wider matrix.
    #[test]
    fn a_row_does_not_depend_on_the_others(
        rows in 1usize..150, half in 1usize..40, from in 0usize..150, len in 1usize..150,
        act in dtype(), picks in (0usize..9, 0usize..9), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let (width, table) = (2 * half, table(&arena, half));
        let positions = arena.input_u32(&arena.indices(rows, POSITIONS));
        let start = arena.normal_values(rows * 3 * width);
        let whole = arena.padded(&start, 3 * width, 0, act);
        let before = whole.bits();
        apply(&queue(picks.0), whole.mat, positions, table, Direction::Forward);
        let from = from % rows;
        let len = len.min(rows - from);
        let part = arena.padded(&start, 3 * width, 0, act);
        let middle = part.mat.row_range(from, len).columns(width, width);
        apply(&queue(picks.1), middle, positions.slice(from, len), table, Direction::Forward);
        for (i, (got, (turned, before))) in part.bits().iter().zip(whole.bits().iter().zip(&before)).enumerate() {
            let (row, head) = (i / (3 * width), i / width % 3);
            let inside = (from..from + len).contains(&row) && head == 1;
            prop_assert_eq!(got, if inside { turned } else { before }, "row {}, head {}", row, head);
        }
    }
}

#[test]
fn the_table_has_the_angles_of_every_position() {
    let arena = TestArena::new(1);
    let (half, frequencies) = (7, frequencies(7));
    let table = table(&arena, half);
    let (cos, sin) = (values(table.cos), values(table.sin));
    for i in 0..POSITIONS * half {
        let angle = (i / half) as f64 * frequencies[i % half];
        assert_eq!((cos[i], sin[i]), (f64::from(angle.cos() as f32), f64::from(angle.sin() as f32)));
    }
}

#[test]
fn zero_rows_are_a_no_op() {
    let arena = TestArena::new(1);
    let empty = arena.output(0, DType::F32);
    apply(
        &Queue::cpu(2),
        Mat::dense(empty, 0, 8),
        arena.input_u32(&[]),
        table(&arena, 2),
        Direction::Forward,
    );
}
