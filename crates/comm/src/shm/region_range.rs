//! The position of an offer in its owner's memory, encoded as two words in a control block.

use lockstep_core::DType;

use crate::call::{dtype_code, dtype_from_code};

/// A range of elements in one of the owner's regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionRange {
    pub(crate) region: u8,
    /// Bytes from the start of the region, less than 2^48. For inline offers, from the start of the slot's bytes.
    pub(crate) offset: u64,
    /// Number of elements.
    pub(crate) len: u64,
    pub(crate) dtype: DType,
}

impl RegionRange {
    pub(crate) const NONE: RegionRange = RegionRange { region: 0, offset: 0, len: 0, dtype: DType::U32 };

    pub(crate) fn to_words(self) -> [u64; 2] {
        debug_assert!(self.offset < 1 << 48);
        [u64::from(self.region) | (dtype_code(self.dtype) << 8) | (self.offset << 16), self.len]
    }

    /// `None` if the words do not encode a range inside the regions, whose sizes in bytes are given by `regions`.
    pub(crate) fn from_words(words: [u64; 2], regions: impl Fn(u8) -> Option<u64>) -> Option<RegionRange> {
        let range = RegionRange {
            region: words[0] as u8,
            dtype: dtype_from_code((words[0] >> 8) & 0xff)?,
            offset: words[0] >> 16,
            len: words[1],
        };
        let end = range.len.checked_mul(range.dtype.size() as u64)?.checked_add(range.offset)?;
        (end <= regions(range.region)?).then_some(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_survive_encoding_and_out_of_bounds_ones_are_rejected() {
        let range = RegionRange { region: 3, offset: 1 << 40, len: 5, dtype: DType::BF16 };
        let sizes = |size: u64| move |region: u8| (region == 3).then_some(size);
        assert_eq!(RegionRange::from_words(range.to_words(), sizes((1 << 40) + 10)), Some(range));
        assert_eq!(RegionRange::from_words(range.to_words(), sizes((1 << 40) + 9)), None);
        assert_eq!(
            RegionRange::from_words(RegionRange { region: 2, ..range }.to_words(), sizes(u64::MAX)),
            None
        );
        assert_eq!(RegionRange::from_words([range.to_words()[0], u64::MAX], sizes(u64::MAX)), None);
        assert_eq!(RegionRange::from_words([0, 0], sizes(u64::MAX)), None);
    }
}
