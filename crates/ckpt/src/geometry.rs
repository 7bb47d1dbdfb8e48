//! Boxes: the part of a tensor that a piece holds, as start and extent in every dimension.
//!
//! Pieces are boxes and not flat ranges, because the format on disk must not depend on the memory layout of a run.

use std::ops::Range;

/// A box-shaped part of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorBox {
    pub start: Vec<usize>,
    pub extent: Vec<usize>,
}

/// A range of elements that is contiguous both in a tensor and in a piece of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CopyRange {
    /// The flat range in the whole tensor.
    pub(crate) tensor: Range<usize>,
    /// The flat position of its first element in the piece.
    pub(crate) piece: usize,
}

impl TensorBox {
    /// The box that covers a whole tensor of `shape`.
    pub fn whole(shape: &[usize]) -> Self {
        TensorBox { start: vec![0; shape.len()], extent: shape.to_vec() }
    }

    /// The boxes that together are the flat `range` of a tensor of `shape`, in order: whole rows, preceded and
    /// followed by parts of a row.
    pub fn of_range(shape: &[usize], range: Range<usize>) -> Vec<TensorBox> {
        if range.is_empty() {
            return Vec::new();
        }
        let Some((rows, inner_shape)) = shape.split_first() else { return vec![TensorBox::whole(shape)] };
        debug_assert!(
            range.end <= rows * inner_shape.iter().product::<usize>(),
            "the range must lie inside the tensor"
        );
        let inner: usize = inner_shape.iter().product();
        let inside = |row: usize, part: Range<usize>| {
            TensorBox::of_range(inner_shape, part).into_iter().map(move |mut b| {
                b.start.insert(0, row);
                b.extent.insert(0, 1);
                b
            })
        };
        let (first, last) = (range.start.div_ceil(inner), range.end / inner);
        if first > last {
            // The range lies inside one row.
            return inside(last, range.start - last * inner..range.end - last * inner).collect();
        }
        let mut boxes: Vec<TensorBox> = Vec::new();
        if range.start < first * inner {
            boxes.extend(inside(first - 1, range.start - (first - 1) * inner..inner));
        }
        if first < last {
            let mut whole = TensorBox::whole(shape);
            (whole.start[0], whole.extent[0]) = (first, last - first);
            boxes.push(whole);
        }
        if last * inner < range.end {
            boxes.extend(inside(last, 0..range.end - last * inner));
        }
        boxes
    }

    pub fn elems(&self) -> usize {
        self.extent.iter().product()
    }

    /// Whether the box lies inside a tensor of `shape`.
    pub fn fits(&self, shape: &[usize]) -> bool {
        self.start.len() == shape.len()
            && self.extent.len() == shape.len()
            && (0..shape.len())
                .all(|d| self.start[d].checked_add(self.extent[d]).is_some_and(|end| end <= shape[d]))
    }

    /// Whether an element of the flat range `wanted` may lie in the box. Exact for boxes that are contiguous in the
    /// tensor, which is what ranks write; otherwise it may return a false positive.
    pub(crate) fn may_overlap(&self, shape: &[usize], wanted: &Range<usize>) -> bool {
        let (mut first, mut last, mut stride) = (0, 0, 1);
        for d in (0..shape.len()).rev() {
            if self.extent[d] == 0 {
                return false;
            }
            first += self.start[d] * stride;
            last += (self.start[d] + self.extent[d] - 1) * stride;
            stride *= shape[d];
        }
        first < wanted.end && wanted.start <= last
    }

    /// The contiguous ranges of this box, within a tensor of `shape`, that overlap the flat range `wanted`.
    pub(crate) fn copy_ranges(
        &self,
        shape: &[usize],
        wanted: &Range<usize>,
    ) -> impl Iterator<Item = CopyRange> {
        // Dimensions after `split` are complete, so the box is contiguous from `split` on.
        let split = (0..shape.len()).rev().find(|d| self.extent[*d] != shape[*d]).unwrap_or(0);
        let inner: usize = shape.iter().skip(split + 1).product();
        let run_len = self.extent.get(split).copied().unwrap_or(1) * inner;
        let outer = &self.extent[..split.min(self.extent.len())];
        let num_runs: usize = if run_len == 0 { 0 } else { outer.iter().product() };
        (0..num_runs).filter_map(move |run| {
            let (mut rest, mut at, mut stride) = (run, 0, inner * shape.get(split).copied().unwrap_or(1));
            for d in (0..split).rev() {
                at += (self.start[d] + rest % self.extent[d]) * stride;
                rest /= self.extent[d];
                stride *= shape[d];
            }
            at += self.start.get(split).copied().unwrap_or(0) * inner;
            let (start, end) = (at.max(wanted.start), (at + run_len).min(wanted.end));
            (start < end).then(|| CopyRange { tensor: start..end, piece: run * run_len + (start - at) })
        })
    }
}

/// Bounds the memory and time that a hostile manifest can cause. A million pieces of a matrix fit.
const MAX_CORNERS: usize = 1 << 22;

/// Whether the boxes cover a tensor of `shape` exactly once. Returns `false` if they have more than [`MAX_CORNERS`]
/// corners.
///
/// Runs in O(n log n). How often each element is covered is a function on the tensor, and such a function is
/// determined by its differences along all dimensions. The differences of a box are non-zero at its corners only,
/// with alternating signs. So the boxes cover the tensor exactly once if, at every corner, their signs sum to that of
/// the whole tensor.
pub(crate) fn tiles(boxes: &[&TensorBox], shape: &[usize]) -> bool {
    let Some(total) = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) else { return false };
    if !boxes.iter().all(|b| b.fits(shape)) {
        return false;
    }
    if total == 0 {
        return true;
    }
    let whole = TensorBox::whole(shape);
    // Dimensions that no box splits can be ignored.
    let divided: Vec<usize> = (0..shape.len())
        .filter(|d| boxes.iter().any(|b| b.extent[*d] != 0 && b.extent[*d] != shape[*d]))
        .collect();
    let per_box = u32::try_from(divided.len()).ok().and_then(|dims| 1usize.checked_shl(dims));
    let num_corners = per_box.and_then(|n| n.checked_mul(boxes.len() + 1));
    if num_corners.is_none_or(|n| n > MAX_CORNERS) {
        return false;
    }
    let mut corners: Vec<(u128, i32)> = Vec::with_capacity(num_corners.unwrap_or(0));
    for (part, sign) in boxes.iter().map(|b| (*b, 1)).chain([(&whole, -1)]) {
        if part.elems() > 0 {
            add_corners(part, shape, &divided, sign, &mut corners);
        }
    }
    corners.sort_unstable();
    corners
        .chunk_by(|a, b| a.0 == b.0)
        .all(|same| same.iter().map(|(_, sign)| i64::from(*sign)).sum::<i64>() == 0)
}

/// Adds the corners of a box along the dimensions `divided`, each encoded as one number.
fn add_corners(
    part: &TensorBox,
    shape: &[usize],
    divided: &[usize],
    sign: i32,
    corners: &mut Vec<(u128, i32)>,
) {
    let from = corners.len();
    corners.push((0, sign));
    for &d in divided {
        for i in from..corners.len() {
            let (at, sign) = corners[i];
            // A coordinate is at most `shape[d]`, and the product of a shape fits into 64 bits, so this cannot
            // overflow.
            let at = at * (shape[d] as u128 + 1) + part.start[d] as u128;
            corners[i].0 = at;
            corners.push((at + part.extent[d] as u128, -sign));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The flat index of every element of the box, computed from its coordinates.
    fn flat_indices(part: &TensorBox, shape: &[usize]) -> Vec<usize> {
        (0..part.elems())
            .map(|elem| {
                let (mut rest, mut at, mut stride) = (elem, 0, 1);
                for d in (0..shape.len()).rev() {
                    at += (part.start[d] + rest % part.extent[d]) * stride;
                    rest /= part.extent[d];
                    stride *= shape[d];
                }
                at
            })
            .collect()
    }

    fn shape_and_box() -> impl Strategy<Value = (Vec<usize>, TensorBox)> {
        let dim = (1usize..5)
            .prop_flat_map(|n| (Just(n), 0..n))
            .prop_flat_map(|(n, s)| (Just(n), Just(s), 0..=n - s));
        prop::collection::vec(dim, 0..4).prop_map(|dims| {
            let shape = dims.iter().map(|d| d.0).collect();
            (
                shape,
                TensorBox {
                    start: dims.iter().map(|d| d.1).collect(),
                    extent: dims.iter().map(|d| d.2).collect(),
                },
            )
        })
    }

    proptest! {
        #[test]
        fn copy_ranges_cover_the_box(case in shape_and_box(), from in 0usize..64, len in 0usize..64) {
            let (shape, part) = case;
            let total: usize = shape.iter().product();
            let wanted = from.min(total)..(from + len).min(total);
            let by_range: Vec<(usize, usize)> = part
                .copy_ranges(&shape, &wanted)
                .flat_map(|copy| copy.tensor.enumerate().map(move |(i, at)| (copy.piece + i, at)))
                .collect();
            let expected: Vec<(usize, usize)> =
                flat_indices(&part, &shape).into_iter().enumerate().filter(|(_, at)| wanted.contains(at)).collect();
            prop_assert_eq!(by_range, expected);
        }
    }

    proptest! {
        #[test]
        fn boxes_of_a_range_cover_it_in_order(
            shape in prop::collection::vec(1usize..6, 0..4), from in 0usize..200, len in 0usize..200,
        ) {
            let total: usize = shape.iter().product();
            let range = from.min(total)..(from + len).min(total);
            let boxes = TensorBox::of_range(&shape, range.clone());
            let elems: Vec<usize> = boxes.iter().flat_map(|b| flat_indices(b, &shape)).collect();
            prop_assert_eq!(elems, range.collect::<Vec<_>>());
            prop_assert!(boxes.len() < 2 * shape.len().max(1) + 1);
        }
    }

    proptest! {
        #[test]
        fn tiles_matches_a_count_of_every_element(
            shape in prop::collection::vec(1usize..4, 0..4),
            cuts in prop::collection::vec((0usize..3, 0usize..4), 0..6),
            change in 0usize..4,
        ) {
            let mut boxes = vec![TensorBox::whole(&shape)];
            for (dim, at) in cuts.iter().filter(|_| !shape.is_empty()) {
                let (dim, mut part) = (dim % shape.len(), boxes.remove(0));
                let mut rest = part.clone();
                let first = at % (part.extent[dim] + 1);
                (rest.start[dim], rest.extent[dim]) = (part.start[dim] + first, part.extent[dim] - first);
                part.extent[dim] = first;
                boxes.extend([part, rest]);
            }
            match change {
                0 => drop(boxes.pop()),
                1 => boxes.push(boxes[0].clone()),
                2 => boxes[0] = boxes[boxes.len() - 1].clone(),
                _ => {}
            }
            let mut counts = vec![0; shape.iter().product()];
            boxes.iter().flat_map(|b| flat_indices(b, &shape)).for_each(|at| counts[at] += 1);
            let boxes: Vec<&TensorBox> = boxes.iter().collect();
            prop_assert_eq!(tiles(&boxes, &shape), counts.iter().all(|n| *n == 1));
        }
    }

    proptest! {
        #[test]
        fn boxes_that_cannot_overlap_a_range_have_no_copy_ranges_in_it(
            case in shape_and_box(), from in 0usize..64, len in 0usize..64,
        ) {
            let (shape, part) = case;
            let wanted = from..from + len;
            prop_assert!(part.may_overlap(&shape, &wanted) || part.copy_ranges(&shape, &wanted).next().is_none());
        }
    }

    #[test]
    fn tiles_accepts_only_exact_covers() {
        let part =
            |start: [usize; 2], extent: [usize; 2]| TensorBox { start: start.into(), extent: extent.into() };
        let (top, bottom, left) = (part([0, 0], [2, 3]), part([2, 0], [2, 3]), part([0, 0], [4, 1]));
        assert!(tiles(&[&top, &bottom], &[4, 3]));
        assert!(!tiles(&[&top], &[4, 3]));
        assert!(!tiles(&[&top, &top], &[4, 3]));
        assert!(!tiles(&[&top, &bottom, &left], &[4, 3]));
        assert!(!tiles(&[&part([0, 0], [4, 4])], &[4, 3]));
        assert!(!tiles(&[&part([usize::MAX, 0], [2, 3]), &bottom], &[4, 3]));
        assert!(tiles(&[&TensorBox::whole(&[])], &[]));
        assert!(!tiles(&[], &[]));
        assert!(tiles(&[], &[0, 3]));
    }

    #[test]
    fn ten_thousand_pieces_of_either_kind_cover_a_tensor() {
        let (rows, columns) = (4000, 25_000);
        let range = |i: usize| i * 10_000..(i + 1) * 10_000;
        let contiguous: Vec<TensorBox> =
            (0..10_000).flat_map(|i| TensorBox::of_range(&[rows, columns], range(i))).collect();
        let tile = |i: usize| TensorBox { start: vec![i / 100 * 40, i % 100 * 250], extent: vec![40, 250] };
        let grid: Vec<TensorBox> = (0..10_000).map(tile).collect();
        for boxes in [contiguous, grid] {
            let mut boxes: Vec<&TensorBox> = boxes.iter().collect();
            assert!(tiles(&boxes, &[rows, columns]));
            let last = boxes.pop().unwrap();
            assert!(!tiles(&boxes, &[rows, columns]), "one piece is missing");
            boxes.extend([last, last]);
            assert!(!tiles(&boxes, &[rows, columns]), "one piece occurs twice");
        }
    }

    #[test]
    fn hostile_boxes_are_refused_in_bounded_time() {
        let shape = [2; 40];
        let part = |d: usize| {
            let mut part = TensorBox::whole(&shape);
            part.extent[d] = 1;
            part
        };
        let boxes: Vec<TensorBox> = (0..40).map(part).collect();
        assert!(!tiles(&boxes.iter().collect::<Vec<_>>(), &shape));
    }
}
