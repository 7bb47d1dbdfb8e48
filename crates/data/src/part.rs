//! Holding out a fraction of the training rows for evaluation (`eval_fraction`).

use lockstep_core::rng::{Purpose, RngStream};

/// Which rows to use. Whether a row is held out depends only on the seed, the file's index and the row's
/// number, so the training and evaluation parts agree without communicating.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Part {
    #[default]
    All,
    /// The rows that are not held out.
    Train { fraction: f64, seed: u64 },
    /// The rows that are held out.
    Eval { fraction: f64, seed: u64 },
}

impl Part {
    pub(crate) fn has(self, file: usize, row: u64) -> bool {
        match self {
            Part::All => true,
            Part::Train { fraction, seed } => !is_held_out(fraction, seed, file, row),
            Part::Eval { fraction, seed } => is_held_out(fraction, seed, file, row),
        }
    }
}

fn is_held_out(fraction: f64, seed: u64, file: usize, row: u64) -> bool {
    // The decisions repeat after 2^32 rows of a file.
    let [word, ..] = RngStream::new(seed, Purpose::DataSplit, file as u32, 0).block(row as u32);
    f64::from(word) < fraction * 4_294_967_296.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_complete_and_of_the_right_size() {
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
