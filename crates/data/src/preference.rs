//! Preference rows: a chosen and a rejected completion of one prompt.
//!
//! The prompt is a column, or it is implicit: then `chosen` and `rejected` begin with it. DPO needs the prompt's end,
//! so an implicit prompt is split off as in TRL's `extract_prompt`: it is the longest common prefix, in messages or in
//! characters. A reward model scores whole sequences, so there the two texts stay whole.

use serde_json::Value;

use crate::read::Record;
use crate::row::{Format, chat, messages, token_ids};
use crate::value::{kind, optional, string, wrong_type};
use crate::{Chat, DataTask, PreferenceLayout, RowFault};

/// A preference pair before it is tokenized.
#[derive(Debug, PartialEq)]
pub(crate) struct PreferenceRow {
    pub(crate) sides: PreferenceSides,
    /// How much better the chosen completion is. Only reward models use it.
    pub(crate) margin: Option<f32>,
}

#[derive(Debug, PartialEq)]
pub(crate) enum PreferenceSides {
    /// The prompt is empty if it is implicit and not split off.
    Text {
        prompt: String,
        chosen: String,
        rejected: String,
    },
    /// The prompt has no messages if it is implicit and not split off.
    Chat {
        prompt: Chat,
        chosen: Vec<Value>,
        rejected: Vec<Value>,
    },
    Tokens {
        chosen: Vec<u32>,
        rejected: Vec<u32>,
    },
}

/// Interprets a record as a preference pair.
pub(crate) fn parse(
    columns: &mut Record,
    layout: PreferenceLayout,
) -> Result<(Format, PreferenceRow), RowFault> {
    let has = |name: &str| columns.contains_key(name);
    let takes_ids = layout == PreferenceLayout::Sequence;
    let (format, sides) = if takes_ids && has("chosen_ids") && has("rejected_ids") {
        let chosen = token_ids(columns, "chosen_ids")?;
        let rejected = token_ids(columns, "rejected_ids")?;
        (Format::TokenPreference, PreferenceSides::Tokens { chosen, rejected })
    } else if has("chosen") && has("rejected") {
        match columns["chosen"].is_array() {
            true => chat_sides(columns, layout)?,
            false => text_sides(columns, layout)?,
        }
    } else {
        let halves = [
            ("chosen", "rejected"),
            ("rejected", "chosen"),
            ("chosen_ids", "rejected_ids"),
            ("rejected_ids", "chosen_ids"),
        ];
        let half = halves[..if takes_ids { 4 } else { 2 }].iter().find(|(present, _)| has(present));
        return Err(match half {
            Some((present, missing)) => RowFault::MissingColumn { present, missing, columns: Vec::new() },
            None => RowFault::wrong_task(DataTask::Preference(layout)),
        });
    };
    let margin = if layout == PreferenceLayout::Sequence { margin(columns)? } else { None };
    Ok((format, PreferenceRow { sides, margin }))
}

fn text_sides(columns: &mut Record, layout: PreferenceLayout) -> Result<(Format, PreferenceSides), RowFault> {
    let explicit = columns.contains_key("prompt");
    let mut prompt = if explicit { string(columns, "prompt")? } else { String::new() };
    let (mut chosen, mut rejected) = (string(columns, "chosen")?, string(columns, "rejected")?);
    if !explicit && layout == PreferenceLayout::Completion {
        let at = common_text_bytes(&chosen, &rejected);
        rejected = rejected.split_off(at);
        let completion = chosen.split_off(at);
        prompt = std::mem::replace(&mut chosen, completion);
    }
    let format = if explicit { Format::Preference } else { Format::ImplicitPreference };
    Ok((format, PreferenceSides::Text { prompt, chosen, rejected }))
}

fn chat_sides(columns: &mut Record, layout: PreferenceLayout) -> Result<(Format, PreferenceSides), RowFault> {
    // Some datasets keep the prompt's text beside conversations that already contain it.
    let explicit = columns.get("prompt").is_some_and(|prompt| !prompt.is_string());
    let prompt = if explicit { messages(columns, "prompt")? } else { Vec::new() };
    if columns["rejected"].is_string() {
        let expected = "a list of messages like `chosen`";
        return Err(wrong_type("rejected", expected, &columns["rejected"]));
    }
    let (mut chosen, mut rejected) = (messages(columns, "chosen")?, messages(columns, "rejected")?);
    let mut prompt = chat(prompt, columns)?;
    if !explicit && layout == PreferenceLayout::Completion {
        let at = num_common_messages(&chosen, &rejected);
        if at == 0 {
            return Err(RowFault::NoCommonPrompt);
        }
        rejected = rejected.split_off(at);
        let completion = chosen.split_off(at);
        prompt.messages = std::mem::replace(&mut chosen, completion);
    }
    let format = if explicit { Format::MessagePreference } else { Format::ImplicitMessagePreference };
    Ok((format, PreferenceSides::Chat { prompt, chosen, rejected }))
}

/// The length in bytes of the implicit prompt of two texts. A space before the first difference belongs to the
/// completions: tokenizers join it with the word that follows. If one text begins with all of the other, the last
/// common character belongs to the completions, so that none of them is empty.
fn common_text_bytes(chosen: &str, rejected: &str) -> usize {
    let mut last = 0;
    for ((at, a), b) in chosen.char_indices().zip(rejected.chars()) {
        if a != b {
            return if chosen[..at].ends_with(' ') { at - 1 } else { at };
        }
        last = at;
    }
    last
}

/// The number of messages of the implicit prompt. Neither completion is left empty.
fn num_common_messages(chosen: &[Value], rejected: &[Value]) -> usize {
    let common = chosen.iter().zip(rejected).take_while(|(a, b)| a == b).count();
    common.min(chosen.len().min(rejected.len()).saturating_sub(1))
}

fn margin(columns: &mut Record) -> Result<Option<f32>, RowFault> {
    let Some(value) = optional(columns, "margin") else { return Ok(None) };
    let number = match &value {
        Value::Number(number) => number.as_f64(),
        // Fields of a CSV file are strings.
        Value::String(text) if text.trim().is_empty() => return Ok(None),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    match number.map(|number| number as f32).filter(|number| number.is_finite()) {
        Some(number) => Ok(Some(number)),
        None => {
            let found = match value {
                Value::Number(_) | Value::String(_) => crate::value::excerpt(&value.to_string()),
                other => kind(&other).into(),
            };
            Err(RowFault::Margin { found })
        }
    }
}

#[cfg(test)]
#[path = "preference_tests.rs"]
mod tests;
