//! Generated sequences, and their binary form: ranks exchange it, and checkpoints store it.

use crate::error::TrainError;

/// A prompt with one completion, and what the run knows about it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Sequence {
    /// The prompt's index in the data set.
    pub(crate) prompt: u32,
    /// The tokens of the prompt and of the completion, with the end token if the completion has one.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: u32,
    /// Whether the completion reached its maximum length without an end token.
    pub(crate) truncated: bool,
    /// For each token of the completion, its log-probability when it was generated.
    pub(crate) log_probs: Vec<f32>,
    /// The same by the reference model; empty without one.
    pub(crate) reference: Vec<f32>,
    /// PPO: the value model's output before each token of the completion, and after an end token.
    pub(crate) values: Vec<f32>,
    /// The reward of each reward function; NaN: it has no opinion.
    pub(crate) rewards: Vec<f64>,
}

impl Sequence {
    pub(crate) fn prompt(&self) -> &[u32] {
        &self.tokens[..self.prompt_len as usize]
    }

    pub(crate) fn completion(&self) -> &[u32] {
        &self.tokens[self.prompt_len as usize..]
    }
}

/// The format of the binary form.
const VERSION: u32 = 1;

/// The binary form of some sequences.
pub(crate) fn to_bytes(sequences: &[Sequence]) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend(VERSION.to_le_bytes());
    out.extend((sequences.len() as u32).to_le_bytes());
    for sequence in sequences {
        for number in [sequence.prompt, sequence.prompt_len, u32::from(sequence.truncated)] {
            out.extend(number.to_le_bytes());
        }
        put(&mut out, &sequence.tokens, |token| token.to_le_bytes());
        for floats in [&sequence.log_probs, &sequence.reference, &sequence.values] {
            put(&mut out, floats, |value| value.to_le_bytes());
        }
        put(&mut out, &sequence.rewards, |value| value.to_le_bytes());
    }
    out
}

fn put<T: Copy, const N: usize>(out: &mut Vec<u8>, values: &[T], bytes: impl Fn(T) -> [u8; N]) {
    out.extend((values.len() as u32).to_le_bytes());
    values.iter().for_each(|value| out.extend(bytes(*value)));
}

/// Reads the binary form. `origin` names its source in errors.
pub(crate) fn from_bytes(bytes: &[u8], origin: &str) -> Result<Vec<Sequence>, TrainError> {
    parse(bytes).ok_or_else(|| TrainError::DamagedRollout { origin: origin.into() })
}

fn parse(mut bytes: &[u8]) -> Option<Vec<Sequence>> {
    let from = &mut bytes;
    if number(from)? != VERSION {
        return None;
    }
    let count = number(from)?;
    let mut sequences = Vec::new();
    for _ in 0..count {
        let (prompt, prompt_len, truncated) = (number(from)?, number(from)?, number(from)? != 0);
        let tokens = list(from, u32::from_le_bytes)?;
        let [log_probs, reference, values] = [
            list(from, f32::from_le_bytes)?,
            list(from, f32::from_le_bytes)?,
            list(from, f32::from_le_bytes)?,
        ];
        let rewards = list(from, f64::from_le_bytes)?;
        if prompt_len as usize > tokens.len() {
            return None;
        }
        sequences.push(Sequence {
            prompt,
            tokens,
            prompt_len,
            truncated,
            log_probs,
            reference,
            values,
            rewards,
        });
    }
    bytes.is_empty().then_some(sequences)
}

fn take<'a>(from: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (first, rest) = from.split_at_checked(count)?;
    *from = rest;
    Some(first)
}

fn number(from: &mut &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(take(from, 4)?.try_into().ok()?))
}

fn list<T, const N: usize>(from: &mut &[u8], value: impl Fn([u8; N]) -> T) -> Option<Vec<T>> {
    let count = number(from)? as usize;
    let bytes = take(from, count.checked_mul(N)?)?;
    bytes.chunks_exact(N).map(|one| Some(value(one.try_into().ok()?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequences() -> Vec<Sequence> {
        let one = Sequence {
            prompt: 7,
            tokens: vec![1, 2, 3, 4],
            prompt_len: 2,
            truncated: true,
            log_probs: vec![-0.5, f32::MIN_POSITIVE],
            reference: vec![],
            values: vec![0.25; 3],
            rewards: vec![1.0, 0.1],
        };
        vec![one, Sequence::default()]
    }

    #[test]
    fn sequences_round_trip() {
        let all = sequences();
        assert_eq!(from_bytes(&to_bytes(&all), "a test").unwrap(), all);
        let unknown = Sequence { rewards: vec![f64::NAN], ..Sequence::default() };
        assert!(from_bytes(&to_bytes(&[unknown]), "a test").unwrap()[0].rewards[0].is_nan());
    }

    #[test]
    fn damaged_bytes_are_an_error() {
        let bytes = to_bytes(&sequences());
        for end in 0..bytes.len() {
            assert!(from_bytes(&bytes[..end], "a test").is_err());
        }
        let mut long = bytes.clone();
        long.push(0);
        assert!(from_bytes(&long, "a test").is_err());
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0xff;
            // It may be other numbers, but never a crash.
            let _ = from_bytes(&changed, "a test");
        }
    }
}
