//! Rows laid out for the model: documents are concatenated without padding, and `cu_seqlens` holds their bounds.
//!
//! Position t of a document has token t as input and token t+1 as target, so a document of n tokens
//! takes n-1 positions. Its last token is only a target: as an input it would predict nothing.

use crate::doc::SUPERVISED;
use crate::{DataError, Dataset};

/// One micro-batch. `tokens`, `targets`, `weights` and `positions` all have the same length T.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    pub tokens: Vec<u32>,
    pub targets: Vec<u32>,
    /// 1 where the target counts in the loss, otherwise 0.
    pub weights: Vec<f32>,
    /// The position within the document, from 0.
    pub positions: Vec<u32>,
    /// 0, then the end of every document: `num_docs` + 1 entries, the last of which is T.
    pub cu_seqlens: Vec<u32>,
    /// The index of each document in the dataset.
    pub samples: Vec<u32>,
    /// The number of ones in `weights`.
    pub supervised: u64,
    /// Read buffer for one document; empty between calls.
    bytes: Vec<u8>,
}

impl Batch {
    /// Empties the batch but keeps its memory.
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

    /// Replaces the content with `rows` of `dataset`, in that order. Without rows the batch is empty; a rank
    /// without work still runs it, so that all ranks make the same collective calls.
    pub fn fill(&mut self, dataset: &Dataset, rows: &[u32]) -> Result<(), DataError> {
        self.clear();
        let mut bytes = std::mem::take(&mut self.bytes);
        let docs = rows.iter().flat_map(|row| dataset.row_docs(*row as usize));
        let filled = docs.copied().try_for_each(|doc| self.add(dataset, doc, &mut bytes));
        bytes.clear();
        self.bytes = bytes;
        filled
    }

    fn add(&mut self, dataset: &Dataset, doc: u32, bytes: &mut Vec<u8>) -> Result<(), DataError> {
        let mut words = dataset.read(doc, bytes)?;
        let mut token = words.next().expect("documents in rows have two tokens or more") & !SUPERVISED;
        for (position, word) in words.enumerate() {
            self.tokens.push(token);
            token = word & !SUPERVISED;
            self.targets.push(token);
            let counts = word & SUPERVISED != 0;
            self.weights.push(if counts { 1.0 } else { 0.0 });
            self.supervised += u64::from(counts);
            self.positions.push(position as u32);
        }
        let end = u32::try_from(self.tokens.len()).expect("a batch has fewer than 2^32 tokens");
        self.cu_seqlens.push(end);
        self.samples.push(doc);
        Ok(())
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
    use crate::builder::Builder;
    use crate::doc::{Doc, Mask};
    use crate::{DataSpec, Packing};
    use proptest::prelude::*;

    fn dataset(docs: &[(Vec<u32>, Mask)], packing: Packing, max_length: usize) -> Dataset {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tokens");
        let spec = DataSpec { max_length, packing, ..DataSpec::new(Vec::new(), dir.path()) };
        let mut builder = Builder::new(&spec, &path, std::fs::File::create(&path).unwrap());
        for (tokens, mask) in docs {
            builder
                .push(&Doc { tokens: tokens.clone(), mask: mask.clone(), prefix_mismatch: false })
                .unwrap();
        }
        builder.finish().unwrap();
        // The file may be removed now: the dataset has it open.
        Dataset::open(&path).unwrap()
    }

    fn filled(dataset: &Dataset, rows: &[u32]) -> Batch {
        let mut batch = Batch::default();
        batch.fill(dataset, rows).unwrap();
        batch
    }

    fn documents(docs: &[&[u32]]) -> Vec<(Vec<u32>, Mask)> {
        docs.iter().map(|tokens| (tokens.to_vec(), Mask::From(0))).collect()
    }

    #[test]
    fn bfd_split_keeps_the_tokens_that_bfd_truncates() {
        let docs = documents(&[&[1, 2, 3, 4, 5, 6], &[7, 8], &[9, 10, 11], &[12]]);
        let ds = dataset(&docs, Packing::Bfd, 4);
        let batch = filled(&ds, &[0, 1, 2]);
        assert_eq!((batch.tokens, batch.targets), (vec![1, 2, 3, 9, 10, 7], vec![2, 3, 4, 10, 11, 8]));
        assert_eq!((ds.stats().truncated, ds.stats().length_max), (1, 6));
        let ds = dataset(&docs, Packing::BfdSplit, 4);
        let batch = filled(&ds, &[0, 1, 2]);
        assert_eq!(batch.tokens, [1, 2, 3, 9, 10, 5, 7]);
        assert_eq!(batch.targets, [2, 3, 4, 10, 11, 6, 8]);
        assert_eq!(batch.cu_seqlens, [0, 3, 5, 6, 7]);
        assert_eq!((ds.stats().truncated, ds.stats().docs, ds.stats().rows), (0, 3, 3));
        // A piece of one token has no target.
        let ds = dataset(&documents(&[&[1, 2, 3, 4, 5]]), Packing::BfdSplit, 4);
        assert_eq!((ds.num_rows(), ds.num_tokens(), ds.num_supervised()), (1, 4, 3));
    }

    #[test]
    fn wrapped_rows_cut_the_stream_and_span_documents() {
        let mut docs = documents(&[&[1, 2, 3, 4, 5], &[6, 7], &[], &[8, 9, 10]]);
        docs.push((vec![11], Mask::From(0)));
        let ds = dataset(&docs, Packing::Wrapped, 4);
        let batch = filled(&ds, &[0, 1, 2]);
        assert_eq!(batch.tokens, [1, 2, 3, 5, 6, 7, 9, 10]);
        assert_eq!(batch.targets, [2, 3, 4, 6, 7, 8, 10, 11]);
        assert_eq!(batch.positions, [0, 1, 2, 0, 1, 2, 0, 1]);
        assert_eq!(batch.cu_seqlens, [0, 3, 6, 8]);
        assert_eq!(batch.supervised, 8);
        assert_eq!((ds.stats().docs, ds.stats().rows, ds.stats().dropped_short), (4, 3, 1));
        // Rows without a supervised target are dropped; the masks of documents are concatenated like their tokens.
        let docs = [
            (vec![1, 2, 3, 4], Mask::From(4)),
            (vec![5, 6], Mask::From(1)),
            (vec![7, 8], Mask::Each(vec![true, false])),
        ];
        let ds = dataset(&docs, Packing::Wrapped, 4);
        assert_eq!((ds.num_rows(), ds.num_docs()), (1, 2));
        assert_eq!(filled(&ds, &[0]).weights, [1.0, 1.0, 0.0]);
    }

    #[test]
    fn targets_are_the_next_tokens_of_the_same_document() {
        let ds = dataset(
            &[
                (vec![1, 2, 3, 4, 5], Mask::From(0)),
                (vec![6, 7], Mask::From(0)),
                (vec![8, 9, 10], Mask::Each(vec![true, false, true])),
                (vec![11], Mask::From(0)),
            ],
            Packing::Bfd,
            6,
        );
        assert_eq!((ds.num_docs(), ds.num_rows()), (3, 2));
        let mut batch = filled(&ds, &[1, 0]);
        assert_eq!(batch.tokens, [8, 9, 6, 1, 2, 3, 4]);
        assert_eq!(batch.targets, [9, 10, 7, 2, 3, 4, 5]);
        assert_eq!(batch.weights, [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(batch.positions, [0, 1, 0, 0, 1, 2, 3]);
        assert_eq!(batch.cu_seqlens, [0, 2, 3, 7]);
        assert_eq!(batch.samples, [2, 1, 0]);
        assert_eq!(batch.supervised, 6);
        assert_eq!(ds.stats().dropped_short, 1);
        assert_eq!((ds.row_tokens(0), ds.row_tokens(1), ds.max_row_tokens()), (4, 3, 4));
        batch.fill(&ds, &[]).unwrap();
        assert_eq!((batch.num_tokens(), batch.cu_seqlens.as_slice()), (0, [0].as_slice()));
    }

    proptest! {
        #[test]
        fn packed_documents_are_isolated_and_complete(
            lengths in prop::collection::vec((0usize..20, 0usize..20), 1..40),
        ) {
            // Every token encodes its document's number, so mixing documents would be visible.
            let docs: Vec<(Vec<u32>, Mask)> = lengths
                .iter()
                .enumerate()
                .map(|(d, (len, from))| {
                    ((0..*len).map(|t| (d * 100 + t) as u32).collect(), Mask::From(*from))
                })
                .collect();
            let ds = dataset(&docs, Packing::Bfd, 16);
            let rows: Vec<u32> = (0..ds.num_rows() as u32).collect();
            let mut batch = filled(&ds, &rows);
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
                    let counted = (t + 1) as usize >= lengths[doc as usize].1;
                    prop_assert_eq!(batch.weights[at], if counted { 1.0 } else { 0.0 });
                }
            }
            let second = batch.clone();
            batch.fill(&ds, &rows).unwrap();
            prop_assert_eq!(batch, second);
        }
    }
}
