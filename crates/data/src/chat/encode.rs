//! Conversations to tokens, and which of them are learnt.

use std::ops::Range;

use serde_json::Value;

use crate::{DataError, Tokenizer};

use super::messages::Ready;
use super::{Chat, ChatFault, ChatTemplate};

/// What is left out of the loss; a token is learnt if every mask that is on lets it through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Masks {
    /// Leave out the prompt of a row that has one.
    pub completion_only: bool,
    /// Leave out everything that is not the assistant's.
    pub assistant_only: bool,
}

/// A conversation as tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    pub tokens: Vec<u32>,
    /// Which of the tokens are learnt.
    pub supervised: Vec<bool>,
    /// The prompt's tokens are not the beginning of the whole's, so that the model is trained in a
    /// context that it will not see. The completion then starts where the two part.
    pub prefix_mismatch: bool,
}

/// A conversation whose every turn is material. `masks.completion_only` has no meaning here.
pub fn encode(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    chat: &Chat,
    masks: Masks,
) -> Result<Encoded, ChatFault> {
    let (tokens, supervised) = encode_whole(template, tokenizer, chat, masks)?;
    Ok(Encoded { tokens, supervised, prefix_mismatch: false })
}

/// A conversation in two parts: `prompt`, and the messages in `completion` that answer it.
pub fn encode_pair(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    prompt: &Chat,
    completion: &[Value],
    masks: Masks,
) -> Result<Encoded, ChatFault> {
    let mut whole = prompt.clone();
    whole.messages.extend_from_slice(completion);
    let (tokens, mut supervised) = encode_whole(template, tokenizer, &whole, masks)?;
    let prompt = tokenizer.encode_plain(&template.prompt(prompt)?).map_err(not_encodable)?;
    let shared = prompt.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
    if masks.completion_only {
        supervised[..shared].fill(false);
    }
    Ok(Encoded { tokens, supervised, prefix_mismatch: shared < prompt.len() })
}

fn encode_whole(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    chat: &Chat,
    masks: Masks,
) -> Result<(Vec<u32>, Vec<bool>), ChatFault> {
    let ready = Ready::new(chat)?;
    // The template writes its own special tokens; the tokenizer must not add them a second time.
    if !masks.assistant_only {
        let tokens = tokenizer.encode_plain(&template.text(&ready, false)?).map_err(not_encodable)?;
        let supervised = vec![true; tokens.len()];
        return Ok((tokens, supervised));
    }
    let (text, spans) = template.text_and_spans(&ready)?;
    let (tokens, offsets) = tokenizer.encode_with_offsets(&text).map_err(not_encodable)?;
    let mut supervised = vec![false; tokens.len()];
    for span in &spans {
        supervised[covered(&offsets, span)].fill(true);
    }
    if !supervised.contains(&true) {
        return Err(ChatFault::NoAssistantTokens);
    }
    Ok((tokens, supervised))
}

/// The tokens from the first that has a byte of `span` to the last that has one, as transformers' mask
/// has them, except where that goes wrong: a span that ends within a character of several tokens keeps
/// all of them, and one that ends in text without a token does not run on to the conversation's end.
fn covered(offsets: &[Range<usize>], span: &Range<usize>) -> Range<usize> {
    let inside = |token: &Range<usize>| token.start < span.end && token.end > span.start;
    match offsets.iter().position(inside) {
        Some(first) => first..offsets.iter().rposition(inside).map_or(first, |last| last + 1),
        None => 0..0,
    }
}

fn not_encodable(error: DataError) -> ChatFault {
    match error {
        DataError::Tokenizer { why, .. } => ChatFault::NotEncodable { why },
        other => ChatFault::NotEncodable { why: other.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::covered;

    #[test]
    fn tokens_that_touch_a_span_are_in_it() {
        let offsets = [0..2, 2..5, 5..5, 5..6, 6..7, 9..12];
        assert_eq!(covered(&offsets, &(2..6)), 1..4);
        assert_eq!(covered(&offsets, &(3..7)), 1..5);
        assert_eq!(covered(&offsets, &(5..8)), 3..5, "nothing has byte 7");
        assert_eq!(covered(&offsets, &(7..9)), 0..0);
        assert_eq!(covered(&offsets, &(5..5)), 0..0, "an empty block");
        assert_eq!(covered(&offsets, &(0..99)), 0..6);
    }
}
