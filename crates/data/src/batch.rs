//! Rows laid out for the model: documents end to end, no padding, bounds in `cu_seqlens`.
//!
//! Position t of a document has token t as input and token t+1 as target, so a document of n tokens
//! takes n-1 positions. Its last token is no input: nothing would attend to it and it predicts nothing.

use crate::Dataset;

/// One micro-batch. `tokens`, `targets`, `weights` and `positions` are of one length T.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    pub tokens: Vec<u32>,
    pub targets: Vec<u32>,
    /// 1 where the target is supervised, otherwise 0.
    pub weights: Vec<f32>,
    /// The position within the document, from 0.
    pub positions: Vec<u32>,
    /// 0, then the end of every document: documents + 1 entries, the last one T.
    pub cu_seqlens: Vec<u32>,
    /// Which document of the data set each is.
    pub samples: Vec<u32>,
    /// The number of ones in `weights`.
    pub supervised: u64,
}

impl Batch {
    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.targets.clear();
        self.weights.clear();
        self.positions.clear();
        self.cu_seqlens.clear();
        self.cu_seqlens.push(0);
        self.samples.clear();
        self.supervised = 0;
    }

    /// Replaces the content by `rows` of `dataset`, in that order. No rows make an empty batch, which a
    /// rank without work still runs.
    pub fn fill(&mut self, dataset: &Dataset, rows: &[u32]) {
        self.clear();
        for row in rows {
            for doc in dataset.row_docs(*row as usize) {
                let (tokens, supervised) = dataset.doc(*doc);
                let len = tokens.len() - 1;
                self.tokens.extend_from_slice(&tokens[..len]);
                self.targets.extend_from_slice(&tokens[1..]);
                self.weights.extend(supervised[1..].iter().map(|s| f32::from(u8::from(*s))));
                self.supervised += supervised[1..].iter().filter(|s| **s).count() as u64;
                self.positions.extend(0..len as u32);
                let end = u32::try_from(self.tokens.len()).expect("a batch has fewer than 2^32 tokens");
                self.cu_seqlens.push(end);
                self.samples.push(*doc);
            }
        }
    }

    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    pub fn num_docs(&self) -> usize {
        self.cu_seqlens.len().saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Packing;
    use crate::dataset::{Builder, Doc};
    use proptest::prelude::*;

    fn dataset(docs: &[(Vec<u32>, usize)], max_length: usize) -> Dataset {
        let mut builder = Builder::new(max_length);
        for (tokens, supervised_from) in docs {
            let (tokens, supervised_from) = (tokens.clone(), *supervised_from);
            builder.push(Doc { tokens, supervised_from, prefix_mismatch: false });
        }
        builder.finish(Packing::Bfd)
    }

    #[test]
    fn targets_are_the_next_tokens_of_the_same_document() {
        let ds = dataset(&[(vec![1, 2, 3, 4, 5], 0), (vec![6, 7], 0), (vec![8, 9, 10], 2), (vec![11], 0)], 6);
        assert_eq!((ds.num_docs(), ds.num_rows()), (3, 2));
        let mut batch = Batch::default();
        batch.fill(&ds, &[1, 0]);
        assert_eq!(batch.tokens, [8, 9, 6, 1, 2, 3, 4]);
        assert_eq!(batch.targets, [9, 10, 7, 2, 3, 4, 5]);
        assert_eq!(batch.weights, [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(batch.positions, [0, 1, 0, 0, 1, 2, 3]);
        assert_eq!(batch.cu_seqlens, [0, 2, 3, 7]);
        assert_eq!(batch.samples, [2, 1, 0]);
        assert_eq!(batch.supervised, 6);
        assert_eq!(ds.stats().dropped_short, 1);
        assert_eq!((ds.row_tokens(0), ds.row_tokens(1), ds.max_row_tokens()), (4, 3, 4));
        batch.fill(&ds, &[]);
        assert_eq!((batch.num_tokens(), batch.cu_seqlens.as_slice()), (0, [0].as_slice()));
    }

    proptest! {
        #[test]
        fn documents_stay_apart_and_nothing_is_lost(
            lengths in prop::collection::vec((0usize..20, 0usize..20), 1..40),
        ) {
            // The document's number is in every token, so a leak would show.
            let docs: Vec<(Vec<u32>, usize)> = lengths
                .iter()
                .enumerate()
                .map(|(d, (len, from))| ((0..*len).map(|t| (d * 100 + t) as u32).collect(), *from))
                .collect();
            let ds = dataset(&docs, 16);
            let rows: Vec<u32> = (0..ds.num_rows() as u32).collect();
            let mut batch = Batch::default();
            batch.fill(&ds, &rows);
            prop_assert_eq!(batch.supervised, ds.num_supervised());
            let by_row: u64 = rows.iter().map(|r| ds.row_supervised(*r as usize)).sum();
            prop_assert_eq!(batch.supervised, by_row);
            prop_assert_eq!(batch.num_docs(), ds.num_docs());
            prop_assert_eq!(batch.num_tokens() as u64, ds.num_tokens() - ds.num_docs() as u64);
            prop_assert_eq!(batch.weights.iter().sum::<f32>() as u64, batch.supervised);
            for pair in batch.cu_seqlens.windows(2) {
                let (start, end) = (pair[0] as usize, pair[1] as usize);
                let doc = batch.tokens[start] / 100;
                for at in start..end {
                    let t = (at - start) as u32;
                    prop_assert_eq!(batch.tokens[at], doc * 100 + t);
                    prop_assert_eq!(batch.targets[at], doc * 100 + t + 1);
                    prop_assert_eq!(batch.positions[at], t);
                    let counted = (t + 1) as usize >= docs[doc as usize].1;
                    prop_assert_eq!(batch.weights[at], if counted { 1.0 } else { 0.0 });
                }
            }
            let again = batch.clone();
            batch.fill(&ds, &rows);
            prop_assert_eq!(batch, again);
        }
    }
}
