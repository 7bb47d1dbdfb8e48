//! Which documents share a row.
//!
//! `bfd` is best-fit decreasing: documents by length, longest first, each into the fullest row that
//! still holds it. Rows of equal room are filled in the order in which they came to have it, which is
//! what TRL does. Left out so far: `bfd_split` and `wrapped`.

use std::collections::{BTreeMap, VecDeque};

/// How documents are grouped into rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packing {
    /// One document, one row.
    #[default]
    None,
    /// Best-fit decreasing.
    Bfd,
}

/// The rows, each a list of indices into `lengths`. Empty documents are in no row under `bfd`.
///
/// # Panics
/// If a document is longer than `capacity`.
pub fn pack(packing: Packing, lengths: &[usize], capacity: usize) -> Vec<Vec<u32>> {
    let num_docs = u32::try_from(lengths.len()).expect("fewer than 2^32 documents");
    match packing {
        Packing::None => (0..num_docs).map(|doc| vec![doc]).collect(),
        Packing::Bfd => best_fit_decreasing(lengths, num_docs, capacity),
    }
}

fn best_fit_decreasing(lengths: &[usize], num_docs: u32, capacity: usize) -> Vec<Vec<u32>> {
    let len = |doc: u32| lengths[doc as usize];
    let mut by_length: Vec<u32> = (0..num_docs).filter(|doc| len(*doc) > 0).collect();
    by_length.sort_by_key(|doc| std::cmp::Reverse(len(*doc)));
    let mut rows: Vec<Vec<u32>> = Vec::new();
    // Room left -> rows that have exactly that much, oldest first.
    let mut open: BTreeMap<usize, VecDeque<usize>> = BTreeMap::new();
    for doc in by_length {
        let need = len(doc);
        assert!(need <= capacity, "document {doc} of {need} tokens in rows of {capacity}");
        let fit =
            open.range_mut(need..).next().map(|(room, queue)| (*room, queue.pop_front(), queue.is_empty()));
        let (room, row) = match fit {
            Some((room, row, now_empty)) => {
                if now_empty {
                    open.remove(&room);
                }
                (room, row.expect("queues in the map are never empty"))
            }
            None => {
                rows.push(Vec::new());
                (capacity, rows.len() - 1)
            }
        };
        rows[row].push(doc);
        if room > need {
            open.entry(room - need).or_default().push_back(row);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bfd_matches_the_documented_vector() {
        // [[1,2,3,4],[6,7],[8,9,10],[11]] after truncation to 4.
        let rows = pack(Packing::Bfd, &[4, 2, 3, 1], 4);
        assert_eq!(rows, [vec![0], vec![2, 3], vec![1]]);
    }

    #[test]
    fn rows_of_equal_room_fill_oldest_first() {
        let rows = pack(Packing::Bfd, &[3, 3, 3, 1, 1], 4);
        assert_eq!(rows, [vec![0, 3], vec![1, 4], vec![2]]);
    }

    #[test]
    fn many_documents_pack_quickly() {
        let lengths: Vec<usize> = (0..200_000).map(|i| 1 + (i * 7919) % 1024).collect();
        let rows = pack(Packing::Bfd, &lengths, 1024);
        let used: usize = lengths.iter().sum();
        assert!(used as f64 / (rows.len() * 1024) as f64 > 0.99);
    }

    /// The definition, without any index.
    fn plainly(lengths: &[usize], capacity: usize) -> usize {
        let mut sorted: Vec<usize> = lengths.iter().copied().filter(|n| *n > 0).collect();
        sorted.sort_by_key(|n| std::cmp::Reverse(*n));
        let mut rooms: Vec<usize> = Vec::new();
        for need in sorted {
            match rooms.iter_mut().filter(|room| **room >= need).min() {
                Some(room) => *room -= need,
                None => rooms.push(capacity - need),
            }
        }
        rooms.len()
    }

    proptest! {
        #[test]
        fn every_document_once_and_no_row_overfull(
            lengths in prop::collection::vec(0usize..=64, 0..300),
        ) {
            let rows = pack(Packing::Bfd, &lengths, 64);
            let mut seen: Vec<u32> = rows.iter().flatten().copied().collect();
            seen.sort_unstable();
            let expected: Vec<u32> = (0..lengths.len() as u32).filter(|d| lengths[*d as usize] > 0).collect();
            prop_assert_eq!(seen, expected);
            for row in &rows {
                prop_assert!(row.iter().map(|d| lengths[*d as usize]).sum::<usize>() <= 64);
            }
            prop_assert_eq!(rows.len(), plainly(&lengths, 64));
        }
    }
}
