//! What became of the rows that were read.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Value, json};

/// A row left out because it is bad.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedRow {
    pub file: PathBuf,
    /// Its number, from 1: of the line in files of lines, of the record elsewhere.
    pub row: u64,
    /// What is wrong with it.
    pub why: String,
}

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counts over a whole data set.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Stats {
            /// Every count with its name.
            pub fn pairs(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }

            pub(crate) fn to_json(self) -> Value {
                json!({ $(stringify!($name): self.$name),* })
            }

            /// `None` if a count is missing.
            pub(crate) fn from_json(value: &Value) -> Option<Stats> {
                Some(Stats { $($name: value[stringify!($name)].as_u64()?),* })
            }
        }
    };
}

stats! {
    /// Rows in the files, blank lines not counted, of the part that was asked for.
    read,
    /// Bad rows left out.
    skipped,
    /// Documents of fewer than two tokens left out.
    dropped_short,
    /// Documents without a supervised target left out.
    dropped_unsupervised,
    /// Documents longer than `max_length` left out.
    dropped_long,
    /// Documents cut to `max_length`.
    truncated,
    /// Documents whose prompt, tokenised alone, is not how the whole begins: the mask's edge may be off
    /// by a token.
    prefix_mismatches,
    /// Documents kept.
    docs,
    rows,
    /// Tokens in rows.
    tokens,
    /// Tokens that are predicted and counted in the loss.
    supervised,
    /// Tokens in the longest document of a row.
    longest,
    /// Tokens that rows of `max_length` could have held.
    capacity,
    /// Half of the documents have at most this many tokens, before any is cut.
    length_p50,
    /// Nine in ten have at most this many.
    length_p90,
    /// Ninety-nine in a hundred have at most this many.
    length_p99,
    /// The longest document, before any is cut.
    length_max,
}

/// How many documents have how many tokens.
#[derive(Debug, Default)]
pub(crate) struct Lengths(BTreeMap<usize, u64>);

impl Lengths {
    pub(crate) fn add(&mut self, len: usize) {
        *self.0.entry(len).or_default() += 1;
    }

    /// The least length that `share` of the documents do not exceed.
    pub(crate) fn percentile(&self, share: f64) -> u64 {
        let total: u64 = self.0.values().sum();
        let rank = (share * total as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (len, count) in &self.0 {
            seen += count;
            if seen >= rank {
                return *len as u64;
            }
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_lengths_that_occur() {
        let mut lengths = Lengths::default();
        assert_eq!(lengths.percentile(0.5), 0);
        (1..=10).for_each(|len| lengths.add(len * 10));
        assert_eq!([0.0, 0.5, 0.9, 0.99, 1.0].map(|p| lengths.percentile(p)), [10, 50, 90, 100, 100]);
    }

    #[test]
    fn stats_read_back() {
        let stats = Stats { read: 7, length_max: 9, ..Stats::default() };
        assert_eq!(Stats::from_json(&stats.to_json()), Some(stats));
        assert_eq!(Stats::from_json(&json!({})), None);
    }
}
