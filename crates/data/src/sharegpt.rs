//! ShareGPT rows: `conversations` with `from` and `value`, and the senders that LLaMA-Factory accepts.

use serde_json::{Value, json};

use crate::RowFault;
use crate::read::Record;
use crate::row::check_messages;
use crate::value::{list, optional_string};

const COLUMN: &str = "conversations";

/// Values of `from` and the roles they map to.
const ROLES: [(&str, &str); 12] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("assistant", "assistant"),
    ("chatgpt", "assistant"),
    ("model", "assistant"),
    ("bot", "assistant"),
    ("system", "system"),
    ("observation", "tool"),
    ("tool", "tool"),
    ("function_response", "tool"),
    ("function_call", "function_call"),
];

/// The messages of a row. Messages that already have a role are kept as they are. The row's `system` comes
/// first if the conversation does not begin with a system message.
pub(crate) fn messages(columns: &mut Record) -> Result<Vec<Value>, RowFault> {
    let mut messages = list(columns, COLUMN)?;
    for (idx, message) in messages.iter_mut().enumerate() {
        if message.get("role").is_none() && message.is_object() {
            *message = converted(message, idx + 1)?;
        }
    }
    check_messages(&messages, COLUMN)?;
    if let Some(system) = optional_string(columns, "system")?
        && messages[0]["role"] != "system"
    {
        messages.insert(0, json!({ "role": "system", "content": system }));
    }
    Ok(messages)
}

fn converted(message: &Value, number: usize) -> Result<Value, RowFault> {
    let fault = |why| RowFault::Message { column: COLUMN, number, why };
    let tag = message["from"].as_str().ok_or_else(|| fault("neither `role` nor `from` is present"))?;
    let text = message["value"].as_str().ok_or_else(|| fault("`value` is not a string"))?;
    let known = ROLES.iter().find(|(name, _)| name.eq_ignore_ascii_case(tag));
    let (_, role) = known.ok_or_else(|| RowFault::UnknownTag { number, tag: crate::value::excerpt(tag) })?;
    Ok(match *role {
        "function_call" => call(text),
        role => json!({ "role": role, "content": text }),
    })
}

/// A tool call in the form that templates expect. Text that is not a JSON object with a name is plain content.
fn call(text: &str) -> Value {
    let calls = match serde_json::from_str(text) {
        Ok(Value::Array(calls)) => calls,
        Ok(call @ Value::Object(_)) => vec![call],
        _ => Vec::new(),
    };
    if calls.is_empty() || calls.iter().any(|call| !call["name"].is_string()) {
        return json!({ "role": "assistant", "content": text });
    }
    let calls: Vec<Value> =
        calls.into_iter().map(|call| json!({ "type": "function", "function": call })).collect();
    json!({ "role": "assistant", "content": "", "tool_calls": calls })
}
