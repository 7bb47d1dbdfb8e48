use lockstep_core::DType;
use lockstep_device::Queue;
use proptest::prelude::*;

use super::*;
use crate::testing::{
    Operands, SameBits, TestArena, assert_near, dot, dtype, finite_differences, queue, queues, tolerance,
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// The table has few rows, so that most tokens occur several times.
    #[test]
    fn forward_and_backward_match_the_reference(
        tokens in 1usize..120, rows in 1usize..40, cols in 1usize..150, pad in 0usize..4,
        act in dtype(), weight in dtype(), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let table = arena.padded_normals(rows, cols, pad, weight);
        let dx = arena.padded_normals(tokens, cols, pad, act);
        let before = arena.normal_values(rows * cols);
        let indices = arena.indices(tokens, rows);
        let tokens_view = arena.input_u32(&indices);
        let mut want: Vec<f64> = before.iter().copied().map(f64::from).collect();
        reference::backward(&mut want, &dx.values(), cols, &indices);
        let mut same = SameBits::new();
        for queue in queues() {
            let x = arena.padded_output(tokens, cols, pad, act);
            forward(&queue, x.mat, table.mat, tokens_view);
            let rounding = if act == weight { 0.0 } else { tolerance(act) };
            assert_near(&x.values(), &reference::forward(&table.values(), cols, &indices), cols, 0.0, rounding);
            let dtable = arena.padded(&before, cols, pad, DType::F32);
            backward(&queue, dtable.mat, dx.mat, tokens_view, View::empty());
            assert_near(&dtable.values(), &want, cols, ((rows * cols) as f64).sqrt(), tolerance(DType::F32));
            same.check(&queue, vec![x.bits(), dtable.bits()]);
        }
    }

    #[test]
    fn backward_matches_finite_differences_of_the_reference(
        tokens in 1usize..6, rows in 1usize..5, cols in 1usize..6, seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let table: Vec<f64> = arena.normal_values(rows * cols).into_iter().map(f64::from).collect();
        let r = arena.padded_normals(tokens, cols, 0, DType::F32);
        let indices = arena.indices(tokens, rows);
        let dtable = arena.padded(&vec![0.0; rows * cols], cols, 0, DType::F32);
        backward(&Queue::cpu(1), dtable.mat, r.mat, arena.input_u32(&indices), View::empty());
        let slope = finite_differences(&table, |table| dot(&r.values(), &reference::forward(table, cols, &indices)));
        assert_near(&dtable.values(), &slope, cols, 1.0, tolerance(DType::F32));
    }

    /// The row contract in forward; in backward, the same sums in the same order however the tokens are split into
    /// calls.
    #[test]
    fn splitting_tokens_into_calls_changes_nothing(
        tokens in 2usize..150, rows in 1usize..20, cols in 1usize..150, cut in 0usize..150, act in dtype(),
        picks in (0usize..9, 0usize..9), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let table = arena.padded_normals(rows, cols, 0, DType::F32);
        let dx = arena.padded_normals(tokens, cols, 0, act);
        let before = arena.normal_values(rows * cols);
        let indices = arena.input_u32(&arena.indices(tokens, rows));
        let run = |pick: usize, parts: &[(usize, usize)]| {
            let x = arena.padded_output(tokens, cols, 0, act);
            let dtable = arena.padded(&before, cols, 0, DType::F32);
            for (from, len) in parts.iter().copied() {
                let tokens = indices.slice(from, len);
                forward(&queue(pick), x.mat.row_range(from, len), table.mat, tokens);
                backward(&queue(pick), dtable.mat, dx.mat.row_range(from, len), tokens, View::empty());
            }
            (x.bits(), dtable.bits())
        };
        let cut = cut % (tokens + 1);
        prop_assert_eq!(run(picks.0, &[(0, tokens)]), run(picks.1, &[(0, cut), (cut, tokens - cut)]));
    }
}

#[test]
#[should_panic]
fn a_token_outside_the_table_is_refused_forward() {
    let arena = TestArena::new(1);
    let table = arena.padded_normals(3, 4, 0, DType::F32);
    let x = arena.padded_output(1, 4, 0, DType::F32);
    forward(&Queue::cpu(1), x.mat, table.mat, arena.input_u32(&[3]));
}

#[test]
#[should_panic(expected = "token 3 of 3")]
fn a_token_outside_the_table_is_refused_backward() {
    let arena = TestArena::new(1);
    let dtable = arena.padded_normals(3, 4, 0, DType::F32);
    let dx = arena.padded_normals(1, 4, 0, DType::F32);
    backward(&Queue::cpu(1), dtable.mat, dx.mat, arena.input_u32(&[3]), View::empty());
}
