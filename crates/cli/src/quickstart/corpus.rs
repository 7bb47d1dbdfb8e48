//! Generates the problems of the quickstart: sums with their intermediate steps, and questions about sentences.
//!
//! A hash of the prompt decides whether a problem is held out, so that no held-out problem is in the training data.

use lockstep_core::rng::{Purpose, RngStream};
use serde_json::json;

use super::sums::Sum;

/// A prompt and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) prompt: String,
    pub(super) answer: String,
}

const NOUNS: [&str; 10] = ["cat", "dog", "fox", "owl", "hen", "pig", "bee", "ant", "cow", "bat"];
const ADJECTIVES: [&str; 6] = ["red", "big", "old", "shy", "sad", "fat"];
const VERBS: [&str; 5] = ["sees", "likes", "finds", "helps", "calls"];

/// One in this many problems is held out.
const HELD_OUT: u64 = 20;

/// Generates `num` problems. Returns those to train on, and the held-out ones without repeats.
pub(super) fn problems(num: u32, seed: u64) -> (Vec<Problem>, Vec<Problem>) {
    let (mut train, mut held_out) = (Vec::new(), Vec::<Problem>::new());
    for i in 0..num {
        let stream = RngStream::new(seed, Purpose::Sampling, i, 0);
        let draw = |index: u32, bound: u64| stream.below(index, bound);
        let sum = || Sum { a: 10 + draw(1, 90), b: 10 + draw(2, 90) }.problem();
        let problem = if draw(0, 4) < 3 { sum() } else { question(&draw) };
        if is_held_out(&problem.prompt) {
            if !held_out.contains(&problem) {
                held_out.push(problem);
            }
        } else {
            train.push(problem);
        }
    }
    (train, held_out)
}

/// A hash of the prompt decides.
pub(super) fn is_held_out(prompt: &str) -> bool {
    let hash = blake3::hash(prompt.as_bytes());
    let word = u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("eight bytes"));
    word.is_multiple_of(HELD_OUT)
}

/// Asks about one of the two nouns of a sentence.
fn question(draw: &impl Fn(u32, u64) -> u64) -> Problem {
    let word = |words: &[&'static str], index| words[draw(index, words.len() as u64) as usize];
    let subject = format!("{} {}", word(&ADJECTIVES, 1), word(&NOUNS, 2));
    let object = format!("{} {}", word(&ADJECTIVES, 3), word(&NOUNS, 4));
    let verb = word(&VERBS, 5);
    let sentence = format!("the {subject} {verb} the {object}.");
    match draw(6, 2) {
        0 => Problem { prompt: format!("{sentence} who {verb}?"), answer: format!(" the {subject}") },
        _ => Problem { prompt: format!("{sentence} whom?"), answer: format!(" the {object}") },
    }
}

/// The problems as rows of a jsonl file.
pub(super) fn to_jsonl(problems: &[Problem]) -> String {
    problems
        .iter()
        .map(|p| json!({ "prompt": p.prompt, "completion": p.answer }).to_string() + "\n")
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_right_and_held_out_problems_are_not_in_the_training_data() {
        let (train, held_out) = problems(3000, 1);
        assert!(train.len() > 2500 && held_out.len() > 50);
        let held: std::collections::HashSet<&str> = held_out.iter().map(|p| p.prompt.as_str()).collect();
        assert_eq!(held.len(), held_out.len());
        for problem in &train {
            assert!(!held.contains(problem.prompt.as_str()));
            if let Some((a, b)) = problem.prompt.trim_end_matches('=').split_once('+') {
                let sum: u32 = a.parse::<u32>().unwrap() + b.parse::<u32>().unwrap();
                assert!(problem.answer.ends_with(&format!(", {sum}")), "{problem:?}");
            } else {
                assert!(problem.prompt.contains(problem.answer.trim()), "{problem:?}");
            }
        }
    }
}
