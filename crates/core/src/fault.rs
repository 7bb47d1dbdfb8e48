//! What every user-facing error has besides its text: a class, which determines the exit code, and a hint. `Display` says
//! what went wrong, where and why; the hint says what to do.

use std::error::Error;

/// The class of an error, which determines the exit code. `docs/exit-codes.md` lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultClass {
    /// An invalid key, value or combination in the configuration.
    BadConfig,
    /// A data row, weight file or checkpoint that cannot be used.
    BadData,
    /// A file or folder that does not exist.
    InputMissing,
    /// A device, library or feature that this build or machine does not have.
    Unavailable,
    /// A bug: a broken invariant.
    Internal,
    /// The disk is full or a path cannot be written.
    CannotWrite,
    /// NaN, infinity or divergence.
    Diverged,
    /// Another rank failed.
    PeerFailed,
    /// Ranks are in different collectives, or one never arrives.
    Desync,
    /// A wrong, missing or replayed proof of the run's token.
    NotAuthorised,
}

impl FaultClass {
    pub const fn exit_code(self) -> u8 {
        match self {
            FaultClass::BadConfig => 64,
            FaultClass::BadData => 65,
            FaultClass::InputMissing => 66,
            FaultClass::Unavailable => 69,
            FaultClass::Internal => 70,
            FaultClass::CannotWrite => 73,
            FaultClass::Diverged => 76,
            FaultClass::PeerFailed => 71,
            FaultClass::Desync => 72,
            FaultClass::NotAuthorised => 77,
        }
    }
}

/// An error with a class and a hint.
pub trait Fault: Error + Send + Sync + 'static {
    fn class(&self) -> FaultClass;

    /// What to do about it, in full sentences. `None` if the text already says it.
    fn hint(&self) -> Option<String> {
        None
    }
}

/// The candidate closest to `word`, if it is close enough to be a typo.
///
/// The Damerau-Levenshtein distance (adjacent swaps count once) must be at most a third of the word's length, so that
/// `lerning_rate` finds `learning_rate` and `foo` finds nothing.
pub fn closest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let limit = word.chars().count().div_ceil(3);
    candidates
        .into_iter()
        .map(|c| (edit_distance(word, c), c))
        .filter(|(d, _)| *d <= limit)
        .min_by_key(|(d, _)| *d)
        .map(|(_, c)| c)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let substitute = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = substitute.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_close_candidates_are_suggested() {
        let keys = ["learning_rate", "max_steps", "seed"];
        assert_eq!(closest("lerning_rate", keys), Some("learning_rate"));
        assert_eq!(closest("max_setps", keys), Some("max_steps"));
        assert_eq!(closest("tokenizer", keys), None);
    }
}
