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
            .push_doc(&Doc { tokens: tokens.clone(), mask: mask.clone(), prefix_mismatch: false })
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
    assert_eq!((ds.row_tokens(0), ds.row_tokens(1), ds.max_doc_len()), (4, 3, 5));
    batch.fill(&ds, &[]).unwrap();
    assert_eq!((batch.num_tokens(), batch.cu_seqlens.as_slice()), (0, [0].as_slice()));
}

#[test]
fn documents_and_sequences_are_appended() {
    let mut batch = Batch::default();
    batch.push_document(&[5, 6, 7, 8], 2, 9);
    batch.push_document(&[1, 2], 0, 4);
    assert_eq!(
        (batch.tokens.as_slice(), batch.targets.as_slice()),
        ([5, 6, 7, 1].as_slice(), [6, 7, 8, 2].as_slice())
    );
    assert_eq!(batch.weights, [0.0, 1.0, 1.0, 1.0]);
    assert_eq!(
        (batch.cu_seqlens.as_slice(), batch.samples.as_slice()),
        ([0, 3, 4].as_slice(), [9, 4].as_slice())
    );
    assert_eq!((batch.positions.as_slice(), batch.supervised), ([0, 1, 2, 0].as_slice(), 3));
    // A document without supervised targets, then one with a score.
    batch.clear();
    batch.push_document(&[5, 6], 2, 0);
    batch.push_sequence(&[1, 2, 3], 2..3, 1);
    batch.push_sequence(&[4], 0..1, 2);
    assert_eq!(batch.tokens, [5, 1, 2, 3, 4]);
    assert_eq!(batch.targets, [6, 2, 3, 0, 0]);
    assert_eq!(batch.weights, [0.0, 0.0, 0.0, 1.0, 1.0]);
    assert_eq!(batch.positions, [0, 0, 1, 2, 0]);
    assert_eq!((batch.cu_seqlens.as_slice(), batch.supervised), ([0, 1, 4, 5].as_slice(), 2));
    assert_eq!((batch.num_docs(), batch.num_tokens()), (3, 5));
}

#[test]
fn pushed_documents_equal_those_of_a_dataset() {
    let docs = [(vec![1, 2, 3], Mask::From(2)), (vec![4, 5], Mask::From(0))];
    let filled = filled(&dataset(&docs, Packing::None, 8), &[0, 1]);
    let mut pushed = Batch::default();
    for (sample, (tokens, mask)) in docs.iter().enumerate() {
        let Mask::From(first) = mask else { panic!() };
        pushed.push_document(tokens, *first, sample as u32);
    }
    assert_eq!(pushed, filled);
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
