//! Turns a record into a row, whose format follows from the task and from the record's columns.
//!
//! Other columns are ignored: people keep ids and sources beside the text. If a row for supervised training matches
//! several formats, the first of these wins: `input_ids`, `prompt` with `completion`, `messages`, `conversations`,
//! `text`, `instruction`.

use std::fmt;

use serde_json::Value;

use crate::preference::{self, PreferenceRow};
use crate::read::{Body, Named, Record};
use crate::value::{list, optional, string, wrong_type};
use crate::{Chat, Columns, DataTask, RowFault, alpaca, record, sharegpt};

/// The format of a row. All rows of a file have the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Text,
    PromptCompletion,
    /// `messages`.
    Messages,
    /// `prompt` and `completion`, both lists of messages.
    MessagePair,
    /// `conversations` with `from` and `value`.
    ShareGpt,
    /// `instruction`, `input`, `output`.
    Alpaca,
    /// `input_ids`.
    Tokens,
    /// `prompt`, `chosen` and `rejected`.
    Preference,
    /// `chosen` and `rejected`, which both begin with the prompt.
    ImplicitPreference,
    /// `prompt`, `chosen` and `rejected`, all lists of messages.
    MessagePreference,
    /// `chosen` and `rejected`, lists of messages that both begin with the prompt.
    ImplicitMessagePreference,
    /// `chosen_ids` and `rejected_ids`.
    TokenPreference,
    /// `prompt`.
    Prompt,
    /// `prompt`, a list of messages.
    MessagePrompt,
}

impl Format {
    /// Whether rows of this format mark the part that counts in the loss.
    pub(crate) fn has_completion(self) -> bool {
        !matches!(self, Format::Text | Format::Messages | Format::ShareGpt)
    }

    /// Whether the rows are token ids, for which no tokenizer is needed.
    pub fn is_tokens(self) -> bool {
        matches!(self, Format::Tokens | Format::TokenPreference)
    }
}

/// A row before it is tokenized.
#[derive(Debug, PartialEq)]
pub(crate) enum Row {
    Text(String),
    Pair {
        prompt: String,
        completion: String,
    },
    Chat(Chat),
    /// The prompt, and the messages that follow it.
    ChatPair {
        prompt: Chat,
        completion: Vec<Value>,
    },
    Tokens {
        ids: Vec<u32>,
        /// For each token, whether it counts in the loss. `None`: all of them do.
        supervised: Option<Vec<bool>>,
    },
    Preference(PreferenceRow),
    Prompt(String),
    ChatPrompt(Chat),
}

/// Parses a raw row. `template`: whether there is a chat template to render conversations with.
pub(crate) fn parse(
    body: Body,
    columns: &Columns,
    task: DataTask,
    template: bool,
) -> Result<(Format, Row), RowFault> {
    // The names of all columns are needed only for error messages, so they are collected lazily.
    match body {
        Body::Known(Named { columns, names }) => {
            interpret(columns, task, template).map_err(|fault| fault.with_columns(|| names.to_vec()))
        }
        Body::Json(bytes) => interpret(record::parse(&bytes, columns, task)?, task, template)
            .map_err(|fault| fault.with_columns(|| record::names(&bytes))),
        Body::All(all) => {
            let names: Vec<String> = all.keys().cloned().collect();
            interpret(record::used(all, columns, task), task, template)
                .map_err(|fault| fault.with_columns(|| names))
        }
    }
}

fn interpret(mut columns: Record, task: DataTask, template: bool) -> Result<(Format, Row), RowFault> {
    match task {
        DataTask::Sft => document(columns, template),
        DataTask::Preference(layout) => {
            preference::parse(&mut columns, layout).map(|(format, row)| (format, Row::Preference(row)))
        }
        DataTask::Prompt { .. } => prompt(columns, task),
    }
}

fn prompt(mut columns: Record, task: DataTask) -> Result<(Format, Row), RowFault> {
    match columns.get("prompt") {
        None => Err(RowFault::wrong_task(task)),
        Some(Value::Array(_)) => {
            let messages = messages(&mut columns, "prompt")?;
            Ok((Format::MessagePrompt, Row::ChatPrompt(chat(messages, &mut columns)?)))
        }
        Some(_) => Ok((Format::Prompt, Row::Prompt(string(&mut columns, "prompt")?))),
    }
}

fn document(mut columns: Record, template: bool) -> Result<(Format, Row), RowFault> {
    let has = |name: &str| columns.contains_key(name);
    if has("input_ids") {
        return Ok((Format::Tokens, tokens(&mut columns)?));
    }
    if has("prompt") && has("completion") {
        return pair(&mut columns);
    }
    if has("messages") {
        let messages = messages(&mut columns, "messages")?;
        return Ok((Format::Messages, Row::Chat(chat(messages, &mut columns)?)));
    }
    if has("conversations") {
        let messages = sharegpt::messages(&mut columns)?;
        return Ok((Format::ShareGpt, Row::Chat(chat(messages, &mut columns)?)));
    }
    if has("text") {
        return Ok((Format::Text, Row::Text(string(&mut columns, "text")?)));
    }
    let missing = |present, missing| RowFault::MissingColumn { present, missing, columns: Vec::new() };
    Err(match (has("instruction"), has("output")) {
        (true, true) => return Ok((Format::Alpaca, alpaca::row(&mut columns, template)?)),
        _ if has("prompt") => missing("prompt", "completion"),
        _ if has("completion") => missing("completion", "prompt"),
        (true, false) => missing("instruction", "output"),
        _ => RowFault::UnknownColumns { columns: Vec::new() },
    })
}

fn pair(columns: &mut Record) -> Result<(Format, Row), RowFault> {
    let lists = ["prompt", "completion"].map(|name| columns[name].is_array());
    match lists {
        [true, true] => {
            let prompt = messages(columns, "prompt")?;
            let completion = messages(columns, "completion")?;
            let row = Row::ChatPair { prompt: chat(prompt, columns)?, completion };
            Ok((Format::MessagePair, row))
        }
        [true, false] if columns["completion"].is_string() => {
            Err(wrong_type("completion", "a list of messages like the prompt", &columns["completion"]))
        }
        _ => {
            let prompt = string(columns, "prompt")?;
            let completion = string(columns, "completion")?;
            Ok((Format::PromptCompletion, Row::Pair { prompt, completion }))
        }
    }
}

/// Takes a list of messages and checks that each has a role.
pub(crate) fn messages(columns: &mut Record, column: &'static str) -> Result<Vec<Value>, RowFault> {
    let messages = list(columns, column)?;
    check_messages(&messages, column)?;
    Ok(messages)
}

pub(crate) fn check_messages(messages: &[Value], column: &'static str) -> Result<(), RowFault> {
    if messages.is_empty() {
        return Err(RowFault::Message { column, number: 0, why: "the list is empty" });
    }
    for (idx, message) in messages.iter().enumerate() {
        let why = match message.get("role") {
            Some(Value::String(_)) => continue,
            Some(_) => "`role` is not a string",
            None if message.is_object() => "`role` is missing",
            None => "not an object",
        };
        return Err(RowFault::Message { column, number: idx + 1, why });
    }
    Ok(())
}

/// The conversation of a row: its messages, tools and template arguments.
pub(crate) fn chat(messages: Vec<Value>, columns: &mut Record) -> Result<Chat, RowFault> {
    let tools = match columns.contains_key("tools") && !columns["tools"].is_null() {
        true => Some(Value::Array(list(columns, "tools")?)).filter(|tools| tools[0] != Value::Null),
        false => None,
    };
    let kwargs = match optional(columns, "chat_template_kwargs") {
        None => serde_json::Map::new(),
        Some(Value::Object(kwargs)) => kwargs,
        Some(other) => return Err(wrong_type("chat_template_kwargs", "an object", &other)),
    };
    Ok(Chat { messages, tools, kwargs })
}

/// The label of a token that does not count in the loss, as in Hugging Face's data collators.
const IGNORE_INDEX: i64 = -100;

/// Takes a list of token ids.
pub(crate) fn token_ids(columns: &mut Record, column: &'static str) -> Result<Vec<u32>, RowFault> {
    let id = |id: &Value| {
        let number = id.as_u64().and_then(|id| u32::try_from(id).ok());
        number.ok_or_else(|| wrong_type(column, "a list of token ids", id))
    };
    list(columns, column)?.iter().map(id).collect()
}

fn tokens(columns: &mut Record) -> Result<Row, RowFault> {
    let ids = token_ids(columns, "input_ids")?;
    let mut supervised: Option<Vec<bool>> = None;
    for (field, expected) in [
        ("labels", "a list of token ids and -100"),
        ("completion_mask", "a list of 0 and 1"),
        ("assistant_masks", "a list of 0 and 1"),
    ] {
        if columns.get(field).is_none_or(Value::is_null) {
            continue;
        }
        let items = list(columns, field)?;
        if items.len() != ids.len() {
            return Err(RowFault::LengthsDiffer { field, found: items.len(), ids: ids.len() });
        }
        let all = supervised.get_or_insert_with(|| vec![true; ids.len()]);
        for (at, item) in items.iter().enumerate() {
            let number = item.as_i64().or_else(|| item.as_bool().map(i64::from));
            all[at] &= match number {
                Some(IGNORE_INDEX) if field == "labels" => false,
                Some(id) if field == "labels" && id == i64::from(ids[at]) => true,
                Some(_) if field == "labels" => {
                    return Err(RowFault::LabelDiffers { at, id: ids[at], label: number.unwrap_or(0) });
                }
                Some(bit @ (0 | 1)) => bit == 1,
                _ => return Err(wrong_type(field, expected, item)),
            };
        }
    }
    Ok(Row::Tokens { ids, supervised })
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Text => "`text`",
            Format::PromptCompletion => "`prompt` and `completion`",
            Format::Messages => "`messages`",
            Format::MessagePair => "`prompt` and `completion` as messages",
            Format::ShareGpt => "`conversations`",
            Format::Alpaca => "`instruction` and `output`",
            Format::Tokens => "`input_ids`",
            Format::Preference => "`prompt`, `chosen` and `rejected`",
            Format::ImplicitPreference => "`chosen` and `rejected` without a `prompt`",
            Format::MessagePreference => "`prompt`, `chosen` and `rejected` as messages",
            Format::ImplicitMessagePreference => "`chosen` and `rejected` as messages without a `prompt`",
            Format::TokenPreference => "`chosen_ids` and `rejected_ids`",
            Format::Prompt => "`prompt`",
            Format::MessagePrompt => "`prompt` as messages",
        })
    }
}

#[cfg(test)]
#[path = "row_tests.rs"]
mod tests;
