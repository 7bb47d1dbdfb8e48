//! Counter-based random numbers: Philox 4x32 with ten rounds.
//!
//! A random number is a pure function of (seed, purpose, a, b, index). There is no state to save: a resumed run draws the
//! same numbers as an uninterrupted one, and any rank can draw the numbers of any sample.

use sha2::{Digest, Sha256};

/// What random numbers are used for. Streams with different purposes never overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    /// Initial weights of a tensor, by its name ([`RngStream::named`]).
    Init = 1,
    /// `a` = epoch.
    DataOrder = 2,
    /// `a` = step, `b` = sample. Each block is the seed of one mask, whose stream has `a` = position and `b` = head.
    Dropout = 3,
    /// `a` = step, `b` = sample.
    Sampling = 4,
    /// The split into training and evaluation rows. `a` = file.
    DataSplit = 5,
    /// Which sequences of a rollout each step uses. `a` = rollout, `b` = pass over it.
    RolloutOrder = 6,
    /// Stochastic rounding of a tensor, by its name: keys of [`crate::rounding::RoundingBits`].
    Rounding = 7,
}

/// One stream of random numbers: four words of 32 bits for every index.
#[derive(Clone, Copy, Debug)]
pub struct RngStream {
    key: [u32; 2],
    purpose: Purpose,
    a: u32,
    b: u32,
}

impl RngStream {
    pub fn new(seed: u64, purpose: Purpose, a: u32, b: u32) -> Self {
        RngStream { key: [seed as u32, (seed >> 32) as u32], purpose, a, b }
    }

    /// The stream of something with a name, such as a tensor: `a` and `b` are a hash of the name.
    pub fn named(seed: u64, purpose: Purpose, name: &str) -> Self {
        let hash = Sha256::digest(name.as_bytes());
        let word = |at: usize| u32::from_le_bytes([hash[at], hash[at + 1], hash[at + 2], hash[at + 3]]);
        RngStream::new(seed, purpose, word(0), word(4))
    }

    /// The block of four words at `index`. The purpose is mixed into the key.
    #[inline]
    pub fn block(&self, index: u32) -> [u32; 4] {
        let key = [self.key[0] ^ (self.purpose as u32).wrapping_mul(0x85EB_CA6B), self.key[1]];
        philox([index, self.a, self.b, self.purpose as u32], key)
    }

    /// Two independent standard normal numbers from block `index`, by the Box-Muller transform.
    pub fn normal_pair(&self, index: u32) -> [f32; 2] {
        let [w0, w1, w2, _] = self.block(index);
        // 53 bits in (0, 1], so that the logarithm is finite.
        let u = (((u64::from(w0) << 21) | (u64::from(w1) >> 11)) + 1) as f64 / (1u64 << 53) as f64;
        let angle = f64::from(w2) * (std::f64::consts::TAU / 4_294_967_296.0);
        let radius = (-2.0 * u.ln()).sqrt();
        [(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]
    }

    /// A uniform integer below `bound`. For `bound` < 2^32 the bias of the 64-bit multiplication is negligible.
    pub fn below(&self, index: u32, bound: u64) -> u64 {
        let [w0, w1, _, _] = self.block(index);
        let word = (u64::from(w0) << 32) | u64::from(w1);
        ((u128::from(word) * u128::from(bound)) >> 64) as u64
    }

    /// A permutation of `0..len`: Fisher-Yates driven by this stream.
    pub fn permutation(&self, len: usize) -> Vec<u32> {
        let len = u32::try_from(len).expect("fewer than 2^32 rows");
        let mut order: Vec<u32> = (0..len).collect();
        for i in (1..len).rev() {
            let j = self.below(i, u64::from(i) + 1) as usize;
            order.swap(i as usize, j);
        }
        order
    }
}

#[inline]
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    const MULTIPLY: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    for _ in 0..10 {
        let p0 = u64::from(MULTIPLY[0]) * u64::from(counter[0]);
        let p1 = u64::from(MULTIPLY[1]) * u64::from(counter[2]);
        counter = [
            (p1 >> 32) as u32 ^ counter[1] ^ key[0],
            p1 as u32,
            (p0 >> 32) as u32 ^ counter[3] ^ key[1],
            p0 as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_the_published_vectors() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }

    /// The initial weights of new runs depend on this.
    #[test]
    fn a_named_stream_is_keyed_by_the_hash_of_its_name() {
        // The first eight bytes of SHA-256("abc").
        let [named, numbered] = [
            RngStream::named(7, Purpose::Init, "abc"),
            RngStream::new(7, Purpose::Init, 0xbf16_78ba, 0xeacf_018f),
        ];
        assert_eq!(named.block(3), numbered.block(3));
        assert_ne!(named.block(3), RngStream::named(7, Purpose::Init, "abd").block(3));
    }

    #[test]
    fn normals_have_the_right_moments() {
        let stream = RngStream::new(7, Purpose::Init, 0, 0);
        let draws: Vec<f64> = (0..50_000).flat_map(|i| stream.normal_pair(i)).map(f64::from).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / draws.len() as f64;
        assert!(mean.abs() < 0.01, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.02, "variance {variance}");
    }

    #[test]
    fn permutations_are_permutations_and_differ_by_epoch() {
        let order = |epoch| RngStream::new(1, Purpose::DataOrder, epoch, 0).permutation(1000);
        let mut sorted = order(0);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<_>>());
        assert_ne!(order(0), order(1));
        assert_eq!(order(3), order(3));
    }
}
