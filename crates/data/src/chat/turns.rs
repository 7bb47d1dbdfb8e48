//! Locates the assistant's turns in the output of a template that has no generation blocks.
//!
//! Usually a turn begins where its generation prompt ends, and ends where the rendering of the conversation up
//! to and including it ends, because both are prefixes of the whole output. This fails for templates that
//! render a turn differently once more messages follow (Qwen3 drops the reasoning). Then the turn is located
//! by probing: the conversation is rendered twice with different placeholders as the turn's content. The text in
//! which the two outputs differ is the content, and the text after the content of a last turn is what closes
//! any turn. Text of the generation prompt is never part of a turn. Every result is checked against the real
//! output; if the check fails, the answer is an error rather than a guess.

use std::ops::Range;

use minijinja::value::Value as Engine;

use super::messages::{RenderInput, message_with_text, role, with_content};
use super::{ChatFault, ChatTemplate};

const ASSISTANT: &str = "assistant";
/// Two placeholder contents that share neither their first nor their last character.
const PLACEHOLDERS: [&str; 2] = ["Q", "Z"];

/// The byte ranges of the assistant's turns in `text`, which is `template`'s output for `chat`.
pub(crate) fn spans(
    template: &ChatTemplate,
    chat: &RenderInput,
    text: &str,
) -> Result<Vec<Range<usize>>, ChatFault> {
    let turns = (0..chat.messages.len()).filter(|idx| role(&chat.messages[*idx]).as_str() == Some(ASSISTANT));
    turns
        .map(|idx| match (AssistantTurn { template, chat, idx }).find(text) {
            Ok(Ok(span)) => Ok(span),
            Ok(Err(why)) => {
                Err(ChatFault::Untraceable { origin: template.origin(chat), number: idx + 1, why })
            }
            Err(fault) => Err(fault),
        })
        .collect()
}

struct AssistantTurn<'a> {
    template: &'a ChatTemplate,
    chat: &'a RenderInput,
    /// The index of the message, from 0.
    idx: usize,
}

/// The outer error is a fault of the template; the inner one is why the turn cannot be located.
type Traced<T> = Result<Result<T, &'static str>, ChatFault>;

impl AssistantTurn<'_> {
    fn find(&self, text: &str) -> Traced<Range<usize>> {
        let before = &self.chat.messages[..self.idx];
        // Do not render an empty conversation: many templates fail on it.
        let prompt = if before.is_empty() { None } else { Some(self.render(before, true)?) };
        if let Some(prompt) = prompt.as_deref().filter(|prompt| text.starts_with(*prompt)) {
            let through = self.render(&self.chat.messages[..=self.idx], false)?;
            if text.starts_with(&through) && prompt.len() <= through.len() {
                return Ok(Ok(prompt.len()..through.len()));
            }
        }
        match self.find_by_probing(text, prompt.as_deref()) {
            Err(ChatFault::Template(_)) => Ok(Err("the template rejects a placeholder as its content")),
            found => found,
        }
    }

    fn find_by_probing(&self, text: &str, prompt: Option<&str>) -> Traced<Range<usize>> {
        let last = ProbeOutput::compare(self.probe(PLACEHOLDERS[0], &[])?, self.probe(PLACEHOLDERS[1], &[])?);
        let after = &self.chat.messages[self.idx + 1..];
        let inside =
            ProbeOutput::compare(self.probe(PLACEHOLDERS[0], after)?, self.probe(PLACEHOLDERS[1], after)?);
        let (Some(last), Some(inside)) = (last, inside) else {
            return Ok(Err("its content does not appear exactly once in the output"));
        };
        let closing = &last.text[last.content.end..];
        if !inside.text[inside.content.end..].starts_with(closing) {
            return Ok(Err("it ends differently when more messages follow"));
        }
        let Some(start) = self.start(&inside, &last, prompt)? else {
            return Ok(Err("the text before it is not its generation prompt"));
        };
        let rest = &inside.text[inside.content.end + closing.len()..];
        let bounded = text.starts_with(&inside.text[..start]) && text.ends_with(rest);
        if !bounded || start + rest.len() > text.len() {
            return Ok(Err("its content changes the text around it"));
        }
        let span = start..text.len() - rest.len();
        if self.next_is_within(span.end)? {
            return Ok(Err("the next message is rendered inside it"));
        }
        Ok(Ok(span))
    }

    /// Whether the content of the next message begins before `end`: some templates render the results of tools
    /// inside the turn that called them.
    fn next_is_within(&self, end: usize) -> Result<bool, ChatFault> {
        let next = self.idx + 1;
        let Some(message) = self.chat.messages.get(next) else { return Ok(false) };
        let [first, second] = PLACEHOLDERS.map(|placeholder| {
            let mut messages = self.chat.messages.clone();
            messages[next] = with_content(message, placeholder);
            self.render(&messages, false)
        });
        let (first, second) = (first?, second?);
        Ok(first != second && common_prefix(&first, &second) < end)
    }

    /// Where the turn begins in `inside`: after the generation prompt, or after the part of it that the output has.
    fn start(
        &self,
        inside: &ProbeOutput,
        last: &ProbeOutput,
        prompt: Option<&str>,
    ) -> Result<Option<usize>, ChatFault> {
        let content = inside.content.start;
        let Some(prompt) = prompt else { return Ok(Some(content)) };
        if inside.text.starts_with(prompt) && prompt.len() <= content {
            return Ok(Some(prompt.len()));
        }
        let head = &inside.text[..content];
        // Text between the prompt and the content belongs to the turn, if the output has it.
        let lead = last.text[..last.content.start].strip_prefix(prompt);
        if let Some(lead) = lead.filter(|lead| head.ends_with(*lead)) {
            return Ok(Some(content - lead.len()));
        }
        let bare = self.render(&self.chat.messages[..self.idx], false)?;
        let generation_prompt = prompt.strip_prefix(bare.as_str()).unwrap_or_default();
        // The generation prompt may start something that a finished turn leaves out, such as a reasoning block. The
        // turn then begins where the output first differs from the prompt.
        if let Some(after) = head.strip_prefix(bare.as_str()).filter(|_| !generation_prompt.is_empty()) {
            return Ok(Some(bare.len() + common_prefix(generation_prompt, after)));
        }
        if !generation_prompt.is_empty() && head.ends_with(generation_prompt) {
            return Ok(Some(content));
        }
        self.start_after_previous(inside)
    }

    /// Locates the start by the previous message, for templates that render that message differently once it is
    /// answered: the text after its content in the prompt also follows it in the output, and then comes the turn.
    fn start_after_previous(&self, inside: &ProbeOutput) -> Result<Option<usize>, ChatFault> {
        let previous = self.idx - 1;
        let (before, after) = self.chat.messages.split_at(self.idx);
        let outputs = |answered: bool| -> Result<Option<ProbeOutput>, ChatFault> {
            let [first, second] = PLACEHOLDERS.map(|placeholder| {
                let mut messages = before.to_vec();
                messages[previous] = with_content(&before[previous], placeholder);
                if answered {
                    messages.push(message_with_text(ASSISTANT, PLACEHOLDERS[0], &after[0]));
                    messages.extend_from_slice(&after[1..]);
                }
                self.render(&messages, !answered)
            });
            Ok(ProbeOutput::compare(first?, second?))
        };
        let (Some(prompt), Some(answered)) = (outputs(false)?, outputs(true)?) else { return Ok(None) };
        let tail = &prompt.text[prompt.content.end..];
        let turn = answered.text[answered.content.end..].strip_prefix(tail);
        let turn = turn.filter(|turn| inside.text.ends_with(*turn));
        Ok(turn.map(|turn| inside.text.len() - turn.len()).filter(|start| *start <= inside.content.start))
    }

    /// Renders the conversation with `placeholder` as this turn's content, followed by `after`.
    fn probe(&self, placeholder: &str, after: &[Engine]) -> Result<String, ChatFault> {
        let mut messages = self.chat.messages[..self.idx].to_vec();
        messages.push(message_with_text(ASSISTANT, placeholder, &self.chat.messages[self.idx]));
        messages.extend_from_slice(after);
        self.render(&messages, false)
    }

    fn render(&self, messages: &[Engine], prompt: bool) -> Result<String, ChatFault> {
        self.template.text(&self.chat.with_messages(messages.to_vec()), prompt)
    }
}

/// The output for the first placeholder, and the range of the placeholder in it.
struct ProbeOutput {
    text: String,
    content: Range<usize>,
}

impl ProbeOutput {
    /// `None` unless the two outputs differ only in the placeholder, and in a single place.
    fn compare(first: String, second: String) -> Option<Self> {
        let start = common_prefix(&first, &second);
        let end = start + PLACEHOLDERS[0].len();
        let same = first.get(start..end)? == PLACEHOLDERS[0] && second.get(start..end)? == PLACEHOLDERS[1];
        (same && first[end..] == second[end..]).then_some(ProbeOutput { text: first, content: start..end })
    }
}

/// The length in bytes of the common prefix.
fn common_prefix(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum()
}
