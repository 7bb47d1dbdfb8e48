//! Counts of the rows that were read, kept and left out.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Value, json};

/// A row that was left out because it cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedRow {
    pub file: PathBuf,
    /// Counted from 1: the line number in line-based files, otherwise the record number.
    pub row: u64,
    /// What is wrong with it.
    pub why: String,
}

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counts over a whole dataset.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Stats {
            /// Every count by name.
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
    /// Rows that were read, without blank lines and rows of other parts.
    read,
    /// Rows left out because they cannot be used.
    skipped,
    /// Rows left out because they have fewer than two tokens; pairs of sequences and prompts: no tokens.
    dropped_short,
    /// Rows left out because they have no supervised target, or a pair of which one document has none.
    dropped_unsupervised,
    /// Rows left out because they are longer than `max_length` (prompts: `max_prompt_length`).
    dropped_long,
    /// Documents truncated to `max_length`.
    truncated,
    /// Documents whose prompt, tokenized alone, is not a prefix of the whole: the boundary of the mask may be off
    /// by one token.
    prefix_mismatches,
    /// Documents kept. A preference pair has two.
    docs,
    rows,
    /// Tokens in rows.
    tokens,
    /// Targets that count in the loss, or documents if each gets one score.
    supervised,
    /// Tokens in the longest document that was kept.
    longest,
    /// Tokens that the rows could hold: rows times `max_length`, twice that for preference pairs.
    capacity,
    /// Median length of the documents in tokens, before truncation.
    length_p50,
    /// 90th percentile of the lengths.
    length_p90,
    /// 99th percentile of the lengths.
    length_p99,
    /// Tokens in the longest document, before truncation.
    length_max,
}

/// A histogram of document lengths.
#[derive(Debug, Default)]
pub(crate) struct Lengths(BTreeMap<usize, u64>);

impl Lengths {
    pub(crate) fn add(&mut self, len: usize) {
        *self.0.entry(len).or_default() += 1;
    }

    /// The smallest length that at least `share` of the documents do not exceed.
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
    fn percentiles_are_actual_lengths() {
        let mut lengths = Lengths::default();
        assert_eq!(lengths.percentile(0.5), 0);
        (1..=10).for_each(|len| lengths.add(len * 10));
        assert_eq!([0.0, 0.5, 0.9, 0.99, 1.0].map(|p| lengths.percentile(p)), [10, 50, 90, 100, 100]);
    }

    #[test]
    fn stats_round_trip_through_json() {
        let stats = Stats { read: 7, length_max: 9, ..Stats::default() };
        assert_eq!(Stats::from_json(&stats.to_json()), Some(stats));
        assert_eq!(Stats::from_json(&json!({})), None);
    }
}
