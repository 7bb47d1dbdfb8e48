use lockstep_core::DType;
use proptest::prelude::*;

use super::*;
use crate::testing::{Operands, SameBits, TestArena, assert_near, dtype, norm, queues, tolerance};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn all_operations_match_the_reference(
        rows in 1usize..90, positions in 0usize..150, cols in 1usize..150, pad in 0usize..4, padding in 0usize..9,
        act in dtype(), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let padding = padding.min(positions);
        let source: Vec<u32> = arena.indices(positions, rows);
        let (offsets, entries) = reference::positions_of_rows(&source, rows, padding);
        let map = RowMap {
            source: arena.input_u32(&source),
            offsets: arena.input_u32(&offsets),
            entries: arena.input_u32(&entries),
        };
        let of_rows = arena.padded_normals(rows, cols, pad, act);
        let of_positions = arena.padded_normals(positions, cols, pad, act);
        let [rv, pv] = [of_rows.values(), of_positions.values()];
        let mut same = SameBits::new();
        for queue in queues() {
            let expanded = arena.padded_output(positions, cols, pad, act);
            expand(&queue, expanded.mat, of_rows.mat, map.source);
            let want: Vec<f64> =
                source.iter().flat_map(|m| rv[*m as usize * cols..][..cols].to_vec()).collect();
            prop_assert_eq!(expanded.values(), want);

            let firsts = arena.padded_output(positions, cols, pad, act);
            expand_first(&queue, firsts.mat, of_rows.mat, &map);
            prop_assert_eq!(firsts.values(), reference::expand_first(&rv, cols, &source, padding));

            let picked = arena.padded_output(rows, cols, pad, act);
            first(&queue, picked.mat, of_positions.mat, &map);
            prop_assert_eq!(picked.values(), reference::first(&pv, cols, &source, rows, padding));

            let sums = arena.padded_output(rows, cols, pad, act);
            sum(&queue, sums.mat, of_positions.mat, &map);
            let want = reference::sum(&pv, cols, &source, rows, padding);
            assert_near(&sums.values(), &want, cols, norm(&pv), tolerance(act));
            same.check(&queue, vec![expanded.bits(), firsts.bits(), picked.bits(), sums.bits()]);
        }
    }

    /// Adding up what was expanded gives each row once for every position: the two are each other's backward.
    #[test]
    fn the_sum_is_the_backward_of_expanding(
        rows in 1usize..20, positions in 1usize..40, cols in 1usize..9, seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let source: Vec<u32> = arena.indices(positions, rows);
        let (offsets, entries) = reference::positions_of_rows(&source, rows, 0);
        let map = RowMap {
            source: arena.input_u32(&source),
            offsets: arena.input_u32(&offsets),
            entries: arena.input_u32(&entries),
        };
        let [x, sums] = [arena.padded_normals(rows, cols, 0, DType::F32), arena.padded_output(rows, cols, 0, DType::F32)];
        let (y, dy) = (arena.padded_output(positions, cols, 0, DType::F32), arena.padded_normals(positions, cols, 0, DType::F32));
        let queue = Queue::cpu(1);
        expand(&queue, y.mat, x.mat, map.source);
        sum(&queue, sums.mat, dy.mat, &map);
        let (by_positions, by_rows) =
            (crate::testing::dot(&y.values(), &dy.values()), crate::testing::dot(&x.values(), &sums.values()));
        prop_assert!((by_positions - by_rows).abs() < 1e-4 * (1.0 + norm(&x.values()) * norm(&dy.values())));
    }
}
