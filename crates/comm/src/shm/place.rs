//! Where an offer lies: two words in a control block.

use lockstep_core::DType;

use crate::call::{dtype_code, dtype_from_code};

/// Elements at a byte of one of the owner's regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) region: u8,
    /// Bytes from the region's start; below 2^48. Of inline offers, from the start of the slot's bytes.
    pub(crate) offset: u64,
    /// Elements.
    pub(crate) len: u64,
    pub(crate) dtype: DType,
}

impl Place {
    pub(crate) const NONE: Place = Place { region: 0, offset: 0, len: 0, dtype: DType::U32 };

    pub(crate) fn to_words(self) -> [u64; 2] {
        debug_assert!(self.offset < 1 << 48);
        [u64::from(self.region) | (dtype_code(self.dtype) << 8) | (self.offset << 16), self.len]
    }

    /// `None` if the words are no place inside the regions, whose sizes are `regions`.
    pub(crate) fn from_words(words: [u64; 2], regions: impl Fn(u8) -> Option<u64>) -> Option<Place> {
        let place = Place {
            region: words[0] as u8,
            dtype: dtype_from_code((words[0] >> 8) & 0xff)?,
            offset: words[0] >> 16,
            len: words[1],
        };
        let end = place.len.checked_mul(place.dtype.size() as u64)?.checked_add(place.offset)?;
        (end <= regions(place.region)?).then_some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_back_within_bounds() {
        let place = Place { region: 3, offset: 1 << 40, len: 5, dtype: DType::BF16 };
        let sizes = |size: u64| move |region: u8| (region == 3).then_some(size);
        assert_eq!(Place::from_words(place.to_words(), sizes((1 << 40) + 10)), Some(place));
        assert_eq!(Place::from_words(place.to_words(), sizes((1 << 40) + 9)), None);
        assert_eq!(Place::from_words(Place { region: 2, ..place }.to_words(), sizes(u64::MAX)), None);
        assert_eq!(Place::from_words([place.to_words()[0], u64::MAX], sizes(u64::MAX)), None);
        assert_eq!(Place::from_words([0, 0], sizes(u64::MAX)), None);
    }
}
