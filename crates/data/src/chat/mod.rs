//! Conversations: renders messages to text with a model's chat template, and turns the text into tokens and
//! loss masks.
//!
//! [`ChatTemplate`] renders; [`encode_chat`] and [`encode_chat_pair`] produce tokens and masks. The template's
//! `{% generation %}` blocks mark the assistant's tokens. For templates without such blocks, `turns` locates
//! the assistant's turns by rendering the conversation with placeholders. Everything is a pure function of the
//! template, the tokenizer and the row; if a template prints the date, the caller provides it.
//!
//! Not supported: content that is not text (images become whatever the template prints for them), continuing a
//! final message, and the training variants of known templates that TRL swaps in. Where such a variant starts
//! a turn earlier, this crate does the same (`template::NEWLINE_SUPERVISED`).

mod bounds;
mod date_time;
mod encode;
mod encoder;
mod fault;
mod lower;
mod messages;
mod python;
mod repr;
mod source;
mod tags;
mod template;
mod turns;

use serde_json::{Map, Value};

pub use date_time::DateTime;
pub use encode::{EncodedChat, LossMasks, encode_chat, encode_chat_pair};
pub use encoder::ChatEncoder;
pub use fault::{ChatFault, TemplateFault};
pub use source::TemplateSource;
pub(crate) use source::additional;
pub use template::ChatTemplate;

/// One conversation of a dataset. Messages keep all their fields, because a template may read any of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    /// Objects with at least a `role`.
    pub messages: Vec<Value>,
    /// The row's `tools`: a list, or a string that contains a JSON list.
    pub tools: Option<Value>,
    /// The row's `chat_template_kwargs`: additional variables of the template.
    pub kwargs: Map<String, Value>,
}
