//! Alpaca rows: `instruction`, `input`, `output`, and LLaMA-Factory's `system` and `history`.
//!
//! With a chat template, a row becomes a conversation whose last reply is the completion. Without one, it
//! becomes the prompt text that Alpaca was trained with.

use serde_json::{Value, json};

use crate::read::Record;
use crate::row::Row;
use crate::value::{optional, optional_string, string, wrong_type};
use crate::{Chat, RowFault};

const PREAMBLE: &str = "Below is an instruction that describes a task. Write a response that appropriately \
                        completes the request.";
const PREAMBLE_WITH_INPUT: &str = "Below is an instruction that describes a task, paired with an input that \
                                   provides further context. Write a response that appropriately completes \
                                   the request.";

pub(crate) fn row(columns: &mut Record, template: bool) -> Result<Row, RowFault> {
    let instruction = string(columns, "instruction")?;
    let input = optional_string(columns, "input")?;
    let output = string(columns, "output")?;
    let system = optional_string(columns, "system")?;
    let history = history(columns)?;
    if !template {
        let prompt = plain(system.as_deref(), &history, &instruction, input.as_deref());
        return Ok(Row::Pair { prompt, completion: output });
    }
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    let mut messages: Vec<Value> = system.iter().map(|text| message("system", text)).collect();
    for [asked, answered] in &history {
        messages.extend([message("user", asked), message("assistant", answered)]);
    }
    let asked: Vec<&str> = [Some(instruction.as_str()), input.as_deref()]
        .into_iter()
        .flatten()
        .filter(|t| !t.is_empty())
        .collect();
    messages.push(message("user", &asked.join("\n")));
    let prompt = Chat { messages, ..Chat::default() };
    Ok(Row::ChatPair { prompt, completion: vec![message("assistant", &output)] })
}

/// The earlier turns: pairs of a question and an answer.
fn history(columns: &mut Record) -> Result<Vec<[String; 2]>, RowFault> {
    let expected = "a list of pairs of strings";
    let rounds = match optional(columns, "history") {
        None => return Ok(Vec::new()),
        Some(Value::Array(rounds)) => rounds,
        Some(other) => return Err(wrong_type("history", expected, &other)),
    };
    let pair = |round: &Value| match round.as_array().map(Vec::as_slice) {
        Some([Value::String(asked), Value::String(answered)]) => Ok([asked.clone(), answered.clone()]),
        _ => Err(wrong_type("history", expected, round)),
    };
    rounds.iter().map(pair).collect()
}

/// The prompt in Alpaca's format. A row's `system` text replaces the preamble.
fn plain(system: Option<&str>, history: &[[String; 2]], instruction: &str, input: Option<&str>) -> String {
    let preamble = system.unwrap_or(if input.is_some() { PREAMBLE_WITH_INPUT } else { PREAMBLE });
    let mut prompt = format!("{preamble}\n\n");
    for [asked, answered] in history {
        prompt.push_str(&format!("### Instruction:\n{asked}\n\n### Response:\n{answered}\n\n"));
    }
    prompt.push_str(&format!("### Instruction:\n{instruction}\n\n"));
    if let Some(input) = input {
        prompt.push_str(&format!("### Input:\n{input}\n\n"));
    }
    prompt.push_str("### Response:\n");
    prompt
}
