//! Where the assistant's turns are in the output of a template that does not mark them.
//!
//! A turn begins where the prompt for it ends and ends where the conversation up to it ends, as long as
//! both are beginnings of the whole. That fails for templates that write a turn in another way once
//! more follows (Qwen3 drops what was thought). Then the turn is found by saying two other things in
//! its place: what the two outputs do not share is the turn's content, and what follows a last turn's
//! content closes any turn. What the prompt for a turn gives is never part of it. Every finding is checked
//! against the real output; where it does not hold, there is no answer rather than a guess.

use std::ops::Range;

use minijinja::value::Value as Engine;

use super::messages::{Ready, role, saying, with_content};
use super::{ChatFault, ChatTemplate};

const ASSISTANT: &str = "assistant";
/// Two contents that share neither their first nor their last character.
const WORDS: [&str; 2] = ["Q", "Z"];

/// The byte ranges of `text`, which `template` made of `chat`, that are the assistant's.
pub(crate) fn spans(
    template: &ChatTemplate,
    chat: &Ready,
    text: &str,
) -> Result<Vec<Range<usize>>, ChatFault> {
    let turns = (0..chat.messages.len()).filter(|idx| role(&chat.messages[*idx]).as_str() == Some(ASSISTANT));
    turns
        .map(|idx| match (Turn { template, chat, idx }).find(text) {
            Ok(Ok(span)) => Ok(span),
            Ok(Err(why)) => {
                Err(ChatFault::Untraceable { origin: template.origin(chat), number: idx + 1, why })
            }
            Err(fault) => Err(fault),
        })
        .collect()
}

struct Turn<'a> {
    template: &'a ChatTemplate,
    chat: &'a Ready,
    /// Of the message, from 0.
    idx: usize,
}

type Answer<T> = Result<Result<T, &'static str>, ChatFault>;

impl Turn<'_> {
    fn find(&self, text: &str) -> Answer<Range<usize>> {
        let before = &self.chat.messages[..self.idx];
        // Templates are not asked about conversations without messages.
        let prompt = if before.is_empty() { None } else { Some(self.render(before, true)?) };
        if let Some(prompt) = prompt.as_deref().filter(|prompt| text.starts_with(*prompt)) {
            let through = self.render(&self.chat.messages[..=self.idx], false)?;
            if text.starts_with(&through) && prompt.len() <= through.len() {
                return Ok(Ok(prompt.len()..through.len()));
            }
        }
        match self.find_by_words(text, prompt.as_deref()) {
            Err(ChatFault::Template(_)) => Ok(Err("the template refuses other words in its place")),
            found => found,
        }
    }

    fn find_by_words(&self, text: &str, prompt: Option<&str>) -> Answer<Range<usize>> {
        let last = Said::compare(self.said(WORDS[0], &[])?, self.said(WORDS[1], &[])?);
        let after = &self.chat.messages[self.idx + 1..];
        let inside = Said::compare(self.said(WORDS[0], after)?, self.said(WORDS[1], after)?);
        let (Some(last), Some(inside)) = (last, inside) else {
            return Ok(Err("what it says is not in the output, or more than once"));
        };
        let closing = &last.text[last.content.end..];
        if !inside.text[inside.content.end..].starts_with(closing) {
            return Ok(Err("it is closed in another way once more follows"));
        }
        let Some(start) = self.start(&inside, &last, prompt)? else {
            return Ok(Err("the text before it is not the prompt that it answers"));
        };
        let rest = &inside.text[inside.content.end + closing.len()..];
        let bounded = text.starts_with(&inside.text[..start]) && text.ends_with(rest);
        if !bounded || start + rest.len() > text.len() {
            return Ok(Err("what it says changes the text around it"));
        }
        let span = start..text.len() - rest.len();
        if self.next_is_within(span.end)? {
            return Ok(Err("what follows is written into it"));
        }
        Ok(Ok(span))
    }

    /// Whether the next message's content begins before `end`: some templates write the results of
    /// tools into the turn that called them.
    fn next_is_within(&self, end: usize) -> Result<bool, ChatFault> {
        let next = self.idx + 1;
        let Some(message) = self.chat.messages.get(next) else { return Ok(false) };
        let [first, second] = WORDS.map(|word| {
            let mut messages = self.chat.messages.clone();
            messages[next] = with_content(message, word);
            self.render(&messages, false)
        });
        let (first, second) = (first?, second?);
        Ok(first != second && shared(&first, &second) < end)
    }

    /// Where the turn begins in `inside`: behind the prompt, or behind what a prompt ends with.
    fn start(&self, inside: &Said, last: &Said, prompt: Option<&str>) -> Result<Option<usize>, ChatFault> {
        let content = inside.content.start;
        let Some(prompt) = prompt else { return Ok(Some(content)) };
        if inside.text.starts_with(prompt) && prompt.len() <= content {
            return Ok(Some(prompt.len()));
        }
        let head = &inside.text[..content];
        // What is written between prompt and content belongs to the turn, if it is there.
        let lead = last.text[..last.content.start].strip_prefix(prompt);
        if let Some(lead) = lead.filter(|lead| head.ends_with(*lead)) {
            return Ok(Some(content - lead.len()));
        }
        let bare = self.render(&self.chat.messages[..self.idx], false)?;
        let cue = prompt.strip_prefix(bare.as_str()).unwrap_or_default();
        // A cue may open what a written turn leaves out, thinking for one. They part within the cue.
        if let Some(after) = head.strip_prefix(bare.as_str()).filter(|_| !cue.is_empty()) {
            return Ok(Some(bare.len() + shared(cue, after)));
        }
        if !cue.is_empty() && head.ends_with(cue) {
            return Ok(Some(content));
        }
        self.start_behind_previous(inside)
    }

    /// The start by the message before: what follows its content in a prompt follows it here too, and
    /// then comes the turn. For templates that write that message in another way once it is answered.
    fn start_behind_previous(&self, inside: &Said) -> Result<Option<usize>, ChatFault> {
        let previous = self.idx - 1;
        let (before, after) = self.chat.messages.split_at(self.idx);
        let outputs = |answered: bool| -> Result<Option<Said>, ChatFault> {
            let [first, second] = WORDS.map(|word| {
                let mut messages = before.to_vec();
                messages[previous] = with_content(&before[previous], word);
                if answered {
                    messages.push(saying(ASSISTANT, WORDS[0], &after[0]));
                    messages.extend_from_slice(&after[1..]);
                }
                self.render(&messages, !answered)
            });
            Ok(Said::compare(first?, second?))
        };
        let (Some(prompt), Some(answered)) = (outputs(false)?, outputs(true)?) else { return Ok(None) };
        let tail = &prompt.text[prompt.content.end..];
        let turn = answered.text[answered.content.end..].strip_prefix(tail);
        let turn = turn.filter(|turn| inside.text.ends_with(*turn));
        Ok(turn.map(|turn| inside.text.len() - turn.len()).filter(|start| *start <= inside.content.start))
    }

    /// The conversation with `word` in this turn's place and `after` behind it.
    fn said(&self, word: &str, after: &[Engine]) -> Result<String, ChatFault> {
        let mut messages = self.chat.messages[..self.idx].to_vec();
        messages.push(saying(ASSISTANT, word, &self.chat.messages[self.idx]));
        messages.extend_from_slice(after);
        self.render(&messages, false)
    }

    fn render(&self, messages: &[Engine], prompt: bool) -> Result<String, ChatFault> {
        self.template.text(&self.chat.with_messages(messages.to_vec()), prompt)
    }
}

/// An output with the first of [`WORDS`], and where that is.
struct Said {
    text: String,
    content: Range<usize>,
}

impl Said {
    /// `None` unless the outputs differ in the words alone, and in one place.
    fn compare(first: String, second: String) -> Option<Self> {
        let start = shared(&first, &second);
        let end = start + WORDS[0].len();
        let same = first.get(start..end)? == WORDS[0] && second.get(start..end)? == WORDS[1];
        (same && first[end..] == second[end..]).then_some(Said { text: first, content: start..end })
    }
}

/// Bytes of the characters that both begin with.
fn shared(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum()
}
