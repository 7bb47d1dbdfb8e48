//! A share of the rows held back for evaluation.

use lockstep_core::rng::{Purpose, RngStream};

/// Which rows are taken. Whether a row is held back depends on the seed, the file's place in the list and
/// the row's number alone, so that both parts agree on it without having met.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Part {
    #[default]
    All,
    /// Rows that are not held back.
    Train { fraction: f64, seed: u64 },
    /// Rows that are.
    Eval { fraction: f64, seed: u64 },
}

impl Part {
    pub(crate) fn has(self, file: usize, row: u64) -> bool {
        match self {
            Part::All => true,
            Part::Train { fraction, seed } => !held_back(fraction, seed, file, row),
            Part::Eval { fraction, seed } => held_back(fraction, seed, file, row),
        }
    }
}

fn held_back(fraction: f64, seed: u64, file: usize, row: u64) -> bool {
    // Rows repeat after 2^32 of a file.
    let [word, ..] = RngStream::new(seed, Purpose::DataSplit, file as u32, 0).block(row as u32);
    f64::from(word) < fraction * 4_294_967_296.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_cover_all_and_have_their_share() {
        let (train, eval) = (Part::Train { fraction: 0.1, seed: 3 }, Part::Eval { fraction: 0.1, seed: 3 });
        let all: Vec<(usize, u64)> = (0..3).flat_map(|file| (1..4000).map(move |row| (file, row))).collect();
        assert!(all.iter().all(|(file, row)| train.has(*file, *row) != eval.has(*file, *row)));
        let held = all.iter().filter(|(file, row)| eval.has(*file, *row)).count();
        assert!((held as f64 / all.len() as f64 - 0.1).abs() < 0.01, "{held}");
        let other = Part::Eval { fraction: 0.1, seed: 4 };
        assert!(all.iter().any(|(file, row)| eval.has(*file, *row) != other.has(*file, *row)));
        assert!(all.iter().any(|(_, row)| eval.has(0, *row) != eval.has(1, *row)));
    }
}
