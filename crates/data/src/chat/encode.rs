//! Turns conversations into tokens and loss masks.

use std::ops::Range;

use serde_json::Value;

use crate::{DataError, Tokenizer};

use super::messages::RenderInput;
use super::{Chat, ChatFault, ChatTemplate};

/// Which tokens to exclude from the loss. A token counts only if no enabled mask excludes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LossMasks {
    /// Exclude the prompt of a row that has one.
    pub completion_only: bool,
    /// Exclude everything except the assistant's turns.
    pub assistant_only: bool,
}

/// A conversation as tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedChat {
    pub tokens: Vec<u32>,
    /// For each token, whether it counts in the loss.
    pub supervised: Vec<bool>,
    /// The prompt's tokens are not a prefix of the conversation's tokens, so that the model is trained in a
    /// context that it will not see at inference. The completion then starts where the two first differ.
    pub prefix_mismatch: bool,
}

/// Encodes a whole conversation. `masks.completion_only` has no effect, because there is no prompt.
pub fn encode_chat(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    chat: &Chat,
    masks: LossMasks,
) -> Result<EncodedChat, ChatFault> {
    let (tokens, supervised) = encode_whole(template, tokenizer, chat, masks)?;
    Ok(EncodedChat { tokens, supervised, prefix_mismatch: false })
}

/// Encodes a conversation in two parts: `prompt`, and the messages in `completion` that answer it.
pub fn encode_chat_pair(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    prompt: &Chat,
    completion: &[Value],
    masks: LossMasks,
) -> Result<EncodedChat, ChatFault> {
    let mut whole = prompt.clone();
    whole.messages.extend_from_slice(completion);
    let (tokens, mut supervised) = encode_whole(template, tokenizer, &whole, masks)?;
    let prompt = encode_prompt(template, tokenizer, prompt)?;
    let shared = prompt.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
    if masks.completion_only {
        supervised[..shared].fill(false);
    }
    Ok(EncodedChat { tokens, supervised, prefix_mismatch: shared < prompt.len() })
}

/// Encodes a conversation that the model continues, with the generation prompt at its end.
pub(crate) fn encode_prompt(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    chat: &Chat,
) -> Result<Vec<u32>, ChatFault> {
    tokenizer.encode_plain(&template.prompt(chat)?).map_err(not_encodable)
}

fn encode_whole(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    chat: &Chat,
    masks: LossMasks,
) -> Result<(Vec<u32>, Vec<bool>), ChatFault> {
    let input = RenderInput::new(chat)?;
    // The template writes the special tokens itself; the tokenizer must not add them again.
    if !masks.assistant_only {
        let tokens = tokenizer.encode_plain(&template.text(&input, false)?).map_err(not_encodable)?;
        let supervised = vec![true; tokens.len()];
        return Ok((tokens, supervised));
    }
    let (text, spans) = template.text_and_spans(&input)?;
    let (tokens, offsets) = tokenizer.encode_with_offsets(&text).map_err(not_encodable)?;
    let mut supervised = vec![false; tokens.len()];
    for span in &spans {
        supervised[tokens_in(&offsets, span)].fill(true);
    }
    if !supervised.contains(&true) {
        return Err(ChatFault::NoAssistantTokens);
    }
    Ok((tokens, supervised))
}

/// The tokens from the first to the last that overlaps `span`. This is transformers' assistant mask except in two
/// cases where transformers gets it wrong: if a span ends inside a character of several tokens, all of them count,
/// and if it ends in text without a token, the mask does not extend to the end of the conversation.
fn tokens_in(offsets: &[Range<usize>], span: &Range<usize>) -> Range<usize> {
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
    use super::tokens_in;

    #[test]
    fn tokens_that_overlap_a_span_belong_to_it() {
        let offsets = [0..2, 2..5, 5..5, 5..6, 6..7, 9..12];
        assert_eq!(tokens_in(&offsets, &(2..6)), 1..4);
        assert_eq!(tokens_in(&offsets, &(3..7)), 1..5);
        assert_eq!(tokens_in(&offsets, &(5..8)), 3..5, "no token has byte 7");
        assert_eq!(tokens_in(&offsets, &(7..9)), 0..0);
        assert_eq!(tokens_in(&offsets, &(5..5)), 0..0, "an empty block");
        assert_eq!(tokens_in(&offsets, &(0..99)), 0..6);
    }
}
