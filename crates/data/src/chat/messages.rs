//! Validates conversations and converts them to the template engine's values.

use minijinja::value::{Value as Engine, ValueKind};
use serde_json::{Map, Value};

use super::{Chat, ChatFault};

/// Variables that a row must not set through `chat_template_kwargs`.
const RESERVED: [&str; 6] =
    ["messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"];

/// The names of the reasoning field, the standard one first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A validated conversation in the engine's values, which can be rendered any number of times.
#[derive(Clone, Debug)]
pub(crate) struct RenderInput {
    pub(crate) messages: Vec<Engine>,
    pub(crate) tools: Engine,
    pub(crate) kwargs: Vec<(String, Engine)>,
}

impl RenderInput {
    pub(crate) fn new(chat: &Chat) -> Result<Self, ChatFault> {
        if chat.messages.is_empty() {
            return Err(ChatFault::NoMessages);
        }
        if let Some(name) = chat.kwargs.keys().find(|name| RESERVED.contains(&name.as_str())) {
            return Err(ChatFault::Reserved { name: name.clone() });
        }
        let message = |(idx, value): (usize, &Value)| match value {
            Value::Object(fields) if fields.contains_key("role") => Ok(engine_map(&aliased(fields))),
            Value::Object(_) => {
                Err(ChatFault::NotAMessage { number: idx + 1, found: "an object without `role`" })
            }
            other => Err(ChatFault::NotAMessage { number: idx + 1, found: kind(other) }),
        };
        Ok(RenderInput {
            messages: chat.messages.iter().enumerate().map(message).collect::<Result<_, _>>()?,
            tools: tools(chat.tools.as_ref())?,
            kwargs: chat.kwargs.iter().map(|(name, value)| (name.clone(), engine(value))).collect(),
        })
    }

    pub(crate) fn has_tools(&self) -> bool {
        !self.tools.is_none()
    }

    pub(crate) fn with_messages(&self, messages: Vec<Engine>) -> Self {
        RenderInput { messages, ..self.clone() }
    }
}

/// The role of a message.
pub(crate) fn role(message: &Engine) -> Engine {
    message.get_attr("role").unwrap_or_default()
}

/// A message with the content `text`, as a list of parts if the content of `like` is a list of parts.
pub(crate) fn message_with_text(role: &str, text: &str, like: &Engine) -> Engine {
    let in_parts = like.get_attr("content").is_ok_and(|content| content.kind() == ValueKind::Seq);
    let content = match in_parts {
        true => [Engine::from_pairs([("type", "text"), ("text", text)])].into_iter().collect(),
        false => Engine::from(text),
    };
    Engine::from_pairs([("role", Engine::from(role)), ("content", content)])
}

/// `message` with its content replaced by `text`.
pub(crate) fn with_content(message: &Engine, text: &str) -> Engine {
    let names = message.try_iter().into_iter().flatten();
    let kept = names.map(|name| {
        let value = message.get_item(&name).unwrap_or_default();
        if name.as_str() == Some("content") { (name, text.into()) } else { (name, value) }
    });
    Engine::from_pairs(kept)
}

fn tools(tools: Option<&Value>) -> Result<Engine, ChatFault> {
    match tools {
        None | Some(Value::Null) => Ok(Engine::from(())),
        Some(list @ Value::Array(_)) => Ok(engine(list)),
        // Tables with one type per column store tools as text.
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(list @ Value::Array(_)) => Ok(engine(&list)),
            Ok(Value::Null) => Ok(Engine::from(())),
            _ => Err(ChatFault::BadTools { found: "a string that is not a JSON list".into() }),
        },
        Some(other) => Err(ChatFault::BadTools { found: kind(other).into() }),
    }
}

/// Adds the reasoning under every name that templates use for it, as transformers does.
fn aliased(message: &Map<String, Value>) -> Map<String, Value> {
    let given = REASONING.into_iter().filter_map(|name| message.get(name)).find(|value| !value.is_null());
    let Some(reasoning) = given.cloned() else { return message.clone() };
    let mut out = Map::new();
    out.insert("thinking".into(), reasoning.clone());
    out.extend(message.clone());
    out.insert("reasoning_content".into(), reasoning);
    out
}

/// Converts JSON to the engine's value. Keys keep their order, which `tojson` of a tool prints.
pub(crate) fn engine(value: &Value) -> Engine {
    match value {
        Value::Null => Engine::from(()),
        Value::Bool(flag) => Engine::from(*flag),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Engine::from(number),
            (None, Some(number)) => Engine::from(number),
            (None, None) => Engine::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(text) => Engine::from(text.as_str()),
        Value::Array(items) => items.iter().map(engine).collect(),
        Value::Object(fields) => engine_map(fields),
    }
}

fn engine_map(fields: &Map<String, Value>) -> Engine {
    Engine::from_pairs(fields.iter().map(|(name, value)| (name.as_str(), engine(value))))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
