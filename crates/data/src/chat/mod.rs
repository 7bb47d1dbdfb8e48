//! Conversations: what a row of messages says, before a template makes text of it.

use serde_json::{Map, Value};

/// One conversation as a row holds it. Messages are kept as they are written: a template may read any
/// field of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    /// Objects with at least a `role`.
    pub messages: Vec<Value>,
    /// The row's `tools`, a list.
    pub tools: Option<Value>,
    /// The row's `chat_template_kwargs`: further variables of the template.
    pub kwargs: Map<String, Value>,
}
