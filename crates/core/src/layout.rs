//! Shard ranges: how a flat parameter is split over ranks, on multiples of 256 elements.

/// Tensors and shards start on multiples of this many elements: 1 KiB of f32, a whole number of cache lines and vectors
/// in every type, and the block of the gradient norm's leaves.
pub const ALIGN_ELEMS: usize = 256;

/// Elements of a 4-bit weight that share a scale.
pub const NF4_BLOCK_ELEMS: usize = 64;

/// Scales of a 4-bit weight that share a scale of their own.
pub const NF4_SCALES_PER_BLOCK: usize = 256;

/// `elems` rounded up to a whole number of alignment blocks.
pub const fn padded_elems(elems: usize) -> usize {
    elems.div_ceil(ALIGN_ELEMS) * ALIGN_ELEMS
}

/// Elements `[start, end)`, owned by one rank of a shard group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardRange {
    pub start: usize,
    pub end: usize,
}

impl ShardRange {
    pub const fn elems(&self) -> usize {
        self.end - self.start
    }
}

/// The shard with index `idx` of `num_shards`, of `unit_elems` elements (a multiple of [`ALIGN_ELEMS`]). All shards have
/// the same size, except the last ones, which may be shorter or empty. So collectives with equal sizes can pad to the size
/// of shard 0.
pub fn shard_range(unit_elems: usize, num_shards: u32, idx: u32) -> ShardRange {
    assert!(
        unit_elems.is_multiple_of(ALIGN_ELEMS),
        "{unit_elems} elements are not a multiple of {ALIGN_ELEMS}"
    );
    assert!(idx < num_shards, "shard {idx} of {num_shards}");
    let blocks = unit_elems / ALIGN_ELEMS;
    let per_shard = blocks.div_ceil(num_shards as usize);
    let start = (per_shard * idx as usize).min(blocks);
    let end = (start + per_shard).min(blocks);
    ShardRange { start: start * ALIGN_ELEMS, end: end * ALIGN_ELEMS }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shards_tile_the_unit(blocks in 0usize..5000, num_shards in 1u32..70) {
            let unit = blocks * ALIGN_ELEMS;
            let mut next = 0;
            for idx in 0..num_shards {
                let range = shard_range(unit, num_shards, idx);
                prop_assert_eq!(range.start, next);
                prop_assert!(range.elems() <= shard_range(unit, num_shards, 0).elems());
                next = range.end;
            }
            prop_assert_eq!(next, unit);
        }
    }
}
