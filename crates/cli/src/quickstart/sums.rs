//! Sums of two-digit numbers, as demonstrations, prompts and preference pairs.

use lockstep_core::rng::{Purpose, RngStream};
use serde_json::{Value, json};

use super::corpus::{Problem, is_held_out};

/// Whether pairs are labelled right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Labels {
    Right,
    /// As people label: one pair in ten is exchanged.
    SomeWrong,
}

const MISLABELLED: u64 = 10;

/// What a wrong sum differs by.
const ERRORS: [i64; 12] = [-30, -20, -10, -3, -2, -1, 1, 2, 3, 10, 20, 30];

/// The sum of two numbers from 10 to 99.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) a: u64,
    pub(super) b: u64,
}

impl Sum {
    pub(super) fn prompt(self) -> String {
        format!("{}+{}=", self.a, self.b)
    }

    pub(super) fn total(self) -> u64 {
        self.a + self.b
    }

    /// The units, the tens with the carry, and `total`, which is the sum if the answer is right.
    fn answer_with(self, total: u64) -> String {
        let Sum { a, b } = self;
        let units = a % 10 + b % 10;
        let carried = if units >= 10 { "+1" } else { "" };
        let tens = a / 10 + b / 10 + units / 10;
        format!("{}+{}={units}, {}+{}{carried}={tens}, {total}", a % 10, b % 10, a / 10, b / 10)
    }

    pub(super) fn problem(self) -> Problem {
        Problem { prompt: self.prompt(), answer: self.answer_with(self.total()) }
    }

    /// A row with the prompt and the sum, for rewards.
    pub(super) fn prompt_row(self) -> Value {
        json!({ "prompt": self.prompt(), "answer": self.total() })
    }

    /// A row with the right answer and one with a wrong sum. `index` numbers the pairs.
    pub(super) fn pair_row(self, labels: Labels, seed: u64, index: u32) -> Value {
        let stream = RngStream::new(seed, Purpose::Sampling, index, 1);
        let error = ERRORS[stream.below(0, ERRORS.len() as u64) as usize];
        let wrong = self.answer_with(self.total().saturating_add_signed(error));
        let right = self.problem().answer;
        let is_exchanged = labels == Labels::SomeWrong && stream.below(1, MISLABELLED) == 0;
        let (chosen, rejected) = if is_exchanged { (wrong, right) } else { (right, wrong) };
        json!({ "prompt": self.prompt(), "chosen": chosen, "rejected": rejected })
    }
}

/// All sums in random order: those to train on, and the held-out ones.
pub(super) fn all(seed: u64) -> (Vec<Sum>, Vec<Sum>) {
    let mut sums: Vec<Sum> = (10..100).flat_map(|a| (10..100).map(move |b| Sum { a, b })).collect();
    let key = |sum: &Sum| *blake3::hash(format!("{seed} {}", sum.prompt()).as_bytes()).as_bytes();
    sums.sort_by_cached_key(key);
    sums.into_iter().partition(|sum| !is_held_out(&sum.prompt()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_right() {
        let (train, held_out) = all(1);
        assert_eq!(train.len() + held_out.len(), 8100);
        assert!(held_out.len() > 300 && train[..5] != all(2).0[..5]);
        let sum = Sum { a: 47, b: 58 };
        let right = "7+8=15, 4+5+1=10, 105";
        assert_eq!(sum.problem(), Problem { prompt: "47+58=".into(), answer: right.into() });
        let pairs: Vec<Value> = (0..1000).map(|i| sum.pair_row(Labels::SomeWrong, 1, i)).collect();
        let mislabelled = pairs.iter().filter(|pair| pair["rejected"] == right).count();
        assert!(pairs.iter().all(|pair| (pair["chosen"] == right) != (pair["rejected"] == right)));
        assert!((0..50).all(|i| sum.pair_row(Labels::Right, 1, i)["chosen"] == right));
        assert!((60..140).contains(&mislabelled), "{mislabelled}");
    }
}
