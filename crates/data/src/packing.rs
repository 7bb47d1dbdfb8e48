//! Packing: which documents share a row.
//!
//! `bfd` is best-fit decreasing: it takes documents from longest to shortest and puts each into the fullest
//! row that still has space for it. Among rows with equal space, it takes the one that reached that space
//! first, as TRL does. `bfd_split` splits documents that are too long instead of truncating them, and
//! `wrapped` cuts the stream of all documents into rows. The builder has already split or wrapped the
//! documents, so that here `bfd_split` is the same as `bfd`, and `wrapped` the same as `none`.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

/// How documents are packed into rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packing {
    /// One document per row.
    #[default]
    None,
    /// Best-fit decreasing.
    Bfd,
    /// Best-fit decreasing, after splitting documents longer than a row.
    BfdSplit,
    /// All documents are concatenated and cut into rows. The model sees a row as one document.
    Wrapped,
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Packing::None => "none",
            Packing::Bfd => "bfd",
            Packing::BfdSplit => "bfd_split",
            Packing::Wrapped => "wrapped",
        })
    }
}

impl Packing {
    /// Whether every token is kept, however long its document is.
    pub fn keeps_all(self) -> bool {
        matches!(self, Packing::BfdSplit | Packing::Wrapped)
    }
}

/// Rows as lists of documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    pub(crate) docs: Vec<u32>,
    /// Row `r` is `docs[bounds[r]..bounds[r + 1]]`.
    pub(crate) bounds: Vec<u32>,
}

impl Rows {
    pub fn num_rows(&self) -> usize {
        self.bounds.len() - 1
    }

    pub fn row(&self, row: usize) -> &[u32] {
        &self.docs[self.bounds[row] as usize..self.bounds[row + 1] as usize]
    }

    /// The same rows, with each item `i` replaced by the documents `n * i .. n * i + n`.
    pub(crate) fn expanded(self, n: u32) -> Rows {
        let docs = self.docs.iter().flat_map(|item| n * item..n * item + n).collect();
        Rows { docs, bounds: self.bounds.iter().map(|bound| n * bound).collect() }
    }

    /// Builds rows from the row index of every document. The documents of a row keep the order of `docs`.
    fn grouped(docs: Vec<u32>, row_of: &[u32], num_rows: usize) -> Rows {
        let mut bounds = vec![0u32; num_rows + 1];
        for row in row_of {
            bounds[*row as usize + 1] += 1;
        }
        for row in 0..num_rows {
            bounds[row + 1] += bounds[row];
        }
        let mut next = bounds.clone();
        let mut grouped = vec![0; docs.len()];
        for (doc, row) in docs.iter().zip(row_of) {
            let at = &mut next[*row as usize];
            grouped[*at as usize] = *doc;
            *at += 1;
        }
        Rows { docs: grouped, bounds }
    }
}

/// Packs `docs` into rows of `capacity` tokens. `len` returns the length of a document.
///
/// # Panics
/// If a document is longer than `capacity`.
pub fn pack(packing: Packing, docs: &[u32], len: impl Fn(u32) -> usize, capacity: usize) -> Rows {
    assert!(u32::try_from(docs.len()).is_ok(), "fewer than 2^32 documents");
    match packing {
        Packing::None | Packing::Wrapped => {
            Rows { docs: docs.to_vec(), bounds: (0..=docs.len() as u32).collect() }
        }
        Packing::Bfd | Packing::BfdSplit => best_fit_decreasing(docs, len, capacity),
    }
}

fn best_fit_decreasing(docs: &[u32], len: impl Fn(u32) -> usize, capacity: usize) -> Rows {
    let mut by_length: Vec<u32> = docs.to_vec();
    by_length.sort_by_key(|doc| std::cmp::Reverse(len(*doc)));
    let mut row_of: Vec<u32> = Vec::with_capacity(by_length.len());
    let mut num_rows = 0u32;
    // Free space -> the rows that have exactly that much, oldest first.
    let mut open: BTreeMap<usize, VecDeque<u32>> = BTreeMap::new();
    for doc in &by_length {
        let need = len(*doc);
        assert!(need <= capacity, "document {doc} of {need} tokens in rows of {capacity}");
        let fit =
            open.range_mut(need..).next().map(|(space, queue)| (*space, queue.pop_front(), queue.is_empty()));
        let (space, row) = match fit {
            Some((space, row, now_empty)) => {
                if now_empty {
                    open.remove(&space);
                }
                (space, row.expect("queues in the map are never empty"))
            }
            None => {
                num_rows += 1;
                (capacity, num_rows - 1)
            }
        };
        row_of.push(row);
        if space > need {
            open.entry(space - need).or_default().push_back(row);
        }
    }
    Rows::grouped(by_length, &row_of, num_rows as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packed(packing: Packing, lengths: &[usize], capacity: usize) -> Vec<Vec<u32>> {
        let docs: Vec<u32> = (0..lengths.len() as u32).collect();
        let rows = pack(packing, &docs, |doc| lengths[doc as usize], capacity);
        (0..rows.num_rows()).map(|row| rows.row(row).to_vec()).collect()
    }

    #[test]
    fn bfd_matches_trl_on_a_small_example() {
        // [[1,2,3,4],[6,7],[8,9,10],[11]] after truncation to 4.
        assert_eq!(packed(Packing::Bfd, &[4, 2, 3, 1], 4), [vec![0], vec![2, 3], vec![1]]);
        // [[1,2,3,4],[5],[6,7],[8,9,10],[11]] after splitting at 4.
        assert_eq!(packed(Packing::BfdSplit, &[4, 1, 2, 3, 1], 4), [vec![0], vec![3, 1], vec![2, 4]]);
    }

    #[test]
    fn rows_with_equal_space_fill_oldest_first() {
        assert_eq!(packed(Packing::Bfd, &[3, 3, 3, 1, 1], 4), [vec![0, 3], vec![1, 4], vec![2]]);
    }

    #[test]
    fn without_packing_every_document_is_a_row() {
        assert_eq!(packed(Packing::None, &[3, 1], 4), [vec![0], vec![1]]);
    }

    #[test]
    fn many_documents_pack_quickly() {
        let lengths: Vec<usize> = (0..200_000).map(|i| 1 + (i * 7919) % 1024).collect();
        let rows = packed(Packing::Bfd, &lengths, 1024);
        let used: usize = lengths.iter().sum();
        assert!(used as f64 / (rows.len() * 1024) as f64 > 0.99);
    }

    /// The number of rows by the definition of best-fit decreasing, in quadratic time.
    fn num_rows_by_definition(lengths: &[usize], capacity: usize) -> usize {
        let mut sorted: Vec<usize> = lengths.to_vec();
        sorted.sort_by_key(|n| std::cmp::Reverse(*n));
        let mut spaces: Vec<usize> = Vec::new();
        for need in sorted {
            match spaces.iter_mut().filter(|space| **space >= need).min() {
                Some(space) => *space -= need,
                None => spaces.push(capacity - need),
            }
        }
        spaces.len()
    }

    proptest! {
        #[test]
        fn every_document_is_packed_once_and_no_row_overflows(
            lengths in prop::collection::vec(1usize..=64, 0..300),
        ) {
            let rows = packed(Packing::Bfd, &lengths, 64);
            let mut seen: Vec<u32> = rows.iter().flatten().copied().collect();
            seen.sort_unstable();
            let expected: Vec<u32> = (0..lengths.len() as u32).collect();
            prop_assert_eq!(seen, expected);
            for row in &rows {
                prop_assert!(row.iter().map(|d| lengths[*d as usize]).sum::<usize>() <= 64);
            }
            prop_assert_eq!(rows.len(), num_rows_by_definition(&lengths, 64));
        }
    }
}
